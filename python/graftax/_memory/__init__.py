# SPDX-License-Identifier: Apache-2.0
"""`graftax.memory`: how much memory a call needs, by path."""
