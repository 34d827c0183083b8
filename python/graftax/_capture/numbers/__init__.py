# SPDX-License-Identifier: Apache-2.0
"""Symbolic numbers: Python numbers that stay unknown while a function is traced."""
