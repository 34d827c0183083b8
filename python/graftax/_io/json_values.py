# SPDX-License-Identifier: Apache-2.0
"""Values that are no arrays, as JSON: plain ones as they are, others as an object that says in "!" what it is."""

from __future__ import annotations

import base64
import collections
import datetime
import decimal
import enum
import fractions
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
from graftax._io.errors import Malformed
from graftax._io.importable_names import MISSING, Known, Names, full_name, has_name
from graftax._io.opaque_keys import OpaqueKey
from graftax._io.packed_state import lines_of
from graftax._io.tensor import LOGICAL

_MOST_DEPTH = 50  # of tuples in tuples
_MOST_INT = 1 << 63
_MOST_OF_ONE_HASH = 1000


class Opaque(Exception):
    """A value that only `like` can give: it has neither a value nor a name."""


class Encoder:
    """Writes values as JSON, and the names that they need into `names`."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._opaque: dict[int, tuple[Any, list[dict[str, Any]]]] = {}  # by id: the object, what is written of it
        self._keys: dict[int, int] = {}  # the number of each one that is a key, by id

    def value(self, value: Any) -> Any:
        """The JSON of a value. One that has neither a value nor a name is written by its type alone."""
        try:
            return self.key(value)
        except Opaque:
            return self._by_type(value)

    def entry(self, key: Any) -> Any:
        """The JSON of a key of a dict. One that only `like` can give has a number, in every place where it stands."""
        try:
            return self.key(key)
        except Opaque:
            held = self._by_type(key)
            number = self._keys.setdefault(id(key), len(self._keys))
            for written in self._opaque[id(key)][1]:
                written["at"] = number
            return held

    def numbered(self, key: Any) -> OpaqueKey | None:
        """What stands for a key that only `like` can give, once it was written."""
        number = self._keys.get(id(key))
        return None if number is None else OpaqueKey(full_name(type(key)), number)

    def _by_type(self, value: Any) -> dict[str, Any]:
        named = {"name": value.__qualname__} if isinstance(value, types.FunctionType) else {}
        held: dict[str, Any] = {"!": "opaque", "of": self._names.number(type(value)), **named}
        if id(value) in self._keys:
            held["at"] = self._keys[id(value)]
        if isinstance(value, HandleLayout):
            held["holds"] = held_in(value)
        self._opaque.setdefault(id(value), (value, []))[1].append(held)
        return held

    def key(self, value: Any, depth: int = 0) -> Any:
        """The JSON of a value. Raises Opaque where there is none."""
        if depth > _MOST_DEPTH:
            raise Opaque
        cls = type(value)
        if value is None or cls is bool or cls is str or (cls is int and -_MOST_INT <= value < _MOST_INT):
            return value
        if cls is float and math.isfinite(value):
            return value
        if cls in (tuple, frozenset):
            parts = [self.key(part, depth + 1) for part in value]
            return {"!": cls.__name__, "of": sorted(parts, key=repr) if cls is frozenset else parts}
        if (write := _WRITERS.get(cls)) is not None:
            return {"!": write[0], **write[1](value, self.key)}
        return self._of_class(value, depth)

    def _of_class(self, value: Any, depth: int) -> dict[str, Any]:
        cls: type = type(value)
        if isinstance(value, enum.Enum):
            name = cast("str | None", value._name_)
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
            kinds = [kind for kind in _PATHS if isinstance(value, kind)]
            if cls in _PATHS:
                return {"!": "path", "kind": kinds[0].__name__, "text": str(value)}
            raise Opaque
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) or has_name(value):
            if isinstance(value, types.BuiltinFunctionType) and not has_name(value):
                raise Opaque
            if isinstance(value, types.FunctionType) and not has_name(value):
                raise Opaque
            return {"!": "name", "of": self._names.number(value)}
        if isinstance(value, np.generic):
            return {"!": "numpy", "dtype": value.dtype.str, "data": _base64(value.tobytes())}
        described = interop.describe(cls)
        if described is not None and described.role == "context":
            return {"!": "new", "of": self._names.number(cls)}
        for base in (int, float, complex, str, bytes):
            if isinstance(value, base) and not getattr(value, "__dict__", None):
                if cls.__reduce_ex__ is not object.__reduce_ex__ or any(vars(c).get("__slots__") for c in cls.__mro__):
                    break
                plain = cast(Any, base)(value)
                return {"!": "instance", "of": self._names.number(cls), "value": self.key(plain, depth + 1)}
        raise Opaque


def held_in(layout: HandleLayout) -> list[str]:
    """What a handle holds, in lines that say the same in every process."""

    def as_json(value: Any) -> Any:
        names = Names()
        found = Encoder(names).value(value)
        return [found, list(names.all)] if names.all else found

    return lines_of(layout, as_json)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _float(value: float) -> Any:
    return value if math.isfinite(value) else struct.pack(">d", value).hex()


_NAN = _float(math.nan)


def _moment(value: Any, key: Any) -> dict[str, Any]:
    names = ("year", "month", "day", "hour", "minute", "second", "microsecond")
    parts = [getattr(value, name) for name in names if hasattr(value, name)]
    return {"parts": parts, "zone": key(value.tzinfo), "fold": value.fold}


def _mesh(value: Any) -> dict[str, Any]:
    axes = [[str(name), size] for name, size in value.shape.items()]
    return {"axes": axes, "types": [kind.name for kind in value.axis_types]}


# The name of the form, and what the object holds; `key` writes a part.
_WRITERS: dict[type, tuple[str, Callable[[Any, Any], dict[str, Any]]]] = {
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
    """Reads what `Encoder` wrote. What is not known is MISSING, and noted in `known`.

    Args:
        names: those of the file, by number.
        known: what they may lead to.
        mesh: stands for a mesh of the same axes.
    """

    def __init__(self, names: Sequence[str], known: Known, mesh: Any) -> None:
        self._names, self.known, self._mesh = names, known, mesh

    def name(self, number: Any) -> str:
        if type(number) is not int or not 0 <= number < len(self._names):
            raise Malformed(f"there is no name {number!r}")
        return self._names[number]

    def value(self, found: Any, depth: int = 0) -> Any:
        """The value. Raises Malformed where the JSON is none that was written by an `Encoder`."""
        if type(found) is not dict:
            if type(found) is list:
                raise Malformed("a list where a value is to be")
            return found
        if depth > _MOST_DEPTH + 4:
            raise Malformed("a value in values without end")
        held = cast("dict[str, Any]", found)
        kind = held.get("!")
        read = _READERS.get(kind) if type(kind) is str else None
        if read is None:
            raise Malformed(f"a value of an unknown form {held.get('!')!r}")
        try:
            return read(self, held, depth + 1)
        except Malformed:
            raise
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, struct.error) as error:
            raise Malformed(f"a {held['!']} that is none: {error!r}") from None

    def parts(self, found: Any, depth: int) -> list[Any] | Any:
        """The parts of a value; MISSING where one of them is."""
        if type(found) is not list:
            raise Malformed("no list of parts")
        parts = [self.value(part, depth) for part in cast("list[Any]", found)]
        return MISSING if any(part is MISSING for part in parts) else parts

    def an_enum(self, held: dict[str, Any], depth: int) -> Any:
        cls = self.known.value(self.name(held["of"]))
        if cls is MISSING or not (isinstance(cls, type) and issubclass(cls, enum.Enum)):
            return MISSING
        if "name" in held:
            return cls._member_map_[held["name"]]
        value = self.value(held["value"], depth)
        known = cls._value2member_map_.get(value)
        if known is None and issubclass(cls, enum.Flag) and cls._missing_.__func__ is enum.Flag._missing_.__func__:
            known = cls(value)
        if known is None:
            raise Malformed(f"{cls.__qualname__} has no {value!r}")
        return known

    def an_instance(self, held: dict[str, Any], depth: int) -> Any:
        cls, value = self.known.value(self.name(held["of"])), self.value(held["value"], depth)
        if cls is MISSING or value is MISSING:
            return MISSING
        base = type(value)
        if base not in (int, float, complex, str, bytes) or not issubclass(cls, base):
            raise Malformed(f"{cls!r} has no value {value!r}")
        return cast(Any, base).__new__(cls, value)

    def a_new(self, held: dict[str, Any], depth: int) -> Any:
        cls = self.known.a_class(self.name(held["of"]))
        described = None if cls is MISSING else interop.describe(cls)
        if described is None or described.role != "context":
            return MISSING
        return cast(Any, described.reduce)()

    def a_mesh(self, held: dict[str, Any], depth: int) -> Any:
        names, sizes, kinds = _axes(held)
        if self._mesh is not None and tuple(map(str, self._mesh.axis_names)) == names:
            return self._mesh
        if math.prod(sizes) > jax.device_count():
            return self.known.missing(f"a mesh of {dict(zip(names, sizes, strict=True))} (mesh=)")
        return jax.make_mesh(sizes, names, axis_types=kinds, devices=jax.devices()[: math.prod(sizes)])

    def a_sharding(self, held: dict[str, Any], depth: int) -> Any:
        mesh, spec = self.value(held["mesh"], depth), self.value(held["spec"], depth)
        return MISSING if mesh is MISSING else NamedSharding(mesh, spec)

    def a_range(self, cls: Any, held: dict[str, Any], depth: int) -> Any:
        parts = self.parts(held["of"], depth)
        return MISSING if parts is MISSING else cls(*parts)


def _axes(held: dict[str, Any]) -> tuple[tuple[str, ...], tuple[int, ...], tuple[AxisType, ...] | None]:
    """Names, sizes and types; None for the types, which the first files do not tell: JAX's own choice."""
    names, sizes = zip(*held["axes"], strict=True) if held["axes"] else ((), ())
    if not all(type(name) is str for name in names) or not all(type(size) is int and size > 0 for size in sizes):
        raise Malformed("axes that are none")
    kinds = tuple(AxisType[name] for name in held["types"]) if "types" in held else None
    if kinds is not None and len(kinds) != len(names):
        raise Malformed("axes with types of others")
    return names, sizes, kinds


