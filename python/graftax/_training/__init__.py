# SPDX-License-Identifier: Apache-2.0
"""What training loops need: optimizers, labels, random streams, maps over arrays."""
