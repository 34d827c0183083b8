# SPDX-License-Identifier: Apache-2.0
"""What the site of the documentation has beside the pages in docs/: those of other folders, examples, and the names.

A hook of mkdocs. A link to a file that is on the site leads there; one to any other file of the repository is its name.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]\[]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")

FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)

# Files that lie elsewhere, by their place on the site.
PAGES = {
    "index.md": "README.md",
    "guides.md": "docs/index.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "benchmarks.md": "benchmarks/README.md",
    "internals/core.md": "core/README.md",
    **{f"examples/{path.stem}.md": f"examples/{path.name}" for path in sorted((ROOT / "examples").glob("*.py"))},
}
EXAMPLES = "examples/index.md"
LAST_FOUND = ("internals/", "changelog", "contributing", "benchmarks")

# The page of each public name, by the module that it is imported from.
GROUPS = {
    "compiling": ("Compiling", {"_jit", "_jitted", "_aot", "_table", "export", "_show", "_explain"}),
    "transforms": ("Transforms", {"transforms", "_stacking"}),
    "filtered": ("By value, as Equinox", set[str]()),  # filter_*
    "files": ("Files", {"_files"}),
    "devices": ("Many devices", {"_rules", "_agreement"}),  # and shard
    "graphs": ("Graphs by hand", set[str]()),  # all others
    "training": ("Training", {"_leaves", "_optimizer", "_labels", "_streams"}),
    "classes": ("Classes", {"_fields", "marks", "module"}),
    "errors": ("Errors and warnings", {"_errors"}),
}


def public_names() -> dict[str, str]:
    """The module that each public name comes from."""
    body = ast.parse((ROOT / "python" / "graftax" / "__init__.py").read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: f"{node.module or alias.name}"
        for node in imports
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }


def group_of(name: str, module: str) -> str:
    """The page that a name is on."""
    if name.startswith("filter_") and module.startswith("transforms"):
        return "filtered"
    if module == "transforms.shard":
        return "devices"
    if name.endswith(("Error", "Warning")):
        return "errors"
    first = module.partition(".")[0]
    return next((group for group, (_, modules) in GROUPS.items() if first in modules), "graphs")


def on_config(config: Any) -> Any:
    """Adds to the navigation what it does not name: the examples, and pages that are new."""
    nav: list[Any] = config["nav"]
    named = set(re.findall(r"'([\w./-]+\.md)'", repr(nav)))
    examples = [{Path(place).stem.replace("_", " "): place} for place in PAGES if place.startswith("examples/")]
    nav.insert(-2, {"Examples": [{"All examples": EXAMPLES}, *examples]})
    for place in sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")):
        if place not in named:
            section = "Internals" if place.startswith("internals/") else "Guides"
            next(part for part in nav if section in part)[section].append(place)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that do not lie in docs/."""
    files.remove(files.get_file_from_path("index.md"))
    for place, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".py"):
            text = f"# {Path(source).name}\n\n```python\n{text}```\n"
        files.append(File.generated(config, place, content=text))
    shim = (ROOT / "tools" / "iframe-worker.js").read_text(encoding="utf-8")
    files.append(File.generated(config, "assets/iframe-worker.js", content=shim))
    listed = "\n".join(f"- [{Path(place).stem}.py]({Path(place).name})" for place in PAGES if "examples/" in place)
    files.append(File.generated(config, EXAMPLES, content=f"# Examples\n\n{listed}\n"))
    grouped: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name, module in public_names().items():
        grouped[group_of(name, module)].append(name)
    for group, (title, _) in GROUPS.items():
        directives = "\n\n".join(_directive(name) for name in sorted(grouped[group]))
        files.append(File.generated(config, f"api/{group}.md", content=f"# {title}\n\n{directives}\n"))
    return files


def _directive(name: str) -> str:
    if name == "show":  # an object that is called
        return "::: graftax._show._Show\n    options:\n      heading: show\n      toc_label: show"
    return f"::: graftax.{'export.' if name == 'export' else ''}{name}"  # there is a module of that name


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leads links to files of the repository to their pages; the search finds guides before internals."""
    here = page.file.src_uri
    if here.startswith(LAST_FOUND):
        page.meta["search"] = {"boost": 0.2}
    source = PAGES.get(here, "examples" if here == EXAMPLES else f"docs/{here}")
    places = {source: place for place, source in PAGES.items()} | {"examples": EXAMPLES}

    def led(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"\w+:", target) or here.startswith(("api/", EXAMPLES)):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        place = places.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if place is None or files.get_file_from_path(place) is None:
            if not (ROOT / path).exists():
                raise PluginError(f"{source}: {target} leads nowhere")
            return text
        return f"[{text}]({os.path.relpath(place, posixpath.dirname(here) or '.')}{anchor})"

    if source.endswith(".py"):
        return markdown
    return "".join(part if i % 2 else LINK.sub(led, part) for i, part in enumerate(FENCE.split(markdown)))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """The signature of `graftax.show`, an object that is called, has its name."""
    return html.replace(">_Show<", ">show<") if page.file.src_uri.startswith("api/") else html
