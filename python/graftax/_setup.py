# SPDX-License-Identifier: Apache-2.0
"""Gives the core what it asks Python for, once, at import; says what `dir(graftax)` shows."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

from jax import tree_util

from . import _compat, _core, _direct, _hooks, _tracebacks
from ._code import Shown
from ._signals import NewReads


def setup() -> None:
    registry = _compat.tree_registry()
    _core.setup(_hooks, registry, tree_util.default_registry.flatten_one_level, _compat.array_class())
    _core.use_settings(
        disable_jit=_direct.setting("disable_jit", False),
        prng_impl=_direct.setting("default_prng_impl", "threefry2x32"),
        others=[_direct.setting("enable_custom_prng", False)],  # decides what `jax.random.PRNGKey` makes
    )
    _core.use_new_reads(NewReads)
    _core.use_shown(Shown)
    gc.callbacks.append(_core.let_go_of_kept)
    _direct.setup()
    _tracebacks.setup()


def public_names() -> list[str]:
    """What `dir(graftax)` shows, and a shell completes: what a user may use, not the modules that it is made in."""
    names = vars(sys.modules["graftax"])
    return sorted(name for name, value in names.items() if name == "tree" or not isinstance(value, ModuleType))
