# SPDX-License-Identifier: Apache-2.0
"""Values other than arrays as JSON: plain values as they are, others as an object whose "!" names its form."""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import enum
import fractions
import functools
import json
import math
import pathlib
import struct
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from graftax import interop
from graftax._base.handles import HandleLayout
from graftax._base.key_path import keystr
from graftax._graph.structure import Op, Structure, place_name
from graftax._io.errors import Malformed
from graftax._io.importable_names import MISSING, NameResolver, NameTable, full_name, has_name
from graftax._io.opaque_keys import OpaqueKey
from graftax._io.tensor import LOGICAL

_MAX_DEPTH = 50  # of nested tuples
_MAX_INT = 1 << 63
_MAX_KEYS_OF_A_HASH = 1000  # of a dict or a set

Form = dict[str, Any]  # the JSON object of a value, whose type is under "!"


class Opaque(Exception):
    """The value cannot be written: it has neither a plain value nor a name. Only `like` can provide it."""


class Encoder:
    """Writes values as JSON, and adds the names that they need to `names`."""

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._opaque: dict[int, tuple[Any, list[Form]]] = {}  # by id: (object, forms that were written of it)
        self._keys: dict[int, int] = {}  # by id: the number of an opaque object that is a dict key

    def value(self, value: object) -> Any:
        """The JSON of a value. An opaque value is written by its type alone."""
        try:
            return self.key(value)
        except Opaque:
            return self._opaque_form(value)

    def entry(self, key: object) -> Any:
        """The JSON of a dict key. An opaque key has a number, which is added to all forms of the same object.

        A reader then knows that a value and a key are one object, and takes the key from the value's path in `like`.
        """
        try:
            return self.key(key)
        except Opaque:
            form = self._opaque_form(key)
            number = self._keys.setdefault(id(key), len(self._keys))
            # The object may have been written as a value before: then it gets the number as well.
            for earlier_form in self._opaque[id(key)][1]:
                earlier_form["at"] = number
            return form

    def opaque_key(self, key: object) -> OpaqueKey | None:
        """The `OpaqueKey` of a dict key that was written as one; None for any other key."""
        number = self._keys.get(id(key))
        return None if number is None else OpaqueKey(full_name(type(key)), number)

    def _opaque_form(self, value: object) -> Form:
        named = {"name": value.__qualname__} if isinstance(value, types.FunctionType) else {}
        form: Form = {"!": "opaque", "of": self._names.number(type(value)), **named}
        if id(value) in self._keys:
            form["at"] = self._keys[id(value)]
        if isinstance(value, HandleLayout):
            form["holds"] = packed_state_lines(value)
        self._opaque.setdefault(id(value), (value, []))[1].append(form)
        return form

    def key(self, value: Any, depth: int = 0) -> Any:
        """The JSON of a value.

        Raises:
            Opaque: where the value cannot be written.
        """
        if depth > _MAX_DEPTH:
            raise Opaque
        cls = type(value)
        # Values that JSON holds exactly. Other parsers do not read larger integers or `nan`.
        if value is None or cls is bool or cls is str or (cls is int and -_MAX_INT <= value < _MAX_INT):
            return value
        if cls is float and math.isfinite(value):
            return value
        # A set has no order: its parts are sorted, so that equal sets have equal JSON.
        if cls in (tuple, frozenset):
            parts = [self.key(part, depth + 1) for part in value]
            return {"!": cls.__name__, "of": sorted(parts, key=repr) if cls is frozenset else parts}
        if (write := _WRITERS.get(cls)) is not None:
            return {"!": write[0], **write[1](value, functools.partial(self.key, depth=depth + 1))}
        return self._key_by_class(value, depth)

    def _key_by_class(self, value: object, depth: int) -> Form:
        """The JSON of a value that is recognized by a base class, or has a name."""
        cls: type = type(value)
        if isinstance(value, enum.Enum):
            name = cast("str | None", value._name_)
            # A combination of flags has no name, or is not a member.
            is_member = name is not None and cls._member_map_.get(name) is value
            named = {"name": name} if is_member else {"value": self.key(value._value_, depth + 1)}
            return {"!": "enum", "of": self._names.number(cls), **named}
        if isinstance(value, types.ModuleType):
            return {"!": "module", "name": value.__name__}
        if isinstance(value, np.dtype):
            dtype = cast("np.dtype[Any]", value)
            if dtype.hasobject or dtype.fields is not None:
                raise Opaque
            return {"!": "dtype", "name": dtype.name if dtype.name in LOGICAL and dtype.isnative else dtype.str}
        if isinstance(value, pathlib.PurePath):
            if cls not in _PATHS:  # a subclass may have more than its text
                raise Opaque
            return {"!": "path", "kind": cls.__name__, "text": str(value)}
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) or has_name(value):
            # Functions without a name, such as lambdas, have only code, which a file does not hold. A class is always
            # written by its name: `like` or `classes=` may have it, although no module does.
            if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)) and not has_name(value):
                raise Opaque
            return {"!": "name", "of": self._names.number(value)}
        if isinstance(value, np.generic):
            return {"!": "numpy", "dtype": value.dtype.str, "data": _base64(value.tobytes())}
        description = interop.describe(cls)
        if description is not None and description.role == "context":
            return {"!": "new", "of": self._names.number(cls)}
        # A subclass with attributes or a pickle of its own has more than its plain value.
        for base in (int, float, complex, str, bytes):
            if isinstance(value, base) and not getattr(value, "__dict__", None):
                if cls.__reduce_ex__ is not object.__reduce_ex__ or any(vars(c).get("__slots__") for c in cls.__mro__):
                    break
                plain = cast(Any, base)(value)
                return {"!": "instance", "of": self._names.number(cls), "value": self.key(plain, depth + 1)}
        raise Opaque


