# SPDX-License-Identifier: Apache-2.0
"""`jit(f, repeated="auto")`: what repeats is shared from its second call on, if the first has shown that it can be."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

pytestmark = pytest.mark.usefixtures("cache_of_jax_is_off")

WIDTH, COUNT = 4, 6
X = jnp.linspace(-1.0, 1.0, 3 * WIDTH).reshape(3, WIDTH)


class Block:
    def __init__(self, key):
        self.w = 0.1 * jax.random.normal(key, (WIDTH, WIDTH))
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        for _ in range(4):
            x = x + jnp.tanh(x @ self.w) * 0.5
        return x


class Logging(Block):
    path = None

    def __call__(self, x):
        with open(self.path, "a") as file:
            file.write("block\n")
        for _ in range(4):
            x = x + jnp.tanh(x @ self.w) * 0.5
        return x


@jax.custom_jvp
def shifted(x):
    return x + 1.0


shifted.defjvp(lambda primals, tangents: (shifted(*primals), 2.0 * tangents[0]))


class Custom(Block):
    def __call__(self, x):
        return shifted(super().__call__(x))


class Small(Block):
    def __call__(self, x):
        return x @ self.w


class Failing(Block):
    def __call__(self, x):
        if self.w.shape[0] != x.shape[-1]:
            raise ValueError("a block of another width")
        return super().__call__(x)


class Model:
    def __init__(self, block=Block):
        self.blocks = [block(key) for key in jax.random.split(jax.random.key(0), COUNT)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


GLOBAL = Model()


def gradient(model, x):
    return graftax.value_and_grad(lambda model: (model(x) ** 2).mean())(model)


def both(step, *arguments, make=Model, **options):
    """What is shared, and whether results and objects are those of the function itself."""
    model, plain = make(), make()
    f = graftax.jit(lambda *given: step(*given), repeated="auto", **options)
    ours, structure = graftax.flatten((f(model, *arguments), model))
    expected, expected_structure = graftax.flatten((step(plain, *arguments), plain))
    assert structure == expected_structure
    for leaf, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-6)
    return list(graftax.explain(f).variants[-1].repeated)


def logged(path):
    """A step that writes a line beside calling its model."""

    def step(model, x):
        with open(path, "a") as file:
            file.write("step\n")
        return model(x)

    return step


@pytest.mark.parametrize("step", [lambda model, x: model(x), gradient])
def test_blocks_are_shared_from_their_second_call_on(step):
    assert both(step, X) == ["Block: traced once for 5 calls"]


def test_a_model_that_is_found_while_the_trace_runs():
    f = graftax.jit(lambda x: GLOBAL(x), repeated="auto")
    np.testing.assert_allclose(f(X), Model()(X), rtol=1e-5)
    assert list(graftax.explain(f).variants[-1].repeated) == ["Block: traced once for 5 calls"]


def test_the_body_runs_once_whatever_it_does_beside_the_blocks(tmp_path):
    path = tmp_path / "log"
    step = logged(path)
    f = graftax.jit(step, repeated="auto", warn_impure=False)
    f(Model(), X)
    assert path.read_text() == "step\n"
    assert list(graftax.explain(f).variants[-1].repeated) == ["Block: traced once for 5 calls"]


def test_blocks_that_do_more_than_compute_are_traced_as_they_are(tmp_path):
    Logging.path = tmp_path / "log"
    f = graftax.jit(lambda model, x: model(x), repeated="auto", warn_impure=False)
    f(Model(Logging), X)
    assert Logging.path.read_text() == "block\n" * COUNT
    assert list(graftax.explain(f).variants[-1].repeated) == []


def test_a_part_that_cannot_be_shared_does_not_begin_the_trace_anew(tmp_path):
    path = tmp_path / "log"
    step = logged(path)
    told = both(step, X, make=lambda: Model(Custom), warn_impure=False)
    assert any("at each call, because it calls a function on the host, or has a derivative" in text for text in told)
    assert path.read_text() == "step\n" * 2  # the plain call and the compiled one


def test_small_parts_are_not_worth_it():
    assert both(lambda model, x: model(x), X, make=lambda: Model(Small)) == []


def test_few_parts_are_not_worth_it():
    def few():
        model = Model()
        del model.blocks[3:]
        return model

    assert both(lambda model, x: model(x), X, make=few) == []


def test_an_error_in_a_later_block_is_raised_where_it_happens():
    model = Model(Failing)
    model.blocks[3].w = jnp.ones((WIDTH + 1, WIDTH + 1))
    with pytest.raises(ValueError, match="another width") as caught:
        graftax.jit(lambda model, x: model(x), repeated="auto")(model, X)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__) if frame.filename == __file__]
    assert names[-2:] == ["__call__", "__call__"] and model.blocks[0].calls == 0


def test_a_word_that_is_none():
    with pytest.raises(TypeError, match="repeated='all'"):
        graftax.jit(lambda x: x, repeated="all")
