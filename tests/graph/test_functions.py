# SPDX-License-Identifier: Apache-2.0
"""Functions are structure: code, globals, defaults, keyword defaults, cells and attributes."""

import functools
import gc
import pickle
import types
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest

import graftax

x = jnp.arange(3.0)


def scaler(w):
    return lambda y: y * w


def apply(f, y):
    return f(y)


def test_a_fresh_equal_lambda_is_a_hit():
    jitted = graftax.jit(lambda f, y: f(y))
    for _ in range(3):
        assert jitted(lambda y: y + 1, x).tolist() == (x + 1).tolist()
    assert jitted.cache_info().traces == 1


def test_arrays_in_cells_are_inputs():
    jitted = graftax.jit(lambda f, y: f(y))
    for i in range(4):
        assert jitted(scaler(jnp.float32(i)), x).tolist() == (x * i).tolist()
    assert jitted.cache_info().traces == 1


def test_arrays_in_defaults_and_attributes_are_inputs():
    jitted = graftax.jit(lambda f, y: f(y) + f.bias)
    for i in range(3):

        def f(y, w=jnp.float32(i), *, v=jnp.float32(2 * i)):
            return y * w + v

        f.bias = jnp.float32(i)
        assert jitted(f, x).tolist() == (f(x) + i).tolist()
    assert jitted.cache_info().traces == 1


def test_a_static_in_a_cell_is_part_of_the_key():
    jitted = graftax.jit(lambda f, y: f(y))
    for k in (1, 1.0, True, 1):
        assert jitted(scaler(k), x).dtype == (x * k).dtype
    assert jitted.cache_info().traces == 3


def test_other_code_and_other_globals_are_other_keys():
    jitted = graftax.jit(lambda f, y: f(y))
    spaces = [{"w": 2.0}, {"w": 3.0}]
    code = compile("def f(y): return y * w", "<text>", "exec")
    for space in spaces:
        exec(code, space)
        assert jitted(space["f"], x).tolist() == (x * space["w"]).tolist()
    assert jitted(lambda y: y * 2, x).tolist() == (x * 2).tolist()
    assert jitted(lambda y: y * 3, x).tolist() == (x * 3).tolist()
    assert jitted.cache_info().traces == 4


def test_a_fresh_optimizer_is_a_hit():
    @graftax.jit
    def step(tx, params, state):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones(3)}
    for _ in range(3):
        tx = optax.adam(1e-3)
        params, _ = step(tx, params, tx.init(params))
    assert step.cache_info().traces == 1
    step(optax.adam(1e-2), params, tx.init(params))
    assert step.cache_info().traces == 2


def test_nonlocal_writes_come_back_through_cells():
    def counter(start):
        total = start

        def add(y):
            nonlocal total
            total = total + y
            return total

        return add, lambda: total

    add, total = counter(jnp.zeros(()))
    jitted = graftax.jit(lambda f, y: f(y))
    assert [float(jitted(add, 2.0 * jnp.ones(()))) for _ in range(3)] == [2, 4, 6]
    assert float(total()) == 6
    assert jitted.cache_info().traces == 1
    count, number = counter(0)
    assert [jitted(count, 1) for _ in range(3)] == [1, 2, 3]
    assert number() == 3


def test_two_functions_share_a_cell():
    def pair():
        w = jnp.ones(())

        def write(y):
            nonlocal w
            w = w + y

        return write, lambda: w

    @graftax.jit
    def use(functions):
        write, read = functions
        write(jnp.float32(1))
        return read()

    functions = list(pair())
    assert [float(use(functions)) for _ in range(3)] == [2, 3, 4]
    assert float(functions[1]()) == 4


def test_attributes_defaults_and_keyword_defaults_written_inside_come_back():
    def g(y, k=1, *, j=2):
        return y * k + j

    @graftax.jit
    def f(g, y):
        g.calls = getattr(g, "calls", 0) + 1
        g.__defaults__ = (g.__defaults__[0] + 1,)
        g.__kwdefaults__["j"] = g.__kwdefaults__["j"] * 2
        return g(y)

    for i in range(1, 4):
        assert f(g, x).tolist() == (x * (1 + i) + 2 * 2**i).tolist()
        assert (g.calls, g.__defaults__, g.__kwdefaults__) == (i, (1 + i,), {"j": 2 * 2**i})


@pytest.mark.parametrize("wrap", [graftax.jit, graftax.filter_jit])
def test_a_function_made_inside_is_fresh_for_each_call(wrap):
    make = wrap(lambda y: lambda z: z + y * 2)
    first, second = make(x), make(x + 1)
    assert first is not second
    assert first(0).tolist() == (x * 2).tolist()
    assert second(0).tolist() == (x * 2 + 2).tolist()
    first.mark = 1
    assert not hasattr(second, "mark")


def test_an_argument_comes_back_as_itself():
    for f in (scaler(x), scaler(2), apply, lambda y: y):
        assert graftax.jit(lambda g, y: {"g": g, "y": y})(f, x)["g"] is f


def test_functions_of_modules_and_classes_come_out_as_themselves():
    class Box:
        def get(self):
            return self.w

    result = graftax.jit(lambda y: (apply, [scaler], Box.get))(x)
    assert result[0] is apply and result[1][0] is scaler
    assert result[2].__code__ is Box.get.__code__


