# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile files: a clear error, no crash, no memory beyond the file's size, and nothing that runs."""

import contextlib
import json
import random
import struct
import subprocess
import sys
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from zoo import Box, Point, Registered

CLASSES = ["zoo.*"]


def sample():
    shared = [1, jnp.ones(3)]
    return {
        "model": Box(layers=[Box(w=jnp.ones((2, 3)), b=None), Registered(jnp.ones(1), shared, name="x")], n=3),
        "shared": shared,
        "point": Point(np.zeros(4, np.int8), (1, (2.5, "x"))),
        "key": jax.random.key(0),
        "set": {1, 2},
        ("a", 1): b"bytes",
        "complex": np.ones(2, complex),
    }


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "x.safetensors"
    graftax.save(path, sample())
    return path.read_bytes()


def parts(data):
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def attempt(path, data, like=None):
    """Loads it; a LoadError is the one error that there may be. Says whether it was loaded."""
    path.write_bytes(data)
    loaded = False
    for options in ({"classes": CLASSES}, {"classes": "dict"}, {"like": like, "strict": False}):
        try:
            new = graftax.load(path, **options)
            if not loaded:
                jax.block_until_ready(graftax.flatten(new)[0])
            loaded = True
        except graftax.LoadError:
            pass
    with contextlib.suppress(graftax.LoadError):
        repr(graftax.peek(path))
    return loaded


def bytes_changed(good, rng):
    data = bytearray(good)
    kind = rng.randrange(5)
    if kind == 0:
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        position = rng.randrange(len(data))
        data[position:position] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
    elif kind == 3:
        position = rng.randrange(len(data))
        del data[position : position + rng.randrange(1, 40)]
    else:
        data[:8] = struct.pack("<Q", rng.choice([0, 1, 2, 7, 1 << 20, 1 << 40, 1 << 63, len(data), len(data) - 8]))
    return bytes(data)


BAD = [None, True, -1, 0, 1, 2**70, 1.5, "", "x", "builtins:list", [], {}, [[]], {"!": "name", "of": 0}, ["r", 0]]
BAD += [{"!": "tuple", "of": [1]}, {"!": "bytes", "data": "!"}, ["n", 0, 2], ["s", {"!": "opaque", "of": 0}], ["a", 1]]
BAD += [
    {"!": "path", "kind": "Path", "text": "a"},
    {"!": "float", "bits": "zz"},
    {"!": "int", "hex": "0x"},
    ["-"],
    ["s"],
]
BAD += [["n", 0, ["a", "a"]], ["n", 3, [[1]], 5], {"!": "mesh", "axes": [["a", 10**9]]}, {"flat": 0}, {"text": "t"}]


def slots(node, path=()):
    """Every place in a JSON value."""
    items = enumerate(node) if isinstance(node, list) else node.items() if isinstance(node, dict) else ()
    for key, value in items:
        yield node, key
        yield from slots(value, (*path, key))


def graph_changed(good, rng):
    header, data = parts(good)
    graph = json.loads(header["__metadata__"]["graftax"])
    for _ in range(rng.randrange(1, 4)):
        part = rng.choice([graph, header, *(graph.get(name) for name in ("rows", "rows", "arrays", "names"))])
        places = list(slots(part))
        if not places:
            continue
        node, key = rng.choice(places)
        kind = rng.randrange(4)
        if kind == 0 and isinstance(node, list):
            node.insert(key, json.loads(json.dumps(rng.choice(BAD))))
        elif kind == 1:
            del node[key]
        elif kind == 2:
            other, there = rng.choice(places)
            try:
                node[key] = json.loads(json.dumps(other[there]))
            except (KeyError, IndexError):
                continue
        else:
            node[key] = json.loads(json.dumps(rng.choice(BAD)))
    if isinstance(header.get("__metadata__"), dict):
        header["__metadata__"]["graftax"] = json.dumps(graph)
    return joined(header, data)


def fuzz(path, good, count, seed):
    rng = random.Random(seed)
    like, loaded = sample(), 0
    for number in range(count):
        state = rng.getstate()
        data = (bytes_changed if number % 3 == 0 else graph_changed)(good, rng)
        try:
            loaded += attempt(path, data, like)
        except BaseException as error:
            error.add_note(f"seed {seed}, file {number}: {len(data)} bytes, {hash(state)}")
            path.rename(path.with_suffix(".bad"))
            raise
    return loaded


