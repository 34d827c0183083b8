# SPDX-License-Identifier: Apache-2.0
"""`pack`: an object graph whose small arrays are slices of a few buffers, so that they cross a call as one."""

from __future__ import annotations

import enum
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import jax
import jax.core
import numpy as np
from jax import tree_util

from graftax import _core
from graftax._base.errors import StructureError
from graftax._base.handles import HandleClass, HandleLayout, add_handle_class
from graftax._base.marks import Dynamic
from graftax._graph.packed_buffers import Buffer, copied, cut, is_deleted, is_plain, join, sharding_of
from graftax._jax.compat import ref_types
from graftax._jax.tracebacks import boundary

PACK_BYTES = "max_bytes={value!r}: expected a whole number of bytes, 0 or more."
PACK_CHANGED_TWICE = (
    "{name} changed what is in a handle of packed state both as its argument and through the handle itself, which it "
    "reaches another way (update, or another argument): one of the two would be lost. Change it in one of these ways."
)
PACK_DELETED = (
    "this packed state's arrays are gone: a call took them as donated. It failed while it ran, or another handle, or "
    "an object packed or unpacked with copy=False, holds the same arrays (jax.tree.map makes such handles). Use what "
    "that call wrote back or returned, copy.copy(handle) before it, or pack with donate=False."
)
PACK_OF_PACK = "this is packed already: a handle can be passed on as it is, and unpack() gives the objects inside."
PACK_USED = (
    "this packed state was used up by {name}, which returned a new one in its place: its memory was donated. Use what "
    "the call returned, or pack with donate=False."
)

T = TypeVar("T")

_MAX_BYTES = 65536


class PackLayout(HandleLayout):
    """What a handle holds, and where: equal layouts are one object."""

    __slots__ = ("__weakref__", "apart", "buffers", "graphdef", "kept", "live", "max_bytes")

    _known: ClassVar[weakref.WeakValueDictionary[tuple[Any, ...], PackLayout]] = weakref.WeakValueDictionary()
    _making: ClassVar[threading.RLock] = threading.RLock()

    graphdef: _core.GraphDef
    buffers: tuple[Buffer, ...]
    apart: tuple[int, ...]  # leaves: JAX arrays
    kept: tuple[int, ...]  # leaves: NumPy arrays, refs, numbers
    max_bytes: int
    live: _Live | None  # what is not rebuilt inside, and may be changed from outside

    def __new__(
        cls,
        graphdef: _core.GraphDef,
        buffers: tuple[Buffer, ...],
        apart: tuple[int, ...],
        kept: tuple[int, ...],
        max_bytes: int,
    ) -> PackLayout:
        live = _live(graphdef)
        # Equal functions are different objects, each with its own closure.
        key = (graphdef, buffers, apart, kept, max_bytes, live and frozenset(map(id, live[0])))
        with cls._making:
            made = cls._known.get(key)
            if made is None:
                made = super().__new__(cls)
                made.graphdef, made.buffers, made.apart, made.kept, made.max_bytes = key[:5]
                made.live = live
                cls._known[key] = made
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return PackLayout, (self.graphdef, self.buffers, self.apart, self.kept, self.max_bytes)

    def __copy__(self) -> PackLayout:
        return self

    def __deepcopy__(self, memo: object) -> PackLayout:
        return self

    @property
    def shapes(self) -> dict[tuple[Any, ...], str]:
        """By key path, what the arrays in the buffers are."""
        paths = self.graphdef.leaf_paths()
        return {
            paths[leaf]: f"{buffer.dtype}{list(shape)}"
            for buffer in self.buffers
            for leaf, shape in zip(buffer.leaves, buffer.shapes, strict=True)
        }

    def __repr__(self) -> str:
        return f"PackLayout({self.graphdef!r}, {len(self.buffers)} buffers, {len(self.apart)} arrays apart)"


_Live = tuple[tuple[types.FunctionType, ...], dict[Any, None]]


def _live(graphdef: _core.GraphDef) -> _Live | None:
    """The functions and keys that are not rebuilt but stay themselves, and have state that may change outside."""
    functions: dict[types.FunctionType, None] = {}
    keys: dict[Any, None] = {}
    todo: list[Any] = []
    for row in graphdef.rows():
        todo.append(getattr(row.key_entry, "key", None))
        value: Any = row.value if row.op is _core.Op.node else None
        if isinstance(value, types.FunctionType):
            # A function that is rebuilt has a twin without state here.
            if value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__:
                functions[value] = None
        elif issubclass(row.type or object, (set, frozenset)):
            todo += value
    while todo:
        x = todo.pop()
        if isinstance(x, (tuple, frozenset)):
            todo += cast("Iterable[Any]", x)
        elif (hasattr(x, "__dict__") or hasattr(type(x), "__slots__")) and not isinstance(x, _STATELESS):
            keys[x] = None
    return (tuple(functions), keys) if functions or keys else None


