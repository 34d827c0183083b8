# SPDX-License-Identifier: Apache-2.0
"""A gradient counts uses of its object from elsewhere, and says so where the code can reach it there."""

import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import graftax


class Trainer:
    def __init__(self) -> None:
        self.model: dict[str, Any] = {"w": jnp.arange(1.0, 3.0), "name": "net"}
        self.target = self.model
        self.scale = 2.0

    def of_argument(self, model: Any) -> Any:
        return (model["w"] ** 2).sum() * self.scale

    def of_itself(self, model: Any) -> Any:
        return (model["w"] * self.target["w"]).sum()

    def by_helper(self, model: Any) -> Any:
        return (model["w"] * self._of_model("w")).sum()

    def _of_model(self, name: str) -> Any:
        return self.model[name]

    def by_computed_name(self, model: Any) -> Any:
        return (model["w"] * getattr(self, "mod" + "el"[: len(model)])["w"]).sum()

    def of_itself_alone(self, model: Any) -> Any:
        return (self.model["w"] ** 2).sum()

    def train(self) -> None:  # not reached by the functions above
        self.model["w"] = self.model["w"] * 0.9


trainer = Trainer()
held = {"net": trainer.model}


def product(a: Any, b: Any) -> Any:
    return (a["w"] * b["w"]).sum()


def captures(a: Any) -> Any:
    return (a["w"] * held["net"]["w"]).sum()


def of_owner(owner: Any, model: Any) -> Any:
    return (owner.model["w"] * model["w"]).sum()


def of_scale(owner: Any, model: Any) -> Any:
    return (owner.scale * model["w"]).sum()


def warned(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert {w.category for w in caught} <= {graftax.SharedGradientWarning}
    return [str(w.message) for w in caught]


DIFFER = {
    "an attribute": (lambda: graftax.grad(trainer.of_itself)(trainer.model), "model is also self.target"),
    "a helper's": (lambda: graftax.grad(trainer.by_helper)(trainer.model), "model is also self.model"),
    "a computed name": (lambda: graftax.grad(trainer.by_computed_name)(trainer.model), "model is also self."),
    "a second argument": (lambda: graftax.grad(product)(trainer.model, trainer.model), "a is also b"),
    "by name": (lambda: graftax.grad(product, wrt="b")(trainer.model, trainer.model), "b is also a"),
    "a captured object": (lambda: graftax.grad(captures)(trainer.model), r"a is also global held\['net'\]"),
    "the owner": (lambda: graftax.grad(of_owner, argnums=1)(trainer, trainer.model), "model is also owner.model"),
    "a Jacobian": (lambda: graftax.jacrev(captures)(trainer.model), "a is also global held"),
    "a linear map": (lambda: graftax.vjp(captures, trainer.model), "a is also global held"),
    "below jit": (lambda: graftax.jit(graftax.grad(captures))(trainer.model), "a is also global held"),
}
AGREE = {
    "not used": lambda: graftax.grad(trainer.of_argument)(trainer.model),
    "not named": lambda: graftax.grad(of_scale, argnums=1)(trainer, trainer.model),
    "both differentiated": lambda: graftax.grad(product, argnums=(0, 1))(trainer.model, trainer.model),
    "read elsewhere alone": lambda: graftax.grad(trainer.of_itself_alone)(trainer.model),
    "a copy": lambda: graftax.grad(product)(trainer.model, graftax.copy(trainer.model)),
    "a whole": lambda: graftax.grad(lambda t: product(t.model, t.target))(trainer),
    "as Equinox": lambda: graftax.filter_grad(captures)(trainer.model),
    "an array": lambda: graftax.grad(lambda a, b: (a * b).sum())(trainer.model["w"], trainer.model["w"]),
}


@pytest.mark.parametrize("name", DIFFER)
def test_uses_that_count_are_named(name: str) -> None:
    call, text = DIFFER[name]
    with pytest.warns(graftax.SharedGradientWarning, match=text):
        call()


@pytest.mark.parametrize("name", AGREE)
def test_nothing_is_said_where_the_argument_alone_is_used(name: str) -> None:
    assert warned(AGREE[name]) == []


def test_the_advice_gives_the_gradient_of_jax() -> None:
    w = trainer.model["w"]
    with pytest.warns(graftax.SharedGradientWarning, match=r"pass graftax\.copy\(a\)"):
        shared = graftax.grad(product)(trainer.model, trainer.model)
    copied = graftax.grad(product)(trainer.model, graftax.copy(trainer.model))
    np.testing.assert_allclose(shared["w"], 2 * w)
    np.testing.assert_allclose(copied["w"], w)


def test_a_steady_call_does_not_warn_again() -> None:
    step = graftax.jit(graftax.grad(captures))
    assert len(warned(lambda: step(trainer.model))) == 1
    assert warned(lambda: step(trainer.model)) == []


def test_a_counter_beside_a_shared_object_is_compiled_once() -> None:
    class Counts(Trainer):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0

        def step(self) -> None:
            grads = graftax.grad(self.of_argument)(self.model)
            self.model["w"] = self.model["w"] - grads["w"] / (1 + self.steps)
            self.steps += 1

    plain, jitted = Counts(), Counts()
    step = graftax.jit(Counts.step)
    for _ in range(4):
        plain.step()
        step(jitted)
    assert (jitted.steps, step.cache_info().traces) == (4, 1)
    np.testing.assert_allclose(jitted.model["w"], plain.model["w"], rtol=1e-6)


def train_once(trainer: Trainer) -> None:
    trainer.train()


def test_code_that_made_an_object_does_not_count() -> None:
    class Made(Trainer):
        def __init__(self) -> None:
            super().__init__()
            train_once(self)

    made = Made()
    assert warned(lambda: graftax.grad(made.of_argument)(made.model)) == []
