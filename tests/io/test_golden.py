# SPDX-License-Identifier: Apache-2.0
"""A file of each format stays here for ever, and is read for ever. Run as a program it writes that of the newest."""

import datetime
from collections import OrderedDict, deque
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import graftax
from zoo import Box, Color, Point, Registered

FOLDER = Path(__file__).parent / "golden"
FILES = sorted(FOLDER.glob("*.safetensors"))


def content():
    """What is in the files of format 1. Never changed."""
    shared = [1, 2.5, "x"]
    cycle = Box(w=jnp.arange(6.0).reshape(2, 3))
    cycle.me = cycle
    return {
        "cycle": cycle,
        "shared": [shared, shared],
        "point": Point(np.arange(4, dtype=np.int8), (None, True)),
        "registered": Registered(jnp.ones(2), [jnp.zeros(1)], name="mine"),
        "dtypes": [np.ones(3, ml_dtypes.int4), np.ones(2, np.complex128), np.ones(2, ml_dtypes.float8_e4m3fn)],
        "half": jnp.ones(2, jnp.bfloat16),
        "weak": jnp.asarray(2.0),
        "scalar": np.float32(1.5),
        "key": jax.random.key(3),
        "empty": jnp.zeros((0, 2)),
        ("tuple", 1): OrderedDict(b=1, a=10**30),
        "values": [Color.RED, b"\0", 1j, float("inf"), -0.0, range(3), slice(1, None), np.dtype("int16"), jnp.tanh],
        "date": datetime.datetime(2020, 2, 29, tzinfo=datetime.UTC),
        "set": {1, 2},
        "deque": deque([1], maxlen=2),
        "text": np.array(["a", "bc"]),
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_an_earlier_format_is_read(path):
    for new in (graftax.load(path, classes=["zoo.*"]), graftax.load(path, content())):
        assert graftax.equal(new, content())
    assert len(graftax.peek(path).tensors) == 12


def test_fields_that_are_not_known_are_ignored(tmp_path):
    text = FILES[0].read_bytes()
    path = tmp_path / "x.safetensors"
    path.write_bytes(text.replace(b'\\"needs\\":1,', b'\\"new\\":1,\\"needs\\":1,'))
    length = int.from_bytes(text[:8], "little") + len(b'\\"new\\":1,')
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    assert graftax.equal(graftax.load(path, classes=["zoo.*"]), content())


def test_there_is_one_of_each_format():
    from graftax._io.encode_graph import FORMAT

    assert [path.stem for path in FILES] == [f"format-{number}" for number in range(1, FORMAT + 1)]


if __name__ == "__main__":
    graftax.save(FOLDER / "format-1.safetensors", content())
