# SPDX-License-Identifier: Apache-2.0
"""Writes recorded calls to a file of `graftax.save`: the arrays of each call by name, and bytes with the structures.

Its metadata have what can be read without running any code: versions, settings, digests, the source of the functions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np

from graftax import _core
from graftax._base.errors import GraftaxError, UnpicklableError
from graftax._base.missing import MISSING
from graftax._base.progress_bar import ByteBar
from graftax._capture.code_owner import is_users, is_users_class, is_users_scope
from graftax._capture.origin import Origin
from graftax._capture.read_set import ReadSet
from graftax._export.holder_names import value_at
from graftax._export.programs import settings_tokens
from graftax._export.read_set_data import version_of
from graftax._export.structure_digest import code_digest
from graftax._graph.pickling import NAMELESS
from graftax._graph.structure import Structure, place_name
from graftax._io.encode_graph import EncodedGraph
from graftax._io.save import write_graph
from graftax._io.tensor import host_bytes, parts_of
from graftax._jax.arrays import ref_types, without_key
from graftax._jit.leaf_names import leaf_names
from graftax._record.cells import is_cell, known_cells
from graftax._record.code_pickle import Template, dumps, main_file, source_of
from graftax._record.snapshot import Snapshot, error_text

NOT_WRITABLE = "{path}: {value} can be neither written nor found by name in another process: {error}"
FORMAT = 1
MOST_BYTES = 50 * 10**9  # of a file, as in `save`

# In the state of a GraphDef: the index of its statics, and what marks one of them as a function.
_STATICS, _FUNCTION = 5, int(_core.How.function)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def write_calls(path: str, calls: Sequence[Snapshot], event: str, reads: ReadSet | None) -> None:
    """Writes calls of one function; the last one is that which went wrong.

    Args:
        event: what went wrong, as a text for people.
        reads: what the code of the function reads.

    Raises:
        GraftaxError: for a value that cannot be written, at its path.
    """
    target = calls[-1].target
    function = target.function
    # Pickled first, so that a value without a name is refused before anything is written.
    structures = dumps(
        {
            # With `captured`, what the function holds is among the roots of each call, so its code is enough here.
            "function": Template(function) if calls[-1].plan.options.captured else function,
            "way": target.form,
            "prefix": target.prefix,
            "options": target.options,
            "constants": list(_constants(reads)),
            "calls": [_call_data(call) for call in calls],
        }
    )
    leaves = [dict(zip(unique_names(call.graphdef, call.names), call.leaves, strict=True)) for call in calls]
    content = EncodedGraph({"calls": leaves, "structures": structures}, None, None)
    # The progress bar counts an array twice: once for its digest, once for its bytes in the file.
    digested = (leaf for call in calls for leaf in (*call.leaves, *call.after_leaves))
    bar = ByteBar(
        f"writing {os.path.basename(path)}", array_bytes(digested) + array_bytes(a.array for a in content.arrays)
    )
    # By the id of a leaf: most arrays are in several calls.
    digest_of: dict[int, str] = {}
    header = {
        "format": FORMAT,
        "what": event,
        "name": calls[-1].plan.name,
        "digest": hashlib.sha256(structures).hexdigest(),
        "calls": [
            {
                "inputs": leaf_digests(call.leaves, digest_of, bar.add),
                "results": _results(call, digest_of, bar.add),
                "raised": call.raised,
            }
            for call in calls
        ],
        **environment(),
        # A replay runs the script only where a pickle names something of `__main__`.
        "script": _script(calls[-1].line) if b"__main__" in structures else None,
        "functions": _functions(function, reads),
    }
    texts = {"recorded": json.dumps(header)}
    write_graph(os.path.realpath(path), content.to_json(), content.arrays, texts, MOST_BYTES, bar.add)


def unique_names(graphdef: _core.GraphDef, roots: tuple[str, ...]) -> list[str]:
    """One distinct name a leaf."""
    names = leaf_names(graphdef, roots)
    return names if len(set(names)) == len(names) else [f"{name} ({i})" for i, name in enumerate(names)]


# ---- one call


def _call_data(call: Snapshot) -> dict[str, Any]:
    signature = call.plan.signature
    return {
        "layout": call.layout,
        "names": call.names,
        "graphdef": _state(call.graphdef, call.names),
        "cells": signature.cells,
        "globals": signature.globals,
        "origins": [_origin_data(origin) for origin in signature.origins],
        # Of arrays whose devices the user chose. Any other one goes to the default device of the process that replays.
        "shardings": [
            (i, x.sharding)
            for i, x in enumerate(call.leaves)
            if isinstance(x, jax.Array) and (x.committed or len(x.sharding.device_set) > 1)
        ],
        "draws": call.draws,
    }


def _origin_data(origin: Origin) -> tuple[Any, str | None, bool] | None:
    """The holder, as a pickle writes it, with the name; None for what only this process has."""
    if isinstance(origin.holder, dict):
        module = origin.holder.get("__name__")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        # Globals of code that `exec` ran, say: no module holds them, so no other process finds them.
        if vars(sys.modules.get(module or "", types.ModuleType(""))) is not origin.holder:  # pyright: ignore[reportUnknownArgumentType]
            return None
    try:
        dumps(origin.holder)
    except GraftaxError:
        return None
    return origin.holder, origin.name, origin.assigned


def _state(graphdef: _core.GraphDef, names: tuple[str, ...]) -> tuple[Any, ...]:
    """The state of a structure, in which functions whose parts are children are templates.

    Raises:
        UnpicklableError: names the path of a value that cannot be written.
    """
    state = graphdef._state()  # pyright: ignore[reportPrivateUsage]
    statics = tuple(
        (how, Template(value) if how == _FUNCTION and isinstance(value, types.FunctionType) else value, *rest)
        for how, value, *rest in state[_STATICS]
    )
    state = (*state[:_STATICS], statics, *state[_STATICS + 1 :])
    try:
        dumps(state)
    except UnpicklableError:
        # One value cannot be pickled. Which one, only a dump of each row tells, and that is slow.
        structure = Structure(graphdef)
        for row in structure.rows:
            value = Template(row.value) if isinstance(row.value, types.FunctionType) else row.value
            cls = None if row.type in NAMELESS else row.type
            for candidate in (cls, value):
                try:
                    dumps(candidate)
                except UnpicklableError as error:
                    path = place_name(structure.root_path(row), names)
                    text = f"a {type(row.value).__qualname__}" if candidate is value else f"the class {candidate!r}"
                    raise UnpicklableError(NOT_WRITABLE.format(path=path, value=text, error=error)) from None
        raise
    return state


# ---- what a replay compares


def array_bytes(leaves: Iterable[Any]) -> int:
    """The bytes of all arrays among some leaves, each counted once."""
    return sum({id(leaf): getattr(leaf, "nbytes", 0) for leaf in leaves}.values())


def leaf_digests(
    leaves: Sequence[Any],
    digest_of: dict[int, str] | None = None,
    on_bytes: Callable[[int], object] | None = None,
) -> list[str]:
    """A text for each leaf that is the same for the same bits.

    Args:
        digest_of: digests that are known, by the id of a leaf that is still held. New ones are added.
        on_bytes: called with the number of bytes after each part of an array.
    """
    digest_of = {} if digest_of is None else digest_of
    for leaf in leaves:
        if id(leaf) not in digest_of:
            digest_of[id(leaf)] = _leaf_digest(leaf, on_bytes)
    return [digest_of[id(leaf)] for leaf in leaves]


def _leaf_digest(leaf: Any, on_bytes: Callable[[int], object] | None) -> str:
    if isinstance(leaf, _PLAIN):
        return f"{type(leaf).__name__} {leaf!r}"
    content = leaf[...] if isinstance(leaf, ref_types) else leaf
    if isinstance(content, jax.Array) and content.is_deleted():
        # A later call has deleted it. A replay compares nothing with an empty text.
        return ""
    content = without_key(content)
    text = f"{content.dtype}[{','.join(map(str, np.shape(content)))}]"
    # A single number is part of the text, so that a difference shows it.
    value = f" {np.asarray(content).reshape(-1)[0]!s}" if content.size == 1 else ""
    digest = hashlib.sha256()
    for part in parts_of(host_bytes(content, content.dtype)):
        digest.update(part)
        if on_bytes is not None:
            on_bytes(part.size)
    return f"{text}{value} {digest.hexdigest()[:16]}"


def results_data(
    graphdef: _core.GraphDef,
    names: tuple[str, ...],
    leaves: Sequence[Any],
    digest_of: dict[int, str] | None = None,
    on_bytes: Callable[[int], object] | None = None,
) -> dict[str, object]:
    """The structure of the results of a call, and a digest of each leaf by its name; see `leaf_digests`."""
    digests = dict(zip(unique_names(graphdef, names), leaf_digests(leaves, digest_of, on_bytes), strict=True))
    return {"structure": graphdef.fingerprint(), "leaves": digests}


def _results(call: Snapshot, digest_of: dict[int, str], on_bytes: Callable[[int], object]) -> dict[str, object] | None:
    if call.after is None:
        return None
    try:
        return results_data(call.after, call.after_names, call.after_leaves, digest_of, on_bytes)
    # JAX returns before the computation ends: it has failed since then.
    except jax.errors.JaxRuntimeError as error:
        call.raised = call.raised or error_text(error)
        return None


# ---- what a call depends on besides


def _constants(reads: ReadSet | None) -> Iterator[tuple[Any, str, Any]]:
    """(holder, name, value) of the numbers and texts that the user's code reads as globals and class attributes."""
    for holder, name in [] if reads is None else list(reads.names.bindings):
        if isinstance(holder, type):
            is_users_own = is_users_class(holder) and name in vars(holder)
        else:
            scope = cast("dict[str, Any]", holder) if type(holder) is dict else {}
            is_users_own = "__name__" in scope and is_users_scope(scope)
        value = value_at(holder, name) if is_users_own else MISSING
        if type(value) in _PLAIN and not name.startswith("__"):
            # A holder that no other process finds is left out: the replay uses the value that it has there.
            with contextlib.suppress(GraftaxError):
                dumps(holder)
                yield holder, name, value


