# SPDX-License-Identifier: Apache-2.0
"""Ahead of time: `lower` and `compile`, with the structure and the statics of every call checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _core
from ._errors import StructureError


class Lowered:
    """A lowered function. Everything JAX's own `Lowered` offers is reachable by attribute."""

    def __init__(self, caller: Any, lowered: Any, graphdef: _core.GraphDef, outcomes: list[_core.Outcome], layout: Any):
        self._caller, self._lowered, self._graphdef = caller, lowered, graphdef
        self._outcomes, self._layout = outcomes, layout

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Compiled:
        """Compiles for the backend."""
        return Compiled(self, self._lowered.compile(compiler_options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowered, name)


class Compiled:
    """A compiled function: takes arguments of the structure and the statics that it was lowered for."""

    def __init__(self, lowered: Lowered, compiled: Any) -> None:
        self._lowered_for, self._compiled = lowered, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        low = self._lowered_for
        bound = low._caller._bind(*args, **kwargs)  # pyright: ignore[reportPrivateUsage]
        walked = _core.walk(low._graphdef, bound[0]) if bound and bound[1] == low._layout else None  # pyright: ignore[reportPrivateUsage]
        if walked is None:
            raise StructureError(
                "the arguments differ in structure or in a static value from those this was compiled for. "
                "Lower again for them, or call the jitted function."
            )
        leaves, nodes = walked
        given = [x.copy() if isinstance(x, (np.ndarray, np.generic)) else x for x in leaves]
        result, written, code = self._compiled(*given)
        outcome = low._outcomes[_core.decode(code)]  # pyright: ignore[reportPrivateUsage]
        return outcome.apply([*result, *written], leaves, nodes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)
