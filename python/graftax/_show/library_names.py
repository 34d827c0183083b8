# SPDX-License-Identifier: Apache-2.0
"""Names that libraries give to what is theirs, for those who only look. Imports none of them."""

# What Flax NNX keeps in its objects for itself, by how its name begins, and where a Variable has its array.
MACHINERY = ("_pytree__", "_object__", "_trace_state", "_var_metadata")
RAW_VALUES = ("_raw_value", "raw_value")