def packed_state_lines(layout: HandleLayout) -> list[str]:
    """The contents of a handle of packed state, as lines that are the same in every process.

    There is one for each array, in the order of the buffers, and for each other part: the structure is not saved.
    """
    structure = Structure(layout.graphdef)
    lines = [f"{keystr(path)}: {array_text}" for path, array_text in layout.shapes.items()]
    for row in structure.rows:
        parts = [full_name(row.type)] if row.type is not None else []
        if row.op in (Op.static, Op.node) and row.value is not None:
            names = NameTable()  # of its own, so that a line does not depend on the lines before it
            data = Encoder(names).value(row.value)
            parts.append(json.dumps([data, list(names.numbers)] if names.numbers else data, sort_keys=True))
        elif row.op is not Op.node:
            parts.append(row.op.name if row.op is not Op.leaf else f"array {row.leaf}")
        if row.op is not Op.leaf and structure.target(row) is not row:
            parts.append(f"that at {place_name(structure.root_path(structure.target(row)), ('obj',))}")
        lines.append(f"{place_name(structure.root_path(row), ('obj',))}: {' '.join(parts)}")
    return lines


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _float(value: float) -> float | str:
    # JSON has no NaN and no infinity. A NaN may carry bits of its own, which its repr does not show.
    return value if math.isfinite(value) else struct.pack(">d", value).hex()


_NAN = _float(math.nan)  # the bits of the usual NaN; others keep theirs


def _moment(value: Any, key: Any) -> Form:
    names = ("year", "month", "day", "hour", "minute", "second", "microsecond")
    parts = [getattr(value, name) for name in names if hasattr(value, name)]
    return {"parts": parts, "zone": key(value.tzinfo), "fold": value.fold}


def _mesh(value: Any) -> Form:
    axes = [[str(name), size] for name, size in value.shape.items()]
    return {"axes": axes, "types": [axis_type.name for axis_type in value.axis_types]}


