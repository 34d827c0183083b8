# SPDX-License-Identifier: Apache-2.0
"""`jit(check=True)`: agrees where plain and compiled do the same, and names the first place where they do not."""

import os
import pickle
import random
import time
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
import zoo
from zoo import Box, f32, i32


def checked(f, **options):
    return graftax.jit(f, check=True, **options)


@pytest.mark.parametrize("build", zoo.BUILDERS, ids=zoo.NAMES)
def test_any_graph_agrees(build):
    run = checked(lambda x: (x, [x]))
    for _ in range(2):
        x = build()
        result = run(x)
        assert graftax.flatten(result)[1] == graftax.flatten((x, [x]))[1]


def test_changes_are_made_once_and_sharing_between_arguments_is_kept():
    def f(a, b):
        a.append(b[0] + len(b))
        return a is b, b

    run, a = checked(f), [f32(1)]
    for i in range(2):
        same, b = run(a, a)
        assert same is True and b is a and len(a) == i + 2
    assert [x.tolist() for x in a] == [[1.0], [2.0], [3.0]]


def test_what_is_captured_is_compared_too_and_changed_once():
    log, state = [], {"n": 0}

    def f(x):
        log.append(x * 2)
        state["n"] += 1
        return state["n"]

    assert [checked(f)(f32(1)) for _ in range(3)] == [1, 2, 3]
    assert len(log) == 3 and all(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in log)


class Model:
    def __init__(self):
        self.w = f32(1)

    @graftax.jit(check=True)
    def step(self, x):
        self.w = self.w + x
        return self

    @graftax.jit(check=True)
    def noisy(self, x):
        self.seen = random.random()
        return x


def test_a_method_is_checked():
    model = Model()
    assert model.step(f32(2)) is model and model.w.tolist() == [3.0]
    with pytest.raises(graftax.CheckError, match=r"self.seen: expected 0\.\d+, given 0\.\d+"):
        model.noisy(f32(1))


def random_number(x):
    return {"n": [random.random()]}


def clock(x):
    return time.perf_counter_ns()


def environment(x):
    os.environ["GRAFTAX_COUNT"] = str(int(os.environ.get("GRAFTAX_COUNT", 0)) + 1)
    return os.environ["GRAFTAX_COUNT"]


def prints(x):
    print("called")
    return x


def warns(x):
    warnings.warn("careful", UserWarning, stacklevel=1)
    return x


def traced(x):
    return "traced" if isinstance(x, jax.core.Tracer) else "plain"


def stale(x):
    names = vars(hidden)  # what a dict of a module holds is read once
    names["n"] = names["n"] + 1
    return x * names["n"]


def typed(x):
    return x * (1 if isinstance(x, jax.core.Tracer) else jnp.asarray(1.5, jnp.bfloat16))


def shaped(x):
    return [x, x if isinstance(x, jax.core.Tracer) else jnp.stack([x, x])]


def near(x):
    return [x + (1e-3 if isinstance(x, jax.core.Tracer) else 0)]


def adds(x, box=None):
    if not isinstance(x, jax.core.Tracer):
        box.extra = 1


def unshares(x):
    y = [x]
    return [y, y] if isinstance(x, jax.core.Tracer) else [y, [x]]


def raises(x):
    if isinstance(x, jax.core.Tracer):
        raise ValueError("only when traced")


def fine(x):
    if not isinstance(x, jax.core.Tracer):
        raise KeyError("only when plain")


