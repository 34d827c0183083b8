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
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "benchmarks.md": "benchmarks/README.md",
    "internals/core.md": "core/README.md",
    **{f"examples/{path.stem}.md": f"examples/{path.name}" for path in sorted((ROOT / "examples").glob("*.py"))},
}
# Names of examples that their files do not tell.
EXAMPLE_NAMES = {"gpt": "GPT", "maml": "MAML", "multihost_train": "Several hosts", "nnx_training": "Flax NNX"}
API = "api/index.md"
FOLDERS = {"examples": "gallery.md", "python/graftax": API}
LAST_FOUND = ("internals/", "changelog", "contributing", "benchmarks")

# The pages of the API: a title, what is there, and the packages or modules that the names are imported from. The first
# name of each page is what most readers come for.
GROUPS = {
    "compile": (
        "Compile",
        "`jit`, what it returns, and its options.",
        {"_jit", "_base.marks", "_explain", "_export"},
    ),
    "transform": (
        "Transform",
        "Derivatives, axes, loops, branches, rules and callbacks.",
        {"transforms", "_graph.stack"},
    ),
    "filtered": ("Transform by value", "Equinox's `filter_*`, with its signatures.", set[str]()),  # filter_*
    "train": (
        "Train",
        "Optimizers, masks, random streams, averages.",
        {"_training"},
    ),
    "edit": ("Edit graphs", "Select, change, split, compare and take apart any objects.", set[str]()),  # all others
    "look": ("Look", "What a model holds, and why a function was compiled.", {"_show"}),
    "save": ("Save", "Files, checkpoints and exported programs.", {"_io"}),
    "scale": (
        "Scale",
        "Several devices, several hosts, and many small arrays.",
        {"_sharding", "_jit.multihost_check", "_graph.packed"},
    ),
    "classes": (
        "Define classes",
        "For classes that JAX's own trees should open, too.",
        {"_graph.types.register", "_graph.module"},
    ),
    "errors": ("Errors and warnings", "What is raised, and what to do about it.", {"_base.errors"}),
}
FIRST = (
    *("jit", "Jitted", "grad", "value_and_grad", "vmap", "scan", "filter_jit", "optimizer", "Optimizer", "at", "show"),
    *("save", "load", "Rules", "Module", "GraftaxError"),
)
# Names that are elsewhere than the other ones of their module.
MOVED = {name: "look" for name in ("explain", "log_recompiles", "Explanation", "CallExplanation", "RecompileLog")}
MOVED |= {"shared": "look", "find": "look", "count": "look", "diff": "look", "export": "save", "Exported": "save"}
MOVED |= {"shard": "scale", "filter_jit": "filtered"}
MOVED |= dict.fromkeys(("cast", "map_leaves"), "edit")


def public_names() -> dict[str, str]:
    """The module that each public name comes from."""
    body = ast.parse((ROOT / "python" / "graftax" / "__init__.py").read_text(encoding="utf-8")).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: str(node.module)
        for node in imports
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }


def group_of(name: str, module: str) -> str:
    """The page that a name is on."""
    if name in MOVED:
        return MOVED[name]
    if name.startswith("filter_"):
        return "filtered"
    if name.endswith(("Error", "Warning")):
        return "errors"
    found = [
        (len(place), group)
        for group, (_, _, places) in GROUPS.items()
        for place in places
        if f"{module}.".startswith(f"graftax.{place}.")
    ]
    return max(found, default=(0, "edit"))[1]


def grouped_names() -> dict[str, list[str]]:
    """The names of each page, in the order of the page."""
    grouped: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name, module in public_names().items():
        grouped[group_of(name, module)].append(name)
    places = {name: place for place, name in enumerate(FIRST)}

    def order(name: str) -> tuple[int, bool, str]:  # functions before the classes of what they return
        return places.get(name, len(places)), name[0].isupper(), name

    return {group: sorted(names, key=order) for group, names in grouped.items()}


