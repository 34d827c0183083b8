# SPDX-License-Identifier: Apache-2.0
"""`register` and `field`: classes that are pytree nodes by their attributes."""

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
from graftax._base.class_lookup import in_mro
from graftax._base.errors import UnsupportedValueError
from graftax._base.trace_markers import Static
from graftax._base.type_record import Description
from graftax._graph.types.describe import by_fields, child_names, is_frozen, schemas, static_classes
from graftax._jax.tree_registry import is_tree_node

REGISTERED_ALREADY = "{cls} is registered with JAX already: by a library, by a base class's decorator, or twice."
REGISTERED_ITEMS = (
    "{cls} holds items besides its attributes, which would be lost. "
    "Give register() flatten= and unflatten= that keep them."
)
UNDECLARED = (
    "{cls}.{name} holds {value!r}, a Python number, and is not a static field: jax.tree, jax.jit and "
    "Optax would treat it as an array. Declare it: {name}: {annotation} = graftax.field(static=True). (If"
    " it is to be trained, make it an array: {name}: jax.Array, and jnp.asarray({value!r}).)"
)
UNDECLARED_DTYPE = (
    "{cls}.{name} holds {value!r}, a dtype, and is not a static field: jax.tree, jax.jit and Optax would "
    "treat it as an array. Declare it: {name}: {annotation} = graftax.field(static=True)."
)

C = TypeVar("C", bound=type)


def field(*, static: bool = False, **kwargs: Any) -> Any:
    """`dataclasses.field`, for fields of a `graftax.Module` or of a class given to `graftax.register`.

    Args:
        static: the field is part of the structure: not a leaf for `jax.tree`, and a new value compiles again.
        kwargs: as for `dataclasses.field`; `metadata` is kept.

    Returns:
        the field, for an annotated attribute of a class.

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
    """Makes a class a pytree node of JAX: it works in `jax.tree`, `jax.jit` and Optax, and in graftax as before.

    Its attributes are its children, those of a dataclass in the order of its fields. Instances are rebuilt without
    `__init__` and `__setattr__`: a constructor that checks its arguments never sees the placeholders that `jax.vmap`
    and `jax.jacobian` put in place of arrays. A decorator, with and without arguments.

    Args:
        cls: a class that is not registered with JAX yet.
        static: attributes that are part of the structure, besides fields declared with `field(static=True)`.
            Their values may be anything that graftax treats as static; they are compared with their types.
        dynamic: the attributes that are children; all others are static then.
        flatten: a function from an instance to (children, aux data), instead of the attributes. Needs `unflatten`.
        unflatten: a function from (aux data, children) to an instance.
        names: the names of the children of `flatten` for key paths, in its order. Without them, these children have
            numbers.

    Returns:
        the class.

    Raises:
        ValueError: if the class is registered already.
        TypeError: if it is not a class, or the arguments contradict each other. Also if it holds items besides
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
        options = {"static": static, "dynamic": dynamic, "flatten": flatten, "unflatten": unflatten, "names": names}
        return functools.partial(register, **options)
    static, dynamic, names = _as_list(static), _as_list(dynamic), _as_list(names)
    _check_arguments(cls, static, dynamic, flatten, unflatten, names)
    if flatten is not None:
        rebuild = cast("Callable[[Any, Any], Any]", unflatten)
        if names is None:
            tree_util.register_pytree_node(cls, flatten, rebuild)
        else:
            child_names[cls] = tuple(names)
            with_keys = functools.partial(_flatten_with_names, flatten, tuple(map(GetAttrKey, names)))
            tree_util.register_pytree_with_keys(cls, with_keys, rebuild, flatten)
        _core.forget_kind(cls)
        return cls
    return register_by_fields(cls, static, dynamic)


