# SPDX-License-Identifier: Apache-2.0
"""The site of the documentation: every page and every public name has its place."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

import graftax

ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(monkeypatch):
    """The hook of mkdocs, which is installed for `make docs` alone."""
    names = ("mkdocs", "mkdocs.exceptions", "mkdocs.structure", "mkdocs.structure.files")
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["mkdocs.exceptions"].PluginError = ValueError
    sys.modules["mkdocs.structure.files"].File = object
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools" / "docs_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_on_one_page(site):
    names = [name for _, names in site.api_pages().values() for name in names]
    public = {*graftax.__all__, *graftax.errors.__all__, *graftax.types.__all__}
    assert sorted(names) == sorted(public - {"errors", "tree", "types"})
    assert {*site.public_names()} == {*site.ABOUT}


def test_a_function_is_on_a_page_with_what_it_returns(site):
    pages = site.api_pages()
    assert pages["api/jit.md"] == ("jit", ["jit", "Jitted", "CacheInfo"])
    assert len({place.lower() for place in pages}) == len(pages)  # on a file system that takes `A` for `a`, too


def test_every_page_is_in_the_navigation(site):
    sections = ("Tutorials", "How-to guides", "Reference", "Explanation", "Internals")
    nav = [{"Home": "index.md"}, *({section: []} for section in sections)]
    nav[1]["Tutorials"].append({"Train a GPT": "examples/gpt.md"})
    text = repr(site.on_config({"nav": nav}))
    own = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    examples = [f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.py")]
    for place in (*own, *examples):
        assert text.count(f"'{place}'") == 1, place
    assert all(text.count(f"'{place}'") == 1 for place in site.api_pages())


def test_the_navigation_names_nothing_that_is_gone(site):
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r": ([\w./-]+\.md)$", navigation, re.MULTILINE)
    assert len(named) > 20
    assert not [
        n for n in named if n not in site.PAGES and not n.startswith("api/") and not (ROOT / "docs" / n).is_file()
    ]


def test_the_search_works_in_pages_opened_from_a_folder():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^  - offline\b", settings, re.MULTILINE)
    # Without a shim of this name the plugin would add one from the network.
    assert "polyfills: [assets/iframe-worker.js]" in settings
    assert (ROOT / "tools" / "iframe-worker.js").is_file()
