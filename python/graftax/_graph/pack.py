# SPDX-License-Identifier: Apache-2.0
"""`pack`: an object graph whose small arrays are slices of a few buffers, so that a call has few arguments."""

from __future__ import annotations

import enum
import operator
import threading
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import jax
import numpy as np
from jax import tree_util

from graftax import _core
from graftax._base.errors import StructureError
from graftax._base.handles import HANDLE_CLASSES, HandleClass, HandleLayout
from graftax._base.trace_markers import Dynamic
from graftax._graph.packed_buffers import Buffer, copy_array, is_plain, join, sharding_of, split
from graftax._jax.arrays import is_deleted, ref_types
from graftax._jax.tracebacks import boundary
from graftax._jax.tracers import has_tracer

PACK_CHANGED_TWICE = (
    "{name} changed what is in a handle of packed state both as its argument and through the handle itself, which it "
    "reaches another way (update, or another argument): one of the two would be lost. Change it in one of these ways."
)
PACK_DELETED = (
    "the arrays of this packed state are gone: they were donated to a call. It failed while it ran, or another "
    "handle, or an object packed or unpacked with copy=False, holds the same arrays (jax.tree.map makes such "
    "handles). Use what that call wrote back or returned, copy.copy(handle) before it, or pack with donate=False."
)
PACK_OF_PACK = "this is packed already: a handle can be passed on as it is, and unpack() gives the objects inside."
PACK_USED = (
    "this packed state was used up by {name}, which returned a new one in its place: its memory was donated. Use what "
    "the call returned, or pack with donate=False."
)

T = TypeVar("T")

_MAX_BYTES = 65536


class PackLayout(HandleLayout):
    """The structure of packed objects, and where their leaves are stored. Equal layouts are one object."""

    __slots__ = ("__weakref__", "buffers", "graphdef", "live", "max_bytes", "other_leaves", "separate")

    _instances: ClassVar[weakref.WeakValueDictionary[tuple[Any, ...], PackLayout]] = weakref.WeakValueDictionary()
    _lock: ClassVar[threading.RLock] = threading.RLock()

    graphdef: _core.GraphDef
    buffers: tuple[Buffer, ...]
    separate: tuple[int, ...]  # leaves that are JAX arrays outside of the buffers
    other_leaves: tuple[int, ...]  # leaves that are NumPy arrays, refs or numbers
    max_bytes: int
    live: LiveStatics | None  # statics that unpacking does not copy, and that others may change

    def __new__(
        cls,
        graphdef: _core.GraphDef,
        buffers: tuple[Buffer, ...],
        separate: tuple[int, ...],
        other_leaves: tuple[int, ...],
        max_bytes: int,
    ) -> PackLayout:
        live = _live_statics(graphdef)
        # Functions count by identity: equal ones may have closures of their own.
        key = (graphdef, buffers, separate, other_leaves, max_bytes, live and frozenset(map(id, live[0])))
        # One object for equal layouts, so that a call compares a pointer in place of the whole structure.
        with cls._lock:
            layout = cls._instances.get(key)
            if layout is None:
                layout = super().__new__(cls)
                layout.graphdef, layout.buffers, layout.separate, layout.other_leaves, layout.max_bytes = key[:5]
                layout.live = live
                cls._instances[key] = layout
        return layout

    def __reduce__(self) -> tuple[object, ...]:
        return PackLayout, (self.graphdef, self.buffers, self.separate, self.other_leaves, self.max_bytes)

    def __copy__(self) -> PackLayout:
        return self

    def __deepcopy__(self, memo: object) -> PackLayout:
        return self

    @property
    def shapes(self) -> dict[tuple[Any, ...], str]:
        """By key path, the dtypes and shapes of the arrays in the buffers."""
        paths = self.graphdef.leaf_paths()
        return {
            paths[leaf]: f"{buffer.dtype}{list(shape)}"
            for buffer in self.buffers
            for leaf, shape in zip(buffer.leaves, buffer.shapes, strict=True)
        }

    def __repr__(self) -> str:
        return f"PackLayout({self.graphdef!r}, {len(self.buffers)} buffers, {len(self.separate)} arrays apart)"


