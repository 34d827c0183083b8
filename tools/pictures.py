# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the pages: runs each block of code that draws one, in docs/."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def main() -> None:
    os.chdir(DOCS)
    for page in sorted(DOCS.rglob("*.md")):
        for code in BLOCK.findall(page.read_text(encoding="utf-8")):
            if '"pictures/' in code:
                module = sys.modules["block"] = type(sys)("block")
                exec(compile(code, str(page), "exec"), module.__dict__)


if __name__ == "__main__":
    main()