def _abstract_mesh(decoder: Decoder, held: dict[str, Any], depth: int) -> Any:
    names, sizes, kinds = _axes(held)
    return AbstractMesh(sizes, names, kinds)


def _bits(found: Any) -> float:
    if type(found) is not str:
        return float(found)
    # NaN as a key is found by identity: this one is what programs write.
    return math.nan if found == _NAN else struct.unpack(">d", bytes.fromhex(found))[0]


def _numbers(held: dict[str, Any], count: int) -> list[int]:
    parts = held["parts"]
    if type(parts) is not list or len(cast("list[Any]", parts)) != count or not all(type(x) is int for x in parts):
        raise Malformed("parts that are no numbers")
    return cast("list[int]", parts)


def _text(held: dict[str, Any], name: str) -> str:
    if type(held[name]) is not str:
        raise Malformed("no text")
    return held[name]


def _fraction(decoder: Decoder, held: dict[str, Any], depth: int) -> Any:
    """Of two numbers: a text may have an exponent, and be far larger than itself."""
    parts = decoder.parts(held["of"], depth)
    if len(parts) != 2 or not all(type(part) is int for part in parts):
        raise Malformed("no fraction")
    return fractions.Fraction(*parts)


def _time(cls: Any, count: int) -> Any:
    def read(decoder: Decoder, held: dict[str, Any], depth: int) -> Any:
        zone = decoder.value(held["zone"], depth)
        return cls(*_numbers(held, count), tzinfo=zone, fold=held["fold"])

    return read


