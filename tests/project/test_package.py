# SPDX-License-Identifier: Apache-2.0
"""The package as a whole: what it exports and ships, which way its imports point, how its files are kept."""

from __future__ import annotations

import ast
import contextlib
import graphlib
import importlib.metadata
import importlib.resources
import inspect
import pickle
import pydoc
import re
import subprocess
import sys
import traceback
import types
import typing
from pathlib import Path

import pytest

import graftax

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "graftax"

# Lowest first. A module imports from its own package and from those before it, also where only a type checker looks.
PACKAGES = (
    *("_base", "interop", "_jax", "_graph", "_capture", "_sharding", "tree", "_explain", "_jit", "transforms"),
    *("_export", "_training", "_io", "_show", "_record", "_memory", "_setup"),
    *("errors", "types", "__init__", "replace", "_cli", "__main__"),
)
# Inside of functions of `_jit`, for what needs all of `Jitted`.
LATE = {("_jit", "_export"), ("_jit", "_record"), ("_jit", "transforms")}
PRIVATE_JAX = re.compile(r"jax\._src|jaxlib\._jax|jaxlib\.xla|from jax import _src|from jaxlib import (_jax|xla)")
NEIGHBOURS = {"equinox", "flarejax", "flax", "optax", "rich", "sklearn"}


