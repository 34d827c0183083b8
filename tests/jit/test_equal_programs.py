# SPDX-License-Identifier: Apache-2.0
"""A trace that comes to a program which is compiled already runs it: a class that is defined again compiles nothing."""

import sys
import types
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax
from compilations import compilations
from graftax._jax.jaxprs import run_the_same
from zoo import f32

NAMES = ("step", "method", "f", "<lambda>", "_lambda_")

pytestmark = pytest.mark.filterwarnings("ignore::graftax.RecompileWarning")

MODEL = """
class Model:
    '''{comment}'''
    def __init__(self):
        self.w, self.calls = jnp.ones(3), 0

    def __call__(self, x):
        self.calls += 1
        self.w = self.w + {step}
        return jax.nn.relu(jnp.sin(self.w * x))

    @jit
    def method(self, x):
        self.w = self.w * 2
        return self(x), type(self) is Model

model = Model()
"""
STEP = """
@jit
def step(model, x):
    made = Model() if {makes} else None
    return model(x), made, isinstance(model, Model)
"""
CALL = "out = step(model, x)\nfirst = out[0].tolist()"


def as_plain(function):
    return function


class Notebook:
    """Cells that run twice: with `graftax.jit`, and in plain Python."""

    def __init__(self, monkeypatch) -> None:
        self.scopes: list[dict] = []
        for jit in (graftax.jit, as_plain):
            module = types.ModuleType(f"cells_of_{jit.__name__}")
            monkeypatch.setitem(sys.modules, module.__name__, module)
            vars(module).update(jit=jit, jax=jax, jnp=jnp, x=f32(1, 2, 3))
            self.scopes.append(vars(module))

    def run(self, cell: str) -> int:
        """How many programs a cell compiles. What it leaves has to be as in plain Python."""
        ours, plain = self.scopes
        code = compile(cell, f"<cell {len(cell)}>", "exec")
        exec(code, plain)
        with compilations(*NAMES) as compiled:
            exec(code, ours)
        for name in ("first", "second"):
            if name in plain:
                assert ours[name] == pytest.approx(plain[name], rel=1e-6)
        for scope in self.scopes:
            assert type(scope["model"]) is scope["Model"]
        assert ours["model"].w.tolist() == plain["model"].w.tolist() and ours["model"].calls == plain["model"].calls
        return len(compiled)


@pytest.fixture
def notebook(monkeypatch) -> Iterator[Notebook]:
    yield Notebook(monkeypatch)


def test_a_class_that_is_defined_again_compiles_nothing(notebook):
    notebook.run(MODEL.format(comment="a class", step=1) + STEP.format(makes=False))
    assert notebook.run(CALL) > 0
    for comment in ("again", "and again"):
        assert notebook.run(MODEL.format(comment=comment, step=1)) == 0
        assert notebook.run(CALL) == 0
        assert notebook.run(CALL) == 0
    assert notebook.scopes[0]["out"][2] is True
    assert notebook.scopes[0]["step"].cache_info().traces == 3


def test_a_class_with_another_method_compiles(notebook):
    notebook.run(MODEL.format(comment="a class", step=1) + STEP.format(makes=False) + CALL)
    notebook.run(MODEL.format(comment="a class", step=2))
    assert notebook.run(CALL) > 0
    notebook.run(MODEL.format(comment="as before", step=1))
    assert notebook.run(CALL) == 0


def test_objects_that_the_code_makes_are_of_the_new_class(notebook):
    notebook.run(MODEL.format(comment="a class", step=1) + STEP.format(makes=True) + CALL)
    notebook.run(MODEL.format(comment="again", step=1) + CALL)
    ours = notebook.scopes[0]
    assert type(ours["out"][1]) is ours["Model"] and ours["out"][1].calls == 0


def test_a_jitted_method_of_a_class_that_is_defined_again_compiles_nothing(notebook):
    call = "second = model.method(x)[0].tolist()\nkind = model.method(x)[1]"
    notebook.run(MODEL.format(comment="a class", step=1))
    assert notebook.run(call) > 0
    for comment in ("again", "and again"):
        notebook.run(MODEL.format(comment=comment, step=1))
        assert notebook.run(call) == 0
        assert notebook.scopes[0]["kind"] is True


def compiled_by(run):
    with compilations(*NAMES) as compiled:
        result = run()
    return result, len(compiled)


def test_a_static_value_that_changes_no_equation_compiles_nothing():
    f = graftax.jit(lambda x, name: (x * 2 if name else x, name))
    assert compiled_by(lambda: f(f32(1), "a"))[1] > 0
    assert compiled_by(lambda: f(f32(2), "b")) == ((f32(4), "b"), 0)
    assert compiled_by(lambda: f(f32(2), "")[1])[1] > 0
    assert f(f32(3), "c")[0].tolist() == [6]
    assert [f(f32(i), "b")[0].item() for i in range(4)] == [0, 2, 4, 6]  # a direct call, too


