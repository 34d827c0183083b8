# SPDX-License-Identifier: Apache-2.0
"""The basis of all other packages: errors, key paths, type descriptions."""