def environment() -> dict[str, Any]:
    """Versions, devices and settings, as texts."""
    devices, packages = jax.devices(), ("graftax", "jax", "jaxlib", "numpy")
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: version_of(name) or "" for name in packages},
        },
        "devices": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "settings": settings_tokens(),
        "x64": bool(jax.config.jax_enable_x64),
        "flags": os.environ.get("XLA_FLAGS", ""),
        # Where the user's modules are. A replay looks for them there, whatever the working directory is.
        "folders": [os.path.abspath(folder) for folder in sys.path if not _is_installed(folder)],
    }


def _is_installed(folder: str) -> bool:
    standard = os.path.realpath(sysconfig.get_paths()["stdlib"])
    path = os.path.realpath(folder)
    return path.startswith(standard) or "site-packages" in path or path.endswith(".zip")


def _script(line: int | None) -> dict[str, Any] | None:
    """The file of the script, and the line of its statement that made the call; or the cells of a notebook."""
    file = main_file()
    if file is None:
        cells = known_cells()
        return {"file": None, "cells": cells} if cells else None
    # `python -m package.module` gives the script a package, which its relative imports need.
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return {"file": file, "line": line, "package": getattr(spec, "parent", None), "argv": sys.argv}


def _functions(function: types.FunctionType, reads: ReadSet | None) -> list[dict[str, str]]:
    """The user's functions that a call runs, with their source texts."""
    helpers = [] if reads is None else list(reads.names.functions.values())
    functions = {id(f.__code__): f for f in (function, *helpers) if _is_in_users_file(f)}
    return [
        {
            "module": f.__module__,
            "name": f.__qualname__,
            "file": f.__code__.co_filename,
            "line": str(f.__code__.co_firstlineno),
            "digest": code_digest(f.__code__),
            "source": source_of(f),
        }
        for f in functions.values()
    ]


def _is_in_users_file(function: types.FunctionType) -> bool:
    file = function.__code__.co_filename
    return is_users(file) and (is_cell(file) or os.path.isfile(file))
