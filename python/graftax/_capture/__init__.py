# SPDX-License-Identifier: Apache-2.0
"""What traced code reads and does besides its arguments."""
