# SPDX-License-Identifier: Apache-2.0
"""JAX's frames that run no code of users: what is read under a trace need not look at them."""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.core
import jax.extend.core
import numpy as np
from jax._src import core as _jax_core
from jax._src import pjit as _pjit
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import partial_eval as _pe

from graftax import _core
from graftax._jax.arrays import ArrayImpl


@functools.cache
def _own_primitives() -> set[Any]:
    """JAX's primitives whose rules are JAX's own: those of its folder of operations, sums of cotangents, and `jit`."""
    folders = "jax._src.lax.", "jax._src.ad_util", "jax._src.pjit"
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith(folders)]
    return {p for names in modules for p in names.values() if isinstance(p, jax.extend.core.Primitive)}


def _subclasses(base: type) -> list[type]:
    return [cls for c in base.__subclasses__() for cls in (c, *_subclasses(c))]


@functools.cache
def _inner_frames() -> _core.InnerFrames | None:
    # With another signature of `bind`, the core would read a wrong local as the primitive.
    bind = getattr(jax.extend.core.Primitive.bind, "__code__", None)
    if bind is None or bind.co_varnames[:3] != ("self", "args", "params"):
        return None
    makes_calls: Any = getattr(getattr(_pjit, "_cpp_pjit", None), "__code__", None)
    # What runs on a call is a nested function, whose code is a constant of the function around it.
    inner = [code for code in getattr(makes_calls, "co_consts", ()) if getattr(code, "co_name", None) == "cache_miss"]
    apply = next((c for c in inner if c.co_varnames[:2] == ("args", "kwargs") and "fun" in c.co_freevars), None)
    plain = bool, int, float, complex, str, type(None)
    return _core.InnerFrames(
        bind,
        apply,
        apply.co_freevars.index("fun") if apply is not None else 0,
        tuple(f.__code__ for f in (getattr(_ad, "backward_pass3", None), getattr(_pe, "dce_jaxpr", None)) if f),
        "jax.",
        modules=tuple(f"jax._src.{name}" for name in ("numpy.", "lax.", "nn.", "scipy.", "random", "core")),
        jaxprs=(jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr),  # pyright: ignore[reportPrivateImportUsage]
        inert=(jax.sharding.Mesh, jax.sharding.AbstractMesh),
        leaves=(ArrayImpl, np.ndarray, jax.core.ShapedArray, *plain, *_subclasses(jax.core.Tracer)),
        owns=lambda p: not _own_primitives().isdisjoint({p, getattr(p, "prim", None)}),  # a stand-in from 0.12 on
    )


def inner_frames() -> _core.InnerFrames | None:
    """JAX's frames that run no code of users. None if another library has classes of traces or avals of its own."""
    classes = (*_subclasses(jax.core.Trace), *_subclasses(jax.core.AbstractValue))
    return _inner_frames() if all(c.__module__.startswith(("jax.", "flax.")) for c in classes) else None


def add_class_of_tracers(cls: type) -> None:
    """A class of tracers made later, whose methods run no code of users: JAX's frames may be given those, too."""
    if (frames := _inner_frames()) is not None:
        frames.add_leaf(cls)
    # JAX finds the type of a value by its class, or after a search by a base.
    types_of_values: dict[type, Any] = getattr(_jax_core, "pytype_aval_mappings", {})
    base = next((base for base in cls.__mro__ if base in types_of_values), None)
    if base is not None:
        types_of_values[cls] = types_of_values[base]