_STATELESS = (type, types.ModuleType, enum.Enum)


class Packed(Generic[T]):
    """A handle on an object graph whose small arrays lie in a few buffers: what `pack` returns.

    Given to a function of `graftax.jit` as an argument, it is the object inside. Elsewhere `unpack` gives the objects
    back. It is a pytree of its buffers for JAX: `jax.grad`, `optax` and the like work on whole buffers.
    """

    __slots__ = ("__weakref__", "_arrays", "_donate", "_kept", "_layout", "_live", "_used")

    _arrays: tuple[Any, ...]
    _kept: tuple[Any, ...]
    _layout: PackLayout | None
    _live: _Live | None  # that of the layout, where a call sees that one of these was changed
    _donate: bool
    _used: str | None

    def __init__(
        self,
        arrays: tuple[Any, ...],
        kept: tuple[Any, ...],
        layout: PackLayout | None,
        donate: bool,
        used: str | None = None,
    ) -> None:
        self._hold(arrays, kept, layout)
        self._donate, self._used = donate, used

    def unpack(self, *, copy: bool = True) -> T:
        """The objects, built anew, with arrays of their own.

        Args:
            copy: False gives the arrays that stand apart (the big ones) as they are. The next call that is given the
                handle donates those, and they are gone from the objects then.

        Raises:
            StructureError: where a call has used the handle up, or its arrays are gone.
        """
        layout = self._in_use()
        return cast(T, _core.unflatten(layout.graphdef, self._leaves(copy)))

    def update(self, obj: T, *, copy: bool = True) -> None:
        """Holds these objects from now on, instead of those before. The arguments are those of `pack`."""
        layout = self._in_use()
        leaves, graphdef = _flatten(obj)
        self._hold(*_packed(leaves, graphdef, layout.max_bytes, copy, self._donate))

    def _hold(self, arrays: tuple[Any, ...], kept: tuple[Any, ...], layout: PackLayout | None) -> None:
        self._arrays, self._kept, self._layout = arrays, kept, layout
        self._live = None if layout is None else layout.live

    @property
    def graphdef(self) -> _core.GraphDef:
        """The structure of the objects inside."""
        return self._in_use().graphdef

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(int(getattr(a, "nbytes", 0)) for a in (*self._arrays, *self._kept))

    def _in_use(self) -> PackLayout:
        if self._layout is None:
            raise StructureError(PACK_USED.format(name=self._used))
        return self._layout

    def _leaves(self, copy: bool) -> list[Any]:
        layout = self._in_use()
        if any(is_deleted(x) for x in self._arrays):
            raise StructureError(PACK_DELETED)
        own = copy and self._donate
        leaves: list[Any] = [None] * layout.graphdef.num_leaves
        buffers = self._arrays[: len(layout.buffers)]
        for joined, buffer in zip(buffers, layout.buffers, strict=True):
            for i, piece in zip(buffer.leaves, cut(joined, buffer), strict=True):
                leaves[i] = piece
        for i, x in zip(layout.apart, self._arrays[len(layout.buffers) :], strict=True):
            leaves[i] = copied(x) if own else x
        for i, x in zip(layout.kept, self._kept, strict=True):
            leaves[i] = x.value if type(x) is Dynamic else _kept(x, copy)
        return leaves

    def __copy__(self) -> Packed[T]:
        """A handle with arrays of its own: those of this one are donated."""
        arrays, kept = tuple(map(copied, self._arrays)), tuple(_kept(x, copy=True) for x in self._kept)
        return Packed(arrays, kept, self._layout, self._donate, self._used)

    def __repr__(self) -> str:
        layout = self._layout
        if layout is None:
            return f"<graftax.pack used up by {self._used}>"
        packed = sum(len(buffer.leaves) for buffer in layout.buffers)
        return (
            f"<graftax.pack of {layout.graphdef.num_leaves} arrays, {self.nbytes:,} bytes: "
            f"{packed} in {len(layout.buffers)} buffers, {len(layout.apart) + len(layout.kept)} apart>"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, (self._arrays, self._kept, self._layout, self._donate, self._used)


def _children(handle: Packed[Any]) -> tuple[tuple[Any, Any], Any]:
    return (handle._arrays, handle._kept), (handle._layout, handle._donate, handle._used)


def _with_keys(handle: Packed[Any]) -> tuple[list[tuple[Any, Any]], Any]:
    children, aux = _children(handle)
    return [(tree_util.GetAttrKey(name), x) for name, x in zip(("_arrays", "_kept"), children, strict=True)], aux


def _from_children(aux: Any, children: Iterable[Any]) -> Packed[Any]:
    return Packed(*children, *aux)


tree_util.register_pytree_with_keys(Packed, _with_keys, _from_children, _children)


@boundary
def pack(obj: T, *, max_bytes: int = _MAX_BYTES, donate: bool = True, copy: bool = True) -> Packed[T]:
    """Packs the small arrays of an object graph into one buffer per dtype and sharding.

    Each array makes a call of `graftax.jit` slower; a handle counts as a few. A function that is given a handle sees
    the object inside, and what it changes is in the handle afterwards. A function that does not change its arguments
    returns `pack(new_state)`; the handle that it was given cannot be used again.

    Args:
        obj: any object graph: a model, an optimizer's state, a tuple of both. Shared and cyclic references are kept.
        max_bytes: arrays of more bytes than this are held as they are, beside the buffers.
        donate: a call that is given the handle may use its memory for the new state. With False the memory is kept, and
            the handle can always be used again.
        copy: take a copy of the arrays that are not in the buffers, so that `obj` keeps its own when the handle's are
            donated. NumPy arrays are always copied. False where `obj` is not used afterwards.

    Returns:
        a `Packed` handle: `unpack()` gives the objects back.

    Raises:
        UnsupportedValueError: for a value that hides state, at its path.
        TypeError: where `obj` is a handle already.

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
        raise ValueError(PACK_BYTES.format(value=max_bytes))
    leaves, graphdef = _flatten(obj)
    return Packed(*_packed(leaves, graphdef, max_bytes, copy, donate), donate)


def _flatten(obj: object) -> tuple[list[Any], _core.GraphDef]:
    if type(obj) is Packed:
        raise TypeError(PACK_OF_PACK)
    return _walked(obj)


def _walked(obj: object) -> tuple[list[Any], _core.GraphDef]:
    """The leaves and the structure, of which the ties of arrays are a part: buffers have no place twice."""
    return _core.record((obj,), aliases=True)


# ---- leaves to buffers and back


def _packed(
    leaves: list[Any], graphdef: _core.GraphDef, max_bytes: int, copy: bool, donate: bool
) -> tuple[tuple[Any, ...], tuple[Any, ...], PackLayout]:
    """(arrays, kept, layout) of these leaves."""
    traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        if is_plain(x, max_bytes):
            place = None if traced else (sharding_of(x), x.committed)
            groups.setdefault((x.dtype, place), []).append(i)
    buffers: tuple[Buffer, ...] = ()
    for (dtype, _), members in groups.items():
        if len(members) > 1:
            members.sort(key=lambda i: leaves[i].shape)
            buffers += (Buffer(tuple(members), tuple(leaves[i].shape for i in members), dtype),)
    inside = {i for buffer in buffers for i in buffer.leaves}
    rest = [i for i in range(len(leaves)) if i not in inside]
    apart = tuple(i for i in rest if isinstance(leaves[i], jax.Array) and not isinstance(leaves[i], ref_types))
    kept = tuple(i for i in rest if i not in apart)
    joined = [join([leaves[i] for i in buffer.leaves]) for buffer in buffers]
    beside = [copied(leaves[i]) if copy and donate else leaves[i] for i in apart]
    layout = PackLayout(graphdef, buffers, apart, kept, max_bytes)
    return (*joined, *beside), tuple(_kept(leaves[i], copy) for i in kept), layout


def _kept(x: Any, copy: bool) -> Any:
    if isinstance(x, (bool, int, float, complex)) and not isinstance(x, np.generic):
        return Dynamic(x)  # a number that is traced wherever it stands
    return x.copy() if copy and isinstance(x, np.ndarray) else x


# ---- in a call


class _Open(NamedTuple):
    """A handle in a call, with the object inside: its leaves and structure, and what the handle held, before it ran."""

    handle: Packed[Any]
    value: Any
    leaves: list[Any]
    graphdef: _core.GraphDef
    held: tuple[Any, ...]


def _open(values: Sequence[Any]) -> tuple[list[Any], list[_Open]]:
    """These arguments, with the object inside in place of each handle."""
    opened: dict[int, _Open] = {}
    out = list(values)
    for i, value in enumerate(out):
        if type(value) is Packed:
            handle = cast("Packed[Any]", value)
            if id(handle) not in opened:
                inside = handle.unpack()
                opened[id(handle)] = _Open(handle, inside, *_walked(inside), _held(handle))
            out[i] = opened[id(handle)].value
    return out, list(opened.values())


def _held(handle: Packed[Any]) -> tuple[Any, ...]:
    return (handle._layout, *handle._arrays, *handle._kept)


def _close(opened: Iterable[_Open], result: object, name: str, uses_up: bool) -> None:
    """Puts what the function did to the objects inside into their handles; empties those that the result replaces."""
    unchanged: list[Packed[Any]] = []
    closing: list[tuple[Packed[Any], tuple[Any, ...]]] = []
    for was in opened:
        leaves, graphdef = _walked(was.value)
        now = _held(was.handle)
        untouched = len(now) == len(was.held) and all(a is b for a, b in zip(now, was.held, strict=True))
        if graphdef == was.graphdef and _are_unchanged(leaves, was):
            if untouched:
                unchanged.append(was.handle)
        elif not untouched:
            raise StructureError(PACK_CHANGED_TWICE.format(name=name))
        else:
            closing.append((was.handle, _closed(was, leaves, graphdef)))
    # Nothing fails from here on: a handle is not written while another cannot be.
    for handle, parts in closing:
        handle._hold(*parts)
    if not uses_up:
        return
    given = {id(x.handle) for x in opened}
    made = [x._layout for x in _handles_in(result) if id(x) not in given]
    for layout in dict.fromkeys(made):
        replaced = [x for x in unchanged if x._layout is layout and x._donate]
        if len(replaced) > made.count(layout):
            continue  # nobody can tell which of them the result replaces: all are kept
        for old in replaced:
            old._hold((), (), None)
            old._used = name


def _are_unchanged(leaves: list[Any], was: _Open) -> bool:
    if not all(a is b for a, b in zip(leaves, was.leaves, strict=True)):
        return False
    kept = zip(was.handle._in_use().kept, was.handle._kept, strict=True)
    return all(_bytes(leaves[i]) == _bytes(x) for i, x in kept)


def _bytes(x: Any) -> bytes | None:
    """The content of a NumPy array, which may change in place; nothing of another leaf."""
    return x.tobytes() if isinstance(x, np.ndarray) else None


def _closed(was: _Open, leaves: list[Any], graphdef: _core.GraphDef) -> tuple[Any, ...]:
    """What a handle holds with these leaves inside: (arrays, kept, layout)."""
    handle, before = was.handle, was.leaves
    layout = handle._in_use()
    fits = (
        graphdef == was.graphdef
        and all(leaves[i] is before[i] and _bytes(leaves[i]) is None for i in layout.kept)
        and all(
            is_plain(leaves[i], layout.max_bytes) and leaves[i].shape == shape and leaves[i].dtype == buffer.dtype
            for buffer in layout.buffers
            for i, shape in zip(buffer.leaves, buffer.shapes, strict=True)
        )
    )
    if not fits:
        return _packed(leaves, graphdef, layout.max_bytes, copy=True, donate=handle._donate)
    joined = [
        old if all(leaves[i] is before[i] for i in buffer.leaves) else join([leaves[i] for i in buffer.leaves])
        for old, buffer in zip(handle._arrays, layout.buffers, strict=False)
    ]
    beside = [
        old if leaves[i] is before[i] else copied(leaves[i]) if handle._donate else leaves[i]
        for i, old in zip(layout.apart, handle._arrays[len(joined) :], strict=True)
    ]
    return (*joined, *beside), handle._kept, layout


def _handles_in(result: object) -> list[Packed[Any]]:
    """The handles in a result, through tuples, lists and dicts."""
    found: list[Packed[Any]] = []
    seen: set[int] = set()
    todo: list[Any] = [result]
    while todo:
        x = todo.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if type(x) is Packed:
            found.append(cast("Packed[Any]", x))
        elif isinstance(x, (tuple, list)):
            todo += cast("list[Any]", x)
        elif isinstance(x, dict):
            todo += cast("dict[Any, Any]", x).values()
    return found[::-1]


def _run_inside(name: str, handle: Packed[Any], run: Callable[[Any], Any]) -> Any:
    held, obj = handle._arrays, handle.unpack()
    before = _walked(obj)
    result = run(obj)
    after = _walked(obj)
    if before[1] != after[1] or any(one is not other for one, other in zip(before[0], after[0], strict=True)):
        if handle._arrays is not held:
            raise StructureError(PACK_CHANGED_TWICE.format(name=name))
        handle.update(obj)
    return result


def _is_donated(handle: Packed[Any]) -> bool:
    return handle._donate


def _is_donated_place(path: Sequence[Any]) -> bool:
    return getattr(path[0], "name", None) == "_arrays"


add_handle_class(
    Packed,
    HandleClass(
        _open,
        _close,
        _run_inside,
        _is_donated,
        _is_donated_place,
        static_fields=frozenset({"_layout", "_donate", "_used"}),
    ),
)
