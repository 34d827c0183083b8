# SPDX-License-Identifier: Apache-2.0
"""What a list of layers costs to compile: a step of training of examples/transformer.py, beside its loop unrolled."""

import gc
import runpy
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from benchmarks.rounds import median, ratios
from benchmarks.verdicts import OnRound, Verdict

_EXAMPLE = Path(__file__).parents[1] / "examples" / "transformer.py"


@dataclass(frozen=True)
class CompiledLayers:
    """The time of the processor until a step is compiled: traced, lowered, and optimized by XLA.

    Once each, since the unrolled one takes a minute. All threads are counted, so other work on the machine is not.
    """

    title: str
    limit: float
    blocks: int = 24

    def rounds(self, rounds: int) -> int:
        return 1

    def run(self, subjects: dict[str, ModuleType], rounds: int, on_round: OnRound) -> Verdict:
        if "graftax_jit" not in subjects or not _EXAMPLE.exists():
            return Verdict(self.title, self.limit, None, False, "absent: graftax_jit, or the examples of a checkout")
        example = runpy.run_path(str(_EXAMPLE), run_name="imported")
        ours, one = self._measure(example, example["Transformer"])
        theirs, other = self._measure(example, unrolled(example["Transformer"]), repeated=None)
        on_round()
        equal = all(np.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(one, other, strict=True))
        detail = f"{ours:.1f} s of the processor against {theirs:.1f} s; results {'equal' if equal else 'DIFFER'}"
        return Verdict(self.title, self.limit, ours / theirs, equal and ours / theirs <= self.limit, detail)

    def _measure(self, example: dict[str, Any], cls: Any, **options: Any) -> tuple[float, list[Any]]:
        import optax

        import graftax

        model = cls("".join(map(chr, range(32, 127))), jax.random.key(0), self.blocks)
        opt = graftax.optimizer(optax.sgd(1e-2), model)
        batch = jax.random.randint(jax.random.key(1), (16, example["CONTEXT"] + 1), 0, 95)

        @graftax.jit(**options)
        def step(model: Any, opt: Any, batch: Any) -> Any:
            loss, grads = graftax.value_and_grad(example["loss_of"])(model, batch)
            return opt.update(model, grads), loss

        jax.clear_caches()
        gc.collect()
        start = time.process_time()
        result = jax.block_until_ready(graftax.flatten(step(model, opt, batch))[0])
        return time.process_time() - start, [np.asarray(x) for x in result]


@dataclass(frozen=True)
class FirstCall(CompiledLayers):
    """The time of the processor of a first call, over that of `jax.jit` on the arrays of the same model: it calls the
    same code, with the same scan over its blocks. The median of three."""

    def rounds(self, rounds: int) -> int:
        return 3

    def run(self, subjects: dict[str, ModuleType], rounds: int, on_round: OnRound) -> Verdict:
        if "graftax_jit" not in subjects or not _EXAMPLE.exists():
            return Verdict(self.title, self.limit, None, False, "absent: graftax_jit, or the examples of a checkout")
        example = runpy.run_path(str(_EXAMPLE), run_name="imported")
        ours, theirs = list[float](), list[float]()
        for _ in range(3):
            ours.append(self._measure(example, example["Transformer"])[0])
            theirs.append(self._of_jax(example))
            on_round()
        found = ratios(ours, theirs)
        detail = f"{median(ours):.2f} s of the processor against {median(theirs):.2f} s"
        if found[0] <= self.limit <= found[-1]:
            detail += "; within noise"
        return Verdict(self.title, self.limit, median(found), median(found) <= self.limit, detail)

    def _of_jax(self, example: dict[str, Any]) -> float:
        import equinox as eqx
        import optax

        model = example["Transformer"]("".join(map(chr, range(32, 127))), jax.random.key(0), self.blocks)
        arrays, static = eqx.partition(model, eqx.is_array)
        sgd, loss_of = optax.sgd(1e-2), example["loss_of"]
        batch = jax.random.randint(jax.random.key(1), (16, example["CONTEXT"] + 1), 0, 95)

        @jax.jit
        def step(arrays: Any, state: Any, batch: Any) -> Any:
            loss, grads = jax.value_and_grad(lambda arrays: loss_of(eqx.combine(arrays, static), batch))(arrays)
            updates, state = sgd.update(grads, state)
            return eqx.apply_updates(arrays, updates), state, loss

        state = sgd.init(arrays)
        jax.clear_caches()
        gc.collect()
        start = time.process_time()
        jax.block_until_ready(step(arrays, state, batch))
        return time.process_time() - start


def unrolled(cls: Any) -> Any:
    """The transformer of the example with a loop over its blocks in place of the scan."""

    class Unrolled(cls):
        def __call__(self, tokens: Any) -> Any:
            embedding, last = self.tied()
            x = jax.vmap(embedding)(tokens) + self.positions[: len(tokens)]
            for block in self.blocks:
                x = block(x)
            return jax.vmap(last)(x)

    return Unrolled
