# SPDX-License-Identifier: Apache-2.0
"""Host functions of any objects inside compiled code: `pure_callback`, `io_callback`, and Equinox's."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np

from graftax import _core
from graftax._base.errors import MutationError, StructureError
from graftax._base.key_path import keystr
from graftax._capture.host_callbacks import copied
from graftax._graph.structure import Structure, place_name
from graftax._graph.structure_diff import differences, differences_text
from graftax._jax.tracebacks import boundary
from graftax.transforms._engine.lift import name_of
from graftax.transforms._engine.snapshot import Snapshot
from graftax.transforms._engine.tangents import array_text

CALLBACK_CHANGES = (
    "{name}: the host function changed its arguments, which are copies: the change would be lost.\n{differences}\n"
    "(expected is what it was given.) Return the new value, or change what the function reaches through its closure or "
    "as a bound method."
)
CALLBACK_RETURNS = (
    "{name}: the result of the host function does not match result_shape_dtypes:\n"
    "{differences}\n"
    "The compiled code is made for result_shape_dtypes: it needs an array for each shape there, and "
    "everything else has to be equal."
)
CALLBACK_SHAPE = (
    "{name}: the host function returned {actual} at {path}, and result_shape_dtypes says {expected}. Return that, for "
    "example np.asarray(value, dtype), or correct result_shape_dtypes."
)
CAPTURED_COPY = (
    "{name}: the host function changed what it captures, which is a copy made for the trace, because the compiled "
    "function captures the object too: the change would be lost.\n{differences}\n(expected is what it was.) Let only "
    "the host function name the object: write it as a function of its own, outside of the compiled one."
)

_RESULT = ("result",)


@boundary
def pure_callback(
    callback: Callable[..., Any],
    result_shape_dtypes: Any,
    *args: Any,
    sharding: Any = None,
    vmap_method: str | None = None,
    **kwargs: Any,
) -> Any:
    """Calls a Python function on the host from compiled code, with any objects as arguments and result.

    The function receives a copy of the arguments as they were when the call was traced, with the arrays of the current
    run. Shared references are kept. The arrays are those that `jax.pure_callback` passes.

    Args:
        callback: a pure function. It must not change its arguments, which are copies.
        result_shape_dtypes: a graph like the result, with `jax.ShapeDtypeStruct` (or arrays) in place of its arrays.
            All other values in it have to equal those that the function returns.
        *args, **kwargs: arguments of the function.
        sharding, vmap_method: as in `jax.pure_callback`.

    Returns:
        what the function returned.

    Raises:
        StructureError: for a result that is not like `result_shape_dtypes`; names the path.
        MutationError: if the function changed its arguments; names the path.
            Both are raised while the compiled code runs, where JAX wraps them in its own error.

    Example:
        >>> def draw(batch):
        ...     return {"noise": np.ones(batch["size"], np.float32), "kind": "ones"}
        >>> shape = {"noise": jax.ShapeDtypeStruct((3,), jnp.float32), "kind": "ones"}
        >>> graftax.jit(lambda batch: graftax.pure_callback(draw, shape, batch)["noise"] * 2)({"size": 3})
        Array([2., 2., 2.], dtype=float32)
    """
    host = _Host(name_of(callback, "pure_callback"), callback, result_shape_dtypes, args, kwargs, vmap_method)
    options: dict[str, Any] = {"sharding": sharding, "vmap_method": vmap_method}
    return host.result(jax.pure_callback(host.call, host.shapes, *host.leaves, **options))


@boundary
def io_callback(
    callback: Callable[..., Any],
    result_shape_dtypes: Any,
    *args: Any,
    sharding: Any = None,
    ordered: bool = False,
    **kwargs: Any,
) -> Any:
    """Calls a Python function with side effects on the host from compiled code; otherwise as `pure_callback`.

    What the function changes has to be reached through the function itself (its closure, or the instance of a bound
    method): its arguments are copies, and a change to one of them is an error.

    Args:
        callback, result_shape_dtypes, *args, **kwargs: as in `pure_callback`.
        sharding, ordered: as in `jax.experimental.io_callback`.

    Returns:
        what the function returned.

    Raises:
        JaxRuntimeError: JAX's, where the computation fails: if `callback` raises, changes its arguments, or returns
            something that does not match `result_shape_dtypes`.

    Example:
        >>> log = []
        >>> def note(record):
        ...     log.append(record)
        >>> graftax.jit(lambda x: graftax.io_callback(note, None, {"loss": x}, ordered=True))(jnp.ones(()))
    """
    host = _Host(name_of(callback, "io_callback"), callback, result_shape_dtypes, args, kwargs, None)
    options: dict[str, Any] = {"sharding": sharding, "ordered": ordered}
    return host.result(jax.experimental.io_callback(host.call, host.shapes, *host.leaves, **options))


@boundary
def filter_pure_callback(
    callback: Callable[..., Any],
    *args: Any,
    result_shape_dtypes: Any,
    sharding: Any = None,
    vmap_method: str | None = None,
    vectorized: bool | None = None,
    **kwargs: Any,
) -> Any:
    """As `equinox.filter_pure_callback`: `graftax.pure_callback` with the shapes as a keyword.

    Args:
        callback, *args, **kwargs, result_shape_dtypes, sharding, vmap_method: as in `pure_callback`.
        vectorized: JAX's older name for `vmap_method`: True is "legacy_vectorized", False "sequential".

    Returns:
        what the function returned.

    Raises:
        JaxRuntimeError: JAX's, when the compiled code runs: if `callback` raises, changes its arguments, or returns
            something that does not match `result_shape_dtypes`.

    Example:
        >>> shape = jax.ShapeDtypeStruct((), jnp.float32)
        >>> double = lambda d: np.float32(d["x"] * 2)
        >>> graftax.filter_pure_callback(double, {"x": jnp.ones(())}, result_shape_dtypes=shape)
        Array(2., dtype=float32)
    """
    if vectorized is not None and vmap_method is None:
        vmap_method = "legacy_vectorized" if vectorized else "sequential"
    return pure_callback(callback, result_shape_dtypes, *args, sharding=sharding, vmap_method=vmap_method, **kwargs)


class _Host:
    """One call of a host function. It outlives the trace, so it holds only the structure of the arguments."""

    def __init__(
        self,
        name: str,
        callback: Callable[..., object],
        result_shape: object,
        args: tuple[object, ...],
        kwargs: dict[str, Any],
        vmap_method: str | None,
    ) -> None:
        self._name, self._callback = name, callback
        # With any other method, `vmap` passes all rows at once.
        self._exact = vmap_method in (None, "sequential", "sequential_unrolled")
        # Captured objects may be copies that a running trace has made: a change to one of these would be lost.
        self._copied = copied(callback, _core.running_traces())
        self._keywords = tuple(kwargs)
        self._names = (*(f"args[{i}]" for i in range(len(args))), *kwargs)
        roots = (*args, *kwargs.values())
        leaves, self._arguments = _core.record(roots, self._names)
        # Copies, because JAX may read a NumPy array after the call has returned.
        self.leaves = [x.copy() if isinstance(x, (np.ndarray, np.generic)) else x for x in leaves]
        shape_leaves, self._result_graphdef = _core.record((result_shape,), ("result_shape_dtypes",), shapes=True)
        self.shapes = tuple(jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for x in shape_leaves)

    @property
    def host_function(self) -> Callable[..., Any]:
        """The user's function, which the core calls."""
        return self._callback

    def result(self, leaves: Sequence[Any]) -> Any:
        return _core.unflatten(self._result_graphdef, list(leaves))

    @property
    def call(self) -> Callable[..., tuple[Any, ...]]:
        """The function that JAX calls on the host, from arrays to arrays. It adds no frame to the user's tracebacks."""
        return types.MethodType(_core.call_host, self)

    def given(self, leaves: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any], Callable[..., Any]]:
        """Called by the core: (positional arguments, keyword arguments, the function to pass the result to)."""
        # What the function can reach is recorded before it runs: `_receive_result` compares.
        roots = _core.unflatten_roots(self._arguments, list(leaves))
        count = len(roots) - len(self._keywords)
        # Without copies among what it captures, there is nothing whose change would be lost.
        captured = self._copied and Snapshot.take(*self._copied)
        snapshot = Snapshot(roots, self._names, self._arguments, leaves)
        return (
            roots[:count],
            dict(zip(self._keywords, roots[count:], strict=True)),
            functools.partial(self._receive_result, snapshot, captured),
        )

    def _receive_result(self, snapshot: Snapshot, captured: Snapshot | None, result: object) -> tuple[Any, ...]:
        for state, message in ((snapshot, CALLBACK_CHANGES), (captured, CAPTURED_COPY)):
            text = state.changes() if state else ""
            if text:
                raise MutationError(message.format(name=self._name, differences=text))
        return self._checked_leaves(result)

    def _checked_leaves(self, result: object) -> tuple[Any, ...]:
        expected = self._result_graphdef
        leaves, graphdef = _core.flatten(result)
        if graphdef != expected:
            # As from JAX's own callbacks, a Python number may come in place of an array.
            matched = _with_numbers(expected, graphdef, leaves)
            if matched is None:
                text = differences_text(expected, graphdef, _RESULT)
                raise StructureError(CALLBACK_RETURNS.format(name=self._name, differences=text))
            leaves = matched
        for path, struct, leaf in zip(expected.leaf_paths(), self.shapes, leaves, strict=True):
            # If JAX maps the function, the result has additional leading axes.
            shape = np.shape(leaf) if self._exact else np.shape(leaf)[max(0, np.ndim(leaf) - len(struct.shape)) :]
            dtype = jnp.result_type(leaf)
            if shape != struct.shape or dtype != struct.dtype:
                expected_text, actual_text = array_text(struct.shape, struct.dtype), array_text(np.shape(leaf), dtype)
                details = {"path": f"result{keystr(path)}", "expected": expected_text, "actual": actual_text}
                raise StructureError(CALLBACK_SHAPE.format(name=self._name, **details))
        return tuple(leaves)


def _with_numbers(expected: _core.GraphDef, actual: _core.GraphDef, leaves: Sequence[Any]) -> list[Any] | None:
    """The leaves of `actual`, if it differs from `expected` only in Python numbers that take the place of arrays."""
    # Nothing is rebuilt for this: a class may check what it is rebuilt around.
    structure = Structure(actual)
    statics = {
        structure.root_path(row): value
        for row, value in structure.statics()
        if type(value) in (bool, int, float, complex)
    }
    leaf_at = dict(zip(actual.leaf_places(), leaves, strict=True))
    matched: list[Any] = []
    numbers: set[str] = set()
    for key_path in expected.leaf_places():
        leaf = leaf_at.get(key_path)
        if leaf is None:
            if key_path not in statics:
                return None
            leaf = np.asarray(statics[key_path])
            numbers.add(place_name(key_path, _RESULT))
        matched.append(leaf)
    return matched if numbers and all(d.path in numbers for d in differences(expected, actual, _RESULT)) else None
