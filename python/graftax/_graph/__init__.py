# SPDX-License-Identifier: Apache-2.0
"""Object graphs: flatten and build, paths and selections, comparison, editing."""
