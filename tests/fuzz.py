# SPDX-License-Identifier: Apache-2.0
"""Damaged input for all that reads: `python tests/fuzz.py SECONDS [TARGET...]`, or `make fuzz`.

A case is a sample of `corpus()` or of tests/corpus, changed at a few places that its number draws. What is found is
written to tests/corpus, where test_fuzz.py tries it from then on.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import random
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import graftax
from graftax import _core
from records import record

CORPUS = pathlib.Path(__file__).with_name("corpus")
ALLOWED = (graftax.GraftaxError, ValueError, TypeError, pickle.UnpicklingError)
SECONDS = 20  # of a processor, for one case
MEMORY = 1 << 30  # more than that is memory without bounds for samples of some kilobytes
BROKEN = (SystemError, RuntimeError, AssertionError, TimeoutError)  # whoever raises them


class Box:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def model() -> Any:
    shared = [1, jnp.ones(3)]
    return {"a": shared, "b": (shared, Box(w=np.ones((2, 3)), n=None)), ("k", 1): {1, "x"}, "t": b"bytes" * 4}


def plain() -> Any:
    return {"a": [1.5, "x"], 3: (jnp.ones(2), {"k": None, (1, "y"): b"z"}), "f": np.float32}


def double(x: Any) -> Any:
    return {"y": x["x"] * 2}


JITTED = graftax.jit(double)
WRONG = (None, -1, 2**31, 2**63, 1.5, "x", "", b"", (), [], {}, {1}, object, Box, len, graftax.Path(), float("nan"))


def replaced(part: Any, rng: random.Random) -> Any:
    """With one part, at some depth, replaced, left out or doubled."""
    if isinstance(part, (tuple, list)) and part and rng.random() < 0.85:
        at = rng.randrange(len(part))
        items = [replaced(x, rng) if i == at else x for i, x in enumerate(part)]
        if rng.random() < 0.05:
            items[at:at] = items[at : at + 1] if rng.random() < 0.5 else [part]
        elif rng.random() < 0.05:
            del items[at]
        return tuple(items) if isinstance(part, tuple) else items
    return rng.choice(WRONG) if rng.random() < 0.5 else rng.randrange(-2, 80)


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


WORDS = (
    "obj",
    ".",
    "[",
    "]",
    "*",
    "**",
    "'",
    '"',
    "\\",
    "0",
    "-1",
    "a",
    "w",
    "[a]",
    "(1,",
    "None",
    "\n",
    "é",
    "<",
    "9" * 30,
)


def text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12)))


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


class Target(NamedTuple):
    """`case(rng)` makes an input, `read` reads it. `pickled`: what pickle itself raises is its own affair."""

    case: Callable[[random.Random], Any]
    read: Callable[[Any], Any]
    pickled: bool = False


def _flat(rng: random.Random) -> Any:
    flat = list(graftax.to_dict(model()).items())
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(flat))
        path, value = flat[at]
        kind = rng.randrange(5)
        if kind == 0:
            del flat[at]
        elif kind == 1:
            flat[at] = (path, rng.choice([*WRONG, graftax.Ref(rng.choice(flat)[0]), rng.choice(flat)[1]]))
        elif kind == 2:
            flat[at] = (rng.choice(flat)[0], value)
        elif kind == 3 and path:
            steps = list(path)
            steps[rng.randrange(len(steps))] = rng.choice([*WRONG[:7], *rng.choice(flat)[0]])
            flat[at] = (graftax.Path(steps), value)
        else:
            flat[at] = (graftax.Path((*path, *rng.choice(flat)[0])), value)
    return flat


def _read_flat(flat: Any) -> None:
    built = graftax.from_dict(dict(flat))
    graftax.equal(built, built)


def _patterns(given: str) -> None:
    for read in (
        graftax.Path.parse,
        graftax.Path.parse("a[0].w").matches,
        lambda t: graftax.at(OBJECT)[t].get(),
        lambda t: graftax.partition(OBJECT, t),
        lambda t: graftax.Rules([(t, None)]),
    ):
        with contextlib.suppress(*ALLOWED):
            read(given)


def _samples() -> dict[str, bytes]:
    path = pathlib.Path(tempfile.mkdtemp()) / "file"
    graftax.save(path, plain())
    out = {"load": path.read_bytes()}
    x = {"x": jnp.ones(3)}
    out["deserialize"] = bytes(graftax.export(JITTED)(x).serialize())
    JITTED(x)
    JITTED.save_compiled(path)
    out["load_compiled"] = path.read_bytes()
    out["pickle"] = pickle.dumps(graftax.flatten(plain())[1])
    return out


OBJECT = model()
SAMPLES: dict[str, bytes] = {}
FILE = pathlib.Path(tempfile.gettempdir()) / f"graftax_fuzz_{os.getpid()}"


def _bytes_of(name: str) -> Callable[[random.Random], bytes]:
    def case(rng: random.Random) -> bytes:
        if not SAMPLES:
            SAMPLES.update(_samples())
        return damaged(SAMPLES[name], rng)

    return case


def _load(data: bytes) -> None:
    FILE.write_bytes(data)
    for options in ({}, {"classes": "dict"}, {"like": plain(), "strict": False}):
        with contextlib.suppress(*ALLOWED):
            graftax.load(FILE, **options)


def _load_compiled(data: bytes) -> None:
    FILE.write_bytes(data)
    JITTED.load_compiled(FILE)


def _deserialize(data: bytes) -> None:
    if not any(name in data for name in NAMES_THAT_ACT):  # it is a pickle
        graftax.Exported.deserialize(data)


def _state(rng: random.Random) -> Any:
    state = graftax.flatten(model())[1]._state()
    for _ in range(rng.randint(1, 2)):
        state = replaced(state, rng)
    return state


TARGETS = {
    "state": Target(_state, lambda state: use(_core.GraphDef._from_state(state))),
    "pickle": Target(_bytes_of("pickle"), lambda data: use(pickle.loads(data)), pickled=True),
    "from_dict": Target(_flat, _read_flat),
    "patterns": Target(text, _patterns),
    "deserialize": Target(_bytes_of("deserialize"), _deserialize),
    "load": Target(_bytes_of("load"), _load),
    "load_compiled": Target(_bytes_of("load_compiled"), _load_compiled),
}
NAMES_THAT_ACT = (b"system", b"exec", b"eval", b"breakpoint", b"exit", b"input", b"help", b"open", b"remove", b"kill")


def attempt(target: Target, case: Any) -> str | None:
    """What is wrong with the answer to a damaged input: None if nothing is."""
    if target.pickled and any(name in case for name in NAMES_THAT_ACT):
        return None
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.read(case)
    except ALLOWED:
        pass
    except Exception as error:
        known = target.pickled and not isinstance(error, BROKEN)
        return None if known else f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return None


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """A case that takes too long, or too much memory, raises."""

    def expired(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    now = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGVTALRM, expired)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGVTALRM, handler)
        FILE.unlink(missing_ok=True)


def fuzz(name: str, seconds: float, begin: int, most: int = 2**62) -> tuple[int, dict[str, int]]:
    """So many seconds or cases of one target: how many there were, and the findings with the number of their case."""
    target, found, number = TARGETS[name], dict[str, int](), begin
    target.case(random.Random(begin))  # its samples are made before memory is bounded
    end = time.monotonic() + seconds
    with bounded():
        while time.monotonic() < end and number - begin < most:
            case = target.case(random.Random(number))
            wrong = attempt(target, case)
            if wrong is not None and found.setdefault(wrong[:80], number) == number:
                print(f"{name} {number}: {wrong[:200]}", flush=True)
                if isinstance(case, (bytes, str)):
                    (CORPUS / name).mkdir(parents=True, exist_ok=True)
                    (CORPUS / name / f"{number}.bin").write_bytes(case if isinstance(case, bytes) else case.encode())
            number += 1
    return number - begin, found


def main() -> int:
    seconds, names = float(sys.argv[1]), sys.argv[2:] or list(TARGETS)
    failures, cases = [], 0
    for name in names:
        begin = int(os.environ.get("FUZZ_FROM", time.time_ns() % 2**40))
        count, found = fuzz(name, seconds, begin)
        print(f"{name}: {count} cases from {begin} on, {len(found)} findings", flush=True)
        failures += [f"{name} {number}: {wrong}" for wrong, number in found.items()]
        cases += count
    record("fuzz", "make fuzz", f"{cases:,} cases for {len(names)} readers", failures)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
