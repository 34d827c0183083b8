# SPDX-License-Identifier: Apache-2.0
"""Functions that are equal share their programs, and nothing else: no value, no count, no object of a user."""

import functools
import gc
import inspect
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import pytest

import graftax
from graftax._jit.same_function import meaning_of
from zoo import f32

SCALE = 2.0
TABLE = jnp.arange(3.0)


class Config:
    width = 2


def helper(x):
    return x * TABLE


def compiled(jitted, *args):
    """(the result as a list, how many traces the call took)."""
    before = jitted.cache_info().traces
    return jitted(*args).tolist(), jitted.cache_info().traces - before


@pytest.fixture
def module(monkeypatch):
    """An empty module, into which tests run cells as a notebook does."""
    functions = types.ModuleType("cells_of_a_test")
    monkeypatch.setitem(sys.modules, functions.__name__, functions)
    exec("import jax, jax.numpy as jnp, graftax", vars(functions))
    return functions


def run(module, cell, name="<cell>"):
    exec(compile(cell, name, "exec"), vars(module))


def test_a_lambda_in_a_loop_compiles_once():
    assert [compiled(graftax.jit(lambda x: x * 2 + SCALE), f32(1)) for _ in range(4)] == [
        ([4.0], 1),
        *[([4.0], 0)] * 3,
    ]


class NoModule:
    """Libraries put such objects where modules are: Cython, six, py."""


def test_objects_among_the_modules_are_nobodys(monkeypatch):
    monkeypatch.setitem(sys.modules, "no_module_of_a_test", NoModule())
    assert [compiled(graftax.jit(lambda x: x * 3 + SCALE), f32(1)) for _ in range(3)] == [
        ([5.0], 1),
        ([5.0], 0),
        ([5.0], 0),
    ]


def test_a_lambda_in_a_loop_reads_globals_as_they_are(monkeypatch):
    def call():
        return compiled(graftax.jit(lambda x: helper(x) * Config.width), f32(1, 1, 1))

    assert call() == ([0.0, 2.0, 4.0], 1)
    assert call() == ([0.0, 2.0, 4.0], 0)
    monkeypatch.setitem(globals(), "TABLE", TABLE + 1)
    assert call() == ([2.0, 4.0, 6.0], 0)
    monkeypatch.setattr(Config, "width", 3)
    assert call()[0] == [3.0, 6.0, 9.0]
    monkeypatch.setitem(globals(), "helper", lambda x: -x)
    assert call()[0] == [-3.0, -3.0, -3.0]


def test_closures_share_programs_and_keep_their_own_values():
    def make(scale):
        return graftax.jit(lambda x: x * scale)

    functions = [make(f32(k)) for k in range(1, 4)]
    assert [compiled(function, f32(1)) for function in functions] == [([1.0], 1), ([2.0], 0), ([3.0], 0)]
    assert [function(f32(1)).tolist() for function in functions] == [[1.0], [2.0], [3.0]]
    texts = [graftax.jit(lambda x, how=how: x + len(how)) for how in ("a", "bb", "a")]
    assert [compiled(function, f32(1)) for function in texts] == [([2.0], 1), ([3.0], 1), ([2.0], 0)]


def test_a_number_in_a_closure_that_changes_is_symbolic():
    def make(k):
        return graftax.jit(lambda x: x * k)

    assert [compiled(make(k), f32(1)) for k in (1, 2, 3, 4)] == [([1.0], 1), ([2.0], 1), ([3.0], 0), ([4.0], 0)]


def test_writes_reach_the_variables_of_the_function_that_ran():
    def make():
        total = f32(0)

        @graftax.jit
        def add(x):
            nonlocal total
            total = total + x

        return add, lambda: total.tolist()

    (add, first), (other, second) = make(), make()
    add(f32(1))
    other(f32(5))
    other(f32(5))
    assert (first(), second()) == ([1.0], [10.0])
    assert other.cache_info().traces == 0


def test_a_function_that_a_closure_calls_is_its_own():
    def make(inner):
        return graftax.jit(lambda x: inner(x))

    plus, minus = make(lambda x: x + 1), make(lambda x: x - 1)
    assert (plus(f32(1)).tolist(), minus(f32(1)).tolist()) == ([2.0], [0.0])