def source_files(*suffixes: str) -> list[Path]:
    folders = ["python", "core", "tests", "benchmarks", "examples", "tools", "ecosystem", ".ci", ".github"]
    found = [
        p
        for folder in folders
        for p in (ROOT / folder).rglob("*")
        if p.suffix in suffixes and ".hypothesis" not in p.parts
    ]
    assert found
    return sorted(found)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(source: str, modules: set[str], *, at_run_time: bool) -> set[str]:
    """The modules of the project that `source` imports; with `at_run_time` those that its own import waits for."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(source)]
    while todo:
        node = todo.pop()
        if at_run_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if at_run_time and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "an import names the whole place: from graftax._graph.path import Path"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in modules else str(node.module))
        todo += ast.iter_child_nodes(node)
    return {name for name in found if name.split(".")[0] == "graftax"}


def imports_of(name: str, *, at_run_time: bool) -> set[str]:
    return imports(MODULES[name].read_text(), {*MODULES, "graftax._core"}, at_run_time=at_run_time) - {name}


def package_of(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


def test_imports_are_read_as_python_reads_them():
    source = "\n".join(
        [
            "from typing import TYPE_CHECKING",
            "import jax, graftax.tree",
            "from graftax.sub import path",
            "from graftax.sub.graph import copy",
            "if TYPE_CHECKING:",
            "    from graftax.sub import types",
            "def f():",
            "    from graftax.late import x",
        ]
    )
    modules = {"graftax.sub.path", "graftax.sub.types"}
    expected = {"graftax.tree", "graftax.sub.path", "graftax.sub.graph"}
    assert imports(source, modules, at_run_time=True) == expected
    assert imports(source, modules, at_run_time=False) == expected | {"graftax.sub.types", "graftax.late"}


def test_every_package_is_in_the_list():
    assert {package_of(name) for name in MODULES} == set(PACKAGES)


@pytest.mark.quick(100)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_what_stands_below_it(package: str):
    used = {
        (name, other)
        for name in MODULES
        if package_of(name) == package
        for other in imports_of(name, at_run_time=False) - {"graftax._core"}
        if (package, package_of(other)) not in LATE
    }
    assert not {(a, b) for a, b in used if PACKAGES.index(package_of(b)) > PACKAGES.index(package)}


def test_imports_have_no_cycle():
    edges = {name: imports_of(name, at_run_time=True) for name in MODULES}
    graphlib.TopologicalSorter(edges).prepare()


FOLDERS_OF_THE_CORE = ("python", "graph", "capture", "call")  # lowest first; `tree` stands on `python` alone


def test_a_folder_of_the_core_includes_what_stands_below_it():
    core, order = ROOT / "core", FOLDERS_OF_THE_CORE
    below = {folder: {*order[: i + 1]} for i, folder in enumerate(order)} | {"tree": {"python", "tree"}}
    for path in [*core.rglob("*.h"), *core.rglob("*.cpp")]:
        used = set(re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE))
        folder = path.relative_to(core).parts[0]
        assert folder == "module.cpp" or used <= below[folder], path


def test_init_holds_imports_and_names_and_nothing_else():
    docstring, *body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    assert isinstance(docstring, ast.Expr)
    rest = [ast.unparse(node) for node in body if not isinstance(node, ast.ImportFrom)]
    rest = [line for line in rest if not line.startswith("__all__ ")]
    # `_setup()` hands the core its Python side, once, before anything else may ask for it; the last call names classes.
    assert set(rest) <= {"_setup()", "_publish_classes()", f"__version__ = '{importlib.metadata.version('graftax')}'"}


def test_every_imported_name_is_public():
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    aliases = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    names = {alias.name for alias in aliases if not (alias.asname or "").startswith("_")}
    # A type checker takes what is not in `__all__` for private, but for `x as x`.
    exported = {alias.name for alias in aliases if alias.name == alias.asname}
    assert exported == {*graftax.errors.__all__, *graftax.types.__all__}
    assert names - exported == {*graftax.__all__} and len(graftax.__all__) == len({*graftax.__all__})


def test_dir_shows_the_public_names():
    assert dir(graftax) == sorted(graftax.__all__)


def test_the_docstring_names_each_public_name_once():
    groups = re.findall(r"^- [\w ,]+:\n((?:  .*\n)+)", graftax.__doc__, re.MULTILINE)
    names = [name for group in groups for name in re.findall(r"\w+", group)]
    assert sorted(names) == sorted({*graftax.__all__} - {"errors", "types"})


def test_errors_and_types_stay_attributes_of_the_package():
    for module in (graftax.errors, graftax.types):
        assert all(getattr(graftax, name) is getattr(module, name) for name in module.__all__)
    raised = {name for name, value in vars(graftax).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised == {*graftax.errors.__all__}


@pytest.mark.parametrize("name", graftax.errors.__all__)
def test_a_traceback_shows_an_error_by_its_public_name(name):
    error = getattr(graftax, name)("text")
    assert traceback.format_exception_only(error) == [f"graftax.{name}: text\n"]
    assert type(pickle.loads(pickle.dumps(error))) is type(error)


def test_help_shows_the_docstring_of_every_public_name():
    text = pydoc.plain(pydoc.render_doc(graftax))
    about = text.partition("PACKAGE CONTENTS")[0]
    assert "- Compile:\n" in about
    for name in graftax.__all__:
        value = getattr(graftax, name)
        if not isinstance(value, types.ModuleType) and name != "show":  # an object that is called: among the data
            first_line = inspect.getdoc(value).splitlines()[0]
            assert re.search(rf"^ +(class )?{name}\b", text, re.MULTILINE) and first_line in text, name


@pytest.mark.parametrize("file", ["py.typed", "_core.pyi"])
def test_the_wheel_carries_its_types(file: str):
    assert (importlib.resources.files("graftax") / file).is_file()


def test_the_package_needs_jax_and_numpy_only():
    needs = [need for need in importlib.metadata.requires("graftax") or [] if "extra ==" not in need]
    assert {re.split(r"[^\w-]", need)[0] for need in needs} == {"jax", "numpy"}


def test_the_changelog_names_this_version():
    assert f"## {importlib.metadata.version('graftax')}" in (ROOT / "CHANGELOG.md").read_text()


def test_import_loads_no_neighbour():
    code = "import sys, graftax; print(*{name.split('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "graftax" in result.stdout.split()
    assert not NEIGHBOURS & set(result.stdout.split())


def test_private_jax_names_stand_in_one_folder_only():
    files = [*PACKAGE.rglob("*.py"), *(p for p in (ROOT / "core").rglob("*") if p.is_file())]
    assert {path.parent for path in files if PRIVATE_JAX.search(path.read_text())} == {PACKAGE / "_jax"}


@pytest.mark.parametrize("line", ["import jax._src.core", "from jaxlib import _jax", "import jaxlib.xla_client as x"])
def test_private_jax_names_are_recognised(line: str):
    assert PRIVATE_JAX.search(line)


def test_what_jax_says_in_messages_is_read_in_one_place():
    readers = {path.name for path in PACKAGE.rglob("*.py") if re.search(r"\bin str\((e|error|exc)\)", path.read_text())}
    assert readers <= {"error_texts.py"}


@pytest.mark.quick(0)
def test_a_message_that_one_file_raises_stands_in_that_file():
    messages = {
        n.targets[0].id
        for n in ast.parse((PACKAGE / "_base" / "errors.py").read_text()).body
        if isinstance(n, ast.Assign)
    }
    users = dict.fromkeys(messages, 0)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "graftax._base.errors":
                for alias in node.names:
                    users[alias.name] = users.get(alias.name, 0) + 1
    assert {name for name in messages if users[name] < 2} == set()


def test_every_file_names_its_licence_first():
    mark = "SPDX-License-Identifier: Apache-2.0"
    kinds = (".py", ".pyi", ".h", ".cpp", ".html", ".js", ".toml", ".yml", ".supp", "")
    files = [path for path in source_files(*kinds) if path.is_file() and "corpus" not in path.parts]
    files += [ROOT / name for name in ("Makefile", "CMakeLists.txt", "pyproject.toml", "mkdocs.yml")]
    assert not [str(path.relative_to(ROOT)) for path in files if mark not in path.read_text()[:100]]


CLASSES = [getattr(module, name) for module in (graftax.errors, graftax.types) for name in module.__all__]
CLASSES += [value for value in map(vars(graftax).get, graftax.__all__) if isinstance(value, type)]


@pytest.mark.quick(100)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_public_class_says_its_public_module(cls):
    assert "._" not in repr(cls)
    assert getattr(sys.modules[cls.__module__], cls.__name__) is cls and pickle.loads(pickle.dumps(cls)) is cls
    assert f"class {cls.__name__} in module {cls.__module__}\n" in pydoc.plain(pydoc.render_doc(cls))
    if cls not in (graftax.Jitted, graftax.Recorder):  # with type variables of their own
        typing.get_type_hints(cls)


@pytest.mark.quick(100)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_what_is_shown_as_source_of_a_public_class_is_its_own(cls):
    with contextlib.suppress(OSError, TypeError):  # says that it finds none
        assert f"class {cls.__name__}" in inspect.getsource(cls)
    for function in [value for value in vars(cls).values() if isinstance(value, types.FunctionType)]:
        if function.__code__.co_filename.startswith(str(PACKAGE)):
            assert inspect.getsource(function).lstrip().startswith(("def ", "@", "async def "))
