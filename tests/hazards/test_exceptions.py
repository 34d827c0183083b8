# SPDX-License-Identifier: Apache-2.0
"""Exceptions as values: what the builtin ones keep beside their args counts, too."""

import zlib

import jax.numpy as jnp
import pytest

import graftax
from zoo import scalar

NAMES = ("filename", "filename2", "errno", "strerror", "characters_written", "name", "path", "msg", "obj", "start")
NAMES += ("end", "reason", "encoding", "object", "lineno", "offset", "text", "code", "value", "args", "exceptions")


def parts(error):
    """All that can be read of it, as text."""
    out = [type(error).__name__, str(error), repr(error.__cause__), repr(vars(error))]
    for name in NAMES:
        try:
            out.append(f"{name} {getattr(error, name)!r}")
        except AttributeError:
            out.append(f"no {name}")
    return "; ".join(out)


def changed(error, **fields):
    for name, value in fields.items():
        setattr(error, name, value)
    return error


FAMILIES = {
    "OSError": [
        OSError(1),
        OSError(1, 2, 3, 4, 5, 6),
        OSError(2, "x"),
        OSError(2, "x", "a"),
        OSError(2, "x", "b"),
        OSError(2, "x", "a", None, "c"),
        OSError(2, "x", "a", None, "d"),
        changed(OSError(2, "x"), errno=3),
        changed(OSError(2, "x"), __cause__=KeyError(1)),
        BlockingIOError(11, "x", 1),
        BlockingIOError(11, "x", 2),
    ],
    "ImportError": [ImportError("x"), *(ImportError("x", name=n, path=p) for n, p in ("ab", "bb", "ac"))],
    "NameError": [NameError("x"), NameError("x", name="a"), NameError("x", name="b")],
    "AttributeError": [AttributeError("x", name=n, obj=o) for n, o in (("a", 1), ("b", 1), ("b", 2))],
    "UnicodeError": [changed(UnicodeDecodeError("ascii", b"abc", 0, 1, "r"), start=i) for i in range(3)]
    + [changed(UnicodeEncodeError("ascii", "abc", 0, 1, "r"), end=i + 2) for i in range(2)]
    + [changed(UnicodeTranslateError("abc", 0, 1, "r"), reason=r) for r in "ab"],
    "SystemExit": [SystemExit(1), SystemExit(2), changed(SystemExit(1), code=2), changed(SystemExit(1), code=[2])],
    "StopIteration": [StopIteration(1), changed(StopIteration(1), value=2)],
    "SyntaxError": [SyntaxError("x", ("f", line, 2, text)) for line, text in ((1, "t"), (2, "t"), (2, "u"))]
    + [changed(SyntaxError("x", ("f", 1, 2, "t")), lineno=5), changed(SyntaxError("x"), msg="y")],
    "ExceptionGroup": [
        ExceptionGroup("a", [ValueError(1)]),
        ExceptionGroup("a", [ValueError(2)]),
        ExceptionGroup("a", [ValueError(1), ValueError(1)]),
        ExceptionGroup("b", [ValueError(1)]),
    ],
}


@pytest.mark.parametrize("errors", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.filterwarnings("ignore::graftax.RecompileWarning")
def test_all_that_can_be_read_of_an_exception_is_in_the_key(errors):
    def program(x, error):
        return x * (zlib.crc32(parts(error).encode()) % 10_000)

    f = graftax.jit(program)
    for error in errors + errors[::-1] + errors:
        assert float(f(scalar(), error)) == program(1, error)


def in_place(kind):
    """One exception, and again after each of its changes."""
    if kind == "group":
        inner = ValueError(1)
        group = ExceptionGroup("a", [inner])
        yield group
        inner.args = (2,)
        yield group
        inner.extra = 5
        yield group
        return
    error = SystemExit([1]) if kind == "code" else OSError(2, "x", ["a"])
    yield error
    (error.code if kind == "code" else error.filename).append(2)
    yield error
    error.args = (5,)
    yield error
    yield changed(error, code=3, filename="b")


@pytest.mark.parametrize("kind", ["code", "filename", "group"])
def test_a_change_of_an_exception_is_seen(kind):
    def program(x, error):
        return x * (zlib.crc32(parts(error).encode()) % 10_000)

    f = graftax.jit(program)
    for error in in_place(kind):
        for _ in range(2):
            assert float(f(scalar(), error)) == program(1, error)


def test_what_a_function_does_to_an_exception_comes_back():
    def program(x, error):
        error.filename, error.errno, error.characters_written, error.args = x * 2, 7, 3, (x, error.filename)
        error.__cause__ = KeyError(x)
        return OSError(2, "made", x), AttributeError("x", name="a", obj=[x])

    f = graftax.jit(program)
    for i in range(3):
        found, expected = BlockingIOError(1, "x", 5), BlockingIOError(1, "x", 5)
        made, right = f(jnp.float32(i), found), program(jnp.float32(i), expected)
        assert parts(found) == parts(expected)
        assert [parts(e) for e in made] == [parts(e) for e in right]


def test_a_property_with_the_name_of_a_field_is_not_asked():
    class Named(OSError):
        filename = property(lambda self: 1 / 0)

    f = graftax.jit(lambda x, error: x * error.args[0])
    assert [float(f(scalar(), Named(n, "x", "y"))) for n in (1, 2, 1)] == [1, 2, 1]


@pytest.mark.parametrize("errors", FAMILIES.values(), ids=FAMILIES)
def test_an_exception_is_made_anew_with_all_its_parts(errors):
    for error in errors:
        copied = graftax.copy(error)
        assert parts(copied) == parts(error)
        if not isinstance(error, ExceptionGroup | SyntaxError):
            assert copied is not error
            assert parts(graftax.from_dict(graftax.to_dict(error))) == parts(error)
