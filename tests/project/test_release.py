# SPDX-License-Identifier: Apache-2.0
"""The files of a release agree with pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def listed(text: str, key: str) -> set[str]:
    """The items of a list in the recipe, without spaces."""
    match = re.search(rf"^  {key}:\n((?:    - .+\n)+)", text, re.MULTILINE)
    assert match
    return {line.strip(" -").replace(" ", "") for line in match[1].splitlines()}


def test_the_citation_has_this_version_and_licence():
    citation = read("CITATION.cff")
    assert re.search(r"^cff-version: 1\.2\.0$", citation, re.MULTILINE)
    assert f"\nversion: {PROJECT['version']}\n" in citation and f"\nlicense: {PROJECT['license']}\n" in citation
    assert PROJECT["description"].rstrip(".") in citation


def test_the_conda_recipe_needs_what_the_project_needs():
    recipe = read("conda/recipe.yaml")
    assert f'version: "{PROJECT["version"]}"' in recipe
    assert {f"python{PROJECT['requires-python']}", *PROJECT["dependencies"]} == listed(recipe, "run")
    assert {*PYPROJECT["build-system"]["requires"]} <= listed(recipe, "host")


def test_a_release_is_published_without_a_token_and_attested():
    publish = read(".github/workflows/wheels.yml").partition("\n  publish:\n")[2]
    assert "id-token: write" in publish and "attestations: write" in publish
    assert "attest-build-provenance" in publish and "password" not in publish


def test_each_version_of_the_site_is_published_with_its_addresses():
    workflow, settings = read(".github/workflows/docs.yml"), read("mkdocs.yml")
    for name in re.findall(r"!ENV \[(\w+),", settings):
        assert f"{name}: " in workflow
    assert "mike deploy" in workflow and "content.action.edit" in settings


def test_actions_are_pinned_by_the_hash_of_a_commit_with_its_version_beside_it():
    workflows = [path.read_text(encoding="utf-8") for path in (ROOT / ".github/workflows").glob("*.yml")]
    used = [line for text in workflows for line in re.findall(r"\buses: (.+)", text)]
    assert used
    assert not [action for action in used if not re.match(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+\b", action)]
