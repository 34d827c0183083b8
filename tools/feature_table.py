# SPDX-License-Identifier: Apache-2.0
"""Writes the README's table of features from runs of tests/support/features.py.

python tools/feature_table.py            # exit 1 where the table is not current
python tools/feature_table.py --write
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import features


def main(arguments: list[str]) -> int:
    text = features.README.read_text(encoding="utf-8")
    new = features.BLOCK.sub(lambda m: m[1] + features.table() + m[3], text)
    if "--write" in arguments:
        features.README.write_text(new, encoding="utf-8")
        return 0
    return int(new != text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
