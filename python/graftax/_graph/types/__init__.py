# SPDX-License-Identifier: Apache-2.0
"""How the values of each type are taken apart: which are nodes, leaves, static or refused."""
