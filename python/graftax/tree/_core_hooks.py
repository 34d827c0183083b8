# SPDX-License-Identifier: Apache-2.0
"""What the core asks Python about trees: how JAX opens a type, treedefs of both kinds, why a tree does not match."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator
from typing import Any, NoReturn

from jax import tree_util

from graftax import _core, interop
from graftax._base.key_path import keystr
from graftax._base.type_record import TreeDescription
from graftax._graph.node_text import keys_of, listed, node_text, value_text
from graftax._graph.structure_diff import Difference, Way, lockstep, short_text, spelled
from graftax._graph.types.describe import schemas
from graftax._jax.compat import (
    Records,
    data_fields,
    is_tree_node,
    names_function,
    tree_functions,
    treedef_of_node,
    treedef_of_records,
    treedef_records,
)

TREE_MISMATCH = "{name}: the trees do not have the same structure.\n{places}"

_CONTAINERS = (type(None), list, tuple, dict, OrderedDict, defaultdict)


def describe(cls: Any) -> TreeDescription:
    """Says how `jax.tree` sees a type."""
    if not is_tree_node(cls):
        return TreeDescription("leaf")
    if cls in _CONTAINERS:
        return TreeDescription("node")
    functions = tree_functions(cls)
    if functions is None:
        names: Any = getattr(cls, "_fields", None)
        if hasattr(cls, "_fields") and issubclass(cls, tuple):
            children = tuple(map(str, names)) if isinstance(names, tuple) else ()
            return TreeDescription("node", None, _is_plain_namedtuple(cls), children)
        # Registered where nothing can be read: through what is public.
        return TreeDescription("node", tree_util.default_registry.flatten_one_level, functools.partial(_rebuild, cls))
    flatten, unflatten = functions
    adapted = interop.tree_fields(cls, flatten, unflatten)
    if adapted is not None:
        return adapted
    names = data_fields(flatten)
    if names is not None:
        children, others = names
        order = _order_of_init(cls, (*children, *others))
        return TreeDescription("fields", flatten, unflatten, children, others, order)
    schema = schemas.get(cls) if _is_its_dict(cls) else None
    return TreeDescription("node", flatten, unflatten, with_keys=names_function(flatten), schema=schema)


def _is_its_dict(cls: Any) -> bool:
    """Is `__dict__` of an instance its own dictionary, and not something that the class makes up?"""
    found = next((vars(base)["__dict__"] for base in cls.__mro__ if "__dict__" in vars(base)), None)
    return isinstance(found, types.GetSetDescriptorType) and cls.__getattribute__ is object.__getattribute__


def _rebuild(cls: type, data: Any, children: tuple[Any, ...]) -> Any:
    leaf = tree_util.tree_structure(0)
    treedef = treedef_of_node(tree_util.default_registry, (cls, data), [leaf] * len(children))
    return treedef.unflatten(children)


def _is_plain_namedtuple(cls: Any) -> bool:
    """Does the class make instances just as `collections.namedtuple` does?"""
    new = cls.__new__
    written = isinstance(new, types.FunctionType) and new.__globals__.get("__name__", "").startswith("namedtuple_")
    called = type(cls).__call__ is type.__call__ and cls.__init__ is object.__init__
    return written and called and new.__code__.co_argcount == 1 + len(cls._fields)


def _order_of_init(cls: Any, names: tuple[str, ...]) -> tuple[int, ...]:
    """In which order a dataclass's own `__init__` assigns; empty where it does anything else as well."""
    init, parameters = vars(cls).get("__init__"), vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.init or not isinstance(init, types.FunctionType):
        return ()
    generated = init.__code__.co_qualname == "__create_fn__.<locals>.__init__"
    plain = cls.__new__ is object.__new__ and not hasattr(cls, "__post_init__") and type(cls).__call__ is type.__call__
    frozen_setattr = "__setattr__" in vars(cls) and parameters.frozen
    plain = plain and (cls.__setattr__ is object.__setattr__ or frozen_setattr)
    declared: dict[str, Any] = cls.__dataclass_fields__  # InitVar and ClassVar too
    fields = [f.name for f in dataclasses.fields(cls)]
    only_fields = all(f.init for f in dataclasses.fields(cls)) and not any(
        getattr(f, "_field_type", None) is dataclasses._FIELD_INITVAR  # type: ignore[attr-defined]  # pyright: ignore
        for f in declared.values()
    )
    if not (generated and plain and only_fields and sorted(fields) == sorted(names)):
        return ()
    return tuple(names.index(name) for name in fields)


# ---- treedefs of JAX


def from_jax(treedef: Any) -> _core.PyTreeDef:
    """The same structure as a treedef of `graftax.tree`.

    Raises:
        TypeError: where it is no treedef.
    """
    if isinstance(treedef, _core.PyTreeDef):
        return treedef
    if not isinstance(treedef, tree_util.PyTreeDef):
        raise TypeError(f"expected a treedef, got {type(treedef).__qualname__}: {treedef!r}")
    records = treedef_records(treedef)
    if records is None:
        return _rebuilt(treedef, _core.PyTreeDef.from_node_data_and_children)
    return _core.PyTreeDef._from_records(records)


def to_jax(treedef: Any) -> Any:
    """The same structure as a treedef of `jax.tree`."""
    if isinstance(treedef, tree_util.PyTreeDef):
        return treedef
    ours = from_jax(treedef)
    theirs = treedef_of_records(ours._records())
    return _rebuilt(ours, treedef_of_node) if theirs is None else theirs


