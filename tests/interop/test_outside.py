# SPDX-License-Identifier: Apache-2.0
"""Functions that capture a test, a progress bar or a logger: these are no part of what is compiled."""

import io
import logging
import unittest

import jax
import jax.numpy as jnp
import pytest

import graftax

pytestmark = pytest.mark.filterwarnings("ignore::graftax.ImpureCallWarning")


class OfMethods(unittest.TestCase):
    scale = 2

    def test_a_function_that_captures_its_test(self):
        @graftax.jit
        def f(x):
            self.assertIsInstance(x, jax.core.Tracer)
            return x * self.scale

        self.assertEqual(f(jnp.array(2.0)), 4)
        self.assertEqual(f(jnp.array(3.0)), 6)
        self.assertEqual(f.cache_info().traces, 1)
        self.assertEqual(graftax.grad(f)(jnp.array(2.0)), 2)
        self.assertEqual(graftax.vmap(lambda x: f(x).astype(self.kind()))(jnp.ones(3)).shape, (3,))

    def kind(self):
        return jnp.float32


def test_a_fixture_that_is_captured(request, monkeypatch):
    @graftax.jit
    def f(x):
        return x + len(request.node.name) * 0 + (monkeypatch is None)

    assert f(jnp.array(1.0)) == 1


def test_reporters():
    tqdm, console = pytest.importorskip("tqdm"), pytest.importorskip("rich.console")
    bar, shown, log = (
        tqdm.tqdm(total=3, file=io.StringIO()),
        console.Console(file=io.StringIO()),
        logging.getLogger("t"),
    )

    class Trainer:
        def __init__(self):
            self.bar, self.shown, self.log, self.weight = bar, shown, log, jnp.array(2.0)

        def step(self, x):
            self.weight = self.weight * x
            return self.weight

    trainer = Trainer()
    step = graftax.jit(Trainer.step)
    step(trainer, jnp.array(3.0))
    bar.update(1)
    step(trainer, jnp.array(3.0))
    assert trainer.weight == 18 and trainer.bar is bar
    assert step.cache_info().traces == 1
