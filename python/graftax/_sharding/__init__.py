# SPDX-License-Identifier: Apache-2.0
"""Rules and specs that assign a sharding to each leaf."""