def test_identity_between_two_functions_is_kept():
    same = graftax.jit(lambda f, g, y: (f is g, f == g))
    f, g = scaler(x), scaler(x)
    assert same(f, f, x) == (True, True)
    assert same(f, g, x) == (False, False)


def test_a_function_that_reaches_itself():
    def make(w):
        def power(y, n):
            return y if n == 0 else power(y * w, n - 1)

        return power

    jitted = graftax.jit(lambda f, y: f(y, 3))
    for i in (1.0, 2.0):
        assert jitted(make(jnp.float32(i)), x).tolist() == (x * i**3).tolist()
    assert jitted.cache_info().traces == 1


def test_a_captured_helper_with_arrays_is_followed():
    w = jnp.ones(())

    def helper(y):
        return y * w

    jitted = graftax.jit(lambda y: helper(y))
    assert jitted(x).tolist() == x.tolist()
    w = jnp.float32(5)
    assert jitted(x).tolist() == (5 * x).tolist()
    assert jitted.cache_info().traces == 1


def test_an_empty_cell_stays_empty():
    def make():
        def f(y):
            try:
                return y * later
            except NameError:
                return y

        if x is None:
            later = 2
        return f

    assert graftax.jit(lambda f, y: f(y))(make(), x).tolist() == x.tolist()


def test_names_are_part_of_the_key_and_kept():
    jitted = graftax.jit(lambda f, y: (f.__name__, f.__qualname__, f(y)))
    f = scaler(x)
    f.__name__ = "other"
    assert jitted(f, x)[:2] == ("other", f.__qualname__)
    assert jitted(scaler(x), x)[0] == "<lambda>"


def test_functions_as_keys_count_by_identity():
    f, g = scaler(2), scaler(2)
    jitted = graftax.jit(lambda table, h, y: table.get(h, 7) * y)
    assert jitted({f: 3}, f, x).tolist() == (3 * x).tolist()
    assert jitted({f: 3}, g, x).tolist() == (7 * x).tolist()
    assert jitted({g: 3}, g, x).tolist() == (3 * x).tolist()


def test_the_arrays_of_functions_in_a_static_argument_are_constants():
    jitted = graftax.jit(apply, static_argnames="f")
    assert jitted(scaler(2), x).tolist() == (2 * x).tolist()
    for w in (x, x + 1, x):
        assert jitted(scaler(w), x).tolist() == (w * x).tolist()
    assert jitted.cache_info().traces == 3


def test_code_replaced_inside_is_a_clear_error():
    def g(y):
        return y

    def f(g, y):
        g.__code__ = (lambda y: y + 1).__code__
        return g(y)

    with pytest.raises(graftax.StructureError, match="code"):
        graftax.jit(f)(g, x)
    assert g(1) in (1, 2)


def test_functions_flatten_print_and_rebuild():
    f = scaler(x)
    leaves, graphdef = graftax.flatten({"f": f, "g": f})
    assert leaves == [x] or leaves[0] is x
    assert repr(graphdef) == "GraphDef({'f': #1=function(scaler.<locals>.<lambda>, None, None, cell(*)), 'g': #1})"
    restored = graftax.unflatten(graphdef, [x + 1])
    assert restored["f"] is restored["g"] and restored["f"] is not f
    assert restored["f"](1).tolist() == (x + 1).tolist()
    assert graftax.flatten({"f": scaler(x), "g": 1})[1] != graphdef
    other = scaler(x)
    assert graftax.flatten({"f": other, "g": other})[1] == graphdef
    back = graftax.from_dict(graftax.to_dict({"f": f, "g": f}))
    assert back["f"] is back["g"] and back["f"](1).tolist() == x.tolist()


def test_a_graphdef_with_module_functions_pickles_and_one_with_lambdas_says_why_not():
    _, graphdef = graftax.flatten([scaler, apply])
    assert pickle.loads(pickle.dumps(graphdef)) == graphdef
    with pytest.raises(graftax.UnpicklableError, match="lambda"):
        pickle.dumps(graftax.flatten([scaler(1)])[1])


def test_no_function_and_no_namespace_is_kept_alive():
    jitted = graftax.jit(lambda f, y: f(y))
    f = scaler(x)
    marker = types.ModuleType("marker")
    space = {"marker": marker}
    exec("def g(y): return y", space)
    jitted(f, x), jitted(space["g"], x)
    reference = weakref.ref(f)
    del f
    gc.collect()
    assert reference() is None
    code = weakref.ref(space["g"].__code__)
    space.clear()
    gc.collect()
    assert code() is None
    jitted(lambda y: y + 7, x)  # a new entry sweeps those that can never match again
    assert jitted.cache_info().currsize == 2


def test_wrapped_functions_are_followed_through_their_attributes():
    def logged(f):
        @functools.wraps(f)
        def inner(*args):
            return f(*args)

        return inner

    jitted = graftax.jit(lambda f, y: f(y))
    for i in range(3):
        assert jitted(logged(scaler(x + i)), x).tolist() == (x * (x + i)).tolist()
    assert jitted.cache_info().traces == 1


def test_what_is_compiled_for_a_function_is_no_part_of_it():
    def h(y):
        return y + 1

    jitted = graftax.jit(lambda f, y: f(y))
    jitted(h, x)
    compiled = graftax.jit(h)
    compiled(x)
    assert jitted(h, x).tolist() == (x + 1).tolist()
    assert jitted.cache_info().traces == 1
    compiled(x)
    assert compiled.cache_info().traces == 1
