# SPDX-License-Identifier: Apache-2.0
"""Records that describe a type to the core, which reads them by the names of their fields."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Description:
    """How the core is to treat one type.

    Roles: array, ref, numpy, shape, identity, equal, reduce, context, refused, registered, node, value, dynamic.
    A context value says where the program is running: it is no part of the key, and a new one is made wherever what
    holds it is rebuilt.
    """

    role: str
    frozen: bool = True  # role reduce: the same object is the same value
    handed: bool = False  # passed as itself if it holds no array
    static_fields: Container[str] | None = None
    dynamic_fields: Container[str] | None = None  # Python numbers in these fields are traced
    context_fields: dict[str, Callable[[], Any]] | None = None  # fields with a context value, and what makes it
    reduce: Callable[..., Any] | None = None  # role reduce: the plain value to compare; role context: makes a new one
    reason: str = ""  # role refused: why, and what to do instead
    opaque: bool = False  # role refused: because C code keeps the state of its instances
    sentinel: bool = False  # an instance without fields is compared by identity
    own_equality: bool = False  # the class defines `__eq__` and `__hash__`, which decide where it is declared static
    order: tuple[str, ...] | None = None  # of fields; registered classes and named tuples: names of the items
    absent: Any = None  # a field with this value counts as missing
    unique: bool = False  # role value: never copied, an instance stands for itself wherever it is rebuilt
    expires: bool = False  # can only be used up, which a by-value call may ignore
    by_name: bool = False  # role node: its attributes are walked sorted by name, whatever their order
    arrays_only: bool = False  # role node: attributes that are no arrays are part of the node for JAX, no leaves


@dataclass(frozen=True, slots=True)
class TreeDescription:
    """How trees see one type.

    Roles: leaf; node (a builtin container, a named tuple, or through the functions that JAX has); fields (children and
    the rest read by name).
    """

    role: str
    flatten: Callable[[Any], Any] | None = None
    unflatten: Any = None  # a named tuple: True where its class makes instances as `collections.namedtuple` does
    children: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    # In which to assign, as numbers of children and then others. Empty: unflatten makes instances.
    order: tuple[int, ...] = ()
    absent: Any = None  # stands for a field that is not there
    size: int = -1  # attributes of an instance; one with more or fewer goes through flatten
    with_keys: Callable[[Any], Any] | None = None  # names the children; None where JAX has to be asked
    # Node: says what flatten and unflatten do with an instance that has attributes of these names.
    schema: Callable[[tuple[str, ...]], Any] | None = None
