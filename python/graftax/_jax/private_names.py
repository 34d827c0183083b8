# SPDX-License-Identifier: Apache-2.0
"""Private names that this JAX lacks."""

from __future__ import annotations

lacking: dict[str, str] = {}  # feature that is off: the missing private name of JAX; shown by the doctor
