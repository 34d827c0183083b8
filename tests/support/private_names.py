# SPDX-License-Identifier: Apache-2.0
"""A JAX that lacks one of the private names that graftax reads: `make names`.

Each name is taken away in turn, in a process of its own. The import has to work, the doctor has to say what is off, and
a small suite has to pass without it.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import sys
import traceback
import types
from pathlib import Path
from typing import Any, NamedTuple

import jax

from records import record

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "graftax"
PRIVATE = "jax._src"


class Name(NamedTuple):
    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def names_in(source: str) -> set[Name]:
    """What a module reads of modules that are private to JAX, by the text."""
    tree, modules, found = ast.parse(source), dict[str, str](), set[Name]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(PRIVATE):
            for alias in node.names:
                if is_module(f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                else:
                    found.add(Name(node.module, alias.name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found.add(Name(modules[node.value.id], node.attr))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            of, name, *_ = [*node.args, None]
            if isinstance(of, ast.Name) and of.id in modules and isinstance(name, ast.Constant):
                found.add(Name(modules[of.id], name.value))
    return found


def private_names() -> list[Name]:
    """Those of this JAX: what it does not have is missing already."""
    found = set[Name]()
    for file in (PACKAGE / "_jax").glob("*.py"):
        found |= names_in(file.read_text(encoding="utf-8"))
    return sorted(name for name in found if hasattr(importlib.import_module(name.module), name.attribute))


def small_suite() -> None:
    """What a user does first: results and changes are those of plain Python."""
    import jax.numpy as jnp

    import graftax

    class Model:
        def __init__(self) -> None:
            self.w, self.steps, self.name = jnp.ones(3), 0, "m"

    def step(model: Any, x: Any) -> Any:
        model.w = model.w * 2 + x
        model.steps = model.steps + 1
        return {"out": model.w, "same": model}

    mine, plain = Model(), Model()
    jitted = graftax.jit(step)
    for x in (1.0, 2.0, 3.0):
        got, expected = jitted(mine, x), step(plain, x)
        assert got["out"].tolist() == expected["out"].tolist() and got["same"] is mine
        assert mine.w.tolist() == plain.w.tolist() and int(mine.steps) == plain.steps
    grads = graftax.grad(lambda model: (model.w**2).sum())(mine)
    assert grads.w.tolist() == (2 * mine.w).tolist()
    value, _ = graftax.scan(lambda c, x: (c + x, c), jnp.zeros(()), jnp.arange(4.0))
    assert value == 6
    assert graftax.vmap(lambda x: x + 1)(jnp.arange(3)).tolist() == [1, 2, 3]
    assert graftax.cond(jnp.array(True), lambda x: x + 1, lambda x: x, jnp.ones(())) == 2
    leaves, graphdef = graftax.flatten(mine)
    assert graftax.equal(graftax.unflatten(graphdef, leaves), mine)
    assert graftax.equal(graftax.from_dict(graftax.to_dict(mine)), mine)
    with contextlib.suppress(TypeError):
        jitted(mine, "text")


class Lacking(types.ModuleType):
    """A module of JAX that has everything for JAX, and for graftax all but one name."""

    def __init__(self, module: types.ModuleType, missing: str) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(__path__=getattr(module, "__path__", None), __spec__=module.__spec__)
        object.__setattr__(self, "_of", (module, missing))

    def __dir__(self) -> list[str]:
        module, missing = object.__getattribute__(self, "_of")
        return [name for name in dir(module) if name != missing]

    def __getattr__(self, name: str) -> Any:
        module, missing = object.__getattribute__(self, "_of")
        if name == missing and str(sys._getframe(1).f_globals.get("__name__")).startswith("graftax"):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return getattr(module, name)


def hide(name: Name) -> None:
    module = importlib.import_module(name.module)
    lacking = Lacking(module, name.attribute)
    sys.modules[name.module] = lacking
    parent, _, last = name.module.rpartition(".")
    setattr(importlib.import_module(parent), last, lacking)


def without(name: Name) -> dict[str, Any]:
    """In a process of its own: what happens where a name is missing."""
    hide(name)
    try:
        import graftax
    except BaseException:
        return {"failed": "import", "error": traceback.format_exc()[-1500:]}
    try:
        from graftax._jax.fast_dispatch import status

        direct = status()
    except BaseException:
        return {"failed": "doctor", "error": traceback.format_exc()[-1500:]}
    try:
        small_suite()
    except BaseException:
        return {"failed": "suite", "error": traceback.format_exc()[-1500:], "direct": direct}
    return {"failed": None, "direct": direct, "version": graftax.__version__}


def tried_without(name: Name) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(write, json.dumps(without(name)).encode()[-60_000:])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read()
    os.waitpid(child, 0)
    return json.loads(content) if content else {"failed": "process", "error": ""}


def main() -> int:
    broken: list[str] = []
    chosen = [n for n in private_names() if not sys.argv[1:] or any(arg in str(n) for arg in sys.argv[1:])]
    for name in chosen:
        found = tried_without(name)
        broken += [f"{name}: {found['failed']}"] * (found["failed"] is not None)
        print(f"{name!s:58} {found['failed'] or 'passes'}; direct calls {found.get('direct', '?')}", flush=True)
        if found["failed"] and sys.argv[1:]:
            print(found["error"])
        elif found["failed"]:
            print("   ", found["error"].strip().rsplit("\n", 1)[-1])
    tried = f"{len(chosen)} names missing in turn on JAX {jax.__version__}"
    if not sys.argv[1:]:
        record("names", "make names", tried, broken)
    print(f"{tried}; {len(broken)} break something")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
