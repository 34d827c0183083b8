# SPDX-License-Identifier: Apache-2.0
"""What went wrong, where, and again: the origin of a nan, and recordings of calls that failed."""