def _zone(decoder: Decoder, held: dict[str, Any], depth: int) -> Any:
    offset, name = decoder.value(held["offset"], depth), held["name"]
    plain = datetime.timezone(offset)
    return plain if plain.tzname(None) == name else datetime.timezone(offset, name)


def _zone_info(decoder: Decoder, held: dict[str, Any], depth: int) -> Any:
    name = held["name"]
    if type(name) is not str:
        raise Malformed("a time zone without a name")
    try:
        return zoneinfo.ZoneInfo(name)
    except zoneinfo.ZoneInfoNotFoundError:
        return decoder.known.missing(f"the time zone {name}")


def _a_path(decoder: Decoder, held: dict[str, Any], depth: int) -> Any:
    kind, text = {cls.__name__: cls for cls in _PATHS}[held["kind"]], held["text"]
    if type(text) is not str:
        raise Malformed("no text")
    if issubclass(kind, pathlib.Path) and not isinstance(pathlib.Path(), kind):  # of another system
        kind = pathlib.PurePosixPath if issubclass(kind, pathlib.PurePosixPath) else pathlib.PureWindowsPath
    return kind(text)


def _dtype(decoder: Decoder, held: dict[str, Any], depth: int) -> Any:
    name = held["name"]
    if type(name) is not str or len(name) > 40:
        raise Malformed("no dtype")
    return LOGICAL[name] if name in LOGICAL else np.dtype(name)