def register_by_fields(cls: C, static: Iterable[str] | None, dynamic: Iterable[str] | None, numbers: bool = True) -> C:
    """`register` by attributes. Static and dynamic attributes of registered base classes are inherited.

    Args:
        cls, static, dynamic: as in `register`.
        numbers: False refuses a number or a dtype in a field whose annotation asks for one, unless the class says
            whether that field is static.
    """
    static, dynamic = _as_list(static), _as_list(dynamic)
    _check_arguments(cls, static, dynamic)
    # JAX does not inherit registrations, so every subclass is registered with the options of its bases.
    bases = [fields_of_class[base] for base in cls.__mro__[1:] if base in fields_of_class]
    statics = {*(static or ()), *(name for base in bases for name in base.static)}
    # A base has named its children, so that all else is static. The new fields of this class are children nevertheless.
    if dynamic is None and any(base.dynamic is not None for base in bases):
        inherited = {name for base in cls.__mro__[1:] for name in _field_names(base)}
        dynamic = [name for name in _field_names(cls) if name not in inherited]
    if dynamic is not None:
        dynamic = ({*dynamic} | {name for base in bases for name in base.dynamic or ()}) - statics
    fields = _Fields(cls, frozenset(statics), None if dynamic is None else frozenset(dynamic), numbers)
    fields_of_class[cls] = fields
    tree_util.register_pytree_with_keys(cls, fields.with_keys, fields.unflatten, fields.flatten)
    order = _field_names(cls) or None
    # Only then can the core read the attributes from the instance's dict by itself.
    if not fields.slots and "number" not in fields.undeclared.values():
        schemas[cls] = fields.by_names
    by_fields[cls] = Description(
        "node", is_frozen(cls), static_fields=fields if fields.has_static else None, order=order
    )
    _core.forget_kind(cls)
    return cls


def _as_list(names: Iterable[str] | None) -> Iterable[str] | None:
    return names if names is None or isinstance(names, str) else list(names)


def _flatten_with_names(
    flatten: Callable[[Any], Any], keys: tuple[Any, ...], obj: object
) -> tuple[list[tuple[Any, Any]], Any]:
    """The flatten function with keys that JAX expects: the children of `flatten`, each with its name."""
    flat = flatten(obj)
    children, aux = tuple(flat[0]), flat[1]
    if len(children) != len(keys):
        names = ", ".join(repr(key.name) for key in keys)
        raise ValueError(
            f"register({type(obj).__qualname__}, flatten=..., names=...) names {len(keys)} children ({names}), and "
            f"flatten gave {len(children)}. Give a name for each child, or leave out names= where their number varies."
        )
    return list(zip(keys, children, strict=True)), aux


def _check_arguments(
    cls: object, static: Any, dynamic: Any, flatten: object = None, unflatten: object = None, children_names: Any = None
) -> None:
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
    if children_names is not None and flatten is None:
        raise TypeError("names= names the children of flatten=: without it, children go by their attributes anyway")
    if children_names is not None and (
        len(set(children_names)) < len(children_names) or not all(isinstance(name, str) for name in children_names)
    ):
        raise TypeError(f"names= needs a different string for each child, got {children_names!r}")
    if static is not None and dynamic is not None:
        raise TypeError("give static= or dynamic=, not both: whatever one does not name is the other")
    # A text is an iterable of letters, which is never meant.
    for names in (static, dynamic, children_names):
        if isinstance(names, str):
            raise TypeError(f"give a list of names: [{names!r}]")
    # Only a dataclass says which attributes its instances have.
    field_names = _field_names(cls)
    unknown = [name for name in (*(static or ()), *(dynamic or ())) if field_names and name not in field_names]
    if unknown:
        texts = [", ".join(map(repr, names)) for names in (unknown, field_names)]
        raise TypeError(f"{cls.__qualname__} has no field {texts[0]}. It has {texts[1]}.")
    # A built-in base class, such as list, keeps items outside of the attributes.
    if flatten is None and any(base.__flags__ & _HEAP_TYPE == 0 for base in cls.__mro__[:-1]):
        raise TypeError(REGISTERED_ITEMS.format(cls=cls.__qualname__))


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement made the class


def _field_names(cls: object) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()


fields_of_class: weakref.WeakKeyDictionary[type, _Fields] = weakref.WeakKeyDictionary()