LiveStatics = tuple[tuple[types.FunctionType, ...], dict[Any, None]]


def _live_statics(graphdef: _core.GraphDef) -> LiveStatics | None:
    """The functions and keys with state that unpacking does not copy: the caller may change it at any time."""
    functions: dict[types.FunctionType, None] = {}
    keys: dict[Any, None] = {}
    todo: list[Any] = []
    for row in graphdef.rows():
        todo.append(getattr(row.key_entry, "key", None))
        value: Any = row.value if row.op is _core.Op.node else None
        if isinstance(value, types.FunctionType):
            # A function that is rebuilt is recorded as a copy without state: only one that is not has any of these.
            if value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__:
                functions[value] = None
        elif issubclass(row.type or object, (set, frozenset)):
            todo += value
    # Keys and elements are objects with state, or tuples that hold some at any depth.
    while todo:
        x = todo.pop()
        if isinstance(x, (tuple, frozenset)):
            todo += cast("Iterable[Any]", x)
        elif (hasattr(x, "__dict__") or hasattr(type(x), "__slots__")) and not isinstance(x, _STATELESS):
            keys[x] = None
    return (tuple(functions), keys) if functions or keys else None


_STATELESS = (type, types.ModuleType, enum.Enum)


class Packed(Generic[T]):
    """A handle on an object graph whose small arrays are stored in a few buffers: the result of `pack`.

    A function of `graftax.jit` that takes the handle as an argument sees the object inside. Elsewhere `unpack` gives
    the objects back. To JAX it is a pytree of its buffers: `jax.grad`, `optax` and the like work on whole buffers.
    """

    __slots__ = ("__weakref__", "_arrays", "_donate", "_kept", "_layout", "_live", "_used")

    # `_arrays`, `_kept` and `_live` are children for a walk: their names appear in key paths.
    _arrays: tuple[Any, ...]  # the buffers, then the separate arrays
    _kept: tuple[Any, ...]  # the other leaves
    _layout: PackLayout | None  # None once a call has used the handle up
    _live: LiveStatics | None  # that of the layout: here a call notices when one of these has changed
    _donate: bool
    _used: str | None  # the name of the function that used the handle up

    def __init__(
        self,
        arrays: tuple[Any, ...],
        other_leaves: tuple[Any, ...],
        layout: PackLayout | None,
        donate: bool,
        used: str | None = None,
    ) -> None:
        self._set_contents(arrays, other_leaves, layout)
        self._donate, self._used = donate, used

    def unpack(self, *, copy: bool = True) -> T:
        """Builds new objects with arrays of their own.

        Args:
            copy: False returns the arrays outside of the buffers (the big ones) as they are. The next call that takes
                the handle donates them, which deletes them from these objects too.

        Raises:
            StructureError: if a call has used the handle up, or its arrays are deleted.
        """
        layout = self._layout_in_use()
        return cast(T, _core.unflatten(layout.graphdef, self._leaves(copy)))

    def update(self, obj: T, *, copy: bool = True) -> None:
        """Replaces the objects inside.

        Args:
            obj: the new objects, of any structure.
            copy: as for `pack`.
        """
        layout = self._layout_in_use()
        leaves, graphdef = _flatten(obj)
        self._set_contents(*_pack_leaves(leaves, graphdef, layout.max_bytes, copy, self._donate))

    def _set_contents(
        self, arrays: tuple[object, ...], other_leaves: tuple[object, ...], layout: PackLayout | None
    ) -> None:
        self._arrays, self._kept, self._layout = arrays, other_leaves, layout
        self._live = None if layout is None else layout.live

    @property
    def graphdef(self) -> _core.GraphDef:
        """The structure of the objects inside."""
        return self._layout_in_use().graphdef

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(int(getattr(a, "nbytes", 0)) for a in (*self._arrays, *self._kept))

    def _layout_in_use(self) -> PackLayout:
        if self._layout is None:
            raise StructureError(PACK_USED.format(name=self._used))
        return self._layout

    def _leaves(self, copy: bool) -> list[Any]:
        layout = self._layout_in_use()
        if any(is_deleted(x) for x in self._arrays):
            raise StructureError(PACK_DELETED)
        # A call that donates the handle's arrays would delete them in the unpacked objects, too.
        needs_copies = copy and self._donate
        leaves: list[Any] = [None] * layout.graphdef.num_leaves
        buffers = self._arrays[: len(layout.buffers)]
        for joined, buffer in zip(buffers, layout.buffers, strict=True):
            for i, piece in zip(buffer.leaves, split(joined, buffer), strict=True):
                leaves[i] = piece
        for i, x in zip(layout.separate, self._arrays[len(layout.buffers) :], strict=True):
            leaves[i] = copy_array(x) if needs_copies else x
        for i, x in zip(layout.other_leaves, self._kept, strict=True):
            leaves[i] = x.value if type(x) is Dynamic else _own_copy(x, copy)
        return leaves

    def __copy__(self) -> Packed[T]:
        """A handle with arrays of its own, because a call may donate those of this handle."""
        arrays, other_leaves = tuple(map(copy_array, self._arrays)), tuple(_own_copy(x, copy=True) for x in self._kept)
        return Packed(arrays, other_leaves, self._layout, self._donate, self._used)

    def __repr__(self) -> str:
        layout = self._layout
        if layout is None:
            return f"<graftax.pack used up by {self._used}>"
        packed = sum(len(buffer.leaves) for buffer in layout.buffers)
        return (
            f"<graftax.pack of {layout.graphdef.num_leaves} arrays, {self.nbytes:,} bytes: "
            f"{packed} in {len(layout.buffers)} buffers, {len(layout.separate) + len(layout.other_leaves)} apart>"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return Packed, (self._arrays, self._kept, self._layout, self._donate, self._used)


def _children(handle: Packed[Any]) -> tuple[tuple[object, object], object]:
    return (handle._arrays, handle._kept), (handle._layout, handle._donate, handle._used)


def _with_keys(handle: Packed[Any]) -> tuple[list[tuple[Any, Any]], object]:
    children, aux = _children(handle)
    return [(tree_util.GetAttrKey(name), x) for name, x in zip(("_arrays", "_kept"), children, strict=True)], aux


def _from_children(aux: Any, children: Iterable[Any]) -> Packed[Any]:
    return Packed(*children, *aux)


tree_util.register_pytree_with_keys(Packed, _with_keys, _from_children, _children)


@boundary
def pack(obj: T, *, max_bytes: int = _MAX_BYTES, donate: bool = True, copy: bool = True) -> Packed[T]:
    """Packs the small arrays of an object graph into one buffer per dtype and sharding.

    Every array adds overhead to a call; a handle counts as a few arrays. A function that receives a handle sees the
    object inside, and its changes are in the handle afterwards. A function that does not change its arguments returns
    `pack(new_state)`; the handle that it took cannot be used again.

    Args:
        obj: any object graph: a model, an optimizer's state, a tuple of both. Shared and cyclic references are kept.
        max_bytes: arrays of more bytes than this stay outside of the buffers.
        donate: a call that takes the handle may reuse its memory for the new state. With False the memory is kept, and
            the handle can always be used again.
        copy: copies the arrays outside of the buffers, so that `obj` keeps its own when the handle's are donated.
            NumPy arrays are always copied. Pass False if `obj` is not used afterwards.

    Returns:
        a `Packed` handle, whose `unpack()` gives the objects back.

    Raises:
        UnsupportedValueError: for a value that hides state; names its path.
        TypeError: if `obj` is a handle already.

    Example:
        >>> state = graftax.pack({"w": [jnp.ones(4)] * 3, "step": jnp.asarray(0)})
        >>> @graftax.jit
        ... def step(state, x):
        ...     state["w"] = [w - x for w in state["w"]]
        >>> step(state, 1.0)
        >>> state.unpack()["w"][0]
        Array([0., 0., 0., 0.], dtype=float32)
    """
    if isinstance(max_bytes, bool) or not isinstance(cast("object", max_bytes), int) or max_bytes < 0:
        raise ValueError(f"max_bytes={max_bytes!r}: expected a whole number of bytes, 0 or more.")
    leaves, graphdef = _flatten(obj)
    return Packed(*_pack_leaves(leaves, graphdef, max_bytes, copy, donate), donate)


def _flatten(obj: object) -> tuple[list[Any], _core.GraphDef]:
    if type(obj) is Packed:
        raise TypeError(PACK_OF_PACK)
    return _record(obj)


def _record(obj: object) -> tuple[list[Any], _core.GraphDef]:
    """The leaves and the structure. Array aliases are part of it: an array at two paths is one leaf, stored once."""
    return _core.record((obj,), aliases=True)


# ---- leaves to buffers and back


def _pack_leaves(
    leaves: list[Any], graphdef: _core.GraphDef, max_bytes: int, copy: bool, donate: bool
) -> tuple[tuple[object, ...], tuple[object, ...], PackLayout]:
    """(arrays, other leaves, layout) of these leaves."""
    # A buffer for each dtype and placement. Tracers have no placement: XLA decides.
    traced = has_tracer(leaves)
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if is_plain(leaf, max_bytes):
            placement = None if traced else (sharding_of(leaf), leaf.committed)
            groups.setdefault((leaf.dtype, placement), []).append(i)
    buffers: tuple[Buffer, ...] = ()
    for (dtype, _), members in groups.items():
        # A single array stays as it is. Equal shapes are side by side, so that they are cut out together.
        if len(members) > 1:
            members.sort(key=lambda i: leaves[i].shape)
            buffers += (Buffer(tuple(members), tuple(leaves[i].shape for i in members), dtype),)
    in_buffers = {i for buffer in buffers for i in buffer.leaves}
    unbuffered = [i for i in range(len(leaves)) if i not in in_buffers]
    separate = tuple(i for i in unbuffered if isinstance(leaves[i], jax.Array) and not isinstance(leaves[i], ref_types))
    other_leaves = tuple(i for i in unbuffered if i not in separate)
    joined_arrays = [join([leaves[i] for i in buffer.leaves]) for buffer in buffers]
    # What is never donated stays valid in the caller's objects, so that it need not be copied.
    separate_arrays = [copy_array(leaves[i]) if copy and donate else leaves[i] for i in separate]
    layout = PackLayout(graphdef, buffers, separate, other_leaves, max_bytes)
    return (*joined_arrays, *separate_arrays), tuple(_own_copy(leaves[i], copy) for i in other_leaves), layout


def _own_copy(leaf: object, copy: bool) -> object:
    """A leaf that is not a JAX array, as a handle stores it."""
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        return Dynamic(leaf)  # a number that was a leaf has to stay one
    return leaf.copy() if copy and isinstance(leaf, np.ndarray) else leaf


# ---- in a call


class _OpenHandle(NamedTuple):
    """A handle in a call, with the object inside and their states before the function runs."""

    handle: Packed[Any]
    value: Any
    leaves: list[Any]
    graphdef: _core.GraphDef
    contents: tuple[Any, ...]  # of the handle


def _open_handles(values: Sequence[object]) -> tuple[list[Any], list[_OpenHandle]]:
    """The arguments with each handle replaced by the object inside, and the handles."""
    opened: dict[int, _OpenHandle] = {}
    arguments = list(values)
    for i, value in enumerate(arguments):
        if type(value) is Packed:
            handle = cast("Packed[Any]", value)
            if id(handle) not in opened:  # a handle that is passed twice is one object inside, too
                obj = handle.unpack()
                opened[id(handle)] = _OpenHandle(handle, obj, *_record(obj), _contents(handle))
            arguments[i] = opened[id(handle)].value
    return arguments, list(opened.values())


def _contents(handle: Packed[Any]) -> tuple[object, ...]:
    return (handle._layout, *handle._arrays, *handle._kept)


def _close_handles(opened: Iterable[_OpenHandle], result: object, name: str, uses_up: bool) -> None:
    """Writes changes of the objects inside to their handles; empties unchanged handles that the result replaces."""
    unchanged: list[Packed[Any]] = []
    closing: list[tuple[Packed[Any], tuple[Any, ...]]] = []
    for open_handle in opened:
        leaves, graphdef = _record(open_handle.value)
        contents = _contents(open_handle.handle)
        untouched = len(contents) == len(open_handle.contents) and all(
            a is b for a, b in zip(contents, open_handle.contents, strict=True)
        )
        if graphdef == open_handle.graphdef and _are_unchanged(leaves, open_handle):
            if untouched:  # otherwise `update` was called on the handle: its new contents stay
                unchanged.append(open_handle.handle)
        elif not untouched:
            raise StructureError(PACK_CHANGED_TWICE.format(name=name))
        else:
            closing.append((open_handle.handle, _updated_contents(open_handle, leaves, graphdef)))
    # All contents are known: nothing raises from here on, so that either all handles are written or none.
    for handle, parts in closing:
        handle._set_contents(*parts)
    if not uses_up:
        return
    # A handle in the result that is not an argument replaces the unchanged argument of the same layout.
    argument_ids = {id(open_handle.handle) for open_handle in opened}
    result_layouts = [handle._layout for handle in _handles_in(result) if id(handle) not in argument_ids]
    for layout in dict.fromkeys(result_layouts):
        replaced = [handle for handle in unchanged if handle._layout is layout and handle._donate]
        if len(replaced) > result_layouts.count(layout):
            continue  # ambiguous which of them the result replaces: all stay usable
        for handle in replaced:
            handle._set_contents((), (), None)
            handle._used = name


def _are_unchanged(leaves: list[Any], open_handle: _OpenHandle) -> bool:
    if not all(a is b for a, b in zip(leaves, open_handle.leaves, strict=True)):
        return False
    other_leaves = zip(open_handle.handle._layout_in_use().other_leaves, open_handle.handle._kept, strict=True)
    return all(_array_bytes(leaves[i]) == _array_bytes(leaf) for i, leaf in other_leaves)


def _array_bytes(leaf: object) -> bytes | None:
    """The content of a NumPy array, which may change in place; None for another leaf."""
    return leaf.tobytes() if isinstance(leaf, np.ndarray) else None


def _updated_contents(open_handle: _OpenHandle, leaves: list[Any], graphdef: _core.GraphDef) -> tuple[object, ...]:
    """The new contents of a handle with these leaves inside: (arrays, other leaves, layout)."""
    # Where the layout still fits, buffers without a changed leaf are reused.
    handle, old_leaves = open_handle.handle, open_handle.leaves
    layout = handle._layout_in_use()
    fits = (
        graphdef == open_handle.graphdef
        and all(leaves[i] is old_leaves[i] and _array_bytes(leaves[i]) is None for i in layout.other_leaves)
        and all(
            is_plain(leaves[i], layout.max_bytes) and leaves[i].shape == shape and leaves[i].dtype == buffer.dtype
            for buffer in layout.buffers
            for i, shape in zip(buffer.leaves, buffer.shapes, strict=True)
        )
    )
    if not fits:
        return _pack_leaves(leaves, graphdef, layout.max_bytes, copy=True, donate=handle._donate)
    joined_arrays = [
        old_array
        if all(leaves[i] is old_leaves[i] for i in buffer.leaves)
        else join([leaves[i] for i in buffer.leaves])
        for old_array, buffer in zip(handle._arrays, layout.buffers, strict=False)  # separate arrays follow the buffers
    ]
    separate_arrays = [
        old_array if leaves[i] is old_leaves[i] else copy_array(leaves[i]) if handle._donate else leaves[i]
        for i, old_array in zip(layout.separate, handle._arrays[len(joined_arrays) :], strict=True)
    ]
    return (*joined_arrays, *separate_arrays), handle._kept, layout


def _handles_in(result: object) -> list[Packed[Any]]:
    """The handles in a result, through tuples, lists and dicts."""
    handles: list[Packed[Any]] = []
    visited: set[int] = set()
    todo: list[Any] = [result]
    while todo:
        value = todo.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if type(value) is Packed:
            handles.append(cast("Packed[Any]", value))
        elif isinstance(value, (tuple, list)):
            todo += cast("list[Any]", value)
        elif isinstance(value, dict):
            todo += cast("dict[Any, Any]", value).values()
    # The stack has taken the last element first.
    return handles[::-1]


HANDLE_CLASSES[Packed] = HandleClass(
    _open_handles,
    _close_handles,
    is_donated=operator.attrgetter("_donate"),
    donated_field="_arrays",
    static_fields=frozenset({"_layout", "_donate", "_used"}),
)