def _numpy_scalar(decoder: Decoder, held: dict[str, Any], depth: int) -> Any:
    dtype, data = _dtype(decoder, {"name": held["dtype"]}, depth), base64.b64decode(held["data"], validate=True)
    if dtype.hasobject or dtype.subdtype is not None or len(data) != dtype.itemsize or not are_characters(dtype, data):
        raise Malformed("no scalar")
    return np.frombuffer(data, dtype)[0] if data else np.zeros((), dtype)[()]


def are_characters(dtype: np.dtype[Any], data: bytes) -> bool:
    """Are the bytes of a text array texts? Other data have none that are wrong."""
    if dtype.kind != "U":
        return True
    codes = np.frombuffer(data, np.dtype(np.uint32).newbyteorder(dtype.byteorder))
    return not codes.size or int(codes.max()) <= sys.maxunicode


def refuse_collisions(keys: Sequence[Any]) -> None:
    """A dict or a set takes forever where thousands of its keys have one hash, which only an attack makes.

    Raises:
        Malformed: where it is so.
    """
    if len(keys) > _MOST_OF_ONE_HASH:
        most = max(collections.Counter(map(hash, keys)).values())
        if most > _MOST_OF_ONE_HASH:
            raise Malformed(f"{most} keys with one hash")


def _collection(cls: Any) -> Any:
    def read(decoder: Decoder, held: dict[str, Any], depth: int) -> Any:
        parts = decoder.parts(held["of"], depth)
        if cls is frozenset and parts is not MISSING:
            refuse_collisions(parts)
        return MISSING if parts is MISSING else cls(parts)

    return read


def _unknown(decoder: Decoder, held: dict[str, Any], depth: int) -> Any:
    cls, name = decoder.name(held["of"]).partition(":")[2], held.get("name")
    what = f"a {cls}" if type(name) is not str else f"the {cls} {name}"
    return decoder.known.missing(f"{what}, which only like= can give")


_READERS: dict[str, Callable[[Decoder, dict[str, Any], int], Any]] = {
    "int": lambda d, v, n: int(v["hex"], 16),
    "float": lambda d, v, n: _bits(v["bits"]),
    "complex": lambda d, v, n: complex(*map(_bits, v["parts"])),
    "bytes": lambda d, v, n: base64.b64decode(v["data"], validate=True),
    "ellipsis": lambda d, v, n: ...,
    "notimplemented": lambda d, v, n: NotImplemented,
    "tuple": _collection(tuple),
    "frozenset": _collection(frozenset),
    "range": lambda d, v, n: d.a_range(range, v, n),
    "slice": lambda d, v, n: d.a_range(slice, v, n),
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
    "spec": lambda d, v, n: d.a_range(PartitionSpec, v, n),
    "mesh": Decoder.a_mesh,
    "abstract_mesh": _abstract_mesh,
    "sharding": Decoder.a_sharding,
    "one_device": lambda d, v, n: SingleDeviceSharding(jax.devices()[0]),
    "enum": Decoder.an_enum,
    "module": lambda d, v, n: d.known.module(v["name"]),
    "name": lambda d, v, n: d.known.value(d.name(v["of"])),
    "instance": Decoder.an_instance,
    "new": Decoder.a_new,
    "opaque": _unknown,
}
