# SPDX-License-Identifier: Apache-2.0
"""What the core asks Python about trees: how JAX opens a type, treedefs of both kinds, why a tree does not match."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Generator
from typing import Any, NoReturn

from jax import tree_util

from graftax import _core, interop
from graftax._base.class_lookup import in_mro
from graftax._base.key_path import keystr
from graftax._base.type_record import TreeDescription
from graftax._graph.node_text import keys_of, list_text, node_text, value_text
from graftax._graph.structure_diff import Difference, LinkedPath, linked_entries, lockstep, short_text
from graftax._graph.types.describe import schemas
from graftax._jax.tree_registry import data_fields, is_tree_node, names_function, tree_functions, treedef_of_node

# (node data, number of children) of each node in pre-order; of leaves: (None, how many stand side by side).
Records = list[tuple[tuple[type, Any] | None, int]]

_CONTAINERS = (type(None), list, tuple, dict, OrderedDict, defaultdict)


def describe(cls: Any) -> TreeDescription:
    """Describes how `jax.tree` flattens a type."""
    if not is_tree_node(cls):
        return TreeDescription("leaf")
    if cls in _CONTAINERS:
        return TreeDescription("node")
    functions = tree_functions(cls)
    if functions is None:
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):  # JAX asks the metaclass, too
            names: Any = in_mro(cls, "_fields")
            children = tuple(map(str, names)) if isinstance(names, tuple) else ()
            return TreeDescription("node", None, _is_plain_namedtuple(cls), children)
        # The functions that it was registered with cannot be read, so JAX's public API opens it.
        return TreeDescription("node", tree_util.default_registry.flatten_one_level, functools.partial(_rebuild, cls))
    # From here on, fields are read in place of calling these functions, where both are known to be equal.
    flatten, unflatten = functions
    adapted = interop.tree_fields(cls, flatten, unflatten)
    if adapted is not None:
        return adapted
    names = data_fields(flatten)  # those of `register_dataclass`
    if names is not None:
        children, aux_fields = names
        order = _order_of_init(cls, (*children, *aux_fields))
        return TreeDescription("fields", flatten, unflatten, children, aux_fields, order)
    schema = schemas.get(cls) if _is_its_dict(cls) else None
    return TreeDescription("node", flatten, unflatten, with_keys=names_function(flatten), schema=schema)


def _is_its_dict(cls: Any) -> bool:
    """Whether `__dict__` of an instance is its real dictionary, and not a property of the class."""
    dict_attribute = next((vars(base)["__dict__"] for base in cls.__mro__ if "__dict__" in vars(base)), None)
    return isinstance(dict_attribute, types.GetSetDescriptorType) and cls.__getattribute__ is object.__getattribute__


def _rebuild(cls: type, data: object, children: tuple[object, ...]) -> object:
    leaf = tree_util.tree_structure(0)
    treedef = treedef_of_node(tree_util.default_registry, (cls, data), [leaf] * len(children))
    return treedef.unflatten(children)


def _is_plain_namedtuple(cls: Any) -> bool:
    """Whether the class creates instances exactly as `collections.namedtuple` does; then the core may do it, too."""
    constructor = cls.__new__
    # `collections.namedtuple` compiles `__new__` in a namespace with a name of its own.
    scope = constructor.__globals__ if isinstance(constructor, types.FunctionType) else {}
    is_generated = scope.get("__name__", "").startswith("namedtuple_")
    is_called_plainly = type(cls).__call__ is type.__call__ and cls.__init__ is object.__init__
    return is_generated and is_called_plainly and constructor.__code__.co_argcount == 1 + len(cls._fields)


def _order_of_init(cls: Any, names: tuple[str, ...]) -> tuple[int, ...]:
    """The order in which a dataclass's generated `__init__` assigns the fields; empty if it may do anything else.

    If it only assigns, the core rebuilds an instance without calling it.
    """
    # An `__init__` that dataclasses has written for this class itself; an inherited one knows other fields.
    init, parameters = vars(cls).get("__init__"), vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.init or not isinstance(init, types.FunctionType):
        return ()
    generated = init.__code__.co_qualname == "__create_fn__.<locals>.__init__"
    # Nothing of the user's runs when an instance is created or a field assigned.
    plain = cls.__new__ is object.__new__ and not hasattr(cls, "__post_init__") and type(cls).__call__ is type.__call__
    frozen_setattr = "__setattr__" in vars(cls) and parameters.frozen
    plain = plain and (cls.__setattr__ is object.__setattr__ or frozen_setattr)
    # Each parameter is a field, and each field a parameter.
    declared: dict[str, Any] = cls.__dataclass_fields__  # InitVar and ClassVar too
    fields = [f.name for f in dataclasses.fields(cls)]
    only_fields = all(f.init for f in dataclasses.fields(cls)) and not any(
        getattr(f, "_field_type", None) is dataclasses._FIELD_INITVAR  # type: ignore[attr-defined]  # pyright: ignore
        for f in declared.values()
    )
    if not (generated and plain and only_fields and sorted(fields) == sorted(names)):
        return ()
    return tuple(names.index(name) for name in fields)


# ---- treedefs of JAX, which copies all that is below a node whose children are asked for or given


def from_jax(treedef: object) -> _core.PyTreeDef:
    """The same structure as a treedef of `graftax.tree`.

    Raises:
        TypeError: if it is not a treedef.
    """
    if isinstance(treedef, _core.PyTreeDef):
        return treedef
    if not isinstance(treedef, tree_util.PyTreeDef):
        raise TypeError(f"expected a treedef, got {type(treedef).__qualname__}: {treedef!r}")
    records: Records = []
    stack: list[Any] = [treedef]
    while stack:
        node = stack.pop()
        data, children = node.node_data(), node.children()
        records.append((None, 1) if data is None else (data, len(children)))
        stack.extend(reversed(children))
    return _core.PyTreeDef._from_records(records)


def to_jax(treedef: object) -> Any:
    """The same structure as a treedef of `jax.tree`."""
    if isinstance(treedef, tree_util.PyTreeDef):
        return treedef
    registry, leaf = tree_util.default_registry, tree_util.tree_structure(0)
    built: list[Any] = []  # from the end, so that the children of a node are the last ones
    for data, arity in reversed(from_jax(treedef)._records()):
        if data is None:
            built += [leaf] * arity
            continue
        first_child = len(built) - arity
        children = built[first_child:][::-1]
        del built[first_child:]
        built.append(treedef_of_node(registry, data, children))
    return built[0]


def from_iterable_tree(treedef: _core.PyTreeDef, tree: object) -> Any:
    """The tree of this structure whose nodes have the elements of the iterables in `tree` as children."""
    records = treedef._records()
    leaves: list[Any] = []
    stack: list[Any] = [tree]
    for number, (data, arity) in enumerate(records):
        if data is None:
            leaves += [stack.pop() for _ in range(arity)]
            continue
        iterable = stack.pop()
        elements = list(iterable)
        if len(elements) != arity:
            expected = _core.PyTreeDef._from_records(records[number : _end_of_subtree(records, number)])
            raise ValueError(f"expected an iterable of {arity} for {expected}, got {short_text(iterable)}")
        stack.extend(reversed(elements))
    return treedef.unflatten(leaves)


def _end_of_subtree(records: Records, number: int) -> int:
    """The index of the first record after the subtree that begins at this one."""
    # A node takes one place and adds one for each child. A record of leaves takes as many as it has leaves.
    nodes_to_come = 1
    while nodes_to_come:
        data, arity = records[number]
        nodes_to_come += -arity if data is None else arity - 1
        number += 1
    return number


def deserialize_using_proto(registry: object, data: bytes) -> _core.PyTreeDef:
    return from_jax(tree_util.PyTreeDef.deserialize_using_proto(registry, data))


class Mark(enum.Enum):
    """Takes the place of the sentinel for an absent field in a pickled treedef."""

    ABSENT = "absent"


def replaced(data: object, target: object, replacement: object) -> Any:
    """Node data with `target` replaced, in tuples of any depth."""
    if type(data) is tuple:
        items: tuple[Any, ...] = data
        return tuple(replaced(item, target, replacement) for item in items)
    return replacement if data is target else data


# Pickles have this function by its name.
def treedef_from_state(state: list[Any]) -> _core.PyTreeDef:
    """Restores a pickled treedef."""
    return _core.PyTreeDef._from_state(state)


# ---- errors for trees that do not match


def differences(treedef: _core.PyTreeDef, tree: object) -> list[Difference[LinkedPath]]:
    """The key paths at which `tree` differs from `treedef`. Nothing is compared below such a path."""
    records = treedef._records()
    children = _children(records)

    def meet(
        number: int | None, value: object, path: LinkedPath
    ) -> Generator[Difference[LinkedPath], None, list[tuple[int | None, Any, Any]]]:
        node, arity = (None, 0) if number is None else records[number]
        if number is None or node is None:  # a leaf may be anything
            return []
        texts = _node_mismatch(*node, arity, value)
        if texts is not None:
            yield Difference(path, *texts)
            return []
        level = _core.tree_one_level(value, with_keys=True)
        assert level is not None
        return [(child, value, entry) for child, (entry, value) in zip(children[number], level[0], strict=True)]

    return list(lockstep(meet, 0, tree))


def _children(records: Records) -> list[list[int | None]]:
    """For each record of a node, the indices of the records of its children; None for a leaf."""
    children: list[list[int | None]] = []
    open_nodes: list[int] = []  # nodes with children that have not been seen yet
    for number, (data, arity) in enumerate(records):
        children.append([])
        # Each goes to the innermost node that still expects children. The first node has no parent.
        for child in [None] * arity if data is None else [number]:
            while open_nodes and len(children[open_nodes[-1]]) == records[open_nodes[-1]][1]:
                open_nodes.pop()
            if open_nodes:
                children[open_nodes[-1]].append(child)
        if data is not None:
            open_nodes.append(number)
    return children


def _node_mismatch(cls: type, data: Any, arity: int, value: object) -> tuple[str, str] | None:
    """(what was expected in place of a node, what was found), as texts; None if `value` matches the node."""

    def texts(detail: str = "") -> tuple[str, str]:
        return node_text(cls, data, arity), value_text(value) + (f"\n    {detail}" if detail else "")

    if type(value) is not cls:
        hint = "None is a node without children, not a leaf: is_leaf=lambda x: x is None makes it one"
        return texts(hint if cls is type(None) else "")
    level = _core.tree_one_level(value)
    assert level is not None
    children, aux_data = level
    if issubclass(cls, dict):
        keys, value_keys = keys_of(cls, data), keys_of(cls, aux_data)
        expected_keys = set(keys)
        if expected_keys != set(value_keys):
            missing = [k for k in keys if k not in value]
            extra = [k for k in value_keys if k not in expected_keys]
            parts = (("missing", missing), ("not expected", extra))
            return texts("keys " + ", ".join(f"{word} {list_text(names)}" for word, names in parts if names))
    if len(children) != arity:
        return texts()
    # The keys of a dict are a tuple where the core opens it, and a list in a treedef.
    if aux_data is not data and not (aux_data == data or (cls is dict and tuple(aux_data) == tuple(data))):
        return texts(f"its aux data are {short_text(aux_data)}, and have to be {short_text(data)}")
    return None


def _path_text(path: tuple[object, ...]) -> str:
    # A tree may be a hundred thousand levels deep, and its paths as long.
    if len(path) > 40:
        return f"{keystr(path[:10])} ... {len(path) - 20} more ... {keystr(path[-10:])}"
    return keystr(path) or "the root"


def mismatch_text(differences: list[Difference[LinkedPath]], name: str) -> str:
    lines = [f"  {_path_text(linked_entries(d.path))}: expected {d.one}, found {d.other}" for d in differences[:5]]
    if len(differences) > 5:
        lines.append(f"  and {len(differences) - 5} more places")
    return f"{name}: the trees do not have the same structure.\n" + "\n".join(lines)


def refuse_mismatch(treedef: _core.PyTreeDef, tree: object, name: str) -> NoReturn:
    """Raises ValueError with the key paths at which `tree` differs from `treedef`."""
    raise ValueError(mismatch_text(differences(treedef, tree), name))
