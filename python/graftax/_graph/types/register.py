# SPDX-License-Identifier: Apache-2.0
"""Classes read by their attributes: `register` and `field`."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypedDict, TypeVar, Union, Unpack, cast, get_args, get_origin, overload

import numpy as np
from jax import tree_util
from jax.tree_util import GetAttrKey
from jax.typing import DTypeLike

from graftax import _core
from graftax._base.errors import UnsupportedValueError
from graftax._base.marks import Static
from graftax._base.type_record import Description
from graftax._graph.types.describe import by_fields, child_names, is_frozen, schemas, static_classes
from graftax._jax.compat import is_tree_node

REGISTERED_ALREADY = "{cls} is registered with JAX already: by a library, by a base class's decorator, or twice."
REGISTERED_NAMES = "{cls} has no field {names}. It has {known}."
REGISTERED_ITEMS = (
    "{cls} holds items besides its attributes, which would be lost. "
    "Give register() flatten= and unflatten= that keep them."
)
REGISTERED_CHILDREN = (
    "register({cls}, flatten=..., names=...) names {wanted} children ({names}), and flatten gave {count}. "
    "Give a name for each child, or leave out names= where their number varies."
)
UNDECLARED = (
    "{cls}.{name} holds {value!r}, a Python number, and is no static field: jax.tree, jax.jit and Optax take it for an "
    "array. Declare it: {name}: {annotation} = graftax.field(static=True). (One that is trained is an array: "
    "{name}: jax.Array, and jnp.asarray({value!r}).)"
)
UNDECLARED_DTYPE = (
    "{cls}.{name} holds {value!r}, a dtype, and is no static field: jax.tree, jax.jit and Optax take it for an array. "
    "Declare it: {name}: {annotation} = graftax.field(static=True)."
)

C = TypeVar("C", bound=type)


def field(*, static: bool = False, **kwargs: Any) -> Any:
    """`dataclasses.field`, for fields of a `graftax.Module` or of a class given to `graftax.register`.

    Args:
        static: the field is part of the structure: no leaf for `jax.tree`, and a new value compiles anew.
        kwargs: as for `dataclasses.field`; `metadata` is kept.

    Example:
        >>> class Linear(graftax.Module):
        ...     weight: jax.Array
        ...     name: str = graftax.field(static=True, default="linear")
    """
    if static:
        kwargs["metadata"] = {**(kwargs.get("metadata") or {}), "static": True}
    return dataclasses.field(**kwargs)


class RegisterOptions(TypedDict, total=False):
    """The keyword arguments of `register`, for type checkers."""

    static: Iterable[str] | None
    dynamic: Iterable[str] | None
    flatten: Callable[[Any], tuple[Iterable[Any], Any]] | None
    unflatten: Callable[[Any, Any], Any] | None
    names: Iterable[str] | None


@overload
def register(cls: C, **options: Unpack[RegisterOptions]) -> C: ...
@overload
def register(cls: None = None, **options: Unpack[RegisterOptions]) -> Callable[[C], C]: ...
def register(
    cls: Any = None,
    *,
    static: Iterable[str] | None = None,
    dynamic: Iterable[str] | None = None,
    flatten: Callable[[Any], tuple[Iterable[Any], Any]] | None = None,
    unflatten: Callable[[Any, Any], Any] | None = None,
    names: Iterable[str] | None = None,
) -> Any:
    """Makes a class a node of JAX's trees: it works in `jax.tree`, `jax.jit`, Optax, and stays what it is in graftax.

    Its attributes are its children, those of a dataclass in the order of its fields. An instance is made anew without
    `__init__` and `__setattr__`: a constructor that checks its arguments is never given the placeholders that
    `jax.vmap` and `jax.jacobian` put in the place of arrays. A decorator, with and without arguments.

    Args:
        cls: a class that is not registered with JAX yet.
        static: attributes that are part of the structure, besides fields declared with `field(static=True)`.
            Their values may be any that graftax takes for static; they are compared with their types.
        dynamic: the attributes that are children; all others are static then.
        flatten: a function from an instance to (children, aux data), instead of the attributes. Needs `unflatten`.
        unflatten: a function from (aux data, children) to an instance.
        names: the attributes that the children of `flatten` are, in its order: in key paths they go by them. Without
            these, children of `flatten` go by number.

    Returns:
        the class.

    Raises:
        ValueError: where the class is registered already.
        TypeError: where it is not a class, or the arguments contradict each other. Also where it holds items besides
            attributes, as a subclass of list does, and `flatten` is missing.

    Example:
        >>> @graftax.register(static=["name"])
        ... class Layer:
        ...     def __init__(self, weight, name):
        ...         self.weight, self.name = jnp.asarray(weight), name
        >>> jax.vmap(lambda layer: layer)(Layer(jnp.arange(3.0), "first")).name
        'first'
    """
    if cls is None:
        given = {"static": static, "dynamic": dynamic, "flatten": flatten, "unflatten": unflatten, "names": names}
        return functools.partial(register, **given)
    static, dynamic, names = _listed(static), _listed(dynamic), _listed(names)
    _check(cls, static, dynamic, flatten, unflatten, names)
    if flatten is not None:
        made = cast("Callable[[Any, Any], Any]", unflatten)
        if names is None:
            tree_util.register_pytree_node(cls, flatten, made)
        else:
            child_names[cls] = tuple(names)
            with_keys = functools.partial(_with_names, flatten, tuple(map(GetAttrKey, names)))
            tree_util.register_pytree_with_keys(cls, with_keys, made, flatten)
        _core.forget_kind(cls)
        return cls
    return register_by_fields(cls, static, dynamic)


def register_by_fields(cls: C, static: Iterable[str] | None, dynamic: Iterable[str] | None, numbers: bool = True) -> C:
    """`register` without a flatten: by attributes. What `register` was told of base classes holds here, too.

    Without `numbers` a field that is annotated as a Python number or a dtype has to be declared as static or dynamic.
    """
    static, dynamic = _listed(static), _listed(dynamic)
    _check(cls, static, dynamic)
    bases = [given[base] for base in cls.__mro__[1:] if base in given]
    statics = {*(static or ()), *(name for base in bases for name in base.static)}
    if dynamic is None and any(base.dynamic is not None for base in bases):
        above = {name for base in cls.__mro__[1:] for name in _names(base)}
        dynamic = [name for name in _names(cls) if name not in above]
    if dynamic is not None:
        dynamic = ({*dynamic} | {name for base in bases for name in base.dynamic or ()}) - statics
    fields = _Fields(cls, frozenset(statics), None if dynamic is None else frozenset(dynamic), numbers)
    given[cls] = fields
    tree_util.register_pytree_with_keys(cls, fields.with_keys, fields.unflatten, fields.flatten)
    order = _names(cls) or None
    if not fields.slots and "number" not in fields.undeclared.values():
        schemas[cls] = fields.by_names
    by_fields[cls] = Description("node", is_frozen(cls), static_fields=fields if fields.some else None, order=order)
    _core.forget_kind(cls)
    return cls


def _listed(names: Iterable[str] | None) -> Iterable[str] | None:
    return names if names is None or isinstance(names, str) else list(names)


def _with_names(flatten: Callable[[Any], Any], keys: tuple[Any, ...], obj: Any) -> Any:
    """The flatten with keys that JAX wants: the children of `flatten` under their names."""
    opened = flatten(obj)
    children, aux = tuple(opened[0]), opened[1]
    if len(children) != len(keys):
        known = ", ".join(repr(key.name) for key in keys)
        raise ValueError(
            REGISTERED_CHILDREN.format(cls=type(obj).__qualname__, count=len(children), wanted=len(keys), names=known)
        )
    return list(zip(keys, children, strict=True)), aux


def _check(cls: Any, static: Any, dynamic: Any, flatten: Any = None, unflatten: Any = None, named: Any = None) -> None:
    if not isinstance(cls, type):
        raise TypeError(f"register expects a class, got {cls!r}")
    if issubclass(cls, enum.Enum):
        raise TypeError(f"the members of {cls.__qualname__} are values, compared by identity: leave it as it is")
    if is_tree_node(cls):
        raise ValueError(REGISTERED_ALREADY.format(cls=cls.__qualname__))
    if (flatten is None) != (unflatten is None):
        raise TypeError("register needs flatten= and unflatten= together")
    if flatten is not None and (static is not None or dynamic is not None):
        raise TypeError("flatten= says what is static: leave out static= and dynamic=")
    if named is not None and flatten is None:
        raise TypeError("names= names the children of flatten=: without it, children go by their attributes anyway")
    if named is not None and (len(set(named)) < len(named) or not all(isinstance(name, str) for name in named)):
        raise TypeError(f"names= takes a different text for each child, got {named!r}")
    if static is not None and dynamic is not None:
        raise TypeError("give static= or dynamic=: what is not the one is the other")
    for names in (static, dynamic, named):
        if isinstance(names, str):
            raise TypeError(f"give a list of names: [{names!r}]")
    known = _names(cls)
    unknown = [name for name in (*(static or ()), *(dynamic or ())) if known and name not in known]
    if unknown:
        texts = [", ".join(map(repr, names)) for names in (unknown, known)]
        raise TypeError(REGISTERED_NAMES.format(cls=cls.__qualname__, names=texts[0], known=texts[1]))
    if flatten is None and any(base.__flags__ & _HEAP_TYPE == 0 for base in cls.__mro__[:-1]):
        raise TypeError(REGISTERED_ITEMS.format(cls=cls.__qualname__))


_HEAP_TYPE = 1 << 9


def _names(cls: Any) -> tuple[str, ...]:
    """The fields of a dataclass."""
    return tuple(f.name for f in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()


given: weakref.WeakKeyDictionary[type, _Fields] = weakref.WeakKeyDictionary()


class _Fields:
    """How instances of one class are opened and made. `name in fields` says whether the attribute is static."""

    def __init__(self, cls: type, static: frozenset[str], dynamic: frozenset[str] | None, numbers: bool) -> None:
        declared: dict[str, Any] = getattr(cls, "__dataclass_fields__", {})
        marked = frozenset(name for name, field in declared.items() if field.metadata.get("static", False))
        # What `Cls[int](...)` leaves on an instance of a generic class.
        generic = frozenset({"__orig_class__"} if issubclass(cls, Generic) else ())  # type: ignore[arg-type]
        self._cls, self.static, self.dynamic = cls, static | marked | generic, dynamic
        self._declared = _names(cls)
        bases = [base for base in reversed(cls.__mro__)]
        found = [(n, v) for base in bases for n, v in vars(base).items() if isinstance(v, types.MemberDescriptorType)]
        self.slots = {name: member for name, member in found}
        self.some = bool(self.static) or dynamic is not None
        open_fields = () if numbers or dynamic is not None else (f for f in declared.values() if f.name not in self)
        self.undeclared = {f.name: means for f in open_fields if (means := _meant_by(f.type))}
        # Which of the names are children, by all the names that an instance has.
        self._schemas: dict[tuple[str, ...], _Schema] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.static or (self.dynamic is not None and name not in self.dynamic)

    def flatten(self, obj: Any) -> tuple[list[Any], _Schema | _Aux]:
        values = self.values(obj)
        if self.undeclared:
            self._refuse_numbers(values)
        schema = self._schema(values)
        children = [values[name] for name in schema.children]
        return children, _Aux(schema, tuple(values[name] for name in schema.others)) if schema.others else schema

    def _refuse_numbers(self, values: dict[str, Any]) -> None:
        for name, means in self.undeclared.items():
            value = values.get(name)
            a_dtype = _is_dtype(value)
            annotation = self._cls.__dataclass_fields__[name].type  # type: ignore[attr-defined]
            a_mask = isinstance(value, bool) and "bool" not in str(annotation)  # of a tree that jax.tree.map made
            if a_dtype or (means == "number" and value.__class__ in _NUMBERS and not a_mask):
                text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
                message = UNDECLARED_DTYPE if a_dtype else UNDECLARED
                cls = self._cls.__qualname__
                raise UnsupportedValueError(message.format(cls=cls, name=name, value=value, annotation=text))

    def with_keys(self, obj: Any) -> tuple[list[tuple[Any, Any]], _Schema | _Aux]:
        children, aux = self.flatten(obj)
        schema = aux.schema if isinstance(aux, _Aux) else aux
        return list(zip(schema.keys, children, strict=True)), aux

    def unflatten(self, aux: _Schema | _Aux, children: Iterable[Any]) -> Any:
        obj = object.__new__(self._cls)
        schema, others = (aux.schema, aux.values) if isinstance(aux, _Aux) else (aux, ())
        values = dict(zip((*schema.children, *schema.others), (*children, *others), strict=True))
        for name in schema.names:
            if name in self.slots:
                self.slots[name].__set__(obj, values[name])
            else:
                obj.__dict__[name] = values[name]
        return obj

    def by_names(self, given: tuple[str, ...]) -> tuple[Any, ...]:
        """What `flatten` and `unflatten` do with an instance that has these attributes, in this order.

        Returns:
            (aux data where nothing is static, class of the aux data where something is, key entries of the children;
            numbers of the names that are children, of the others, and in which order both are assigned).
        """
        schema = self._schema(dict.fromkeys(given))
        children, others = (tuple(map(given.index, names)) for names in (schema.children, schema.others))
        order = tuple(map((*schema.children, *schema.others).index, schema.names))
        return schema, _Aux, schema.keys, children, others, order

    def values(self, obj: Any) -> dict[str, Any]:
        """The attributes of an instance, in slots too."""
        values: dict[str, Any] = getattr(obj, "__dict__", {})
        if not self.slots:
            return values
        values = dict(values)
        for name, member in self.slots.items():
            if name != "__weakref__" and name != "__dict__":
                try:
                    values[name] = member.__get__(obj)
                except AttributeError:  # an empty slot
                    continue
        return values

    def _schema(self, values: dict[str, Any]) -> _Schema:
        given = tuple(values)
        schema = self._schemas.get(given)
        if schema is None:
            declared = [name for name in self._declared if name in values]
            names = (*declared, *(name for name in given if name not in self._declared))
            children = tuple(name for name in names if name not in self)
            schema = _Schema(names, children, tuple(name for name in names if name in self))
            if len(self._schemas) < 64:  # instances with ever new names are not worth remembering
                self._schemas[given] = schema
        return schema


_NUMBERS = (bool, int, float, complex)
_NUMBER_NAMES = {"bool", "int", "float", "complex", "dtype", "DType", "DTypeLike"}
_ANYTHING = {"Any", "object", "type"}


def _meant_by(annotation: Any) -> str:
    """`number` where an annotation allows Python numbers and dtypes alone, `anything` where it says nothing, or ``."""
    if annotation is Any or annotation in (object, type):
        return "anything"
    if isinstance(annotation, str):
        names = {part.strip().partition("[")[0].rpartition(".")[2] for part in annotation.strip("'\"").split("|")} - {
            "None"
        }
        if names and names <= _ANYTHING:
            return "anything"
        return "number" if names and names <= _NUMBER_NAMES else ""
    if annotation == DTypeLike:
        return "number"
    if isinstance(annotation, types.UnionType) or get_origin(annotation) is Union:
        found = {_meant_by(part) for part in get_args(annotation) if part is not types.NoneType}
        return found.pop() if len(found) == 1 else ""
    return "number" if (get_origin(annotation) or annotation) in (*_NUMBERS, np.dtype) else ""


def _is_dtype(value: Any) -> bool:
    """Also a type of NumPy's or JAX's that stands for one."""
    return isinstance(value, np.dtype) or (
        isinstance(value, type) and (issubclass(value, np.generic) or hasattr(value, "dtype"))
    )


class _Schema:
    """Which attributes of an instance are children, and which not. The aux data of one with children alone."""

    __slots__ = ("children", "keys", "names", "others")

    def __init__(self, names: tuple[str, ...], children: tuple[str, ...], others: tuple[str, ...]) -> None:
        self.names, self.children, self.others = names, children, others
        self.keys = tuple(map(GetAttrKey, children))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Schema) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.names, self.others

    def __reduce__(self) -> Any:
        return _Schema, (self.names, self.children, self.others)

    def __repr__(self) -> str:
        return ", ".join(self.names)


class _Aux:
    """The aux data of an instance with static attributes, compared by what they were then, as graftax does."""

    __slots__ = ("key", "schema", "values")

    def __init__(self, schema: _Schema, values: tuple[Any, ...]) -> None:
        self.schema, self.values = schema, values
        self.key = _core.flatten(Static(values))[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Aux) and self.schema == other.schema and self.key == other.key

    def __hash__(self) -> int:
        return hash((self.schema, self.key))

    def __reduce__(self) -> Any:
        return _Aux, (self.schema, self.values)

    def __repr__(self) -> str:
        shown = [f"{name}={value!r}" for name, value in zip(self.schema.others, self.values, strict=True)]
        return ", ".join([*self.schema.children, *shown])


def register_static(cls: C) -> C:
    """Makes every instance of a class one static value, which is never opened.

    Instances are compared with the class's own `__eq__` and `__hash__`, or by identity where it has none; a change in
    place is not seen. The class is registered with JAX too (`jax.tree_util.register_static`). A decorator.

    Args:
        cls: a class that is not registered with JAX yet.

    Returns:
        the class.

    Raises:
        ValueError: where the class is registered with JAX already.
        TypeError: where it is no class.

    Example:
        >>> @graftax.register_static
        ... class Config:
        ...     def __init__(self, width):
        ...         self.width = width
        >>> config = Config(4)
        >>> graftax.flatten({"config": config, "w": jnp.ones(2)})[0]
        [Array([1., 1.], dtype=float32)]
    """
    if not isinstance(cast("object", cls), type):
        raise TypeError(f"register_static expects a class, got {cls!r}. For one value, use graftax.Static(value).")
    tree_util.register_static(cls)
    static_classes.add(cls)
    _core.forget_kind(cls)
    return cls