# By type: the name of the form, and a function that gives its fields; `key` writes a part of the value.
_WRITERS: dict[type, tuple[str, Callable[[Any, Any], Form]]] = {
    int: ("int", lambda v, key: {"hex": hex(v)}),
    float: ("float", lambda v, key: {"bits": _float(v)}),
    complex: ("complex", lambda v, key: {"parts": [_float(v.real), _float(v.imag)]}),
    bytes: ("bytes", lambda v, key: {"data": _base64(v)}),
    type(...): ("ellipsis", lambda v, key: {}),
    type(NotImplemented): ("notimplemented", lambda v, key: {}),
    range: ("range", lambda v, key: {"of": [key(v.start), key(v.stop), key(v.step)]}),
    slice: ("slice", lambda v, key: {"of": [key(v.start), key(v.stop), key(v.step)]}),
    datetime.date: ("date", lambda v, key: {"parts": [v.year, v.month, v.day]}),
    datetime.time: ("time", _moment),
    datetime.datetime: ("datetime", _moment),
    datetime.timedelta: ("timedelta", lambda v, key: {"parts": [v.days, v.seconds, v.microseconds]}),
    datetime.timezone: ("timezone", lambda v, key: {"offset": key(v.utcoffset(None)), "name": v.tzname(None)}),
    zoneinfo.ZoneInfo: ("zoneinfo", lambda v, key: {"name": key(v.key)}),
    decimal.Decimal: ("decimal", lambda v, key: {"text": str(v)}),
    fractions.Fraction: ("fraction", lambda v, key: {"of": [key(v.numerator), key(v.denominator)]}),
    uuid.UUID: ("uuid", lambda v, key: {"hex": v.hex}),
    PartitionSpec: ("spec", lambda v, key: {"of": [key(part) for part in v]}),
    Mesh: ("mesh", lambda v, key: _mesh(v)),
    AbstractMesh: ("abstract_mesh", lambda v, key: _mesh(v)),
    NamedSharding: ("sharding", lambda v, key: {"mesh": key(v.mesh), "spec": key(v.spec)}),
    SingleDeviceSharding: ("one_device", lambda v, key: {}),
}
_PATHS = (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)


class Decoder:
    """Reads the JSON that `Encoder` wrote. An unknown value is MISSING, which the resolver notes.

    Args:
        names: the names of the file, by number.
        resolver: resolves names to objects.
        mesh: replaces a saved mesh with the same axis names.
    """

    def __init__(self, names: Sequence[str], resolver: NameResolver, mesh: Mesh | None) -> None:
        self._names, self.resolver, self._mesh = names, resolver, mesh

    def name(self, number: object) -> str:
        if type(number) is not int or not 0 <= number < len(self._names):
            raise Malformed(f"there is no name {number!r}")
        return self._names[number]

    def value(self, data: object, depth: int = 0) -> Any:
        """Reads a value.

        Raises:
            Malformed: for JSON that no `Encoder` writes.
        """
        if type(data) is not dict:
            if type(data) is list:
                raise Malformed("a list in place of a value")
            return data
        # Earlier versions counted the parts of a slice or a spec from 0 again: their files may nest a little deeper.
        if depth > _MAX_DEPTH + 4:
            raise Malformed("values nested too deeply")
        form = cast(Form, data)
        form_name = form.get("!")
        read = _READERS.get(form_name) if type(form_name) is str else None
        if read is None:
            raise Malformed(f"a value of an unknown kind {form.get('!')!r}")
        try:
            return read(self, form, depth + 1)
        except Malformed:
            raise
        # A damaged value may fail anywhere in its constructor, which is one of the standard library, NumPy or JAX.
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, struct.error) as error:
            raise Malformed(f"a value of the kind {form['!']!r} cannot be read: {error!r}") from None

    def parts(self, data: object, depth: int) -> list[Any] | Any:
        """Reads the parts of a value; MISSING if one of them is."""
        if type(data) is not list:
            raise Malformed("parts that are not a list")
        parts = [self.value(part, depth) for part in cast("list[Any]", data)]
        return MISSING if any(part is MISSING for part in parts) else parts

    def read_enum(self, form: Form, depth: int) -> Any:
        cls = self.resolver.resolve(self.name(form["of"]))
        if cls is MISSING or not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
            return MISSING
        if "name" in form:
            return cls._member_map_[form["name"]]
        value = self.value(form["value"], depth)
        member = cls._value2member_map_.get(value)
        # Combinations of flags are created on demand, but not by code of the class.
        if member is None and issubclass(cls, enum.Flag) and cls._missing_.__func__ is enum.Flag._missing_.__func__:
            member = cls(value)
        if member is None:
            raise Malformed(f"{cls.__qualname__} has no {value!r}")
        return member

    def read_instance(self, form: Form, depth: int) -> Any:
        cls, value = self.resolver.resolve(self.name(form["of"])), self.value(form["value"], depth)
        if cls is MISSING or value is MISSING:
            return MISSING
        # `base.__new__` runs no code of the class.
        base = type(value)
        if base not in (int, float, complex, str, bytes) or not issubclass(cls, base):
            raise Malformed(f"{cls!r} has no value {value!r}")
        return cast(Any, base).__new__(cls, value)

    def read_new(self, form: Form, depth: int) -> Any:
        cls = self.resolver.resolve_class(self.name(form["of"]))
        description = None if cls is MISSING else interop.describe(cls)
        if description is None or description.role != "context":
            return MISSING
        return cast(Any, description.reduce)()

    def read_mesh(self, form: Form, depth: int) -> Any:
        names, sizes, axis_types = _axes(form)
        if self._mesh is not None and tuple(map(str, self._mesh.axis_names)) == names:
            return self._mesh
        # The file may come from a machine with more devices.
        if math.prod(sizes) > jax.device_count():
            return self.resolver.note_missing(f"a mesh of {dict(zip(names, sizes, strict=True))} (mesh=)")
        return jax.make_mesh(sizes, names, axis_types=axis_types, devices=jax.devices()[: math.prod(sizes)])

    def read_sharding(self, form: Form, depth: int) -> Any:
        mesh, spec = self.value(form["mesh"], depth), self.value(form["spec"], depth)
        return MISSING if mesh is MISSING else NamedSharding(mesh, spec)


