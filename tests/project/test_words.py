# SPDX-License-Identifier: Apache-2.0
"""The pages and docstrings are in natural English: phrases that have slipped in before do not come back."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import graftax

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "core/README.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

ODD = [
    "is no array",
    "are no pytrees",
    "means nothing",
    "goes by structure",
    "puts another one there",
    "is none of these",
    "pytree leaves",
]
# What users read has to be plain at the first reading, so more is asked of it than of the pages for contributors.
ODD_FOR_USERS = [
    "an equal one",
    "another one of its kind",
    "as tests find it",
    "as the tests find it",
    "comes back to the caller",
    "leads nowhere",
    "made again",
    "no part of the",
    "one and the other",
    "the way out",
    "without a word",
]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def odd_in(text: str, is_for_users: bool) -> list[str]:
    text = " ".join(text.split())
    return [phrase for phrase in ODD + (ODD_FOR_USERS if is_for_users else []) if phrase in text]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_no_odd_phrase(page):
    is_for_users = page.name == "README.md" and page.parent == ROOT
    is_for_users |= page.is_relative_to(ROOT / "docs") and "internals" not in page.parts
    assert not odd_in(page.read_text(encoding="utf-8"), is_for_users)


def test_an_odd_phrase_is_found_across_lines():
    assert odd_in("It is no\narray.", False) == ["is no array"]
    assert odd_in("dropped without\n  a word", True) == ["without a word"]
    assert not odd_in("dropped without a word", False)


# ---- the docstrings, which the site's API pages and help() show


def documented():
    """The public names and methods with their docstrings."""
    for name, thing in sorted(vars(graftax).items()):
        if not name.startswith("_") and not inspect.ismodule(thing):
            yield name, inspect.getdoc(thing)
            if inspect.isclass(thing):
                own = {k: v for k, v in vars(thing).items() if not k.startswith("_")}
                yield from ((f"{name}.{k}", inspect.getdoc(v)) for k, v in own.items() if callable(v))


@pytest.mark.parametrize(("name", "doc"), list(documented()), ids=[name for name, _ in documented()])
def test_a_docstring_has_no_odd_phrase(name, doc):
    assert not odd_in(doc or "", is_for_users=False)
