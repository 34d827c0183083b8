# SPDX-License-Identifier: Apache-2.0
"""How a line of code is named in messages."""

from __future__ import annotations

import os
import sys
from typing import Any


def code_line(file: str, line: int, *, folder: bool = True) -> str:
    """`folder/train.py:12`; in a notebook, whose cells have files of meaningless names, `In[3], line 12`.

    Args:
        file: the name that the code has as its file.
        line: of the file.
        folder: names the folder of the file, too.
    """
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    name_cell = getattr(getattr(shell, "compile", None), "format_code_name", None)  # since IPython 8
    cell = name_cell(file) if name_cell is not None else None
    if cell is not None:
        return f"{cell[1]}, line {line}"
    return f"{file if folder else os.path.basename(file)}:{line}"
