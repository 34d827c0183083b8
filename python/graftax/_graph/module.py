# SPDX-License-Identifier: Apache-2.0
"""`Module`: a small mutable base class whose instances are pytree nodes of JAX as well."""

from __future__ import annotations

import contextvars
import dataclasses
from typing import Any, dataclass_transform

import jax
import numpy as np

from graftax._base.class_lookup import in_mro
from graftax._graph.types.register import field, fields_of_class, register_by_fields

DATACLASS_ALREADY = (
    "{cls} is a dataclass already, as every subclass of graftax.Module: leave dataclass(slots=True) off, "
    "which would create the class again without the declarations of its fields. A class may write its own"
    " __slots__ and __init__."
)


@dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field, field))
class Module:
    """A base class for models: plain Python objects that are pytree nodes of JAX.

    A subclass is a dataclass: annotated attributes are fields, and there is an `__init__` that takes them, unless the
    class writes its own. Attributes may be added and changed at any time. Instances are compared by identity.
    `graftax.field(static=True)` keeps a field out of the leaves of `jax.tree`. Layers may be shared, and refer back to
    what contains them: in graftax they stay one object. `jax.tree` and `jax.jit` see a tree: a shared layer twice, and
    a `RecursionError` for a cycle, unless the field that closes it is static.

    Keywords of the class statement: `kw_only` as for `dataclasses.dataclass`, `static` and `dynamic` as for
    `graftax.register`. Subclasses inherit them.

    Example:
        >>> class Linear(graftax.Module):
        ...     weight: jax.Array
        ...     bias: jax.Array
        ...     name: str = graftax.field(static=True, default="linear")
        ...
        ...     def __call__(self, x):
        ...         return x @ self.weight + self.bias
        >>> Linear(jnp.ones((3, 2)), jnp.zeros(2))
        Linear(weight=f32[3,2], bias=f32[2], name='linear')
    """

    def __init_subclass__(
        cls, *, kw_only: bool = False, static: Any = None, dynamic: Any = None, **kwargs: object
    ) -> None:
        super().__init_subclass__(**kwargs)
        if _DATACLASS_MARK in vars(cls):
            raise TypeError(DATACLASS_ALREADY.format(cls=cls.__qualname__))
        # An `__init__` that the user wrote, in this class or in a base class, is not replaced.
        written = "__init__" in vars(cls) or not _has_generated_init(cls)
        dataclasses.dataclass(init=not written, repr=False, eq=False, kw_only=kw_only)(cls)
        if not written:
            cls.__init__.__graftax_generated__ = True  # type: ignore[attr-defined]
        # `type.__setattr__`, because a metaclass may refuse to set attributes.
        type.__setattr__(cls, _DATACLASS_MARK, True)
        register_by_fields(cls, static, dynamic, numbers=False)

    def __repr__(self) -> str:
        ids = _printing.get()
        if id(self) in ids:  # a cycle through another object's repr, such as that of a named tuple
            return f"<{type(self).__qualname__} that contains this>"
        token = _printing.set(ids | {id(self)})
        try:
            return _value_text(self, {}, "", 0)
        finally:
            _printing.reset(token)


# An attribute of each class that became a dataclass here. The copy that `dataclass(slots=True)` makes has it too.
_DATACLASS_MARK = "__graftax_dataclass__"

# The ids of the modules whose repr is being computed.
_printing: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar("graftax_printing", default=frozenset())


def _has_generated_init(cls: type) -> bool:
    """Is the `__init__` that a class inherits a generated one?"""
    owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
    is_protocol = in_mro(owner, "_is_protocol")  # typing adds an `__init__`
    return owner is object or is_protocol or getattr(owner.__init__, "__graftax_generated__", False)


_WIDTH = 100
_MAX_ITEMS = 20  # shown of a container
_MAX_INDENT = 64  # two for each level: the text is made by recursion, and a graph may be deeper than Python's stack


def _value_text(value: Any, paths: dict[int, str], path: str, indent: int) -> str:
    if type(value).__repr__ is Module.__repr__:
        parts = [(f"{name}=", child, f"{path}.{name}") for name, child in _attributes(value).items()]
        return _node_text(value, type(value).__qualname__ + "(", ")", parts, paths, path, indent)
    if type(value) in (list, tuple):
        parts = [("", child, f"{path}[{i}]") for i, child in enumerate(value)]
        close = ",)" if type(value) is tuple and len(value) == 1 else "])"[type(value) is tuple]
        return _node_text(value, "[("[type(value) is tuple], close, parts, paths, path, indent)
    if type(value) is dict:
        parts = [(f"{key!r}: ", child, f"{path}[{key!r}]") for key, child in value.items()]
        return _node_text(value, "{", "}", parts, paths, path, indent)
    return array_text(value) or repr(value)


def _attributes(module: Module) -> dict[str, Any]:
    """The fields in the order of their declaration, then all other attributes."""
    values = fields_of_class[type(module)].values(module)
    declared = [f.name for f in dataclasses.fields(module) if f.name in values]  # type: ignore[arg-type]
    return {name: values[name] for name in (*declared, *(name for name in values if name not in declared))}


def _node_text(
    value: object,
    begin: str,
    end: str,
    parts: list[tuple[str, Any, str]],
    paths: dict[int, str],
    path: str,
    indent: int,
) -> str:
    # Tuples are printed again: their identity means nothing.
    if id(value) in paths and not isinstance(value, tuple):
        return f"<{type(value).__qualname__} at {paths[id(value)] or 'the root'}>"
    if indent > _MAX_INDENT:
        return begin + "..." + end
    paths[id(value)] = path
    texts = [name + _value_text(child, paths, child_path, indent + 2) for name, child, child_path in parts[:_MAX_ITEMS]]
    if len(parts) > _MAX_ITEMS:
        texts.append(f"... {len(parts) - _MAX_ITEMS} more")
    # On one line if it fits, otherwise one line for each part.
    line = begin + ", ".join(texts) + end
    if indent + len(line) <= _WIDTH and "\n" not in line:
        return line
    margin = "\n" + " " * (indent + 2)
    return begin + margin + ("," + margin).join(texts) + "\n" + " " * indent + end.removeprefix(",")


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def array_text(value: object) -> str | None:
    """The type of an array: `f32[3,4]`. None for any other value."""
    if not isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return None
    name = str(value.dtype)
    letters = name.rstrip("0123456789")
    short = _SHORT.get(letters, letters) + name[len(letters) :] if letters in _SHORT else name
    class_suffix = "" if isinstance(value, jax.Array) else f" {type(value).__name__}"
    return f"{short}[{','.join(map(str, value.shape))}]{class_suffix}"
