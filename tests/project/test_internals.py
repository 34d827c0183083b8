# SPDX-License-Identifier: Apache-2.0
"""What docs/internals, core/README.md and the table of layers name exists: files, modules, types and functions.

The decisions are left out: each says what was there when it was taken.
"""

import builtins
import fnmatch
import importlib
import io
import keyword
import re
import tokenize
from functools import cache
from pathlib import Path

import jax
import pytest

from graftax import _core

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "core" / "README.md", *sorted((ROOT / "docs" / "internals").glob("*.md"))]
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
NAME = r"[A-Za-z_]\w*"
# A name, dotted or not, perhaps called with something.
CALLABLE = re.compile(rf"({NAME}(?:\.{NAME})*)(\(.*\))?")
FILE = re.compile(r"[\w./]*(\.(py|pyi|h|cpp|md|toml)|\.\*|/|/\w+)")
# Where a name may come from that is nobody's here.
OUTSIDE = ["jax", "jax.numpy", "jax.tree_util", "numpy", "functools", "gc", "types", "decimal"]
# What a type's own name is, and no module has by that name.
SHOWN = {"mappingproxy"}


def sources(*patterns):
    return sorted(path for pattern in patterns for path in ROOT.glob(pattern))


def tokens(*patterns):
    for path in sources(*patterns):
        yield from tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)


@cache
def names_in_tests():
    return {token.string for token in tokens("tests/**/*.py") if token.type == tokenize.NAME}


@cache
def names_in_code():
    """Every name that the package and the core use, comments left out; of their strings those that are a name."""
    found = set()
    for token in tokens("python/graftax/**/*.py", "python/graftax/*.pyi"):
        if token.type == tokenize.NAME:
            found.add(token.string)
        elif token.type == tokenize.STRING:
            found.update(re.findall(rf"^['\"]({NAME})['\"]$", token.string))
    for path in sources("core/**/*.h", "core/**/*.cpp"):
        code = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        found.update(re.findall(rf"\"({NAME})\"", code))
        found.update(re.findall(NAME, re.sub(r'"(\\.|[^"\\\n])*"', '""', code)))
    return found


def is_outside(name):
    if name in dir(builtins) or name in SHOWN or keyword.iskeyword(name) or name.startswith(("Py_", "PyObject_")):
        return True
    if hasattr(jax.config, name) or hasattr(jax.config, f"jax_{name}"):
        return True
    return any(hasattr(importlib.import_module(module), name) for module in OUTSIDE)


@cache
def known_paths():
    """Of all files and folders of the project, without those that a build or an environment leaves there."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name != "build" and path.name[0] != "."]
    paths = [*ROOT.iterdir(), *folders, *(path for folder in folders for path in folder.rglob("*"))]
    return {f"/{path.relative_to(ROOT).as_posix()}" for path in paths}


def file_exists(text):
    """A file, a folder, or `core/graph/program_rows` for source and header; from the root or any folder."""
    text = text.strip("/")
    patterns = [f"*/{text}"] + ([f"*/{text}.*"] if "/" in text and "." not in text else [])
    return any(fnmatch.filter(known_paths(), pattern) for pattern in patterns)


@cache
def module_names():
    return {path.stem for path in sources("core/**/*.*", "python/graftax/**/*.py")} | {"core", "graftax"}


def missing(text):
    """What of the text in backquotes is said to be there, and is not."""
    if FILE.fullmatch(text):
        return [] if file_exists(text) else [text]
    if text.startswith("test_"):
        return [] if text in names_in_tests() or next((ROOT / "tests").rglob(f"{text}.py"), None) else [text]
    match = CALLABLE.fullmatch(text)
    if match is None:
        return []  # an expression: an example, and no claim
    words = match[1].split(".")
    unknown = [
        word for word in words if word not in names_in_code() and word not in module_names() and not is_outside(word)
    ]
    return [word for word in unknown if word not in names_in_tests()]  # which take seconds to read


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    said = {text: missing(text) for text in CODE.findall(text)}
    assert not {text: found for text, found in said.items() if found}


@pytest.mark.quick(0)
def test_a_name_that_is_nowhere_is_missing():
    assert missing("no_such_function(x)") == ["no_such_function"]
    assert missing("Caller.no_such_method") == ["no_such_method"]
    assert missing("core/no_such_file.cpp") and missing("no_such_file.py") and missing("test_no_such_thing")
    assert not missing("Caller") and not missing("core/graph/graphdef.*") and not missing("jax.tree_util.tree_flatten")


def rows_of(page, column):
    """The cells of each table whose second column is `column`."""
    table = False
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            table = False
        elif len(cells) > 1 and cells[1] == column:
            table = True
        elif table and not line.startswith("|-"):
            yield cells


CORE_TYPES = [(name, cells[1]) for cells in rows_of(PAGES[0], "file") for name in CODE.findall(cells[0])]


@pytest.mark.parametrize(("name", "files"), CORE_TYPES, ids=[name for name, _ in CORE_TYPES])
def test_a_type_of_the_core_is_declared_in_the_files_that_its_page_gives(name, files):
    given = {
        stem: sources(f"core/{stem}*" if stem.endswith("/") else f"core/**/{stem}.*") for stem in CODE.findall(files)
    }
    assert all(given.values()), given
    declared = re.compile(rf"\b(struct|class|using)\s+{name}(Object)?\b")
    assert any(declared.search(path.read_text(encoding="utf-8")) for found in given.values() for path in found), (
        f"{name} in {files}"
    )


def test_the_fields_of_a_row_are_those_that_its_page_names():
    (cells,) = (cells for cells in rows_of(ROOT / "docs" / "internals" / "engine.md", "file") if cells[0] == "`Row`")
    named = [name for name in CODE.findall(cells[2]) if name != "Op"]
    assert named and not [name for name in named if not hasattr(_core.Row, name)]


def test_the_glossary_has_forty_words_at_most_and_none_twice():
    words = [cells[0] for cells in rows_of(ROOT / "docs" / "internals" / "glossary.md", "meaning")]
    assert 0 < len(words) <= 40 and len(set(words)) == len(words)
    assert all(re.fullmatch(r"[A-Za-z -]+", word) for word in words), "a name of the code is no word"
