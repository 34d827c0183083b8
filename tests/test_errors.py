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


def test_a_static_that_keeps_changing_earns_one_warning_with_its_path():
    f = graftax.jit(lambda config, x: x * config["rate"])
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
        graftax.jit(lambda config: None)({"data": [1, iter([1])]})


def test_an_exception_of_a_flatten_function_is_unchanged_and_says_where():
    class Broken:
        pass

    def flatten(b):
        raise KeyError("mine")

    jax.tree_util.register_pytree_node(Broken, flatten, lambda aux, c: Broken())
    with pytest.raises(KeyError, match="mine") as caught:
        graftax.jit(lambda model: None)({"layers": [Broken()]})
    assert any("model['layers'][0]" in note for note in caught.value.__notes__)
