# SPDX-License-Identifier: Apache-2.0
"""`jit(f, repeated=...)`: calls that repeat are traced once, and everything else is as without the option."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import graftax

pytestmark = pytest.mark.usefixtures("cache_of_jax_is_off")

WIDTH = 4
SCALE = {"factor": jnp.ones(())}
SEEN = []
MODELS = {}


def shared(f):
    """What `explain` says of the calls in the last program of a function."""
    return list(graftax.explain(f).variants[-1].repeated)


class Block:
    def __init__(self, key):
        self.w = 0.1 * jax.random.normal(key, (WIDTH, WIDTH))
        self.mean = jnp.zeros(WIDTH)
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        y = jnp.tanh(x @ self.w)
        self.mean = 0.9 * self.mean + 0.1 * jax.lax.stop_gradient(y.mean(0))
        return x + y


class Model:
    def __init__(self, count=4, block=Block):
        self.blocks = [block(key) for key in jax.random.split(jax.random.key(0), count)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def train(model, x):
    loss, grads = graftax.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    for block, gradient in zip(model.blocks, grads.blocks, strict=True):
        block.w = block.w - 0.1 * gradient.w
    return loss


X = jnp.linspace(-1.0, 1.0, 3 * WIDTH).reshape(3, WIDTH)


def outcome(step, model, *arguments):
    """What a call returns, and what the model is afterwards."""
    result = step(model, *arguments)
    return graftax.flatten((result, model))


def assert_same(with_option, without):
    leaves, structure = with_option
    expected, expected_structure = without
    assert structure == expected_structure
    for leaf, other in zip(leaves, expected, strict=True):
        assert leaf.dtype == other.dtype
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-6)


def check(function, make, *arguments, repeated=Block, calls=2):
    """The jitted function with the option does what it does without; gives what was shared."""
    plain, model = graftax.jit(lambda *a: function(*a)), make()
    jitted, other = graftax.jit(lambda *a: function(*a), repeated=repeated), make()
    for _ in range(calls):
        assert_same(outcome(jitted, other, *arguments), outcome(plain, model, *arguments))
    return shared(jitted)


def forward(model, x):
    return model(x)


@pytest.mark.quick(1)
@pytest.mark.parametrize("repeated", [Block, Block.__call__, True, (Block, Model)])
@pytest.mark.parametrize("step", [forward, train])
def test_blocks_are_traced_once(step, repeated):
    f = graftax.jit(lambda model, x: step(model, x), repeated=repeated)
    model = Model()
    assert_same(outcome(f, model, X), outcome(lambda model, x: step(model, x), Model(), X))
    assert shared(f) == ["Block: traced once for 4 calls"]
    assert [block.calls for block in model.blocks] == [1, 1, 1, 1]


def test_the_program_calls_one_function():
    model = Model(6)
    plain = graftax.jit(forward).trace(model, X).jaxpr
    inner = graftax.jit(forward, repeated=Block).trace(model, X).jaxpr
    calls = [equation for equation in inner.eqns if equation.params.get("name") == "Block"]
    assert len(calls) == 6 and len(plain.eqns) > 6
    assert len({id(equation.params["jaxpr"]) for equation in calls}) == 1


def test_shapes_dtypes_and_structures_have_programs_of_their_own():
    def step(model, x):
        first, second, third, fourth = model.blocks
        second.name = "other"
        y = first(x) + third(x) + second(x)
        return y, fourth(x[:2]), first(x.astype(jnp.float16))

    assert check(step, Model, X, calls=1) == ["Block: traced once for 2 calls"]


def test_shared_weights_stay_shared():
    def tied():
        model = Model(4)
        model.blocks[2] = model.blocks[0]
        model.blocks[1].w = model.blocks[3].w
        return model

    assert check(train, tied, X, calls=1)


def test_one_object_twice_in_the_arguments():
    class Pair(Block):
        def __call__(self, x, other):
            other.calls += 1
            self.mean = self.mean + other.mean + 1
            return super().__call__(x)

    def step(model, x):
        a, b, c, _ = model.blocks
        return a(x, b), b(x, c), c(x, c), a(x, a)

    check(step, lambda: Model(4, Pair), X, repeated=Pair, calls=1)


class Plain(Block):
    def __call__(self, x):
        y = jnp.tanh(x @ self.w)
        self.mean = self.mean + y.mean(0)
        return x + y


def in_scan(model, x):
    return graftax.scan(lambda x, _: (model(x), None), x, length=2)[0]


def in_cond(model, x):
    return graftax.cond(x.sum() > 0, lambda: model(x), lambda: 2 * model(x))


def in_vmap(model, x):
    return graftax.vmap(lambda x: jax.tree.leaves([block.pure(x) for block in model.blocks]))(x)


def in_vmap_of_jax(model, x):
    return jax.vmap(lambda x: [block.pure(x) for block in model.blocks])(x)


def in_checkpoint(model, x):
    return graftax.grad(lambda x: graftax.checkpoint(model)(x).sum())(x)


def in_checkpoint_of_jax(model, x):
    return jax.grad(jax.checkpoint(lambda x: sum(block.pure(x).sum() for block in model.blocks)))(x)


def in_hessian(model, x):
    return graftax.hessian(lambda x: model(x).sum())(x)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "step", [in_scan, in_cond, in_vmap, in_vmap_of_jax, in_checkpoint, in_checkpoint_of_jax, in_hessian]
)
def test_inside_of_transforms(step):
    class Inner(Plain):
        def pure(self, x):
            return jnp.sin(x @ self.w) * self.w.sum()

    lines = check(step, lambda: Model(4, Inner), X, repeated=(Inner, Inner.pure), calls=1)
    assert lines and all("traced once for" in line for line in lines)


@pytest.mark.quick(0)
def test_counters_that_change_between_calls():
    check(train, Model, X, calls=3)


def test_a_number_beside_the_calls_may_change():
    f = graftax.jit(lambda model, x, n: model(x) * n, repeated=Plain)
    model, other = Model(3, Plain), Model(3, Plain)
    for n in range(1, 5):
        assert_same(graftax.flatten((f(model, X, n), model)), graftax.flatten((other(X) * n, other)))
    assert f.cache_info().traces == 2
    assert [variant.repeated for variant in graftax.explain(f).variants] == [("Plain: traced once for 3 calls",)] * 2


def test_a_number_that_is_passed_may_change():
    class Scaling(Plain):
        def __call__(self, x, n):
            return super().__call__(x) * n if n > 2 else super().__call__(x)

    def step(model, x, n):
        for block in model.blocks:
            x = block(x, n)
        return x

    f, model, other = graftax.jit(step, repeated=Scaling), Model(3, Scaling), Model(3, Scaling)
    for n in (1, 2, 3, 2, 4):
        assert_same(graftax.flatten((f(model, X, n), model)), graftax.flatten((step(other, X, n), other)))


@dataclasses.dataclass
class Dropout:
    rate: float
    key: jax.Array

    def __call__(self, x):
        self.key, use = jax.random.split(self.key)
        return jnp.where(jax.random.bernoulli(use, self.rate, x.shape), x, 0)


def test_random_streams_go_on():
    def step(layers, x):
        for layer in layers:
            x = layer(x)
        return x

    shared_key = [Dropout(0.5, jax.random.key(3)) for _ in range(3)]
    lines = check(step, lambda: [dataclasses.replace(layer) for layer in shared_key], X, repeated=Dropout)
    assert lines == ["Dropout: traced once for 3 calls"]


# ---- what is read besides the arguments


class Scaled(Plain):
    def __call__(self, x):
        return super().__call__(x) * SCALE["factor"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("doubles", [False, True])
def test_a_global_is_read_anew(doubles):
    def step(model, x):
        y = model.blocks[0](x) + model.blocks[1](x)
        if doubles:
            SCALE["factor"] = SCALE["factor"] * 2
        return y + model.blocks[2](x) + model.blocks[3](x)

    def run(**options):
        SCALE["factor"] = jnp.ones(())
        f, model = graftax.jit(lambda model, x: step(model, x), **options), Model(4, Scaled)
        results = [outcome(f, model, X), outcome(f, model, X)]
        SCALE["factor"] = 3 * jnp.ones(())
        return [*results, outcome(f, model, X), outcome(f, Model(4, Scaled), X)], f

    results, f = run(repeated=Scaled)
    for ours, plain in zip(results, run()[0], strict=True):
        assert_same(ours, plain)
    calls = 2 if doubles else 4
    assert f"Scaled: traced once for {calls} calls" in graftax.explain(f).variants[0].repeated


class Logging(Block):
    def __call__(self, x):
        y = super().__call__(x)
        note(y)
        return y


def note(y):
    SEEN.append(y.sum())


def test_what_changes_a_global_is_not_shared():
    def run(**options):
        SEEN.clear()
        f = graftax.jit(lambda model, x: model(x), **options)
        y = f(Model(3, Logging), X)
        return y, [float(s) for s in SEEN], shared(f)

    y, seen, lines = run(repeated=Logging)
    expected, seen_before, _ = run()
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert len(seen) == 3 and np.allclose(seen, seen_before)
    assert lines == ["Logging: traced at each call, because it changes what is not among its arguments"]


class Counting(type):
    instances = 0


class Counted(metaclass=Counting):
    made = 0

    def __init__(self, x):
        type(self).made += 1
        Counting.instances += 1
        self.x = x


def in_its_class(block, x):
    type(block).calls_of_all += 1
    return x


def in_a_class_that_is_read(block, x):
    Counted.made += 2
    return x * Counted.made


def in_the_class_of_what_it_makes(block, x):
    return Counted(x).x


def as_an_array(block, x):
    type(block).last = x.sum()
    return x


@pytest.mark.parametrize("repeated", ["auto", None, "named"])
@pytest.mark.parametrize("effect", [in_its_class, in_a_class_that_is_read, in_the_class_of_what_it_makes, as_an_array])
def test_what_changes_a_class_is_not_shared(effect, repeated):
    def program(wrap):
        class Summing(Block):
            calls_of_all, last = 0, jnp.zeros(())

            def __call__(self, x):
                for _ in range(8):  # large enough for sharing to pay
                    x = super().__call__(x)
                return effect(self, x)

        Counted.made = Counting.instances = 0
        f, model = wrap(Model.__call__, Summing), Model(5, Summing)
        y = [f(model, X) for _ in range(2)]
        return y, Summing.last, (Summing.calls_of_all, Counted.made, Counting.instances)

    plain = program(lambda f, _: f)
    compiled = program(lambda f, block: graftax.jit(f, repeated=block if repeated == "named" else repeated))
    assert compiled[2] == plain[2]
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4), compiled[:2], plain[:2])


class Reaching(Block):
    def __call__(self, x):
        MODELS["model"].blocks[0].calls += 1
        return super().__call__(x)


def test_what_reaches_its_arguments_by_name():
    def run(**options):
        MODELS["model"] = Model(3, Reaching)
        f = graftax.jit(lambda x: MODELS["model"](x), **options)
        y = f(X)
        return y, [block.calls for block in MODELS["model"].blocks]

    y, calls = run(repeated=Reaching)
    expected, calls_before = run()
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    assert calls == calls_before == [4, 1, 1]


def test_what_prints_prints_each_time(capsys):
    class Printing(Block):
        def __call__(self, x):
            print("block", self.calls)
            return super().__call__(x)

    with pytest.warns(graftax.errors.ImpureCallWarning):
        f = graftax.jit(forward, repeated=Printing)
        f(Model(3, Printing), X)
    printed = capsys.readouterr().out
    assert printed.count("block 0") >= 3
    assert "cannot repeat" in shared(f)[0]


def test_callbacks_run_for_each_object():
    def run(**options):
        seen = []

        class Calling(Block):
            def __call__(self, x):
                name = self.name
                jax.debug.callback(lambda total: seen.append((name, round(float(total), 3))), x.sum())
                return super().__call__(x)

        model = Model(3, Calling)
        for block in model.blocks:
            block.name = "same"
        f = graftax.jit(lambda model, x: model(x), **options)
        f(model, X)
        jax.effects_barrier()
        return sorted(seen)

    assert run(repeated=True) == run()


def test_rules_of_derivatives_that_close_over_the_object():
    class Ruled(Block):
        def __call__(self, x):
            w = self.w

            @jax.custom_vjp
            def apply(x):
                return jnp.tanh(x @ w)

            def back(x, g):
                return (2 * g @ w.T,)

            apply.defvjp(lambda x: (apply(x), x), back)
            return apply(x)

    def step(model, x):
        return jax.grad(lambda x: model(x).sum())(x)

    check(step, lambda: Model(3, Ruled), X, repeated=Ruled, calls=1)


# ---- errors


class Failing(Block):
    def __call__(self, x):
        if self.w.sum() > 0:
            return x
        return super().__call__(x)


def test_errors_are_those_without_the_option():
    messages = []
    for options in ({}, {"repeated": Failing}):
        with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
            graftax.jit(forward, **options)(Model(2, Failing), X)
        messages.append(str(raised.value))
        names = [entry.name for entry in raised.traceback]
        assert "__call__" in names and "answer" not in names
    assert messages[0] == messages[1]


def test_an_error_that_is_caught():
    class Picky(Block):
        def __call__(self, x):
            if x.shape[0] == 3:
                raise ValueError("three")
            return super().__call__(x)

    def step(model, x):
        try:
            return model(x)
        except ValueError:
            return model(x[:2])

    check(step, lambda: Model(3, Picky), X, repeated=Picky)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "is not a Python class, method or function"),
        (int, "are not called"),
        ("Block", "is not a Python class, method or function"),
    ],
)
def test_what_is_no_part(given, message):
    with pytest.raises(TypeError, match=message):
        graftax.jit(forward, repeated=given)


def test_functions_repeat_too():
    def layer(params, x):
        return jnp.tanh(x @ params["w"]) + params.get("b", 0)

    def step(params, x):
        for each in params:
            x = layer(each, x)
        return x

    def make():
        return [{"w": key_w} for key_w in jax.random.normal(jax.random.key(1), (4, WIDTH, WIDTH))]

    assert check(step, make, X, repeated=layer) == ["test_functions_repeat_too.<locals>.layer: traced once for 4 calls"]


def test_the_explanation_says_what_was_shared():
    f = graftax.jit(lambda model, x: model(x), repeated=Block)
    f(Model(5), X)
    assert "Block: traced once for 5 calls" in str(graftax.explain(f))
    assert json.loads(graftax.explain(f).to_json())["variants"][0]["repeated"] == ["Block: traced once for 5 calls"]


def test_nothing_is_held_after_the_trace():
    import gc
    import weakref

    f = graftax.jit(forward, repeated=Block)
    model = Model(3)
    f(model, X)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_saved_programs_are_found_whatever_repeats(tmp_path):
    f, model = graftax.jit(forward, repeated=Plain.__call__), Model(3, Plain)
    y = f(model, X)
    assert f.save_compiled(tmp_path / "programs") == 1
    g = graftax.jit(forward, cache_size=512)
    g.clear_cache()
    assert g.load_compiled(tmp_path / "programs") == 1
    np.testing.assert_allclose(g(Model(3, Plain), X), y, rtol=1e-6)
    assert g.cache_info().traces == 0