hidden = types.ModuleType("hidden")


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (random_number, r"result\['n'\]\[0\]: expected [\d.e-]+, given [\d.e-]+"),
        (clock, r"result: expected \d+, given \d+"),
        (environment, r"result: expected '\d+', given '\d+'"),
        (traced, "result: expected 'plain', given 'traced'"),
        (stale, "result: expected .*, given"),
        (shaped, r"result\[1\]: expected float32\[2, 1\], given float32\[1\]"),
        (near, r"result\[0\]: expected 1.0, given 1.001"),
        (unshares, r"result\[0\] and result\[1\]: expected two objects, given one object"),
        (raises, "exception: expected none, given ValueError: only when traced"),
        (fine, "exception: expected KeyError: 'only when plain', given none"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_the_first_difference_is_named(f, text):
    hidden.n = 0
    with pytest.raises(graftax.CheckError, match=text) as caught:
        run = checked(f)
        for _ in range(3):
            run(f32(1))
    assert f"{f.__name__} behaves differently when it is compiled" in str(caught.value)


def test_a_difference_in_an_argument_is_named():
    with pytest.raises(graftax.CheckError, match=r"box\.extra: expected 1, given nothing"):
        checked(adds)(f32(1), Box(a=1))


def test_a_weak_type_counts():
    with pytest.raises(graftax.CheckError, match=r"expected float32\[\], given float32\[\], weakly typed"):
        checked(lambda x: x if isinstance(x, jax.core.Tracer) else x.astype(jnp.float32))(jnp.asarray(1.0))


def test_print_is_shown_once_and_reported_where_it_is_missing(capsys):
    run = checked(prints)
    run(f32(1))
    assert capsys.readouterr().out == "called\n"
    with pytest.raises(graftax.CheckError, match=r"print: expected 'called\\n', given ''"):
        run(f32(1))


def test_a_print_of_jax_agrees(capsys):
    run = checked(lambda x: jax.debug.print("x = {}", x))
    for _ in range(2):
        run(i32(1))
        assert capsys.readouterr().out == "x = [1]\n"


def test_a_warning_is_reported_where_it_is_missing():
    run = checked(warns)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with pytest.warns(UserWarning, match="careful"):
            run(f32(1))
        with pytest.raises(graftax.CheckError, match=r"warnings: expected UserWarning\('careful'\), given none"):
            run(f32(1))


def test_the_same_exception_of_both_is_raised():
    def f(x):
        x.append(1)
        raise KeyError("mine")

    x = [f32(1)]
    with pytest.raises(KeyError, match="mine"):
        checked(f)(x)
    assert len(x) == 1


def test_an_error_of_graftax_says_itself_why():
    with pytest.raises(graftax.MutationError):
        checked(lambda x: x.append(1), mutation="error")([f32(1)])


def test_an_error_of_jax_is_the_cause_of_the_report():
    with pytest.raises(graftax.CheckError, match="given TracerBoolConversionError") as caught:
        checked(lambda x: 1 if x > 0 else 2)(jnp.asarray(1.0))
    assert isinstance(caught.value.__cause__, jax.errors.TracerBoolConversionError)


def test_rounding_is_no_difference():
    x = jax.random.normal(jax.random.key(0), (64, 64))
    checked(lambda x: jnp.tanh(x @ x.T).sum(0) / 3)(x)
    checked(lambda x: (jnp.tanh(x @ x.T).sum(0) / 3).astype(jnp.bfloat16))(x)
    checked(lambda x: jnp.array([jnp.nan, jnp.inf, -jnp.inf]) * x[0, 0])(x)


def test_numpy_arguments_and_by_value_calls_agree():
    x = {"a": np.arange(3.0)}
    assert checked(lambda x: x["a"] * 2)(x).tolist() == [0.0, 2.0, 4.0]
    box = [f32(1)]
    assert len(checked(lambda x: x.append(x[0]) or x, mutation="discard")(box)) == 2
    assert len(box) == 1


def test_donated_arguments_are_compared_first():
    params = {"w": f32(1)}
    w = params["w"]
    checked(lambda p: p.update(w=p["w"] + 1), donate="all")(params)
    assert params["w"].tolist() == [2.0] and w.is_deleted()


if hasattr(jax, "new_ref"):

    def test_a_mutable_array_is_written_once():
        def f(ref):
            ref[...] = ref[...] + 1

        ref = jax.new_ref(f32(1))
        checked(f)(ref)
        assert ref[...].tolist() == [2.0]


def test_traced_numbers_agree():
    run = checked(lambda x, n, m: (x * n, n + 1, m["k"]), dynamic=["n", "m[k]"])
    for n in (2, 3):
        assert run(f32(1), n, {"k": 0.5})[1] == n + 1


def test_inside_another_trace_there_is_nothing_to_compare():
    run = checked(lambda x: x * 2)
    assert jax.grad(lambda x: run(x).sum())(f32(1)).tolist() == [2.0]
    with jax.disable_jit():
        assert checked(traced)(f32(1)) == "plain"


def test_a_checked_function_shares_its_traces_and_survives_pickle():
    plain, run = graftax.jit(traced_once), checked(traced_once)
    run(f32(1))
    plain(f32(1))
    assert plain.cache_info().traces == 1
    assert type(pickle.loads(pickle.dumps(run))) is type(run)
    with pytest.raises(TypeError, match="traced_once"):
        run()


def traced_once(x):
    return x * 3


@pytest.mark.parametrize("change", ["(k + 1, held)", "(k + 1, held + [1])"])
def test_an_own_default_beside_a_list_agrees(change):
    scope = {}
    exec(f"def f(x, k=1, held=[1]):\n    f.__defaults__ = {change}\n    return x * k * len(held)", scope)
    plain, x = scope["f"], jnp.arange(3.0)
    f = graftax.jit(plain, check=True)
    for i in range(3):
        assert f(x).tolist() == (x * (i + 1) * (i + 1 if "+ [1]" in change else 1)).tolist()
        assert plain.__defaults__ == (i + 2, [1] * (i + 2 if "+ [1]" in change else 1))


def test_a_function_whose_defaults_are_replaced_agrees():
    x = jnp.arange(3.0)

    def helper(y, k=1):
        return y * k

    def own(y, k=1):
        own.__defaults__ = (k + 1,)
        return y * k

    def other(y):
        helper.__defaults__ = (helper.__defaults__[0] + 1,)
        return helper(y)

    for f, changed in ((own, own), (other, helper)):
        g = graftax.jit(f, check=True)
        begin = changed.__defaults__[0]
        for i in range(3):
            assert g(x).tolist() == (x * (i + (1 if f is own else 2))).tolist()
            assert changed.__defaults__ == (begin + i + 1,)
