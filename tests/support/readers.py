# SPDX-License-Identifier: Apache-2.0
"""All that reads, as functions of bytes: what `fuzz.py` and test_fuzz.py give damaged input to.

A file and a pickle are bytes. What is not is made by a script, whose bytes say which parts of a good one are changed
into what: bytes that reach more of a reader are worth keeping in both.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pathlib
import pickle
import random
import resource
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import graftax
from graftax import _core

CORPUS = pathlib.Path(__file__).with_name("corpus")
ALLOWED = (graftax.GraftaxError, ValueError, TypeError, pickle.UnpicklingError)
BROKEN = (SystemError, RuntimeError, AssertionError)  # whoever raises them
MEMORY = 8 << 20  # bytes that one input may add to what the process took at most: inputs have some hundred
ADDRESSES = 1 << 27  # bytes that may be asked for beyond what a process has: more is a MemoryError


class Box:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Slots:
    __slots__ = ("a", "b")


def model() -> Any:
    shared = [1, jnp.ones(3)]
    cyclic: dict[str, Any] = {"w": jnp.ones(2)}
    cyclic["self"] = cyclic
    slots = Slots()
    slots.a, slots.b = shared, (np.arange(3), cyclic)
    return {"a": shared, "b": (shared, Box(w=np.ones((2, 3)), n=None)), ("k", 1): {1, "x"}, "t": b"by" * 8, "s": slots}


def plain() -> Any:
    return {"a": [1.5, "x"], 3: (jnp.ones(2), {"k": None, (1, "y"): b"z"}), "f": np.float32}


def double(x: Any) -> Any:
    return {"y": x["x"] * 2}


JITTED = graftax.jit(double)
OBJECT = model()
FLAT = list(graftax.to_dict(OBJECT).items())
STATES = tuple(graftax.flatten(x)[1]._state() for x in (OBJECT, plain(), (double, len, Box(f=double)), [OBJECT] * 2))
WRONG = (None, -1, 2**31, 2**32 - 1, 2**32, 2**63, 1.5, "x", "", b"", (), [], {}, {1}, object, Box, len, float("nan"))
WRONG += (graftax.Path(), double, np.ones(2), jnp.ones(2), dict, list, tuple)
PATTERNS = (
    *(
        "obj",
        "",
        "a",
        ".b[0]",
        "b[*]",
        "b[1].w",
        "**",
        "**.w",
        "*.w",
        "[('k', 1)]",
        "['a'][0]",
        '["t"]',
        "a[-1]",
        "a[:1]",
    ),
    *("s.b[1].w", "{a,b}", "a|b", "\\*", "[0]", "a[999999999999999999999]", "(1,", "None", "\n", "é", "<b>", "a.b.c"),
)
LIKE = plain()
# In memory where a system has a folder for that: a file is written for each input.
FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


class Script:
    """Numbers that bytes say, until they end."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def __bool__(self) -> bool:
        return self.at < len(self.data)

    def below(self, n: int) -> int:
        if self.at >= len(self.data):
            return 0
        self.at += 1
        return self.data[self.at - 1] % n

    def of(self, items: Any) -> Any:
        return items[self.below(len(items))]


def replaced(part: Any, script: Script) -> Any:
    """With one part, at some depth, replaced, left out, doubled or moved."""
    act = script.below(256)
    if not isinstance(part, tuple) or not part or act >= 248:
        if isinstance(part, int) and act & 1:
            return part + (1, -1, 2, -2)[act >> 1 & 3]
        return script.of(WRONG) if act & 2 else script.below(80)
    at = script.below(len(part))
    if act < 224:
        return (*part[:at], replaced(part[at], script), *part[at + 1 :])
    other = part[script.below(len(part))]
    if act < 232:
        return (*part[:at], other, *part[at + 1 :])
    return (*part[:at], *([other] if act < 240 else []), *part[at + (act >= 240) :])


def use(graphdef: Any) -> None:
    """A structure that was read can be used, or says why not."""
    if not isinstance(graphdef, graftax.GraphDef):
        return
    for act in (repr, hash, lambda g: g == g, lambda g: g.leaf_paths(), lambda g: g.fingerprint(), pickle.dumps):
        with contextlib.suppress(*ALLOWED):
            act(graphdef)
    if graphdef.num_leaves < 1000:
        with contextlib.suppress(*ALLOWED, AttributeError, LookupError):  # classes may refuse values in their own words
            graftax.flatten(graftax.unflatten(graphdef, [0.0] * graphdef.num_leaves))


def _state(data: bytes) -> None:
    script = Script(data)
    state = script.of(STATES)
    while script:
        state = replaced(state, script)
    use(_core.GraphDef._from_state(state))