def test_explain_tells_that_the_program_was_there():
    f = graftax.jit(lambda x, name: x * 2)
    for name in "ab":
        f(f32(1), name)
    assert [variant.is_reused for variant in graftax.explain(f).variants] == [False, True]
    assert "was compiled already" in str(graftax.explain(f))
    assert "compiled" not in graftax.explain(f).variants[1].seconds


def test_the_structure_of_the_result_is_that_of_each_call():
    f = graftax.jit(lambda x, pair: (x * 2, x * 3) if pair else [x * 2, x * 3])
    (a, b), _ = compiled_by(lambda: f(f32(1), True))
    result, count = compiled_by(lambda: f(f32(1), False))
    assert type(result) is list and [y.tolist() for y in result] == [a.tolist(), b.tolist()] and count == 0

    def update(state, x, returns):
        state["w"] = state["w"] + x
        return state["w"] * 2 if returns else None

    g = graftax.jit(update)
    for returns in (True, False, True):
        state = {"w": f32(1)}
        assert (g(state, f32(2), returns) is None) is not returns and state["w"].tolist() == [3]


def test_more_than_two_structures_share_one_executable_after_the_first_is_gone():
    f = graftax.jit(lambda x, name: x * 2, cache_size=2)
    f(f32(1), "a")
    for name in "bcd":
        assert compiled_by(lambda name=name: f(f32(1), name)) == (f32(2), 0)


def test_donated_arguments_are_donated():
    f = graftax.jit(lambda x, name: x * 2, donate="x")
    for name in "abb":
        x = jnp.ones(1000)
        assert f(x, name)[0] == 2 and x.is_deleted()


def test_other_shapes_types_and_settings_are_other_programs():
    f = graftax.jit(lambda x, name: x * 2)
    f(f32(1), "a")
    assert f(f32(1, 2), "b").tolist() == [2, 4]
    assert f(jnp.ones(1, "int32"), "b").dtype == jnp.int32
    assert f(f32(1), "b").tolist() == [2]
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        assert f(jnp.ones(1, "float64"), "b").dtype == jnp.float64


def test_host_functions_are_those_of_each_call():
    def make(log, name):
        def host(x):
            log.append((name, float(x)))
            return x

        def f(x, name):
            del name
            return jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x)

        return graftax.jit(f)

    log: list = []
    functions = [make(log, name) for name in "ab"]
    for k, function in enumerate([*functions, *functions]):
        function(jnp.float32(k), "x").block_until_ready()
        function(jnp.float32(k), "y").block_until_ready()
    assert log == [(name, float(k)) for k, name in enumerate("abab") for _ in "xy"]


def test_derivatives_are_those_of_each_call():
    f = graftax.jit(lambda x, name: jax.nn.relu(x) * 2)
    assert [f(jnp.float32(1), name).item() for name in "ab"] == [2, 2]
    assert [jax.grad(f)(jnp.float32(1), name).item() for name in "ab"] == [2, 2]


def test_nans_are_found_in_a_shared_program():
    f = graftax.jit(lambda x, name: jnp.log(x))
    f(f32(1), "a")
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        f(f32(-1), "b")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (lambda x: x * 2.0, lambda y: y * 2.0, True),
        (lambda x: x * 2.0, lambda x: x * 3.0, False),
        (lambda x: x * 0.0, lambda x: x * -0.0, False),
        (lambda x: jax.nn.relu(x), lambda x: jax.nn.relu(x), True),
        (
            lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * 2, x),
            lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * 2, x),
            True,
        ),
        (
            lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * 2, x),
            lambda x: jax.lax.fori_loop(0, 4, lambda i, y: y * 2, x),
            False,
        ),
        (lambda x: (x, x + 1), lambda x: (x + 1, x), False),
        (lambda x: x - jnp.sum(x), lambda x: jnp.sum(x) - x, False),
    ],
)
@pytest.mark.quick(20)
def test_which_programs_are_the_same(one, other, same):
    traced = [jax.jit(function).trace(jnp.ones(3)).jaxpr for function in (one, other)]
    assert run_the_same(*traced) is same


def test_a_constant_that_was_changed_in_place_is_another_program():
    table = np.asarray(2.0, "float32")

    @graftax.jit
    def f(x, name):
        return x * table if float(table) else x  # asks for its value: a constant

    assert f(f32(1), "a").tolist() == [2]
    table[...] = 3
    assert f(f32(1), "b").tolist() == [3]
    table[...] = 2
    assert compiled_by(lambda: f(f32(1), "c")) == (f32(2), 0)
