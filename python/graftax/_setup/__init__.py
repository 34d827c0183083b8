# SPDX-License-Identifier: Apache-2.0
"""Gives the core what it asks Python for, once, at import; says what is public."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable
from typing import Any

from jax import tree_util

from graftax import _core
from graftax._base.missing import MISSING
from graftax._capture.retrace_signals import NewReads
from graftax._jax import fast_dispatch, tracebacks
from graftax._jax.arrays import array_class
from graftax._jax.settings import setting
from graftax._jax.tree_registry import tree_registry
from graftax._setup import core_hooks


def setup() -> None:
    registry = tree_registry()
    _core.setup(core_hooks, registry, tree_util.default_registry.flatten_one_level, array_class())
    _core.use_settings(
        disable_jit=setting("disable_jit", False),
        prng_impl=setting("default_prng_impl", "threefry2x32"),
        others=[setting("enable_custom_prng", False)],  # decides what `jax.random.PRNGKey` makes
    )
    _core.use_new_reads(NewReads)
    _core.use_missing(MISSING)
    gc.callbacks.append(_core.let_go_of_kept)
    fast_dispatch.setup()
    tracebacks.setup()
    # Where type checkers see a `__getattr__`, every name would be there.
    vars(sys.modules["graftax"])["__getattr__"] = _shell_hook


def publish_classes() -> None:
    """Classes of private modules say the public module that has them, so that it is read in tracebacks and `help`."""
    # `inspect` then finds the source of their methods, but not of the classes: it reads the file of the module that a
    # class names, and tracebacks, `help` and pickles read that same name. A `str` that `sys.modules` finds as another
    # could tell them apart, but it would get into pickles, and would not equal what it prints.
    graftax = sys.modules["graftax"]
    # All but the classes of results are read as attributes of `graftax`: a traceback shows `graftax.LoadError`.
    of_results = graftax.types
    for module in (graftax.errors, of_results, graftax):
        for value in map(vars(module).get, module.__all__):
            if isinstance(value, type) and "._" in value.__module__:
                value.__module__ = (of_results if module is of_results else graftax).__name__
                # Since Python 3.13 `inspect` takes the first line from the class: without one it says that there is no
                # source, and shows no other.
                if "__firstlineno__" in vars(value):
                    del value.__firstlineno__  # type: ignore[attr-defined]


def list_names() -> list[str]:
    """What `dir(graftax)` shows and a shell completes: `__all__`, not the modules that the names are imported from."""
    return sorted(sys.modules["graftax"].__all__)


def _shell_hook(name: str) -> Callable[[Any], None]:
    """What `%load_ext graftax` and `%unload_ext graftax` ask this module for; it has no other names than its own."""
    for hook in ("load", "unload"):
        if name == f"{hook}_ipython_extension":
            return getattr(importlib.import_module("graftax._cli.notebook"), hook)
    raise AttributeError(f"module 'graftax' has no attribute {name!r}", name=name, obj=sys.modules["graftax"])
