# SPDX-License-Identifier: Apache-2.0
"""Writes the tutorials as notebooks, from the blocks of their pages and from examples: `python tools/notebooks.py`.

The format is written here, without jupytext: a test compares the notebooks with their sources on every machine.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
# By the name of the notebook: a page of docs/, or an example.
SOURCES = {
    "tutorial": "docs/tutorial.md",
    "gpt": "examples/gpt.py",
    "agent": "examples/agent.py",
    "planets": "examples/planets.py",
}
FOLDER_OF_PICTURES = """
from pathlib import Path

Path("pictures").mkdir(exist_ok=True)  # where cells draw
"""
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"\A\s*^```text\n.*?^```$", re.DOTALL | re.MULTILINE)  # by the block before: its cell prints it
IMAGE = re.compile(r"^!\[.*\]\((.*)\)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:|#)([^)\s]+)\)")
DEFINITIONS = (ast.ClassDef, ast.FunctionDef)
RAISES = re.compile(r"  # \w+Error(: .*)?$")


def cells_of_page(text: str) -> Iterator[tuple[str, str]]:
    """(type, source) of each cell. A cell shows a picture that a block has drawn; others are linked."""
    code_before = ""
    for i, part in enumerate(BLOCK.split(text)):
        if i % 2:
            code_before += part
            yield "code", part
            continue
        for j, piece in enumerate(IMAGE.split(PRINTED.sub("", part))):
            if j % 2 == 0:
                yield "markdown", LINK.sub(r"](../\1)", piece)
            elif f'"{piece}"' in code_before:
                yield "code", f'from IPython.display import SVG\n\nSVG("{piece}")'
            else:
                yield "markdown", f"![](../{piece})"


def cells_of_example(text: str) -> Iterator[tuple[str, str]]:
    """(type, source) of each cell: the docstring, each class and function, and the statements between them."""
    lines, module = text.splitlines(), ast.parse(text)
    title, _, about = (ast.get_docstring(module) or "").partition("\n\n")
    title = re.sub(r":? `python .*", "", title.replace("\n", " "), flags=re.DOTALL).rstrip(".")
    yield "markdown", f"# {title}\n\n{about}"
    begin: int | None = None  # the first line of the statements between two definitions
    body = module.body[1:]
    for node, following in zip(body, [*body[1:], None], strict=True):
        decorators = getattr(node, "decorator_list", [])
        start = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
            yield "code", textwrap.dedent("\n".join(lines[node.body[0].lineno - 1 : node.end_lineno]))
        elif isinstance(node, DEFINITIONS):
            yield "code", "\n".join(lines[start : node.end_lineno])
        else:
            begin = start if begin is None else begin
            if following is None or isinstance(following, (*DEFINITIONS, ast.If)):
                yield "code", "\n".join(lines[begin : node.end_lineno])
                begin = None


def notebook(name: str) -> dict[str, Any]:
    """A notebook in the format of Jupyter, without outputs."""
    source = SOURCES[name]
    text = (ROOT / source).read_text(encoding="utf-8")
    cells = [*(cells_of_page(text) if source.endswith(".md") else cells_of_example(text))]
    packages = "graftax optax" if "import optax" in text else "graftax"
    cells.insert(1, ("code", f"%pip install --quiet {packages}" + FOLDER_OF_PICTURES * ('"pictures/' in text)))
    return {
        "cells": [_cell(i, kind, text.strip()) for i, (kind, text) in enumerate(cells) if text.strip()],
        "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(number: int, kind: str, text: str) -> dict[str, Any]:
    tags = {"tags": ["raises-exception"]} if kind == "code" and RAISES.search(text) else {}
    cell: dict[str, Any] = {"cell_type": kind, "id": str(number), "metadata": tags}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return {**cell, "source": text.splitlines(keepends=True)}


def notebook_text(name: str) -> str:
    return json.dumps(notebook(name), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in SOURCES:
        (FOLDER / f"{name}.ipynb").write_text(notebook_text(name), encoding="utf-8")
