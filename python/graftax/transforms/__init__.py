# SPDX-License-Identifier: Apache-2.0
"""JAX's transforms for functions of any objects: a file for each, which says only what that transform changes.

`graftax/__init__.py` is the list of them. What Equinox calls `filter_x` is in the file of `x`.
"""