def _rebuilt(treedef: Any, make: Callable[..., Any]) -> Any:
    """The structure, made by public functions from below: time grows with nodes times depth."""
    registry = tree_util.default_registry
    done: list[Any] = []
    stack: list[tuple[Any, Any, int]] = [(treedef, None, -1)]
    while stack:
        node, data, count = stack.pop()
        if count >= 0:
            children = done[len(done) - count :]
            del done[len(done) - count :]
            done.append(make(registry, data, children))
            continue
        data, children = node.node_data(), node.children()
        stack.append((None, data, len(children)))
        stack.extend((child, None, -1) for child in reversed(children))
    return done[0]


def from_iterable_tree(treedef: _core.PyTreeDef, tree: Any) -> Any:
    """The tree of this structure whose nodes have the elements of the iterables in `tree` as their children."""
    records = treedef._records()
    leaves: list[Any] = []
    stack: list[Any] = [tree]
    for number, (data, arity) in enumerate(records):
        if data is None:
            leaves += [stack.pop() for _ in range(arity)]
            continue
        given = stack.pop()
        elements = list(given)
        if len(elements) != arity:
            wanted = _core.PyTreeDef._from_records(records[number : _after(records, number)])
            raise ValueError(f"expected an iterable of {arity} for {wanted}, got {short_text(given)}")
        stack.extend(reversed(elements))
    return treedef.unflatten(leaves)


def _after(records: Records, number: int) -> int:
    """The first record that is not below that of this number."""
    left = 1  # nodes still to come
    while left:
        data, arity = records[number]
        left += -arity if data is None else arity - 1
        number += 1
    return number


def deserialize_using_proto(registry: Any, data: bytes) -> _core.PyTreeDef:
    return from_jax(tree_util.PyTreeDef.deserialize_using_proto(registry, data))


class Mark(enum.Enum):
    """Stands in a pickled treedef for the sentinel of an absent field."""

    ABSENT = "absent"


def replaced(data: Any, old: Any, new: Any) -> Any:
    """Node data with one object replaced, in tuples of any depth."""
    if type(data) is tuple:
        items: tuple[Any, ...] = data
        return tuple(replaced(item, old, new) for item in items)
    return new if data is old else data


def treedef_from_state(state: list[Any]) -> _core.PyTreeDef:
    """What a pickled treedef is loaded through."""
    return _core.PyTreeDef._from_state(state)


# ---- why a tree does not match


def differences(treedef: _core.PyTreeDef, tree: Any) -> list[Difference[Way]]:
    """Every place where `tree` is not what `treedef` says; below such a place nothing more is looked for."""
    records = treedef._records()
    below = _children(records)

    def meet(
        number: int | None, given: Any, way: Way
    ) -> Generator[Difference[Way], None, list[tuple[int | None, Any, Any]]]:
        node, arity = (None, 0) if number is None else records[number]
        if number is None or node is None:  # a leaf may be anything
            return []
        texts = _of_one_node(*node, arity, given)
        if texts is not None:
            yield Difference(way, *texts)
            return []
        level = _core.tree_one_level(given, with_keys=True)
        assert level is not None
        return [(child, value, entry) for child, (entry, value) in zip(below[number], level[0], strict=True)]

    return list(lockstep(meet, 0, tree))


def _children(records: Records) -> list[list[int | None]]:
    """For each record of a node those of its children; None for a leaf."""
    below: list[list[int | None]] = []
    todo: list[int] = []  # nodes that have children still to come
    for number, (data, arity) in enumerate(records):
        below.append([])
        for child in [None] * arity if data is None else [number]:
            while todo and len(below[todo[-1]]) == records[todo[-1]][1]:
                todo.pop()
            if todo:
                below[todo[-1]].append(child)
        if data is not None:
            todo.append(number)
    return below


def _of_one_node(cls: type, data: Any, arity: int, given: Any) -> tuple[str, str] | None:
    """What was expected in place of a node, and what was found there; None where it is what it has to be."""

    def texts(more: str = "") -> tuple[str, str]:
        return node_text(cls, data, arity), value_text(given) + (f"\n    {more}" if more else "")

    if type(given) is not cls:
        none = "None is a node without children, not a leaf: is_leaf=lambda x: x is None makes it one"
        return texts(none if cls is type(None) else "")
    level = _core.tree_one_level(given)
    assert level is not None
    children, own = level
    if issubclass(cls, dict):
        wanted_keys, own_keys = keys_of(cls, data), keys_of(cls, own)
        known = set(wanted_keys)
        if known != set(own_keys):
            missing = [k for k in wanted_keys if k not in given]
            extra = [k for k in own_keys if k not in known]
            words = [f"missing {listed(missing)}"] * bool(missing) + [f"not expected {listed(extra)}"] * bool(extra)
            return texts("keys " + ", ".join(words))
    if len(children) != arity:
        return texts()
    if own is not data and not (own == data or (cls is dict and tuple(own) == tuple(data))):
        return texts(f"its aux data are {short_text(own)}, and have to be {short_text(data)}")
    return None


def _path_text(path: tuple[Any, ...]) -> str:
    if len(path) > 40:
        return f"{keystr(path[:10])} ... {len(path) - 20} more ... {keystr(path[-10:])}"
    return keystr(path) or "the root"


def mismatch_text(found: list[Difference[Way]], name: str) -> str:
    lines: list[str] = []
    for difference in found[:5]:
        lines.append(f"  {_path_text(spelled(difference.path))}: expected {difference.one}, found {difference.other}")
    if len(found) > 5:
        lines.append(f"  and {len(found) - 5} more places")
    return TREE_MISMATCH.format(name=name, places="\n".join(lines))


def refuse_mismatch(treedef: _core.PyTreeDef, tree: Any, name: str) -> NoReturn:
    """Says where `tree` is not what `treedef` says."""
    raise ValueError(mismatch_text(differences(treedef, tree), name))
