# SPDX-License-Identifier: Apache-2.0
"""Names of internal fields of other libraries, which are not imported here."""

# The internal fields of Flax NNX by their first letters, and the fields in which a Variable has its array.
MACHINERY = ("_pytree__", "_object__", "_trace_state", "_var_metadata")
RAW_VALUES = ("_raw_value", "raw_value")
