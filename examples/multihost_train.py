# SPDX-License-Identifier: Apache-2.0
"""A model over several hosts. `python examples/multihost_train.py` starts two processes on this machine, as hosts.

On a cluster every host runs `python multihost_train.py --cluster` (docs/many-devices.md).
"""

import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import graftax


class Layer:
    def __init__(self, key, inputs, outputs):
        self.w, self.b = jax.random.normal(key, (inputs, outputs)) / inputs**0.5, jnp.zeros(outputs)


class Model:
    def __init__(self, seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        self.layers = [Layer(key, *size) for key, size in zip(keys, [(8, 64), (64, 64), (64, 1)], strict=True)]
        self.steps = 0

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jnp.tanh(x @ layer.w + layer.b)
        return x @ self.layers[-1].w + self.layers[-1].b


RULES = graftax.Rules([("layers[*].b", None), ("layers[2].w", P("model")), ("layers[*].w", P(None, "model"))])


def loss(model, x, y):
    return ((model(x) - y) ** 2).mean()


@graftax.jit
def train_step(model, opt, x, y):
    value, gradients = graftax.value_and_grad(loss)(model, x, y)
    opt.update(model, gradients)
    model.steps += 1
    return value


def batches(seed, size):
    """What the data loader of this host reads: its own part of each batch."""
    rng = np.random.default_rng(seed)
    while True:
        x = rng.normal(size=(size, 8)).astype(np.float32)
        yield {"x": x, "y": np.sin(x.sum(1, keepdims=True))}


def train(steps=60):
    shape, auto = (jax.process_count(), jax.local_device_count()), (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=auto)
    with jax.set_mesh(mesh):
        model = graftax.jit(Model, out_shardings=RULES)(seed=0)  # each host makes the parts of its devices only
        opt = graftax.optimizer(optax.adam(1e-2), model)
    graftax.check_hosts([model, steps])  # two hosts with other settings would end here, with the name of what differs
    if jax.process_index() == 0:
        print(RULES.table(model, mesh))
    losses = []
    data = batches(seed=jax.process_index(), size=32)
    for _ in range(steps):
        batch = graftax.shard(next(data), mesh, [("**", P("data"))], local=True)
        losses.append(train_step(model, opt, batch["x"], batch["y"]))
    first, last = float(np.mean(losses[:5])), float(np.mean(losses[-5:]))
    assert last < 0.7 * first and train_step.cache_info().misses <= 2
    if jax.process_index() == 0:
        devices = f"{jax.process_count()} hosts, {jax.device_count()} devices"
        print(f"{devices}: loss {first:.2f}, after {steps} steps {last:.2f}")


def launch(hosts=2, devices=2):
    """Runs this file in several processes, which find each other on the loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--host", str(number), str(hosts), str(port)],
            env={**os.environ, **flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(hosts)
    ]
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("\n".join(said))
    print("\n".join(line for line in said[0].splitlines() if not line.startswith("[Gloo]")))


def main():
    if "--host" in sys.argv:
        number, count, port = sys.argv[sys.argv.index("--host") + 1 :]
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(number))
        train()
    elif "--cluster" in sys.argv:
        jax.distributed.initialize()  # Slurm, Cloud TPU and Kubernetes tell JAX who is who
        train()
    else:
        launch()


if __name__ == "__main__":
    main()