class _Unpickler(pickle.Unpickler):
    """Finds the names that the samples have: others may act when they are called."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


NAMES = {("builtins", x) for x in ("dict", "list", "tuple", "set", "len", "object", "bytes", "str", "int")}
NAMES |= {("graftax._graph.pickling", x) for x in ("graphdef_from_state", "outcome_from_state", "_device")}
NAMES |= {("numpy", "float32"), ("numpy", "dtype"), ("readers", "Box"), ("readers", "Slots"), ("readers", "double")}


def _pickle(data: bytes) -> None:
    use(_Unpickler(io.BytesIO(data)).load())


def _from_dict(data: bytes) -> None:
    script, flat = Script(data), list(FLAT)
    while script and flat:
        at = script.below(len(flat))
        (path, value), (others, another) = flat[at], script.of(flat)
        kind = script.below(8)
        if kind == 0:
            del flat[at]
        elif kind == 1:
            flat[at] = (path, script.of(WRONG))
        elif kind == 2:
            flat[at] = (path, graftax.Ref(others))
        elif kind == 3:
            flat[at] = (path, another)
        elif kind == 4:
            flat[at] = (others, value)
        elif kind == 5 and path:
            steps = list(path)
            steps[script.below(len(steps))] = script.of((*WRONG[:8], *others))
            flat[at] = (graftax.Path(steps), value)
        elif len(path) < 50:
            flat[at] = (graftax.Path((*path, *others)), value)
    built = graftax.from_dict(dict(flat))
    graftax.equal(built, built)


def _patterns(data: bytes) -> None:
    given = data.decode("utf-8", "surrogateescape")
    for read in (
        graftax.Path.parse,
        graftax.Path.parse("a[0].w").matches,
        lambda t: graftax.at(OBJECT)[t].get(),
        lambda t: graftax.partition(OBJECT, t),
        lambda t: graftax.Rules([(t, None)]),
    ):
        with contextlib.suppress(*ALLOWED):
            read(given)


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[pathlib.Path]:
    path = pathlib.Path(FOLDER, f"graftax_fuzz_{os.getpid()}")
    path.write_bytes(data)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _load(data: bytes) -> None:
    with _file(data) as path:
        for options in ({}, {"classes": "dict"}, {"like": LIKE, "strict": False}):
            with contextlib.suppress(*ALLOWED):
                graftax.load(path, **options)


def _load_compiled(data: bytes) -> None:
    _, digest, content = (*data.split(b"\n", 2), b"", b"")[:3]
    if digest != hashlib.sha256(content).hexdigest().encode():  # see _deserialize
        with _file(data) as path:
            assert JITTED.load_compiled(path) == 0


def _deserialize(data: bytes) -> None:
    digest, content = data[len(b"graftax.Exported 3\n") :][:32], data[len(b"graftax.Exported 3\n") + 32 :]
    if digest != hashlib.sha256(content).digest():  # libFuzzer makes it right: what is behind it is a pickle as any
        graftax.Exported.deserialize(data)
        raise AssertionError("damaged bytes are taken for an exported function")


def _written(save: Callable[[pathlib.Path], object]) -> bytes:
    with _file(b"") as path:
        save(path)
        return path.read_bytes()


def _compiled() -> list[bytes]:
    JITTED({"x": jnp.ones(3)})
    return [_written(JITTED.save_compiled)]


def _exported() -> list[bytes]:
    return [bytes(graftax.export(JITTED)({"x": jnp.ones(3)}).serialize())]


class Reader(NamedTuple):
    """`seeds()` are inputs to begin with. `pickled`: what pickle itself raises, or takes, is its own affair."""

    read: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    pickled: bool = False
    longest: int = 1 << 14  # bytes of an input


def _scripts() -> list[bytes]:
    return [random.Random(number).randbytes(4 + number) for number in range(40)]


READERS = {
    "state": Reader(_state, _scripts, longest=64),
    "pickle": Reader(_pickle, lambda: [pickle.dumps(graftax.flatten(x)[1]) for x in (plain(), OBJECT)], pickled=True),
    "from_dict": Reader(_from_dict, _scripts, longest=64),
    "patterns": Reader(_patterns, lambda: [pattern.encode() for pattern in PATTERNS], longest=256),
    "deserialize": Reader(_deserialize, _exported),
    "load": Reader(
        _load, lambda: [_written(lambda path: graftax.save(path, x)) for x in (plain(), graftax.to_dict(plain()))]
    ),
    "load_compiled": Reader(_load_compiled, _compiled),
}


def seeds(name: str) -> list[bytes]:
    """What a reader begins with: good input, and what was found once."""
    found = sorted((CORPUS / name).glob("*"))
    return READERS[name].seeds() + [file.read_bytes() for file in found]


def damaged(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            del out[at : at + rng.randint(1, 16)]
        elif kind == 1 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2 and at < len(out):
            out[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 3:
            out[at:at] = out[at : at + rng.randint(1, 16)]
        elif kind == 4:
            out[at:at] = rng.randbytes(rng.randint(1, 4))
        elif rng.random() < 0.1:
            del out[at:]
    return bytes(out)


def attempt(name: str, data: bytes) -> None:
    """Raises where the answer to an input is not what is promised."""
    reader, before = READERS[name], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        reader.read(data)
    except ALLOWED:
        pass
    except Exception as error:
        if not reader.pickled or isinstance(error, BROKEN):
            raise
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if added > MEMORY and not reader.pickled:
        raise MemoryError(f"{added / 2**20:.0f} MB for {len(data)} bytes")


def prepare(name: str) -> list[bytes]:
    """The seeds of a reader, read once; what it takes from then on is bounded, and warnings are not heard."""
    warnings.simplefilter("ignore")
    given = seeds(name)
    for data in given:
        with contextlib.suppress(Exception):
            READERS[name].read(data)
    now = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ADDRESSES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return given
