# SPDX-License-Identifier: Apache-2.0
"""What every part of the package knows: errors, key paths, how a type is described."""
