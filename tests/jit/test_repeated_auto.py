# SPDX-License-Identifier: Apache-2.0
"""`repeated="auto"`, the default: what repeats is shared from its second call on, if the first shows that it can."""

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
        self.calls = jnp.zeros((), jnp.int32)

    def __call__(self, x):
        self.calls += 1
        for _ in range(8):
            x = x + jnp.tanh(x @ self.w) * 0.5
        return x


class Counting(Block):
    def __init__(self, key):
        super().__init__(key)
        self.calls = 0


class Logging(Block):
    path = None

    def __call__(self, x):
        with open(self.path, "a") as file:
            file.write("block\n")
        for _ in range(8):
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


class Stages:
    """Blocks of one class and of several widths, as in a ResNet: so many of each."""

    def __init__(self, *counts):
        self.stages = [[Block(jax.random.key(i)) for i in range(count)] for count in counts]
        for width, stage in enumerate(self.stages):
            for block in stage:
                block.w = jnp.eye(WIDTH + width)

    def __call__(self, x):
        for stage in self.stages:
            x = jnp.pad(x, ((0, 0), (0, stage[0].w.shape[0] - x.shape[1])))
            for block in stage:
                x = block(x)
        return x


def test_few_equal_blocks_among_many_are_not_shared():
    step, model, plain = graftax.jit(lambda model, x: model(x)), Stages(2, 3, 5, 2), Stages(2, 3, 5, 2)
    for _ in range(2):
        np.testing.assert_allclose(step(model, X), plain(X), rtol=1e-6)
    # The first of the five equal ones is traced as it is.
    assert graftax.explain(step).variants[0].repeated == ("Block: traced once for 4 calls",)
    assert [block.calls.item() for stage in model.stages for block in stage] == [2] * 12


def test_few_blocks_that_are_called_often_are_shared():
    step = graftax.jit(lambda blocks, x: [x := block(x) for _ in range(4) for block in blocks][-1])
    blocks = [Block(key) for key in jax.random.split(jax.random.key(0), 2)]
    step(blocks, X)
    assert [block.calls.item() for block in blocks] == [4, 4]
    (text,) = graftax.explain(step).variants[0].repeated
    assert text.startswith("Block: traced once for")


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
    texts = both(step, X, make=lambda: Model(Custom), warn_impure=False)
    assert any("at each call, because it calls a function on the host, or has a derivative" in text for text in texts)
    assert path.read_text() == "step\n" * 2  # the plain call and the compiled one


def test_small_parts_are_not_worth_it():
    assert both(lambda model, x: model(x), X, make=lambda: Model(Small)) == []


def test_few_parts_are_not_worth_it():
    def few():
        model = Model()
        del model.blocks[3:]
        return model

    assert both(lambda model, x: model(x), X, make=few) == []


def test_blocks_that_count_in_python_are_traced_as_they_are_and_compile_once():
    model, plain = Model(Counting), Model(Counting)
    f = graftax.jit(lambda model, x: model(x))
    for _ in range(3):
        np.testing.assert_allclose(f(model, X), plain(X), rtol=1e-5)
    assert [block.calls for block in model.blocks] == [3] * COUNT
    assert f.cache_info().traces == 1


def test_a_counter_beside_the_blocks_costs_no_second_compilation():
    class Trainer:
        def __init__(self):
            self.model, self.steps = Model(), 0

    @graftax.jit
    def f(trainer, x):
        trainer.steps += 1
        return trainer.model(x) * trainer.steps

    trainer, plain = Trainer(), Model()
    for i in range(3):
        np.testing.assert_allclose(f(trainer, X), plain(X) * (i + 1), rtol=1e-5)
    assert trainer.steps == 3 and f.cache_info().traces == 1
    assert list(graftax.explain(f).variants[-1].repeated) == ["Block: traced once for 5 calls"]


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


def rough(x, k):
    for _ in range(6):
        x = x + jnp.tanh(x * k) * 0.5
    return x


class Springs:
    def __init__(self):
        self.k, self.calls = jnp.ones(()), jnp.zeros((), jnp.int32)

    def step(self, x):
        self.calls += 1
        return rough(rough(x, self.k), self.k)


def test_functions_and_methods_of_one_object_are_shared_from_their_fourth_call_on():
    def simulate(springs, x):
        for _ in range(8):
            x = springs.step(x)
        return x

    springs, f = Springs(), graftax.jit(simulate)
    np.testing.assert_allclose(f(springs, X), simulate(Springs(), X), rtol=1e-5)
    assert springs.calls == 8
    texts = list(graftax.explain(f).variants[-1].repeated)
    assert "Springs.step: traced once for 5 calls" in texts


def test_a_function_that_changes_what_it_captures_is_not_shared():
    def program(wrap):
        state = {"w": jnp.ones(3)}

        def accumulate(x):
            state["w"] = state["w"] + x
            return rough(state["w"], 2.0)

        def run(x):
            for _ in range(6):
                x = accumulate(x)
            return x

        return wrap(run)(jnp.ones(3)), state["w"]

    for one, other in zip(program(graftax.jit), program(lambda f: f), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_function_that_is_given_shared_arrays_still_tells_of_their_copies():
    w = jnp.ones((2, 3))
    f = graftax.jit(lambda m: (0, jax.tree.map(lambda w: rough(w, 2.0), m)))
    with pytest.warns(graftax.UntiedWarning):
        f({"a": w, "b": w, "c": w + 1, "d": w + 2, "e": w + 3})


def test_what_is_searched_for_leaks_has_no_parts():
    f = graftax.jit(lambda model, x: model(x))
    with jax.checking_leaks():
        f(Model(), X)
    assert list(graftax.explain(f).variants[-1].repeated) == []
