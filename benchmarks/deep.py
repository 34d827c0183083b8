# SPDX-License-Identifier: Apache-2.0
"""What deep models cost to trace, lower and compile, beside `jax.jit`: `python benchmarks/deep.py --help`.

All programs have a Python loop over their parts, as it is written first. The first call of each is measured once, in
time of the processor (all threads, so other work on the machine is not counted), and later calls in interleaved rounds.
"""

import argparse
import gc
import itertools
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import graftax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.layers import unrolled
from benchmarks.rounds import median, ratios

_EXAMPLE = Path(__file__).parents[1] / "examples" / "transformer.py"


class Program(NamedTuple):
    """A model, what is done with it, and its data; `scanned` does the same with a `jax.lax.scan` by hand, on arrays."""

    model: Any
    step: Callable[[Any, Any], Any]
    data: Any
    scanned: Callable[[Any, Any], Any] | None = None


def transformer(blocks: int) -> Program:
    example = runpy.run_path(str(_EXAMPLE), run_name="imported")
    characters = "".join(map(chr, range(32, 127)))
    model = unrolled(example["Transformer"])(characters, jax.random.key(0), blocks)
    data = jax.random.randint(jax.random.key(1), (16, example["CONTEXT"] + 1), 0, 95)
    stacked = example["Transformer"](characters, jax.random.key(0), blocks)
    arrays, static = eqx.partition(stacked, eqx.is_array)

    def scanned(_: Any, data: Any) -> Any:
        return jax.value_and_grad(lambda arrays: example["loss_of"](eqx.combine(arrays, static), data))(arrays)

    return Program(model, lambda model, data: graftax.value_and_grad(example["loss_of"])(model, data), data, scanned)


class MixerBlock(eqx.Module):
    """Of an MLP-Mixer: one network over the patches, one over the channels."""

    patches: eqx.nn.MLP
    channels: eqx.nn.MLP
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, patches: int, channels: int, key: Any) -> None:
        keys = jax.random.split(key)
        self.patches = eqx.nn.MLP(patches, patches, 2 * patches, depth=1, key=keys[0])
        self.channels = eqx.nn.MLP(channels, channels, 2 * channels, depth=1, key=keys[1])
        self.norms = [eqx.nn.LayerNorm((channels, patches)) for _ in range(2)]

    def __call__(self, y: Any) -> Any:
        y = y + jax.vmap(self.patches)(self.norms[0](y))
        return y + jax.vmap(self.channels)(self.norms[1](y).T).T


class Mixer(eqx.Module):
    blocks: list[MixerBlock]

    def __call__(self, y: Any) -> Any:
        for block in self.blocks:
            y = block(y)
        return y


def mixer(blocks: int) -> Program:
    model = Mixer([MixerBlock(16, 32, key) for key in jax.random.split(jax.random.key(0), blocks)])

    def loss(model: Any, data: Any) -> Any:
        return (jax.vmap(model)(data) ** 2).mean()

    data = jax.random.normal(jax.random.key(1), (8, 32, 16))
    return Program(model, lambda model, data: graftax.value_and_grad(loss)(model, data), data)


class Bottleneck(nnx.Module):
    def __init__(self, channels: int, rngs: nnx.Rngs) -> None:
        narrow = channels // 4
        shapes = ((channels, narrow, 1), (narrow, narrow, 3), (narrow, channels, 1))
        self.convolutions = nnx.List([nnx.Conv(a, b, (k, k), rngs=rngs) for a, b, k in shapes])
        self.norms = nnx.List([nnx.BatchNorm(b, rngs=rngs) for _, b, _ in shapes])

    def __call__(self, x: Any) -> Any:
        y = x
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = jax.nn.relu(norm(convolution(y)))
        return jax.nn.relu(x + y)


class ResNet(nnx.Module):
    """The stages of a ResNet-50, narrow: 3, 4, 6 and 3 blocks."""

    def __init__(self, blocks: tuple[int, ...], rngs: nnx.Rngs) -> None:
        self.stages = nnx.List(
            [nnx.List([Bottleneck(8 << i, rngs) for _ in range(count)]) for i, count in enumerate(blocks)]
        )

    def __call__(self, x: Any) -> Any:
        for i, stage in enumerate(self.stages):
            x = jnp.concatenate([x, x], axis=-1) if i else x
            for block in stage:
                x = block(x)
            x = nnx.avg_pool(x, (2, 2), (2, 2))
        return x.mean()


def resnet(blocks: tuple[int, ...]) -> Program:
    model, data = ResNet(blocks, nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (2, 32, 32, 8))
    return Program(model, lambda model, data: graftax.value_and_grad(lambda model: model(data))(model), data)


class Springs:
    """Bodies in a ring with springs between them, moved by the classical method of Runge and Kutta."""

    def __init__(self) -> None:
        self.stiffness, self.damping = jnp.asarray(2.0), jnp.asarray(0.1)

    def slope(self, state: Any) -> Any:
        x, v = state
        force = self.stiffness * (jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0) - 2 * x) - self.damping * v
        return v, force - jnp.sin(x)

    def step(self, state: Any, dt: float = 0.01) -> Any:
        def moved(by: Any, dt: float) -> Any:
            return jax.tree.map(lambda a, b: a + dt * b, state, by)

        a = self.slope(state)
        b = self.slope(moved(a, dt / 2))
        c = self.slope(moved(b, dt / 2))
        d = self.slope(moved(c, dt))
        return jax.tree.map(lambda s, a, b, c, d: s + dt / 6 * (a + 2 * b + 2 * c + d), state, a, b, c, d)