class _Fields:
    """Flattens and unflattens the instances of a class. `name in fields` tells whether an attribute is static."""

    def __init__(self, cls: type, static: frozenset[str], dynamic: frozenset[str] | None, numbers: bool) -> None:
        declared: dict[str, Any] = in_mro(cls, "__dataclass_fields__") or {}
        declared_static = frozenset(name for name, field in declared.items() if field.metadata.get("static", False))
        # `Cls[int](...)` sets this attribute on an instance of a generic class.
        generic = frozenset({"__orig_class__"} if issubclass(cls, Generic) else ())  # type: ignore[arg-type]
        self._cls, self.static, self.dynamic = cls, static | declared_static | generic, dynamic
        self._declared = _field_names(cls)
        # From the most general class on: a slot of a subclass replaces one of the same name.
        self.slots = {
            name: member
            for base in reversed(cls.__mro__)
            for name, member in vars(base).items()
            if isinstance(member, types.MemberDescriptorType)
        }
        self.has_static = bool(self.static) or dynamic is not None
        open_fields = () if numbers or dynamic is not None else (f for f in declared.values() if f.name not in self)
        self.undeclared = {f.name: means for f in open_fields if (means := _annotation_meaning(f.type))}
        # By the names of all attributes of an instance.
        self._schemas: dict[tuple[str, ...], _Schema] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.static or (self.dynamic is not None and name not in self.dynamic)

    def flatten(self, obj: Any) -> tuple[list[Any], _Schema | _Aux]:
        values = self.values(obj)
        if self.undeclared:
            self._refuse_numbers(values)
        schema = self._schema(values)
        children = [values[name] for name in schema.children]
        if not schema.static_names:
            return children, schema
        return children, _Aux(schema, tuple(values[name] for name in schema.static_names))

    def _refuse_numbers(self, values: dict[str, Any]) -> None:
        for name, meaning in self.undeclared.items():
            value = values.get(name)
            is_dtype = _is_dtype(value)
            annotation = self._cls.__dataclass_fields__[name].type  # type: ignore[attr-defined]
            # `jax.tree.map` with a predicate makes a module of bools, whose fields had arrays.
            is_mask = isinstance(value, bool) and "bool" not in str(annotation)
            # `__class__` and not the type: a symbolic number says that it is an int or a float.
            if is_dtype or (meaning == "number" and value.__class__ in _NUMBERS and not is_mask):
                text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
                message = UNDECLARED_DTYPE if is_dtype else UNDECLARED
                cls = self._cls.__qualname__
                raise UnsupportedValueError(message.format(cls=cls, name=name, value=value, annotation=text))

    def with_keys(self, obj: Any) -> tuple[list[tuple[Any, Any]], _Schema | _Aux]:
        children, aux = self.flatten(obj)
        schema = aux.schema if isinstance(aux, _Aux) else aux
        return list(zip(schema.keys, children, strict=True)), aux

    def unflatten(self, aux: _Schema | _Aux, children: Iterable[object]) -> Any:
        obj = object.__new__(self._cls)
        schema, static_values = (aux.schema, aux.values) if isinstance(aux, _Aux) else (aux, ())
        values = dict(zip((*schema.children, *schema.static_names), (*children, *static_values), strict=True))
        # Written directly: neither `__init__` nor a frozen class's `__setattr__` runs.
        for name in schema.names:
            if name in self.slots:
                self.slots[name].__set__(obj, values[name])
            else:
                obj.__dict__[name] = values[name]
        return obj

    def by_names(self, attribute_names: tuple[str, ...]) -> tuple[Any, ...]:
        """How the core flattens and unflattens instances with these attributes, in this order, by itself.

        Returns:
            (aux data if no attribute is static, class of the aux data otherwise, key entries of the children, indices
            of the attributes that are children, indices of the static ones, the order in which all are assigned).
        """
        schema = self._schema(dict.fromkeys(attribute_names))
        children, statics = (
            tuple(map(attribute_names.index, group)) for group in (schema.children, schema.static_names)
        )
        order = tuple(map((*schema.children, *schema.static_names).index, schema.names))
        return schema, _Aux, schema.keys, children, statics, order

    def values(self, obj: object) -> dict[str, Any]:
        """The attributes of an instance, those in slots included."""
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
        attribute_names = tuple(values)
        schema = self._schemas.get(attribute_names)
        if schema is None:
            # Declared fields first, in their order, so that instances agree however they were assigned.
            declared = [name for name in self._declared if name in values]
            names = (*declared, *(name for name in attribute_names if name not in self._declared))
            children = tuple(name for name in names if name not in self)
            schema = _Schema(names, children, tuple(name for name in names if name in self))
            if len(self._schemas) < 64:  # instances that keep having new names do not fill the memory
                self._schemas[attribute_names] = schema
        return schema


