# SPDX-License-Identifier: Apache-2.0
"""Rules and specs that place leaves on devices."""
