# SPDX-License-Identifier: Apache-2.0
"""`jit`: one call, from the options to the compiled program and back."""
