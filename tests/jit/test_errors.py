# SPDX-License-Identifier: Apache-2.0
"""Messages: JAX's own errors name key paths and the user's function, and ours say what to write instead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax


@pytest.mark.parametrize("others", [0, 100])
def test_an_error_of_jax_names_the_key_path_and_the_function(others):
    @graftax.jit
    def choose(config, x):
        return x if config["sizes"][1] > 0 else -x

    config = {"sizes": [1, jnp.ones(())], "others": [jnp.ones(1) for _ in range(others)]}
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        choose(config, jnp.ones(2))
    message = str(caught.value)
    assert "config['sizes'][1]" in message
    assert "choose" in message
    assert __file__ in message
    assert "leaves[" not in message


def test_a_deleted_array_is_named():
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(RuntimeError, match=r"model\['w'\] holds an array that was deleted.*donate"):
        graftax.jit(lambda model: model["w"] + 1)({"w": x})


@pytest.mark.quick(0)
def test_a_static_that_keeps_changing_earns_one_warning_with_its_path():
    f = graftax.jit(lambda config, x: x * config["rate"], numbers="static")
    with pytest.warns(graftax.RecompileWarning, match=r"config\['rate'\].*graftax\.Dynamic") as caught:
        for i in range(30):
            f({"rate": 0.5 + i}, jnp.ones(1))
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_big_captured_numpy_array_earns_one_warning_with_its_name():
    table = np.zeros((600, 600))
    f = graftax.jit(lambda x: x + table[0, 0])
    with pytest.warns(graftax.CapturedArrayWarning, match=r"table.*jnp\.asarray") as caught:
        f(jnp.ones(1))
        f(jnp.ones(2))
        f(jnp.ones(1))
    assert len(caught) == 1


def test_a_refused_value_is_named_with_its_path_and_the_way_out():
    with pytest.raises(graftax.UnsupportedValueError, match=r"config\['data'\]\[1\].*list"):
        graftax.jit(lambda config: next(config["data"][1]))({"data": [1, iter([1])]})


def test_an_exception_of_a_flatten_function_is_unchanged_and_says_where():
    class Broken:
        pass

    def flatten(b):
        raise KeyError("mine")

    jax.tree_util.register_pytree_node(Broken, flatten, lambda aux, c: Broken())
    with pytest.raises(KeyError, match="mine") as caught:
        graftax.jit(lambda model: None)({"layers": [Broken()]})
    assert any("model['layers'][0]" in note for note in caught.value.__notes__)


def test_an_error_of_numpy_shapes_names_the_key_path():
    with pytest.raises(TypeError, match=r"argument config\['size'\]"):
        graftax.jit(lambda config: jnp.zeros(config["size"]))({"size": jnp.asarray(3)})


def test_an_exception_of_the_function_that_looks_like_jax_is_unchanged():
    def f(x):
        raise ValueError("leaves[0] is mine")

    with pytest.raises(ValueError, match=r"leaves\[0\] is mine"):
        graftax.jit(f)(jnp.ones(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"donate": "al"}, r"donate='al': f has no argument 'al'; it takes state\. Words are all, all-except-first"),
        ({"donate": "sate.opt"}, r"donate='sate\.opt': f has no argument 'sate'.*pattern of key paths.*It takes state"),
        ({"dynamic": "sate['lr']"}, r"dynamic=.*f has no argument 'sate'"),
        ({"donate": 3}, r"donate=3: f has no positional argument 3; it takes 1"),
        ({"static_argnames": "sate"}, r"static_argnames='sate'"),
        ({"static_argnums": 3}, r"static_argnums=3"),
        ({"static_argnums": 0, "donate_argnames": "state"}, r"f: the argument 'state' is static and donated"),
        ({"static_argnames": "state", "donate_argnums": -1}, r"f: the argument 'state' is static and donated"),
    ],
)
def test_an_option_that_names_no_argument_is_refused_where_jit_is_called(options, message):
    def f(state):
        return state

    with pytest.raises(ValueError, match=message):
        graftax.jit(f, **options)


@pytest.mark.parametrize("option", ["static_argnames", "donate_argnames"])
def test_a_name_that_takes_any_number_of_arguments_is_refused(option):
    def f(x, *rest, **options):
        return x

    with pytest.raises(ValueError, match=r"='rest': \*rest of .*f is any number of arguments\. Write their positions"):
        graftax.jit(f, **{option: "rest"})


@pytest.mark.parametrize("pattern", ["**.opt", "*['w']", "state.opt", "args[0].w", "closure n", "global ROOT"])
def test_a_pattern_that_may_match_is_taken(pattern):
    graftax.jit(lambda state, *args: state, donate=pattern, dynamic=pattern)


def test_a_sharding_prefix_that_does_not_fit_names_the_place():
    with pytest.raises(ValueError, match=r"no entry for d\['b'\]"):
        graftax.jit(lambda d: d, in_shardings=({"a": None},))({"b": jnp.ones(1)})


def test_register_static_of_a_value_says_what_to_write():
    with pytest.raises(TypeError, match=r"expects a class, got 3\. .*graftax\.Static"):
        graftax.register_static(3)


def test_a_lost_change_is_reported_where_the_function_was_called():
    @graftax.filter_jit
    def f(model):
        model["w"] = model["w"] + 1

    with pytest.warns(graftax.LostChangeWarning, match="model") as caught:
        f({"w": jnp.ones(1)})
    assert caught[0].filename == __file__


@pytest.mark.quick(0)
def test_structures_that_change_on_every_call_earn_one_warning_with_the_places():
    class Trainer:
        def __init__(self):
            self.w, self.phase, self.history = jnp.ones(()), "0", []

        @graftax.jit
        def step(self, x):
            self.w = self.w + x
            return self.w

    trainer = Trainer()
    with pytest.warns(graftax.RecompileWarning, match=r"step compiles again on most calls") as caught:
        for _ in range(20):
            trainer.history.append(trainer.step(jnp.ones(())))
            trainer.phase = str(int(trainer.phase) + 1)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert "self.phase was '2', is '3'" in message
    assert "self.history[2] was nothing, is an array" in message


@pytest.mark.filterwarnings("error::graftax.RecompileWarning")
@pytest.mark.quick(0)
def test_many_different_calls_in_a_row_earn_no_warning():
    f = graftax.jit(lambda a, b: len(a) + len(b))
    a, b = [], []
    for n in range(20):  # no two neighbours in a row differ in the same place
        (b if n % 2 else a).append(jnp.ones(()))
        assert f(a, b) == n + 1


@pytest.mark.filterwarnings("error::graftax.RecompileWarning")
@pytest.mark.quick(0)
def test_structures_that_change_between_hits_earn_no_warning():
    f = graftax.jit(lambda xs, n: sum(xs) + n)
    for n in range(1, 20):
        for _ in range(3):
            f([jnp.ones(())] * n, 2 * n)


@pytest.mark.quick(0)
def test_two_numbers_that_change_on_every_call_earn_one_warning():
    f = graftax.jit(lambda x, n, m: x * n + m, numbers="static")
    with pytest.warns(graftax.RecompileWarning, match=r"n was 2, is 3\n  m was 4, is 6") as caught:
        for n in range(20):
            f(jnp.ones(()), n, 2 * n)
    assert len(caught) == 1


@pytest.mark.filterwarnings("error::graftax.RecompileWarning")
def test_a_function_of_many_kinds_earns_no_warning():
    f = graftax.jit(lambda x: x)
    for x in ([1], {1}, (1,), {1: 1}, 1, "1", None, b"1", 1.0, 1j, frozenset({1}), [[1]], bytearray(b"1")):
        assert f(x) == x