@pytest.mark.filterwarnings("ignore")
def test_damaged_files_are_refused(tmp_path, good):
    loaded = fuzz(tmp_path / "x.safetensors", good, 60, seed=0)
    assert 0 < loaded < 60  # some damage changes a value, no more


@pytest.mark.quick(0)  # the sample above runs instead
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(1, 21))
def test_ten_thousand_damaged_files(tmp_path, good, seed):
    fuzz(tmp_path / "x.safetensors", good, 500, seed)


def test_a_good_file_is_loaded(tmp_path, good):
    assert attempt(tmp_path / "x.safetensors", good, sample())


EMPTY = {"__metadata__": {}}


@pytest.mark.quick(60)
@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "too few for the header"),
        (b"[]", b"", "not an object"),
        (b"{ ", b"", "JSON"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, b"", "nested"),
        (b"[" * 200_000, b"", "nested"),
        (b"\xff\xfe", b"", "JSON"),
        (b'{"a":NaN}', b"", "NaN"),
        (b'{"__metadata__":{"a":"1","a":"2"}}', b"", "twice"),
        ({"__metadata__": {"a": 1}}, b"", "not strings"),
        ({"__metadata__": []}, b"", "not strings"),
        ({"a": 1}, b"", "does not describe a tensor"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 5]}}, b"1234", "does not describe a tensor"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234", "does not describe a tensor"),
        ({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"1234", "does not describe a tensor"),
        ({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, b"1234", "X9"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234", "does not have 4 bytes"),
        ({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}, b"1234", "does not have"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345", "describes 4"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"123", "describes 4"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678", "begins at 4"),
        ({"a": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}}, b"1", "65 dimensions"),
        (
            {name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for name in "ab"},
            b"1234",
            "begins at 0",
        ),
        ({"__metadata__": {"graftax": "["}}, b"", "JSON"),
        ({"__metadata__": {"graftax": "[]"}}, b"", "not an object"),
        ({"__metadata__": {"graftax": "{}"}}, b"", "what it needs"),
        ({"__metadata__": {"graftax": '{"needs":2}'}}, b"", "update graftax"),
        ({"__metadata__": {"graftax": '{"needs":1}'}}, b"", "names"),
        ({"__metadata__": {"graftax": '{"needs":1,"parts":["../x"]}'}}, b"", "not named like parts"),
        ({"__metadata__": {"graftax": '{"needs":1,"names":[],"arrays":[],"rows":[]}'}}, b"", "missing"),
        ({"__metadata__": {"graftax": '{"needs":1,"names":["builtins:list"],"arrays":[],"rows":[["n",0,99999]]}'}}, b"",
         "more children than there are rows"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path, header, data, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(joined(header, data))
    with pytest.raises(graftax.LoadError, match=message):
        graftax.load(path)


def test_a_file_that_is_none(tmp_path):
    path = tmp_path / "x.safetensors"
    for data in (b"", b"1234567", b"PK\3\4" * 100):
        path.write_bytes(data)
        with pytest.raises(graftax.LoadError, match="not a safetensors file"):
            graftax.load(path)
    with pytest.raises(FileNotFoundError):
        graftax.load(tmp_path / "none")


@pytest.mark.quick(0)
def test_no_memory_is_taken_for_what_is_not_there(tmp_path):
    path = tmp_path / "x.safetensors"
    rows = [["n", 0, 1]] * 3000 + [["s", 1]]
    graph = {"needs": 1, "names": ["builtins:tuple"], "arrays": [], "rows": rows}
    twice = [["n", 0, 2], ["s", 1], ["s", 1]]
    for _ in range(60):  # a tuple of the last two, and so on: 2**60 items, were they written out
        twice = [["n", 0, 2], *twice, ["r", 1]]
    bombs = [graph, {**graph, "rows": twice}, {**graph, "rows": [["s", {"!": "range", "of": [0, 10**18, 1]}]]}]
    for bomb in bombs:
        path.write_bytes(joined({"__metadata__": {"graftax": json.dumps(bomb)}}, b""))
        tracemalloc.start()
        with contextlib.suppress(graftax.LoadError):
            graftax.load(path)
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert taken < 200 * path.stat().st_size + 1_000_000


LOADER = """
import builtins, sys, pickle
import graftax, jax
before = set(sys.modules)
def refuse(*args, **kwargs):
    raise SystemExit("a file ran something")
pickle.loads = pickle.load = pickle.Unpickler = builtins.eval = builtins.exec = refuse
try:
    graftax.load(sys.argv[1])
except graftax.LoadError as error:
    assert set(error.differences) == {"os:system", "mypkg.model:Net", "antigravity:fly", "json.tool:main"}, error
assert "mypkg" not in sys.modules and "antigravity" not in sys.modules and "json.tool" not in sys.modules
print("fine")
"""


@pytest.mark.quick(0)
def test_nothing_is_imported_and_nothing_runs(tmp_path):
    path = tmp_path / "x.safetensors"
    names = ["builtins:list", "os:system", "mypkg.model:Net", "antigravity:fly", "json.tool:main"]
    rows = [["n", 0, 4], ["s", {"!": "name", "of": 1}], ["n", 2, ["w"]], ["s", 1], ["n", 3, []], ["n", 4, []]]
    graph = {"needs": 1, "names": names, "arrays": [], "rows": rows}
    path.write_bytes(joined({"__metadata__": {"graftax": json.dumps(graph)}}, b""))
    process = subprocess.run([sys.executable, "-c", LOADER, path], capture_output=True, text=True, check=False)
    assert process.stdout == "fine\n", process.stderr


def with_value(path, value):
    """A file of `{"n": 3}` that holds another value in the place of the number."""
    graftax.save(path, {"n": 3, "w": jnp.ones(2)})
    header, data = parts(path.read_bytes())
    graph = json.loads(header["__metadata__"]["graftax"])
    graph["rows"] = [["s", value] if row[0] == "s" else row for row in graph["rows"]]
    header["__metadata__"]["graftax"] = json.dumps(graph)
    path.write_bytes(joined(header, data))


HOSTILE_VALUES = {
    "a fraction with an exponent": {"!": "fraction", "of": ["1e300000000", None]},
    "a fraction of one part": {"!": "fraction", "of": [1]},
    "a fraction of floats": {"!": "fraction", "of": [0.5, 2.5]},
    "a decimal of parts": {"!": "decimal", "text": [0, [1], 999999999]},
    "a uuid that is a number": {"!": "uuid", "hex": 3},
    "a text scalar of no characters": {"!": "numpy", "dtype": "<U1", "data": "/////w=="},
    "a big-endian text scalar of no characters": {"!": "numpy", "dtype": ">U1", "data": "/////w=="},
    "a scalar that is an array": {"!": "numpy", "dtype": "(2,)i4", "data": "AAAAAAAAAAA="},
    "a frozen set of colliding numbers": {
        "!": "frozenset",
        "of": [{"!": "int", "hex": hex(i * ((1 << 61) - 1))} for i in range(3000)],
    },
}


@pytest.mark.quick(99)
@pytest.mark.parametrize("value", HOSTILE_VALUES.values(), ids=HOSTILE_VALUES)
def test_values_that_are_none_are_refused_at_once(value, tmp_path):
    with_value(tmp_path / "x", value)
    begin = time.perf_counter()
    for like in (None, {"n": 3, "w": jnp.ones(2)}):
        with pytest.raises(graftax.LoadError):
            graftax.load(tmp_path / "x", like)
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize("kind", [dict.fromkeys, set, frozenset])
def test_thousands_of_keys_with_one_hash_are_refused(kind, tmp_path):
    graftax.save(tmp_path / "x", {"of": kind(i * ((1 << 61) - 1) for i in range(1500)), "w": jnp.ones(2)})
    with pytest.raises(graftax.LoadError, match="1500 keys with one hash"):
        graftax.load(tmp_path / "x")
    some = {"of": kind(i * ((1 << 61) - 1) for i in range(300)), "w": jnp.ones(2)}
    graftax.save(tmp_path / "x", some)
    assert graftax.equal(graftax.load(tmp_path / "x"), some)


@pytest.mark.parametrize("shape", [[(1 << 60) - 1] * 10 + [0], [0, 1 << 59], [1 << 40, 0, 1 << 40]])
def test_an_empty_tensor_that_no_array_can_be_is_refused(shape, tmp_path):
    graftax.save(tmp_path / "x", {"w": jnp.ones((0, 2))})
    header, data = parts((tmp_path / "x").read_bytes())
    header["[w]"]["shape"] = shape
    (tmp_path / "x").write_bytes(joined(header, data))
    for options in ({}, {"like": {"w": jnp.ones((0, 2))}}, {"lazy": True}):
        with pytest.raises(graftax.LoadError):
            graftax.load(tmp_path / "x", **options)
