# SPDX-License-Identifier: Apache-2.0
"""`Module`: a small mutable base class whose instances are nodes for JAX too."""

from __future__ import annotations

import contextvars
import dataclasses
from typing import Any, dataclass_transform

import jax
import numpy as np

from graftax._graph.types.register import field, given, register_by_fields

DATACLASS_ALREADY = (
    "{cls} is a dataclass already, as every subclass of graftax.Module: leave dataclass(slots=True) off, which would "
    "make it anew without what its fields are declared with. A class may write its own __slots__ and __init__."
)


@dataclass_transform(eq_default=False, field_specifiers=(dataclasses.field, field))
class Module:
    """A base class for models: plain Python objects, and nodes of JAX's trees.

    A subclass is a dataclass: annotated attributes are fields, and there is an `__init__` that takes them, unless the
    class writes its own. Attributes may be added and changed at any time. Instances are compared by identity.
    `graftax.field(static=True)` keeps a field out of the leaves of `jax.tree`. Layers may be shared, and refer back to
    what contains them: in graftax they stay one object. `jax.tree` and `jax.jit` see a tree: a shared layer twice, and
    no end in a cycle (a `RecursionError`), unless the field that closes it is static.

    Keywords of the class statement: `kw_only` as for `dataclasses.dataclass`, `static` and `dynamic` as for
    `graftax.register`; subclasses inherit what they say.

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
        cls, *, kw_only: bool = False, static: Any = None, dynamic: Any = None, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if _SEEN in vars(cls):
            raise TypeError(DATACLASS_ALREADY.format(cls=cls.__qualname__))
        written = "__init__" in vars(cls) or not _has_generated_init(cls)
        dataclasses.dataclass(init=not written, repr=False, eq=False, kw_only=kw_only)(cls)
        if not written:
            cls.__init__.__graftax_generated__ = True  # type: ignore[attr-defined]
        type.__setattr__(cls, _SEEN, True)
        register_by_fields(cls, static, dynamic, numbers=False)

    def __repr__(self) -> str:
        inside = _printing.get()
        if id(self) in inside:  # reached again by the repr of something else, such as a named tuple
            return f"<{type(self).__qualname__} that contains this>"
        token = _printing.set(inside | {id(self)})
        try:
            return _text(self, {}, "", 0)
        finally:
            _printing.reset(token)


# In the contents of each class that was made a dataclass here, and of the copy that `dataclass(slots=True)` makes.
_SEEN = "__graftax_dataclass__"

# Modules whose repr is being made.
_printing: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar("graftax_printing", default=frozenset())


def _has_generated_init(cls: type) -> bool:
    """Is the `__init__` that a class inherits a generated one?"""
    owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
    of_protocol = getattr(owner, "_is_protocol", False)  # typing puts one there
    return owner is object or of_protocol or getattr(owner.__init__, "__graftax_generated__", False)


_WIDTH = 100
_MOST = 20  # items of a container


def _text(value: Any, seen: dict[int, str], path: str, indent: int) -> str:
    if type(value).__repr__ is Module.__repr__:
        parts = [(f"{name}=", child, f"{path}.{name}") for name, child in _attributes(value).items()]
        return _node(value, type(value).__qualname__ + "(", ")", parts, seen, path, indent)
    if type(value) in (list, tuple):
        parts = [("", child, f"{path}[{i}]") for i, child in enumerate(value)]
        close = ",)" if type(value) is tuple and len(value) == 1 else "])"[type(value) is tuple]
        return _node(value, "[("[type(value) is tuple], close, parts, seen, path, indent)
    if type(value) is dict:
        parts = [(f"{key!r}: ", child, f"{path}[{key!r}]") for key, child in value.items()]
        return _node(value, "{", "}", parts, seen, path, indent)
    return array_text(value) or repr(value)


def _attributes(module: Module) -> dict[str, Any]:
    """Fields in the order in which they are declared, then other attributes."""
    own = given[type(module)].values(module)
    declared = [f.name for f in dataclasses.fields(module) if f.name in own]  # type: ignore[arg-type]
    return {name: own[name] for name in (*declared, *(name for name in own if name not in declared))}


def _node(
    value: Any,
    begin: str,
    end: str,
    parts: list[tuple[str, Any, str]],
    seen: dict[int, str],
    path: str,
    indent: int,
) -> str:
    if id(value) in seen and not isinstance(value, tuple):
        return f"<{type(value).__qualname__} at {seen[id(value)] or 'the root'}>"
    if indent > 64:
        return begin + "..." + end
    seen[id(value)] = path
    shown = [name + _text(child, seen, place, indent + 2) for name, child, place in parts[:_MOST]]
    if len(parts) > _MOST:
        shown.append(f"... {len(parts) - _MOST} more")
    line = begin + ", ".join(shown) + end
    if indent + len(line) <= _WIDTH and "\n" not in line:
        return line
    margin = "\n" + " " * (indent + 2)
    return begin + margin + ("," + margin).join(shown) + "\n" + " " * indent + end.removeprefix(",")


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def array_text(value: Any) -> str | None:
    """An array as its type: `f32[3,4]`. None for anything else."""
    if not isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return None
    name = str(value.dtype)
    letters = name.rstrip("0123456789")
    short = _SHORT.get(letters, letters) + name[len(letters) :] if letters in _SHORT else name
    kind = "" if isinstance(value, jax.Array) else f" {type(value).__name__}"
    return f"{short}[{','.join(map(str, value.shape))}]{kind}"