def test_a_class_that_a_closure_reads_is_its_own():
    def make(factor):
        class Own:
            width = factor

        return Own, graftax.jit(lambda x: x * Own.width)

    (one, first), (two, second) = make(2), make(3)
    assert (first(f32(1)).tolist(), second(f32(1)).tolist()) == ([2.0], [3.0])
    two.width = 5
    assert (first(f32(1)).tolist(), second(f32(1)).tolist()) == ([2.0], [5.0])
    del one


def test_defaults_are_those_of_the_function():
    def make(value):
        def f(x, y=value, *, z=value):
            return x * y + z

        return graftax.jit(f)

    assert [compiled(make(k), f32(1))[0] for k in (1.0, 2.0, 7.0)] == [[2.0], [4.0], [14.0]]


def test_host_functions_are_those_of_the_function():
    def make(log):
        def note(value):
            log.append(float(value))

        @graftax.jit
        def f(x):
            jax.debug.callback(note, x[0])
            return x

        return f

    one, two = [], []
    f, g = make(one), make(two)
    for function, x in ((f, 1), (g, 2), (f, 3), (g, 4)):
        function(f32(x))
    jax.effects_barrier()
    assert (one, two) == ([1.0, 3.0], [2.0, 4.0])


def test_code_that_looks_at_itself_shares_only_with_equal_text(module):
    cell = "@graftax.jit\ndef f(x):\n    {doc}\n    return x * len(inspect.getdoc(f))\n"
    module.inspect = inspect
    for doc in ('"a"', '"bbb"'):
        run(module, cell.format(doc=doc))
        assert module.f(f32(1)).tolist() == [len(doc) - 2]


def test_annotations_that_are_read_are_those_of_the_function(module):
    for annotation, size in (("x: int", 1), ("x: int, y: int = 0", 2)):
        run(module, f"@graftax.jit\ndef f({annotation}):\n    return x * len(f.__annotations__)\n")
        assert module.f(f32(1)).tolist() == [size]
    for annotation in ("int", "float"):
        run(module, f"def g(x: {annotation}):\n    return x * len(g.__annotations__['x'].__name__)\nh = graftax.jit(g)")
        assert module.h(f32(1)).tolist() == [len(annotation)]


def test_a_traceback_shows_the_lines_of_the_function_that_was_called(module):
    cell = "@graftax.jit\ndef f(x, fails):\n    if fails:\n        raise ValueError\n    return x\n"
    run(module, cell, "first")
    module.f(f32(1), False)
    run(module, "\n\n" + cell, "second")
    assert compiled(module.f, f32(1), False) == ([1.0], 0)
    with pytest.raises(ValueError) as raised:
        module.f(f32(1), True)
    last = raised.traceback[-1]
    assert (last.frame.code.raw.co_filename, last.lineno + 1) == ("second", 6)


def test_other_options_globals_and_attributes_share_nothing(module):
    def make():
        return lambda x: x * 2

    first = make()
    graftax.jit(first)(f32(1))
    assert compiled(graftax.jit(make(), mutation="error"), f32(1)) == ([2.0], 1)
    marked = make()
    marked.note = 1
    assert compiled(graftax.jit(marked), f32(1)) == ([2.0], 1)
    elsewhere = types.FunctionType(first.__code__, vars(module), first.__name__)
    assert compiled(graftax.jit(elsewhere), f32(1)) == ([2.0], 1)


def test_code_that_is_replaced_leaves_the_others():
    def make():
        def f(x):
            return x * 2

        return f

    f, g = make(), make()
    first, second = graftax.jit(f), graftax.jit(g)
    first(f32(1)), second(f32(1))
    f.__code__ = (lambda x: x * 3).__code__
    assert (first(f32(1)).tolist(), second(f32(1)).tolist()) == ([3.0], [2.0])
    assert graftax.jit(make())(f32(1)).tolist() == [2.0]
    assert graftax.jit(f)(f32(1)).tolist() == [3.0]


def test_clear_and_freeze_concern_one_function():
    def make():
        return graftax.jit(lambda x: x * 2)

    first, second = make(), make()
    first(f32(1))
    second.freeze()
    assert compiled(second, f32(1)) == ([2.0], 0)
    with pytest.raises(graftax.RecompileError):
        second(f32(1, 2))
    assert first(f32(1, 2)).tolist() == [2.0, 4.0]
    first.clear_cache()
    assert compiled(first, f32(1)) == ([2.0], 1)
    assert compiled(make(), f32(1)) == ([2.0], 1)


