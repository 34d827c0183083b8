# SPDX-License-Identifier: Apache-2.0
"""Values that are compared and never traced: numbers, text, times, enums, classes, sentinels."""

from __future__ import annotations

import cmath
import datetime
import decimal
import enum
import fractions
import ipaddress
import math
import os
import pathlib
import pickle
import re
import time
import uuid
import zoneinfo
from typing import Any

from values.record import ITSELF, NAN, NO_ARRAYS, Kind, constant


class Color(enum.Enum):
    RED = 1
    ALSO = 1.5
    BLUE = "blue"


class Level(enum.IntEnum):
    ONE = 1
    TWO = 2


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Setting:
    def __init__(self, n):
        self.n = n


class Mode(enum.Enum):
    FIRST = Setting(1)
    SECOND = Setting(2)


class Text(str):
    pass


class Whole(int):
    pass


class Real(float):
    pass


class Octets(bytes):
    pass


class Day(datetime.date):
    pass


class Ratio(fractions.Fraction):
    pass


class Exactly(decimal.Decimal):
    pass


class Offset(datetime.tzinfo):
    """A time zone with state."""

    def __init__(self, hours=0):
        self.hours = hours

    def utcoffset(self, dt):
        return datetime.timedelta(hours=self.hours)

    def dst(self, dt):
        return None

    def __repr__(self):
        return f"Offset({self.hours!r})"

    def __eq__(self, other):
        return isinstance(other, Offset) and self.hours == other.hours

    def __hash__(self):
        return hash(self.hours)


MISSING, UNSET = object(), object()


class Unknown:
    def __repr__(self):
        return "UNKNOWN"


UNKNOWN, NOTHING = Unknown(), Unknown()


def copied(name: str, *values: Any, **more: Any) -> Kind:
    """A kind of immutable value whose equal copies are other objects."""
    kind = constant(name, *values, **more)
    return Kind(**{**vars(kind), "make": lambda w, n: pickle.loads(pickle.dumps(n))})


def derived(name: str, cls: type, *content: Any) -> Kind:
    """A subclass of an immutable type with an array and a static as attributes."""

    def make(w, n):
        v = cls(*content)
        v.w, v.n = w, n
        return v

    def change(v, w, n):
        v.w, v.n = w, n

    return Kind(name, make, lambda v: (str(v), v.w, v.n), change)


def derived_static(name: str, cls: type, *content: Any) -> Kind:
    """A subclass of an immutable type with a static as attribute."""

    def make(w, n):
        v = cls(*content)
        v.n = n
        return v

    return Kind(
        name,
        make,
        lambda v: (str(v), v.n),
        lambda v, w, n: setattr(v, "n", n),
        without={"traced": NO_ARRAYS},
        note="An error if an attribute is an array.",
    )


utc = datetime.UTC
later = datetime.timezone(datetime.timedelta(hours=2), "later")

NUMBERS = [
    constant("`int`", 1, 0, -1, 10**30),
    constant("`bool`", True, False, 1, 0),
    constant("`float`", 1.0, 0.0, -0.0, NAN, math.inf, 1),
    constant("`complex`", 1j, complex(0.0, 0.0), complex(0.0, -0.0), complex(-0.0, 0.0), complex(NAN, 1.0)),
    copied("`str`", "a", "b", "", "\ud800"[:0] + "é"),
    copied("`bytes`", b"a", b"b", b""),
    constant("`None` and `...`", None, ...),
    copied("`fractions.Fraction`", fractions.Fraction(1, 3), fractions.Fraction(2, 3)),
    copied("`decimal.Decimal`", *map(decimal.Decimal, ("1.0", "1.00", "0.0", "-0.0", "NaN", "-NaN"))),
    copied("`range`", range(2), range(3), range(0), range(1, 1), range(0, 4, 2), range(0, 3, 2)),
    copied("`slice`", slice(1), slice(True), slice(1.0), slice(0, None, 2), slice(None)),
    derived("`str` subclass", Text, "text"),
    derived("`int` subclass", Whole, 3),
    derived("`float` subclass", Real, -0.0),
    derived("`bytes` subclass", Octets, b"octets"),
    derived_static("`Fraction` subclass", Ratio, 1, 3),
    derived_static("`Decimal` subclass", Exactly, "1.0"),
    derived_static("`datetime.date` subclass", Day, 2020, 1, 1),
]

TIMES = [
    copied("`datetime.date`", datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)),
    copied(
        "`datetime.datetime`",
        datetime.datetime(2020, 1, 1, 12),
        datetime.datetime(2020, 1, 1, 12, fold=1),
        datetime.datetime(2020, 1, 1, 12, tzinfo=utc),
        datetime.datetime(2020, 1, 1, 14, tzinfo=later),
        note="`fold` and the time zone are compared, so two equal instants can be two keys.",
    ),
    copied("`datetime.time`", datetime.time(1), datetime.time(1, fold=1), datetime.time(1, tzinfo=utc)),
    copied("`datetime.timedelta`", datetime.timedelta(1), datetime.timedelta(microseconds=1)),
    copied("`datetime.timezone`", utc, later, datetime.timezone(datetime.timedelta(hours=2))),
    copied("`tzinfo` subclass", Offset(1), Offset(2)),
    copied("`zoneinfo.ZoneInfo`", zoneinfo.ZoneInfo("UTC"), zoneinfo.ZoneInfo("Etc/GMT+1")),
    copied("`time.struct_time`", time.gmtime(0), time.gmtime(1), time.struct_time(range(9))),
    copied(
        "`os.stat_result`", os.stat_result(range(10)), os.stat_result((True, *range(1, 10))), os.stat_result(range(12))
    ),
    copied("`uuid.UUID`", uuid.UUID(int=1), uuid.UUID(int=2)),
    copied(
        "`pathlib` paths",
        pathlib.PurePosixPath("a/b"),
        pathlib.PureWindowsPath("a/b"),
        pathlib.Path("a"),
        pathlib.Path("b"),
    ),
    copied("`re.Pattern`", re.compile("a"), re.compile("a", re.IGNORECASE), re.compile("b")),
    copied("`ipaddress`", ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")),
]

itself = {"identity": ITSELF}
NAMES = [
    constant("`Enum` member", Color.RED, Color.ALSO, Color.BLUE, **itself),
    constant("`IntEnum` member", Level.ONE, Level.TWO, 1, True, **itself),
    constant("`Flag` member", Access.READ, Access.WRITE, Access.READ | Access.WRITE, Access(0), **itself),
    Kind(
        "`Enum` member whose value is an object",
        lambda w, n: n,
        lambda v: (v, v.name),
        statics=(Mode.FIRST, Mode.SECOND),
        identity=ITSELF,
        without={"traced": NO_ARRAYS, "in place": "a constant"},
        note="Members are compared by identity; the value inside is read while tracing.",
    ),
    constant("class", int, Color, Setting, Any, **itself),
    constant("type alias", list[int], dict[str, int], int | str),
    constant("module", math, cmath, **itself),
    constant("sentinel `object()`", MISSING, UNSET, **itself, note="`x is MISSING` stays true inside."),
    constant("sentinel of a class of its own", UNKNOWN, NOTHING, **itself),
]