def _axes(form: Form) -> tuple[tuple[str, ...], tuple[int, ...], tuple[AxisType, ...] | None]:
    """Names, sizes and types of mesh axes. The types are None, JAX's default, in files that do not have them."""
    names, sizes = zip(*form["axes"], strict=True) if form["axes"] else ((), ())
    if not all(type(name) is str for name in names) or not all(type(size) is int and size > 0 for size in sizes):
        raise Malformed("invalid mesh axes")
    axis_types = tuple(AxisType[name] for name in form["types"]) if "types" in form else None
    if axis_types is not None and len(axis_types) != len(names):
        raise Malformed("another number of axis types than of axes")
    return names, sizes, axis_types


def _abstract_mesh(decoder: Decoder, form: Form, depth: int) -> AbstractMesh:
    names, sizes, axis_types = _axes(form)
    return AbstractMesh(sizes, names, axis_types)


def _bits(data: Any) -> float:
    if type(data) is not str:
        return float(data)
    # A NaN that is a dict key is found by identity: `math.nan` is the object that programs write.
    return math.nan if data == _NAN else struct.unpack(">d", bytes.fromhex(data))[0]


def _numbers(form: Form, count: int) -> list[int]:
    parts = form["parts"]
    if type(parts) is not list or len(cast("list[Any]", parts)) != count or not all(type(x) is int for x in parts):
        raise Malformed("parts that are not numbers")
    return cast("list[int]", parts)


def _text(form: Form, name: str) -> str:
    if type(form[name]) is not str:
        raise Malformed("a value that should be a string")
    return form[name]


def _fraction(decoder: Decoder, form: Form, depth: int) -> fractions.Fraction:
    """Reads a fraction from two integers. From a text, an exponent could make a huge number of a few characters."""
    parts = decoder.parts(form["of"], depth)
    if len(parts) != 2 or not all(type(part) is int for part in parts):
        raise Malformed("a fraction without two integers")
    return fractions.Fraction(*parts)


def _time(cls: Any, count: int) -> Callable[[Decoder, Form, int], Any]:
    def read(decoder: Decoder, form: Form, depth: int) -> Any:
        zone = decoder.value(form["zone"], depth)
        return cls(*_numbers(form, count), tzinfo=zone, fold=form["fold"])

    return read


def _zone(decoder: Decoder, form: Form, depth: int) -> datetime.timezone:
    offset, name = decoder.value(form["offset"], depth), form["name"]
    # A zone without a name of its own has one that Python derives from the offset: passing it would make another repr.
    plain = datetime.timezone(offset)
    return plain if plain.tzname(None) == name else datetime.timezone(offset, name)


def _zone_info(decoder: Decoder, form: Form, depth: int) -> Any:
    name = _text(form, "name")
    try:
        return zoneinfo.ZoneInfo(name)
    except zoneinfo.ZoneInfoNotFoundError:
        return decoder.resolver.note_missing(f"the time zone {name}")


def _a_path(decoder: Decoder, form: Form, depth: int) -> pathlib.PurePath:
    path_class, text = {cls.__name__: cls for cls in _PATHS}[form["kind"]], _text(form, "text")
    # A concrete path of another system cannot be created here.
    if issubclass(path_class, pathlib.Path) and not isinstance(pathlib.Path(), path_class):
        path_class = pathlib.PurePosixPath if issubclass(path_class, pathlib.PurePosixPath) else pathlib.PureWindowsPath
    return path_class(text)


