# SPDX-License-Identifier: Apache-2.0
"""Leaves that look like those of a known executable, and are others."""

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

import graftax
from graftax import _core
from graftax._jax import fast_dispatch
from watchdog import python


@pytest.mark.quick(0)
def test_keys_of_another_implementation_and_plain_arrays_are_other_leaves():
    def program(t):
        x = t["x"]
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x + 1
        return jax.random.key_data(jax.random.split(x)), str(x.dtype)

    bits = jnp.arange(4, dtype="uint32") + 5
    leaves = [jax.random.wrap_key_data(bits, impl=impl) for impl in ("rbg", "unsafe_rbg")] + [bits]
    f = graftax.jit(program)
    for leaf in 4 * leaves + [x for x in leaves for _ in range(3)] + 2 * leaves[::-1]:
        result, expected = f({"x": leaf}), program({"x": leaf})
        assert jax.tree.all(jax.tree.map(np.array_equal, result, expected))


OTHERS = {
    "weak type": lambda x: jax.jit(lambda: jnp.broadcast_to(1.5, (2, 3)))(),
    "committed": lambda x: jax.device_put(x, jax.devices()[0]),
    "turned": lambda x: jax.device_put(x, Format(Layout((1, 0)), x.sharding)),
    "NumPy": np.asarray,
}


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.quick(12)
def test_each_leaf_is_looked_at_wherever_it_stands(place, other):
    def program(leaves):
        return [x * 2 for x in leaves]

    f, expected = graftax.jit(program), jax.jit(program)
    known = [jnp.full((2, 3), i + 0.5, "float32") for i in range(3)]
    changed = list(known)
    changed[place] = OTHERS[other](known[place])
    for leaves in (*5 * [known], *3 * [changed, known, known], changed):
        for a, b in zip(f(leaves), expected(leaves), strict=True):
            assert a.aval == b.aval and a.committed == b.committed and np.array_equal(a, b)
    for first, second in ((known, changed), (changed, known)):
        for _ in range(3):
            f(first)
        for a, b in zip(f(second), expected(second), strict=True):
            assert a.aval == b.aval and a.committed == b.committed and np.array_equal(a, b)


@pytest.fixture(params=["parts", "getters"])
def looked_at(request):
    """How an array is asked what it looks like: where it holds that, or by its getters."""

    def samples():
        return [(a, a.aval, a._sharding, a._committed) for a in fast_dispatch._samples()]

    graftax.jit(lambda x: x)(jnp.zeros(3))
    if request.param == "parts":
        assert _core.find_array_parts(samples()), "this JAX holds them elsewhere"
    else:
        assert not _core.find_array_parts(samples()[:1] * 3)  # whatever is zero may be `committed`
    yield
    assert _core.find_array_parts(samples())