def test_explain_and_cache_info_tell_what_is_shared():
    first, second = (graftax.jit(lambda x: x * 2) for _ in range(2))
    first(f32(1)), second(f32(1)), second(f32(2))
    assert second.cache_info()._asdict() == dict(
        hits=2, misses=0, maxsize=512, currsize=1, traces=0, shared=1, disk=0, compiling=0
    )
    assert first.cache_info().shared == 0
    (cause,) = graftax.explain(second).variants[0].causes
    assert str(cause) == "shared with an equal function"


def test_nothing_of_the_users_is_kept_alive():
    class Model:
        def __init__(self):
            self.w = f32(1)

    def call(model, hidden):
        return graftax.jit(lambda x: model.w * x + hidden[0])(f32(1))

    model, hidden = Model(), jnp.ones(1000)
    refs = [weakref.ref(model), weakref.ref(hidden), weakref.ref(Model)]
    call(model, [hidden])
    del model, hidden, Model
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_a_result_that_holds_an_object_of_the_users_is_not_kept():
    class Tag:
        pass

    def call(tag):
        graftax.jit(lambda x: (x, tag))(f32(1))

    tag = Tag()
    call(tag)
    ref = weakref.ref(tag)
    del tag
    gc.collect()
    assert ref() is None


@pytest.mark.quick(0)
def test_the_programs_that_wait_are_bounded():
    from graftax._jit import same_function

    for i in range(70):
        graftax.jit(eval(f"lambda x: x * {i}", globals()))(f32(1))
    assert len(same_function._IDLE) == same_function._MOST_IDLE_SHARINGS


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("def f(x):\n return x + 1", "\n\ndef f(x):  # a comment\n  'text'\n  return x + 1", True),
        ("def f(x):\n return x + 1", "def f(x):\n return x + 1.0", False),
        ("def f(x):\n return x + 1", "def f(x):\n return x + True", False),
        ("def f(x):\n return x + 0.0", "def f(x):\n return x + -0.0", False),
        ("def f(x):\n return x + 1", "def f(y):\n return y + 1", False),
        ("def f(x):\n return g(x)", "def f(x):\n return h(x)", False),
        ("def f(x):\n return (lambda y: y)(x)", "def f(x):\n\n return (lambda y: y)(x)", True),
        ("def f(x):\n return (lambda y: y)(x)", "def f(x):\n return (lambda y: -y)(x)", False),
        ("def f(x):\n return x in {1, 2}", "def f(x):\n return x in {1, 2.0}", False),
        ("def f(x):\n 'a'\n return f.__doc__", "def f(x):\n 'b'\n return f.__doc__", False),
    ],
)
@pytest.mark.quick(20)
def test_the_meaning_of_code(one, other, equal):
    first, second = (next(c for c in compile(text, "", "exec").co_consts if inspect.iscode(c)) for text in (one, other))
    assert (meaning_of(first) == meaning_of(second)) is equal


def test_a_wrapper_shares_by_what_it_wraps():
    def make(scale):
        def f(x):
            return x * scale

        @functools.wraps(f)
        def wrapper(x):
            return f(x) + 1

        return graftax.jit(wrapper)

    assert [make(k)(f32(1)).tolist() for k in (2.0, 3.0)] == [[3.0], [4.0]]


def test_partials_of_a_function_share_its_programs():
    def scaled(factor, x, shift):
        return factor * x + shift

    jitted = [graftax.jit(functools.partial(scaled, jnp.float32(n), shift=0.5)) for n in (1, 2, 3)]
    assert [f(jnp.ones(())).item() for f in jitted] == [1.5, 2.5, 3.5]
    assert jitted[0].cache_info().traces == 1 and jitted[2].cache_info().currsize == 1
    other = graftax.jit(functools.partial(scaled, shift=jnp.zeros(2)))
    assert other(jnp.ones(()), jnp.ones(2)).tolist() == [1, 1]
    assert graftax.jit(scaled)(jnp.ones(()), jnp.ones(2), 0.5).tolist() == [1.5, 1.5]
