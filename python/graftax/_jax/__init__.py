# SPDX-License-Identifier: Apache-2.0
"""The only place that reads what JAX keeps private."""
