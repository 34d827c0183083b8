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

ABOUT = {
    "Compile": "`jit`, what it returns, and its options.",
    "Transform": "Derivatives, mapped axes, loops, branches, derivative rules and callbacks.",
    "Transform by value, as Equinox does": "Equinox's `filter_*`, with its signatures.",
    "Train": "Optimizers, masks, random streams, averages.",
    "Edit graphs": "Select, change, split, compare and flatten any objects.",
    "Inspect": "What a model contains, and why a function was compiled.",
    "Save": "Files, checkpoints and exported programs.",
    "Scale": "Several devices, several hosts, and many small arrays.",
    "Define classes": "Classes that are pytrees of JAX, too.",
    "Results": "The classes of what functions return, in `graftax.types` as well.",
    "Errors": "Errors and warnings, and what to do about them; in `graftax.errors` as well.",
}
# What a function returns is on the page of the function.
RESULTS = {
    "jit": ("Jitted", "CacheInfo"),
    "optimizer": ("Optimizer",),
    "pack": ("Packed",),
    "export": ("Exported",),
    "explain": ("Explanation", "CallExplanation"),
    "log_recompiles": ("RecompileLog",),
    "flatten": ("GraphDef",),
    "memory": ("MemoryReport", "ArrayMemory"),
}


def public_names() -> dict[str, list[str]]:
    """The names of each group, as the docstring of the package has them, then those of results and errors."""
    about = ast.get_docstring(_parsed("__init__")) or ""
    groups = re.findall(r"^- ([\w ,]+):\n((?:  .*\n)+)", about, re.MULTILINE)
    names = {title: [name for name in re.findall(r"\w+", text) if name != "tree"] for title, text in groups}
    return names | {"Results": _exported("types"), "Errors": _exported("errors")}


def _parsed(module: str) -> ast.Module:
    return ast.parse((ROOT / "python" / "graftax" / f"{module}.py").read_text(encoding="utf-8"))


def _exported(module: str) -> list[str]:
    last = _parsed(module).body[-1]
    assert isinstance(last, ast.Assign) and ast.unparse(last.targets[0]) == "__all__"
    return list(ast.literal_eval(last.value))


def api_pages() -> dict[str, tuple[str, list[str]]]:
    """The title and the names of each page: one for a function or a class, one for all errors."""
    beside = {name for names in RESULTS.values() for name in names}
    pages: dict[str, tuple[str, list[str]]] = {}
    for group, names in public_names().items():
        if group == "Errors":
            pages["api/errors.md"] = ("Errors", names)
        else:
            pages |= {f"api/{n}.md": (n, [n, *RESULTS.get(n, ())]) for n in names if n not in beside}
    return pages


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
    if "MIKE_DOCS_VERSION" in os.environ:  # mike builds one version of several: a menu to choose from
        config["extra"]["version"] = {"provider": "mike", "default": "latest"}
    nav: list[Any] = config["nav"]
    named = set(re.findall(r"'([\w./-]+\.md)'", repr(nav)))
    sections = {name: part[name] for part in nav for name in part if isinstance(part[name], list)}
    examples = [place for place in PAGES if place.startswith("examples/") and place not in named]
    sections["Tutorials"].append({"More examples": [{name_of(place): place} for place in examples]})
    sections["Reference"].insert(0, {"API": [API, *_api_navigation()]})
    for place in sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")):
        if place not in named:
            sections["Internals" if place.startswith("internals/") else "How-to guides"].append(place)
    return config


def _api_navigation() -> list[Any]:
    page_of = {name: (title, place) for place, (title, names) in api_pages().items() for name in names}
    nav: list[Any] = []
    for group, names in public_names().items():
        pages = dict.fromkeys(page_of[name] for name in names if group != "Results" or page_of[name][0] == name)
        nav.append({group: [{title: place} for title, place in pages]})
    nav[-1] = {"Errors": "api/errors.md"}
    return nav


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
    made |= {place: _api_page(title, names) for place, (title, names) in api_pages().items()}
    made[API] = _api_index()
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def _api_index() -> str:
    place_of = {name: posixpath.basename(place) for place, (_, names) in api_pages().items() for name in names}
    lines = ["# API", "", "Attributes of `graftax`. [`graftax.tree`](../trees.md) has a page of its own."]
    for group, names in public_names().items():
        links = ", ".join(f"[`{name}`]({place_of[name]}#{_anchor(name)})" for name in names)
        lines += ["", f"## {group}", "", ABOUT[group], "", links]
    return "\n".join([*lines, ""])


def _api_page(title: str, names: list[str]) -> str:
    """The title of the page is that of the function or class that has it, with what it returns below."""
    own = [f"# {title}"] if title not in names else []
    levels = (1 if name == title else 2 for name in names)
    return "\n\n".join([*own, *map(_directive, names, levels), ""])


def _anchor(name: str) -> str:
    return "graftax._show._Show" if name == "show" else f"graftax.{name}"


def _directive(name: str, level: int) -> str:
    options = [f"heading_level: {level}"]
    if name == "show":  # an object that is called
        options += ["heading: show", "toc_label: show"]
    if name == "Jitted":  # with what it has from the stages: lower, trace, warm
        options += ["inherited_members: true"]
    directive = "\n      ".join([f"::: {_anchor(name)}\n    options:", *options])
    if (ROOT / "docs" / "errors" / f"{name}.md").is_file():
        return f"{directive}\n\n[What to do about it](../errors/{name}.md)"
    return directive


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

    notebook = f"notebooks/{posixpath.splitext(posixpath.basename(here))[0]}.ipynb"
    if here.startswith(("examples/", "tutorial")) and (ROOT / "docs" / notebook).is_file():
        markdown = _with_notebook(markdown, here, notebook, str(config["repo_url"] or ""))
    if source.endswith(".py"):
        return markdown
    if here == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
        markdown = re.sub(r"^\[.*\) · \[.*$", _as_buttons, markdown, flags=re.MULTILINE)
    return "".join(part if i % 2 else LINK.sub(led, part) for i, part in enumerate(FENCE.split(markdown)))


def _with_notebook(markdown: str, here: str, notebook: str, repository: str) -> str:
    """The page with links to its notebook below the title: the file, and Colab where the sources are on GitHub."""
    links = [f"[Download as a notebook]({os.path.relpath(notebook, posixpath.dirname(here) or '.')}){{ download }}"]
    if repository.startswith("https://github.com/"):
        address = f"{repository.removeprefix('https://github.com/')}/blob/main/docs/{notebook}"
        links.insert(0, f"[Open in Colab](https://colab.research.google.com/github/{address})")
    title, _, rest = markdown.partition("\n")
    return f"{title}\n\n{' · '.join(links)}\n{rest}"


def _as_buttons(line: re.Match[str]) -> str:
    first, *others = line[0].split(" · ")
    return "\n".join([f"{first}{{ .md-button .md-button--primary }}", *(f"{link}{{ .md-button }}" for link in others)])


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """The signature of `graftax.show`, an object that is called, has its name."""
    return html.replace(">_Show<", ">show<") if page.file.src_uri.startswith("api/") else html