def _dtype(decoder: Decoder, form: Form, depth: int) -> np.dtype[Any]:
    name = form["name"]
    if type(name) is not str or len(name) > 40:
        raise Malformed("a dtype without a valid name")
    return LOGICAL[name] if name in LOGICAL else np.dtype(name)


def _numpy_scalar(decoder: Decoder, form: Form, depth: int) -> Any:
    dtype, data = _dtype(decoder, {"name": form["dtype"]}, depth), base64.b64decode(form["data"], validate=True)
    # The bytes come from the file: they must not become pointers.
    if dtype.hasobject or dtype.subdtype is not None or len(data) != dtype.itemsize or not are_characters(dtype, data):
        raise Malformed("a NumPy scalar whose bytes do not fit its dtype")
    return np.frombuffer(data, dtype)[0] if data else np.zeros((), dtype)[()]


def are_characters(dtype: np.dtype[Any], data: bytes) -> bool:
    """Are the bytes valid for the dtype? Only those of a text array may not be."""
    if dtype.kind != "U":
        return True
    codes = np.frombuffer(data, np.dtype(np.uint32).newbyteorder(dtype.byteorder))
    return not codes.size or int(codes.max()) <= sys.maxunicode


def refuse_collisions(keys: Sequence[object]) -> None:
    """Refuses keys of which thousands have the same hash: an attack that would make a dict or a set very slow.

    Raises:
        Malformed: for such keys.
    """
    if len(keys) > _MAX_KEYS_OF_A_HASH:
        largest = max(collections.Counter(map(hash, keys)).values())
        if largest > _MAX_KEYS_OF_A_HASH:
            raise Malformed(f"{largest} keys with one hash")


def _of_parts(make: Callable[[list[Any]], Any]) -> Callable[[Decoder, Form, int], Any]:
    def read(decoder: Decoder, form: Form, depth: int) -> Any:
        parts = decoder.parts(form["of"], depth)
        return MISSING if parts is MISSING else make(parts)

    return read


def _frozenset(parts: list[Any]) -> frozenset[Any]:
    refuse_collisions(parts)
    return frozenset(parts)


def _unknown(decoder: Decoder, form: Form, depth: int) -> Any:
    cls, name = decoder.name(form["of"]).partition(":")[2], form.get("name")
    text = f"a {cls}" if type(name) is not str else f"the {cls} {name}"
    return decoder.resolver.note_missing(f"{text}, which only like= can give")


_READERS: dict[str, Callable[[Decoder, Form, int], Any]] = {
    "int": lambda d, v, n: int(v["hex"], 16),
    "float": lambda d, v, n: _bits(v["bits"]),
    "complex": lambda d, v, n: complex(*map(_bits, v["parts"])),
    "bytes": lambda d, v, n: base64.b64decode(v["data"], validate=True),
    "ellipsis": lambda d, v, n: ...,
    "notimplemented": lambda d, v, n: NotImplemented,
    "tuple": _of_parts(tuple),
    "frozenset": _of_parts(_frozenset),
    "range": _of_parts(lambda parts: range(*parts)),
    "slice": _of_parts(lambda parts: slice(*parts)),
    "date": lambda d, v, n: datetime.date(*_numbers(v, 3)),
    "time": _time(datetime.time, 4),
    "datetime": _time(datetime.datetime, 7),
    "timedelta": lambda d, v, n: datetime.timedelta(*_numbers(v, 3)),
    "timezone": _zone,
    "zoneinfo": _zone_info,
    "decimal": lambda d, v, n: decimal.Decimal(_text(v, "text")),
    "fraction": _fraction,
    "uuid": lambda d, v, n: uuid.UUID(hex=_text(v, "hex")),
    "path": _a_path,
    "dtype": _dtype,
    "numpy": _numpy_scalar,
    "spec": _of_parts(lambda parts: PartitionSpec(*parts)),
    "mesh": Decoder.read_mesh,
    "abstract_mesh": _abstract_mesh,
    "sharding": Decoder.read_sharding,
    "one_device": lambda d, v, n: SingleDeviceSharding(jax.devices()[0]),
    "enum": Decoder.read_enum,
    "module": lambda d, v, n: d.resolver.resolve_module(v["name"]),
    "name": lambda d, v, n: d.resolver.resolve(d.name(v["of"])),
    "instance": Decoder.read_instance,
    "new": Decoder.read_new,
    "opaque": _unknown,
}