_NUMBERS = (bool, int, float, complex)
_NUMBER_NAMES = {"bool", "int", "float", "complex", "dtype", "DType", "DTypeLike"}
_ANYTHING = {"Any", "object", "type"}


def _annotation_meaning(annotation: Any) -> str:
    """`number` if an annotation allows only Python numbers and dtypes, `anything` if it allows all, else empty."""
    if annotation is Any or annotation in (object, type):
        return "anything"
    # Annotations are often texts (PEP 563), and evaluating them may fail: names have to do.
    if isinstance(annotation, str):
        parts = annotation.strip("'\"").split("|")
        names = {part.strip().partition("[")[0].rpartition(".")[2] for part in parts} - {"None"}
        if names and names <= _ANYTHING:
            return "anything"
        return "number" if names and names <= _NUMBER_NAMES else ""
    if annotation == DTypeLike:
        return "number"
    if isinstance(annotation, types.UnionType) or get_origin(annotation) is Union:
        meanings = {_annotation_meaning(part) for part in get_args(annotation) if part is not types.NoneType}
        return meanings.pop() if len(meanings) == 1 else ""
    return "number" if (get_origin(annotation) or annotation) in (*_NUMBERS, np.dtype) else ""


def _is_dtype(value: object) -> bool:
    """Is it a dtype, or a scalar type of NumPy or JAX that is used as one?"""
    return isinstance(value, np.dtype) or (
        isinstance(value, type) and (issubclass(value, np.generic) or hasattr(value, "dtype"))
    )


class _Schema:
    """Which attributes of an instance are children and which are static; the aux data if none is static."""

    __slots__ = ("children", "keys", "names", "static_names")

    def __init__(self, names: tuple[str, ...], children: tuple[str, ...], static_names: tuple[str, ...]) -> None:
        self.names, self.children, self.static_names = names, children, static_names
        self.keys = tuple(map(GetAttrKey, children))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Schema) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.names, self.static_names

    def __reduce__(self) -> tuple[object, ...]:
        return _Schema, (self.names, self.children, self.static_names)

    def __repr__(self) -> str:
        return ", ".join(self.names)


class _Aux:
    """The aux data of an instance with static attributes. These are compared as graftax compares statics."""

    __slots__ = ("key", "schema", "values")

    def __init__(self, schema: _Schema, values: tuple[Any, ...]) -> None:
        self.schema, self.values = schema, values  # the core reads both by these names
        # The structure now: a value that changes in place later must not change the comparison.
        self.key = _core.flatten(Static(values))[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Aux) and self.schema == other.schema and self.key == other.key

    def __hash__(self) -> int:
        return hash((self.schema, self.key))

    def __reduce__(self) -> tuple[object, ...]:
        return _Aux, (self.schema, self.values)

    def __repr__(self) -> str:
        shown = [f"{name}={value!r}" for name, value in zip(self.schema.static_names, self.values, strict=True)]
        return ", ".join([*self.schema.children, *shown])


def register_static(cls: C) -> C:
    """Makes every instance of a class a static value, which is never traversed.

    Instances are compared with the class's own `__eq__` and `__hash__`, or by identity where it has none; a change in
    place is not noticed. The class is registered with JAX too (`jax.tree_util.register_static`). A decorator.

    Args:
        cls: a class that is not registered with JAX yet.

    Returns:
        the class.

    Raises:
        ValueError: if the class is registered with JAX already.
        TypeError: if it is not a class.

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
