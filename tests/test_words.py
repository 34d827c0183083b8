# SPDX-License-Identifier: Apache-2.0
"""The pages are in plain words: short sentences, and one word for one thing."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import graftax

ROOT = Path(__file__).parents[1]
MOST_WORDS = 25
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "core/README.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

BLOCK = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
MEASURED = re.compile(r"<!-- measured: .*?<!-- end -->", re.DOTALL)
CODE = re.compile(r"`[^`]*`")
LISTED = re.compile(r"code(,?\s+(and\s+|or\s+)?code)+")  # names in a row count as one
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +", re.MULTILINE)
# A sentence ends with a mark and a space; so does what stands before a list.
END = re.compile(r"(?<=[.!?:;])[\"')*]*\s+|\n\s*\n")

ODD = [
    "is no array",
    "are no pytrees",
    "means nothing",
    "goes by structure",
    "puts another one there",
    "is none of these",
    "pytree leaves",
]


def sentences(text: str) -> list[str]:
    """The sentences of a page: code, tables, headings and what a link leads to left out."""
    for pattern, instead in (
        (BLOCK, "\n\n"),
        (MEASURED, ""),
        (COMMENT, ""),
        (LINK, r"\1"),
        (CODE, "code"),
        (LISTED, "code"),
    ):
        text = pattern.sub(instead, text)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(("|", "#", "---"))]
    return [part.strip() for part in END.split(ITEM.sub("\n\n", "\n".join(lines))) if part.strip()]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_sentence_has_at_most_25_words(page):
    long = [s for s in sentences(page.read_text(encoding="utf-8")) if len(s.split()) > MOST_WORDS]
    assert not long, "\n\n".join(long)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_no_odd_phrase(page):
    text = " ".join(page.read_text(encoding="utf-8").split())
    assert not [phrase for phrase in ODD if phrase in text]


def test_sentences_are_counted():
    assert sentences("Take `a`, `b` and `c`.") == ["Take code."]
    text = "# A title\n\nOne two `x y z`. Three\nfour:\n\n- five\n- six; seven.\n\n| a | b |\n\n```\ncode here.\n```\n"
    assert sentences(text) == ["One two code.", "Three\nfour:", "five", "six;", "seven."]


# ---- the docstrings, which the site's API pages and help() show

SECTION = re.compile(r"^(Args|Returns|Raises|Example|Examples):$")
ARGUMENT = re.compile(r"^ {4}\*{0,2}\w+(, \*{0,2}\w+)*: ")


def documented():
    """The public names and methods with their docstrings."""
    for name, thing in sorted(vars(graftax).items()):
        if not name.startswith("_") and not inspect.ismodule(thing):
            yield name, inspect.getdoc(thing)
            if inspect.isclass(thing):
                own = {k: v for k, v in vars(thing).items() if not k.startswith("_")}
                yield from ((f"{name}.{k}", inspect.getdoc(v)) for k, v in own.items() if callable(v))


def without_code(doc):
    """A docstring as text: examples left out, each argument a paragraph."""
    lines, is_code = [], False
    for line in doc.splitlines():
        is_code = line.lstrip().startswith((">>>", "...")) or (is_code and bool(line.strip()))
        if not is_code:
            lines.append("" if SECTION.match(line) else ARGUMENT.sub("\n\n", line))
    return "\n".join(lines)


@pytest.mark.parametrize(("name", "doc"), list(documented()), ids=[name for name, _ in documented()])
def test_a_docstring_is_in_plain_words_too(name, doc):
    text = without_code(doc or "")
    assert not [s for s in sentences(text) if len(s.split()) > MOST_WORDS]
    assert not [phrase for phrase in ODD if phrase in " ".join(text.split())]
