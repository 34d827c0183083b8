# SPDX-License-Identifier: Apache-2.0
"""`id()` in a traced function is that of the caller's object: state that is kept by it is found, and kept."""

import copy

import jax.numpy as jnp
import pytest

import graftax
from zoo import Box

x = jnp.ones(2)
REGISTRY: dict[int, float] = {}


def listed(value):
    return [v.tolist() for v in graftax.flatten(value)[0]]


class Param:
    def __init__(self, value):
        self.value = value


class Momentum:
    """As PyTorch's optimizers keep their state."""

    def __init__(self, params):
        self.params, self.state = params, {}

    def step(self, gradients):
        for p, g in zip(self.params, gradients, strict=True):
            state = self.state.setdefault(id(p), {"m": jnp.zeros_like(p.value)})
            state["m"] = 0.9 * state["m"] + g
            p.value = p.value - state["m"]


def test_state_by_the_id_of_parameters_is_found_again():
    def train(step):
        params = [Param(x), Param(2 * x)]
        optimizer = Momentum(params)
        for _ in range(4):
            step(optimizer, [x, x])
        return [p.value for p in params], [id(p) for p in params] == list(optimizer.state), len(optimizer.state)

    jitted = graftax.jit(Momentum.step)
    for _ in range(2):  # the second time on a known structure, with other objects
        plain, given = train(Momentum.step), train(jitted)
        assert listed(given[0]) == listed(plain[0]) and given[1:] == plain[1:] == (True, 2)


class Registered:
    def __init__(self, rate):
        self.w = x
        REGISTRY[id(self)] = rate

    def rate(self):
        return REGISTRY.get(id(self), 0.0)


def test_a_registry_by_id_is_read():
    f = graftax.jit(lambda layer, x: layer.w * x * layer.rate())
    one, other = Registered(4.0), Registered(5.0)
    for _ in range(2):
        for layer in (one, other):
            assert f(layer, x).tolist() == (layer.w * layer.rate()).tolist()
    REGISTRY[id(one)] = 7.0
    assert f(one, x).tolist() == [7, 7] and f(other, x).tolist() == [5, 5]


class Linked:
    def __init__(self, w):
        self.w, self.other = w, self

    def __deepcopy__(self, memo):
        memo[id(self)] = twin = Linked(self.w)
        twin.other = copy.deepcopy(self.other, memo)
        return twin


def pair():
    one, other = Linked(jnp.ones(2)), Linked(jnp.zeros(2))
    one.other, other.other = other, one
    return one


@pytest.mark.parametrize(
    "f",
    [
        lambda one: (one.other, (twin := copy.deepcopy(one)), twin.other.other is twin),
        lambda one: (one, copy.deepcopy([one], {id(one): one})[0] is one),
        lambda one: (one, copy.deepcopy(one, memo := {}), memo[id(one)] is not one),
    ],
    ids=["method", "kept", "asked"],
)
def test_a_copy_finds_by_id_what_the_code_has_put_there(f):
    for _ in range(2):
        one, also = pair(), pair()
        assert graftax.equal(graftax.jit(f)(one), f(also))


def test_objects_are_compared_and_counted_by_id():
    def f(boxes, x):
        def distinct():
            return len({id(box) for box in boxes})

        return x * distinct(), id(boxes[0]) == id(boxes[1])

    jitted = graftax.jit(f)
    a, b = Box(w=x), Box(w=x)
    for boxes in ([a, b], [a, a], [b, a], [b, b]):
        for _ in range(2):
            assert jitted(boxes, x)[1] == f(boxes, x)[1]
            assert jitted(boxes, x)[0].tolist() == f(boxes, x)[0].tolist()


@pytest.mark.parametrize(
    "make", [lambda: [1, x], lambda: {"w": x}, lambda: Box(w=x), lambda: {1, 2}], ids=["list", "dict", "object", "set"]
)
def test_an_id_that_is_given_back_is_the_callers(make):
    f = graftax.jit(lambda obj, x: (id(obj), x))
    for obj in (make(), make()):
        for _ in range(2):
            assert f(obj, x)[0] == id(obj)


def test_a_function_without_id_compiles_once_for_all_objects():
    f = graftax.jit(lambda box, x: box.w * x)
    for _ in range(5):
        f(Box(w=x), x)
    assert f.cache_info().traces == 1


def test_an_id_of_the_users_own_is_the_users():
    scope = {"id": lambda obj: 3}
    f = graftax.jit(eval("lambda obj, x: x * id(obj)", scope))
    assert f([x], x).tolist() == [3, 3]


def test_texts_and_numbers_have_no_identity():
    """As docs/limits.md says: equal ones are one program, whichever objects they are."""
    text, same_text, nan = "hello world", " ".join(["hello", "world"]), float("nan")
    is_one = graftax.jit(lambda x, a, b: (x, a is b))
    assert is_one(jnp.ones(1), text, text)[1] and is_one(jnp.ones(1), text, same_text)[1]
    holds = graftax.jit(lambda x, values, value: (x, value in values))
    assert holds(jnp.ones(1), [nan], nan)[1] and holds(jnp.ones(1), [nan], float("nan"))[1]
    assert is_one.cache_info().traces == holds.cache_info().traces == 1