def simulation(steps: int) -> Program:
    def run(model: Any, state: Any) -> Any:
        for _ in range(steps):
            state = model.step(state)
        return state

    def scanned(model: Any, state: Any) -> Any:
        return jax.lax.scan(lambda state, _: (model.step(state), None), state, length=steps)[0]

    return Program(Springs(), run, (jnp.linspace(0.0, 1.0, 64).reshape(16, 4), jnp.zeros((16, 4))), scanned)


class Round:
    """One round of messages between the nodes of a graph."""

    def __init__(self, width: int, key: Any) -> None:
        keys = jax.random.split(key)
        self.message = 0.1 * jax.random.normal(keys[0], (2 * width, width))
        self.update = 0.1 * jax.random.normal(keys[1], (2 * width, width))

    def __call__(self, nodes: Any, senders: Any, receivers: Any) -> Any:
        messages = jax.nn.silu(jnp.concatenate([nodes[senders], nodes[receivers]], axis=-1) @ self.message)
        sums = jnp.zeros_like(nodes).at[receivers].add(messages)
        nodes = nodes + jax.nn.silu(jnp.concatenate([nodes, sums], axis=-1) @ self.update)
        return (nodes - nodes.mean(-1, keepdims=True)) / jnp.sqrt(nodes.var(-1, keepdims=True) + 1e-5)


def graph_network(rounds: int) -> Program:
    model = [Round(16, key) for key in jax.random.split(jax.random.key(0), rounds)]

    def loss(model: Any, data: Any) -> Any:
        nodes, senders, receivers = data
        for part in model:
            nodes = part(nodes, senders, receivers)
        return (nodes**2).mean()

    edges = jax.random.randint(jax.random.key(2), (2, 128), 0, 32)
    data = jax.random.normal(jax.random.key(1), (32, 16)), edges[0], edges[1]
    return Program(model, lambda model, data: graftax.value_and_grad(loss)(model, data), data)


PROGRAMS: dict[str, Callable[[], Program]] = {
    **{f"transformer, {n} layers": lambda n=n: transformer(n) for n in (4, 12, 24, 48)},
    "MLP-Mixer of Equinox, 12 blocks": lambda: mixer(12),
    "ResNet-50 of NNX, 16 blocks": lambda: resnet((3, 4, 6, 3)),
    "simulation, 64 steps": lambda: simulation(64),
    "graph network, 16 rounds": lambda: graph_network(16),
}


class _Staged(NamedTuple):
    """A compiled program; seconds of the processor to trace, lower and compile it."""

    call: Callable[[], list[Any]]
    seconds: tuple[float, float, float]


def _stage(jitted: Any, *args: Any) -> _Staged:
    jax.clear_caches()
    gc.collect()
    times = [time.process_time()]
    stage = jitted.trace(*args)
    for method in ("lower", "compile"):
        times.append(time.process_time())
        stage = getattr(stage, method)()
    times.append(time.process_time())

    def call() -> list[Any]:
        return jax.block_until_ready(jax.tree.leaves(graftax.flatten(stage(*args))[0]))

    trace, lower, compiled = (b - a for a, b in itertools.pairwise(times))
    return _Staged(call, (trace, lower, compiled))


def _on_arrays(program: Program, function: Callable[[Any, Any], Any]) -> _Staged:
    """The same under `jax.jit`: the arrays of the model are an argument, and the trace makes the model around them."""
    leaves, graphdef = graftax.flatten(program.model)

    @jax.jit
    def step(leaves: Any, data: Any) -> Any:
        model = graftax.unflatten(graphdef, leaves)
        return graftax.flatten((function(model, data), model))[0]

    return _stage(step, leaves, program.data)


def measure(program: Program, rounds: int) -> str:
    """A row: seconds of `jax.jit`, and of graftax; their ratio; a scan's; the median ratio of later calls."""
    theirs = _on_arrays(program, program.step)
    ours = _stage(graftax.jit(program.step), program.model, program.data)
    scanned = _on_arrays(program, program.scanned) if program.scanned else None
    one, other = ours.call(), theirs.call()
    equal = all(np.abs(a - b).max() <= 1e-2 * np.abs(b).max() + 1e-3 for a, b in zip(one, other, strict=False))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for spent, staged in zip(times, (ours, theirs), strict=True):
            start = time.perf_counter()
            staged.call()
            spent.append(time.perf_counter() - start)
    parts = " | ".join(" / ".join(f"{s:.2f}" for s in staged.seconds) for staged in (theirs, ours))
    by_hand = f"{sum(scanned.seconds) / sum(theirs.seconds):.2f}" if scanned else ""
    ratio = sum(ours.seconds) / sum(theirs.seconds)
    return f"{parts} | {ratio:.2f} | {by_hand} | {median(ratios(*times)):.2f}{'' if equal else ' ≠'}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python benchmarks/deep.py", description=__doc__)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--rounds", type=int, default=21, help="of later calls")
    given = parser.parse_args()
    print("| program | jax.jit: trace / lower / compile | graftax.jit | first call | a scan | later calls |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, make in PROGRAMS.items():
        if given.only in name:
            print(f"| {name} | {measure(make(), given.rounds)} |", flush=True)


if __name__ == "__main__":
    main()