VECTORS = {
    "committed": lambda x: jax.device_put(x, jax.devices()[0]),
    "weak type": lambda x: jax.jit(lambda: jnp.broadcast_to(1.5, x.shape))(),
    "an equal sharding": lambda x: jax.device_put(x, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
    "a mesh": lambda x: jax.device_put(x, jax.NamedSharding(jax.make_mesh((1,), "a"), jax.P())),
    "another dtype": lambda x: x.astype("int32"),
    "another shape": lambda x: jnp.concatenate([x, x]),
    "NumPy": np.asarray,
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("other", VECTORS)
@pytest.mark.parametrize("fed_back", [False, True])
def test_a_vector_is_looked_at_on_every_call(other, fed_back, looked_at):
    def program(leaves):
        return [x * 2 for x in leaves]

    f, expected = graftax.jit(program), jax.jit(program)
    leaves = [jnp.full(3, i + 0.5, "float32") for i in range(6)]
    for number in range(12):
        if number % 4 == 3:
            leaves = list(leaves)
            leaves[number // 4] = VECTORS[other](leaves[number // 4])
        result = f(leaves)
        for a, b in zip(result, expected(leaves), strict=True):
            assert a.aval == b.aval and a.committed == b.committed and a.sharding == b.sharding
            assert a.weak_type == b.weak_type and np.array_equal(a, b)
        if fed_back:
            leaves = result


def test_places_are_those_of_arrays_alone():
    with pytest.raises(TypeError):
        _core.find_array_parts([(object(),)])  # four parts are asked for
    samples = [(a, a.aval, a._sharding, a._committed) for a in fast_dispatch._samples()]
    assert not _core.find_array_parts([])
    assert not _core.find_array_parts([*samples, (3, *samples[0][1:])])
    wrong = [(a, aval, sharding, not committed) for a, aval, sharding, committed in samples]
    assert not _core.find_array_parts(wrong)
    assert _core.find_array_parts(samples)


@pytest.mark.quick(0)
def test_keys_of_two_implementations_with_the_same_bits_are_two_programs():
    def program(t):
        return jax.random.key_data(jax.random.split(t["x"], 3)), t["x"]

    bits = jnp.arange(4, dtype="uint32") + 5
    keys = [jax.random.wrap_key_data(bits, impl=impl) for impl in ("rbg", "unsafe_rbg")]
    f, expected = graftax.jit(program), [program({"x": key})[0] for key in keys]
    assert not np.array_equal(*expected)
    for i in (0, 1, 0, 1, 0, 1, 0, 0, 1, 1, bits, 0, 1):
        if i is bits:
            with pytest.raises(TypeError):
                f({"x": bits})
            continue
        result, key = f({"x": keys[i]})
        assert np.array_equal(result, expected[i]) and key is keys[i]


def test_an_array_in_a_file_is_taken_as_jit_takes_it(tmp_path):
    f = graftax.jit(lambda t: t["x"] * 2)
    for i in range(6):
        x = np.memmap(tmp_path / str(i), "float32", "w+", shape=(2, 2))
        x[:] = i
        assert np.array_equal(f({"x": x}), jax.jit(lambda x: x * 2)(x))


def test_an_array_at_the_address_of_a_result_that_is_gone_says_nothing_of_that_result():
    f = graftax.jit(lambda t: {"a": t["a"] + 1, "b": t["a"].T * 2})
    a, met = jnp.zeros((2, 3)), False
    for _ in range(20):
        for _ in range(6):  # its first result comes back as its leaf
            out = f({"a": a})
            a = out["a"]
        place = id(out["b"])
        del out
        others = [a + i for i in range(20)]
        [other, *_] = [x for x in others if id(x) == place] or [a]
        met = met or other is not a
        second = f({"a": other})["b"]
        assert np.array_equal(second, other.T * 2)
        assert np.array_equal(f({"a": second})["a"], second + 1)
    assert met


def test_leaves_with_one_sharding_object_are_told_apart_by_all_else():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    weak = jax.jit(lambda: jnp.broadcast_to(1.5, (3,)))()
    leaves = [jax.device_put(x, device) for x in (jnp.ones(3), weak, jnp.arange(3), jnp.arange(3, dtype="uint32"))]
    f, expected = graftax.jit(lambda t: t["x"] * 2), jax.jit(lambda x: x * 2)
    for leaf in 3 * leaves + [x for x in leaves for _ in range(3)] + leaves[::-1]:
        result = f({"x": leaf})
        assert result.aval == expected(leaf).aval and np.array_equal(result, expected(leaf))


def test_an_executable_is_given_the_leaves_that_it_takes(capfd):
    f = graftax.jit(lambda t: {n: x + 1 for n, x in t.items() if n != "unused"})
    t = {n: jnp.full(3, i) for i, n in enumerate(["a", "b", "unused", "c", "d"])}
    for _ in range(5):
        assert {n: x.tolist() for n, x in f(t).items()} == {"a": [1] * 3, "b": [2] * 3, "c": [4] * 3, "d": [5] * 3}
    assert [entry.direct for entry in f._table.entries.values()] == [fast_dispatch.status() == "on"]
    assert "supplied" not in capfd.readouterr().err  # XLA's word for a call with another number of arguments


@pytest.mark.quick(0)
def test_a_program_with_arguments_of_its_own_is_left_to_jax():
    code = """
        import jax, jax.numpy as jnp, numpy as np, graftax
        from graftax._jax import fast_dispatch
        from graftax import _core
        fast_dispatch.start_from(1)
        table = np.arange(300.0, dtype="float32")
        try:
            jax.jit(lambda x: x * np.arange(300.0, dtype="float32"))(jnp.zeros(300))
        except TypeError:
            raise SystemExit  # JAX 0.8 cannot do this itself
        def step(t):
            table = np.arange(300.0, dtype="float32")  # an argument with this setting, and it looks as the leaves do
            return {"a": t["a"] * table, "b": t["b"] + 1, "c": t["c"] + 2}  # the last leaf is dropped
        f = graftax.jit(step)
        for i in range(5):
            found = f({name: jnp.full(300, i + k, "float32") for k, name in enumerate("abcd")})
            assert np.array_equal(found["a"], i * table)
            assert np.array_equal(found["b"], found["c"] - 2) and found["c"][0] == i + 4
        assert fast_dispatch.status() != "on" or [entry.direct for entry in f._table.entries.values()] == [None]
        """
    python(textwrap.dedent(code), JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS="1")
