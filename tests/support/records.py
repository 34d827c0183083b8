# SPDX-License-Identifier: Apache-2.0
"""What a long run leaves for the page of what was tested: `tools/tested.py` reads it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

PLACE = Path(__file__).resolve().parents[2] / "build" / "records"


def record(name: str, command: str, tried: str, findings: Iterable[str]) -> None:
    """Writes how often something was tried, and what was found; a later run replaces an earlier one.

    Args:
        name: of the file.
        command: what runs it again.
        tried: how much, in words.
        findings: what is not as it should be.
    """
    if os.environ.get("GRAFTAX_SANITIZED", name) != name:
        return  # a part of a longer run, which leaves its own
    PLACE.mkdir(parents=True, exist_ok=True)
    found = {
        "command": command,
        "tried": f"{tried}; Python {platform.python_version()}",
        "findings": list(findings),
        "day": time.strftime("%Y-%m-%d"),
    }
    (PLACE / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