def name_of(place: str) -> str:
    """What an example is called in the navigation."""
    stem = Path(place).stem
    return EXAMPLE_NAMES.get(stem, stem.replace("_", " ").capitalize())


def title_of(source: str) -> str:
    """The first sentence of an example, without the command that runs it."""
    said = ast.get_docstring(ast.parse((ROOT / source).read_text(encoding="utf-8"))) or ""
    return re.sub(r":? `python .*", "", said.split("\n\n")[0].replace("\n", " ")).rstrip(".")


def on_config(config: Any) -> Any:
    """Adds to the navigation what it does not name: examples, the pages of the API, and pages that are new."""
    nav: list[Any] = config["nav"]
    named = set(re.findall(r"'([\w./-]+\.md)'", repr(nav)))
    sections = {name: part[name] for part in nav for name in part if isinstance(part[name], list)}
    examples = [place for place in PAGES if place.startswith("examples/") and place not in named]
    sections["Tutorials"].append({"More examples": [{name_of(place): place} for place in examples]})
    api = [{title: f"api/{group}.md"} for group, (title, _, _) in GROUPS.items()]
    sections["Reference"].insert(0, {"API": [API, *api]})
    for place in sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")):
        if place not in named:
            sections["Internals" if place.startswith("internals/") else "How-to guides"].append(place)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that do not lie in docs/."""
    made: dict[str, str] = {}
    for place, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".py"):
            said = f"{title_of(source)}. Run it with `python {source}`."
            text = f"# {name_of(source)}\n\n{said}\n\n```python\n{text}```\n"
        made[place] = text
    for name in ("iframe-worker.js", "site.css"):
        made[f"assets/{name}"] = (ROOT / "tools" / name).read_text(encoding="utf-8")
    contents = ["# API", "", "Everything here is an attribute of `graftax`."]
    for group, names in grouped_names().items():
        title, about, _ = GROUPS[group]
        directives = "\n\n".join(_directive(name) for name in names)
        made[f"api/{group}.md"] = f"# {title}\n\n{about}\n\n{directives}\n"
        links = ", ".join(f"[`{name}`]({group}.md#{_anchor(name)})" for name in names)
        contents += ["", f"## [{title}]({group}.md)", "", about, "", links]
    made[API] = "\n".join([*contents, ""])
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def _anchor(name: str) -> str:
    return "graftax._show._Show" if name == "show" else f"graftax.{name}"


def _directive(name: str) -> str:
    if name == "show":  # an object that is called
        return "::: graftax._show._Show\n    options:\n      heading: show\n      toc_label: show"
    if name == "Jitted":  # with what it has from the stages: lower, trace, warm
        return "::: graftax.Jitted\n    options:\n      inherited_members: true"
    return f"::: graftax.{'export.' if name == 'export' else ''}{name}"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Leads links to files of the repository to their pages; the search finds guides before internals."""
    here = page.file.src_uri
    if here.startswith(LAST_FOUND):
        page.meta["search"] = {"boost": 0.2}
    source = PAGES.get(here, f"docs/{here}")
    places = {source: place for place, source in PAGES.items()} | FOLDERS

    def led(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if re.match(r"\w+:", target) or here == API:
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
    if here == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
        markdown = re.sub(r"^\[.*\) · \[.*$", _as_buttons, markdown, flags=re.MULTILINE)
    return "".join(part if i % 2 else LINK.sub(led, part) for i, part in enumerate(FENCE.split(markdown)))


def _as_buttons(line: re.Match[str]) -> str:
    first, *others = line[0].split(" · ")
    return "\n".join([f"{first}{{ .md-button .md-button--primary }}", *(f"{link}{{ .md-button }}" for link in others)])


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """The signature of `graftax.show`, an object that is called, has its name."""
    return html.replace(">_Show<", ">show<") if page.file.src_uri.startswith("api/") else html
