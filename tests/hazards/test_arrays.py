# SPDX-License-Identifier: Apache-2.0
"""Arrays that are overwritten, deleted, donated, mutable, strange, or no arrays at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import oracle
from sizes import sized
from zoo import Box, Frozen, Registered, f32, scalar

# ── NumPy arguments that are overwritten ──

PLACES = {
    "bare": lambda a: a,
    "list": lambda a: [a],
    "object": lambda a: Box(a=(a,)),
    "registered": lambda a: Registered(a, None),
    "twice": lambda a: [a, a],
}
jits = pytest.mark.parametrize("jit", [graftax.jit, graftax.filter_jit], ids=["jit", "filter_jit"])


@pytest.mark.quick(1)
@jits
@pytest.mark.parametrize("wrap", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("size", [4, 100_000])
def test_a_numpy_argument_may_be_overwritten_right_after_the_call(jit, wrap, size):
    def f(x):
        found = [leaf for leaf in jax.tree.leaves(oracle.reachable(x)[1])]
        return [jnp.sort(a * 2)[::-1] for a in found]

    jitted, wrong = jit(f), 0
    buffer = np.empty(size + 16, np.float32)
    start = (-buffer.ctypes.data % 64) // 4  # where XLA could use the memory as it is
    for turn in range(sized(60, 20)):
        a = buffer[start : start + size]
        a[:] = turn
        out = jitted(wrap(a))
        a[:] = -1
        wrong += sum(not (np.asarray(y) == 2 * turn).all() for y in out)
    assert wrong == 0


def test_a_captured_numpy_array_may_be_overwritten_right_after_the_call():
    a = np.zeros(1000, np.float32)
    f = graftax.jit(lambda x: x + a)
    for turn in range(60):
        a[:] = turn
        out = f(scalar(1.0))
        a[:] = -1
        assert (np.asarray(out) == turn + 1).all()
    assert f.cache_info().traces == 1


def test_an_untouched_numpy_array_comes_back_as_itself():
    f = graftax.jit(lambda box, x: (box.a, [x, box.a], jnp.sin(x)))
    for _ in range(2):
        box, x = Box(a=np.arange(3.0)), np.float32(2)
        out = f(box, x)
        assert out[0] is out[1][1] is box.a and out[1][0] is x


# ── NumPy arrays that cannot be traced ──

REFUSED = {
    "big_endian": (lambda: np.arange(3, dtype=">f4"), "byte order"),
    "big_endian_int": (lambda: np.arange(3, dtype=">i8"), "byte order"),
    "masked": (lambda: np.ma.masked_array([1.0, 2.0], [True, False]), "mask"),
    "structured": (lambda: np.zeros(2, [("a", "f4")]), "columns"),
    "record": (lambda: np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f4")]), "columns"),
    "object": (lambda: np.array([f32, None], object), "object"),
    "longdouble": (lambda: np.zeros(2, np.longdouble), "float64"),
    "void": (lambda: np.zeros(2, "V4"), "V4"),
}


@pytest.mark.parametrize(("make", "why"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: {"k": [a]}], ids=["bare", "nested"])
def test_an_array_that_cannot_be_traced_is_refused_by_path_cold_and_warm(make, why, wrap):
    path = r"x\['k'\]\[0\]" if isinstance(wrap(1), dict) else "x"
    for warm in (False, True):
        f = graftax.jit(lambda x, w: w * 2 * jax.tree.leaves(x)[0].ndim)  # uses it: what is only kept may be anything
        if warm:
            f(wrap(np.zeros(3, np.float32)), f32(1))
        for _ in range(2):
            with pytest.raises(graftax.UnsupportedValueError, match=f"^{path}: .*{why}"):
                f(wrap(make()), f32(1))
        assert f(wrap(np.zeros(3, np.float32)), f32(1)).tolist() == [2.0]
        assert f.cache_info().traces + f.cache_info().shared == 1  # the second function is equal to the first


# ── deleted arrays ──


@pytest.mark.parametrize("place", ["argument", "nested", "captured", "donated", "partly_donated"])
def test_a_deleted_array_is_named_and_nothing_else_is_consumed(place):
    gone, other = jnp.ones(3), jnp.ones(3)

    def plain(box, y):
        return box.a[0]["w"] + y

    f = graftax.jit(plain, donate={"donated": ("box", "y"), "partly_donated": ("y",)}.get(place, ()))
    box, y, path = Box(a=[{"w": gone}]), other, r"box\.a\[0\]\['w'\]"
    if place == "argument":
        box, y, path = Box(a=[{"w": other}]), gone, "y"
    if place == "captured":
        f, path = graftax.jit(lambda box, y: gone + y), "closure gone"
        box = None
    f(Box(a=[{"w": jnp.ones(3)}]) if box else None, jnp.ones(3))
    gone.delete()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{path}.* deleted"):
            f(box, y)
        assert not other.is_deleted()


def test_a_deleted_array_that_is_not_used_is_no_reason_to_fail_where_plain_python_does_not():
    gone = jnp.ones(3)
    f = graftax.jit(lambda box, y: y + 1)
    f(Box(w=jnp.ones(3)), scalar())
    gone.delete()
    assert float(f(Box(w=gone), scalar())) == 2.0


# ── donation ──


def test_one_donated_array_given_twice_is_passed_once():
    f = graftax.jit(lambda a, b: (a["w"] + 1, b["w"] + 2), donate=("a", "b"))
    for _ in range(2):
        w = jnp.ones(3)
        one, two = f({"w": w}, {"w": w})
        assert (one.tolist(), two.tolist()) == ([2.0] * 3, [3.0] * 3)
    a, b = jnp.ones(3), jnp.ones(3)
    one, two = f({"w": a}, {"w": b})
    assert (one.tolist(), two.tolist()) == ([2.0] * 3, [3.0] * 3)


@pytest.mark.parametrize("where", ["argument", "closure"])
def test_an_array_that_is_donated_and_kept_is_refused_with_both_paths_before_anything_is_consumed(where):
    w, other = jnp.ones(3), jnp.ones(3)
    if where == "argument":
        f, second = graftax.jit(lambda box, y, z: box.w + y.w + z, donate=("box", "z")), r"y\.w"
    else:
        f, second = graftax.jit(lambda box, y, z: box.w + w + z, donate=("box", "z")), "closure w"
    kept = Box(w=w if where == "argument" else jnp.ones(3))
    for _ in range(2):
        with pytest.raises(graftax.StructureError, match=rf"(?s)box\.w.*{second}|{second}.*box\.w"):
            f(Box(w=w), kept, other)
        assert not w.is_deleted() and not other.is_deleted()


@pytest.mark.parametrize("fail", ["function", "write", "compile"])
def test_a_failed_call_donates_nothing(fail):
    def function(box, x):
        box.w = box.w + x
        if fail == "function":
            raise ValueError("no")
        if fail == "write":
            box.leak = iter([box.w])

    options = {"compiler_options": {"no_such_option": True}} if fail == "compile" else {}
    f = graftax.jit(function, donate="all", **options)
    for _ in range(2):
        box, x = Box(w=jnp.ones(64)), jnp.ones(64)
        w = box.w
        with pytest.raises(Exception, match=r"no|iterator"):
            f(box, x)
        assert box.w is w and not w.is_deleted() and not x.is_deleted() and list(vars(box)) == ["w"]


# ── jax.Ref ──

new_ref = getattr(jax, "new_ref", None)

if new_ref is not None:

    @jits
    @pytest.mark.parametrize(
        "wrap", [lambda r: [r], lambda r: Box(r=r), lambda r: (r, 1)], ids=["list", "object", "tuple"]
    )
    def test_a_ref_in_a_container_is_mutated_with_one_trace(jit, wrap):
        f = jit(lambda holder, x: first_ref(holder).__setitem__(..., first_ref(holder)[...] * 2 + x))
        for _ in range(3):
            ref = new_ref(jnp.ones(2))
            f(wrap(ref), jnp.ones(2))
            f(wrap(ref), jnp.ones(2))
            assert ref[...].tolist() == [7.0, 7.0]
        assert f.cache_info().traces == 1

    def first_ref(holder):
        return holder.r if isinstance(holder, Box) else holder[0]

    def test_a_ref_given_twice_is_one_ref():
        def plain(a, b):
            a[...] = a[...] + 1
            b[...] = b[...] * 10
            return a is b, a[...] + 0

        f = graftax.jit(plain)
        for _ in range(2):
            one, two = new_ref(jnp.ones(2)), new_ref(jnp.ones(2))
            same, value = f(one, one)
            assert (same, value.tolist(), one[...].tolist()) == (True, [20.0] * 2, [20.0] * 2)
            same, value = f(one, two)
            assert (same, value.tolist(), two[...].tolist()) == (False, [21.0] * 2, [10.0] * 2)
        assert f.cache_info().traces == 2

    def test_a_ref_that_is_captured_is_mutated():
        ref = new_ref(jnp.zeros(2))
        f = graftax.jit(lambda x: ref.__setitem__(..., ref[...] + x))
        for count in (1, 2, 3):
            f(jnp.ones(2))
            assert ref[...].tolist() == [float(count)] * 2
        assert f.cache_info().traces == 1

    def test_a_returned_ref_is_the_callers_own_and_a_new_one_is_new_in_each_call():
        given = new_ref(jnp.ones(2))
        out = graftax.jit(lambda r: {"r": r, "also": [r]})(given)
        assert out["r"] is out["also"][0] is given

        def make(x):
            return new_ref(x + 1)

        f = graftax.jit(make)  # jax.jit refuses it
        one, other = f(jnp.ones(2)), f(jnp.ones(2))
        assert one is not other and one[...].tolist() == other[...].tolist() == [2.0, 2.0]
        one[...] = jnp.zeros(2)
        assert other[...].tolist() == [2.0, 2.0] and f(jnp.ones(2))[...].tolist() == [2.0, 2.0]


# ── static values ──

RESULTS = {
    "int": 3,
    "bool": True,
    "float": 0.5,
    "negative_zero": -0.0,
    "complex": 1j,
    "none": None,
    "text": "x",
    "bytes": b"x",
    "ellipsis": ...,
    "type": int,
    "range": range(3),
    "frozenset": frozenset({1}),
    "tuple": (1, (2.0, "x")),
    "dtype": np.dtype("float32"),
    "big": 10**40,
}


@jits
@pytest.mark.parametrize("value", RESULTS.values(), ids=RESULTS)
def test_what_is_no_array_comes_out_as_it_is(jit, value):
    f = jit(lambda v, x: [v, {"v": v}, Frozen(v), x + 1])
    made = jit(lambda x: [value, {"v": value}, Frozen(value), x + 1])
    for _ in range(2):
        for out in (f(value, f32(1)), made(f32(1))):
            for found in (out[0], out[1]["v"], out[2].a):
                assert type(found) is type(value) and repr(found) == repr(value)


def test_a_numpy_array_made_inside_stays_numpy_and_is_fresh_in_every_call():
    f = graftax.jit(lambda x: {"np": np.arange(3), "scalar": np.float32(2), "x": x + 1})
    first, second = f(f32(1)), f(f32(1))
    for out in (first, second):
        assert type(out["np"]) is np.ndarray and type(out["scalar"]) is np.float32
        assert out["np"].tolist() == [0, 1, 2]
    first["np"][:] = 9
    assert second["np"].tolist() == f(f32(1))["np"].tolist() == [0, 1, 2]


# ── unusual arrays ──

UNUSUAL = {
    "weak": lambda: jnp.asarray(1.0),
    "strong": lambda: jnp.float32(1.0),
    "weak_int": lambda: jnp.asarray(2),
    "typed_key": lambda: jax.random.key(3),
    "typed_keys": lambda: jax.random.split(jax.random.key(3), 3),
    "rbg_key": lambda: jax.random.key(3, impl="rbg"),
    "raw_key": lambda: jax.random.key_data(jax.random.key(3)),
    "zero_dim": lambda: jnp.zeros(()),
    "zero_size": lambda: jnp.zeros((0, 3)),
    "numpy_zero_dim": lambda: np.ones(()),
    "numpy_zero_size": lambda: np.ones((3, 0), np.float32),
    "strided": lambda: np.arange(12, dtype=np.float32).reshape(3, 4)[::2, ::-1],
    "fortran": lambda: np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "broadcast": lambda: np.broadcast_to(np.float32(2), (2, 2)),
    "read_only": lambda: np.frombuffer(b"\x00\x00\x80?", np.float32),
    "unaligned": lambda: np.frombuffer(b"x\x00\x00\x80?", np.float32, offset=1),
    "bool": lambda: np.array([True, False]),
    "uint8": lambda: np.array([255], np.uint8),
    "half": lambda: np.array([1.5], np.float16),
    "bfloat16": lambda: np.array([1.5], jnp.bfloat16),
    "float8": lambda: np.array([1.5], jnp.float8_e4m3fn),
    "int4": lambda: np.array([1], jnp.int4),
    "complex": lambda: np.array([1j], np.complex64),
    "numpy_scalar": lambda: np.int16(3),
    "numpy_bool": lambda: np.True_,
}


def uses(x):
    """The array untouched, and what shows its values, its dtype and how it promotes."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return [x, jax.random.uniform(x if x.ndim == 0 else x[0], (2,))]
    return [x, jnp.stack([x, x]), *([jnp.add(x, 0)] if x.dtype != jnp.int4 else [])]


