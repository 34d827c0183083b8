# SPDX-License-Identifier: Apache-2.0
"""The file of results: the parts of a measurement, a row a line, so that one other number is one other line."""

import json
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    """The parts in a file; none where there is no file yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, parts: dict[str, Any]) -> None:
    """Table, growth series, trees and budgets, as many as there are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_lines(parts) + "\n", encoding="utf-8")


def _lines(value: Any, indent: str = "") -> str:
    """Objects that hold objects and lists of objects are opened; everything else stands on one line."""
    inside = indent + " "
    if isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values()):
        items = [f"{inside}{json.dumps(key)}: {_lines(item, inside)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(inside + json.dumps(item) for item in value) + f"\n{indent}]"
    return json.dumps(value)