@jits
@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: Box(x=x)], ids=["bare", "object"])
def test_an_unusual_array_gives_what_plain_python_gives(jit, make, wrap):
    def plain(x):
        return uses(x.x if isinstance(x, Box) else x)

    f = jit(plain)
    for _ in range(2):
        given = make()
        expected, got = plain(wrap(given)), f(wrap(given))
        if jit is graftax.filter_jit and not isinstance(given, jax.Array):  # an array of JAX, as in Equinox
            assert isinstance(got[0], jax.Array) and np.array_equal(got[0], given)
        else:
            assert got[0] is given
        assert oracle.difference(expected[1:], got[1:]) is None
    assert f.cache_info().traces == 1


def test_weak_and_strong_types_do_not_mix():
    f = graftax.jit(lambda x: x + np.int8(1))
    for x in (jnp.asarray(1), jnp.int32(1), jnp.asarray(1)):
        plain = x + np.int8(1)
        assert (f(x).dtype, f(x).weak_type) == (plain.dtype, plain.weak_type)


def test_a_shape_dtype_struct_is_static_and_lowers_as_an_array_would():
    struct = jax.ShapeDtypeStruct((2,), np.float32)
    f = graftax.jit(lambda s, x: jnp.zeros(s.shape, s.dtype) + x)
    for shape in ((2,), (3,), (2,)):
        assert f(jax.ShapeDtypeStruct(shape, np.float32), scalar()).shape == shape
    assert f.cache_info().traces == 2
    out = graftax.jit(lambda s, x: (s, x))(struct, scalar())
    assert out[0] == struct


def test_a_tracer_kept_from_another_transformation_is_jaxs_own_error():
    kept = []
    jax.jit(lambda x: kept.append(x))(f32(1))
    f = graftax.jit(lambda box: box.w + 1)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        f(Box(w=kept[0]))
    assert f(Box(w=f32(1))).tolist() == [2.0]
