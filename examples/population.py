# SPDX-License-Identifier: Apache-2.0
"""A population of models trained in one `vmap`, which is selected and mutated: `python examples/population.py`."""

import jax
import jax.numpy as jnp
import optax

import graftax

MEMBERS = 16


class Layer:
    def __init__(self, key, inputs, outputs):
        self.w, self.b = jax.random.normal(key, (inputs, outputs)) / inputs**0.5, jnp.zeros(outputs)

    def __call__(self, x):
        return x @ self.w + self.b


class Model:
    def __init__(self, key, size=16):
        keys = jax.random.split(key, 3)
        self.middle = Layer(keys[1], size, size)
        self.layers = [Layer(keys[0], 2, size), self.middle, self.middle, Layer(keys[2], size, 1)]  # one layer twice
        self.activation = jnp.tanh

    def __call__(self, x):
        *layers, last = self.layers
        for layer in layers:
            x = self.activation(layer(x))
        return last(x)


class Member:
    """A model, its optimizer with a learning rate of its own, and how well it does."""

    def __init__(self, key):
        keys = jax.random.split(key)
        self.model = Model(keys[0])
        rate = 10 ** jax.random.uniform(keys[1], minval=-5.0, maxval=-1.0)
        self.opt = graftax.optimizer(optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), self.model)
        self.opt.state.hyperparams["learning_rate"] = rate
        self.score = jnp.asarray(jnp.inf, jnp.float32)

    @property
    def rate(self):
        return self.opt.state.hyperparams["learning_rate"]

    def train(self, xs, ys):
        """Some steps of its own, each with a batch."""

        def step(_, batch):
            value, grads = graftax.value_and_grad(loss_of)(self.model, *batch)
            self.opt.update(self.model, grads)
            return None, value

        values = graftax.scan(step, None, (xs, ys))[1]
        self.score = values[-10:].mean()

    def mutate(self, key):
        self.opt.state.hyperparams["learning_rate"] = self.rate * 2 ** jax.random.normal(key)


def loss_of(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def batches(key, steps=40):
    xs = jax.random.uniform(key, (steps, 32, 2), minval=-2.0, maxval=2.0)
    return xs, jnp.sin(2 * xs[..., :1]) * xs[..., 1:]


@graftax.jit
def generation(population, key):
    """All members learn; the worse half is overwritten by copies of the better one, with other rates."""
    keys = jax.random.split(key)
    graftax.vmap(Member.train, in_axes=(0, None, None))(population, *batches(keys[0]))
    order = jnp.argsort(population.score)
    better = jnp.concatenate([order[: MEMBERS // 2], order[: MEMBERS // 2]])
    chosen = graftax.map_leaves(lambda x: x[better], population)  # each array once: the middle layer stays shared
    changed = graftax.copy(chosen)
    graftax.vmap(Member.mutate)(changed, jax.random.split(keys[1], MEMBERS))
    kept = jnp.arange(MEMBERS) < MEMBERS // 2
    rates = jnp.where(kept, chosen.rate, changed.rate)
    graftax.update(population, chosen)
    population.opt.state.hyperparams["learning_rate"] = rates
    return population.score


def main(generations=15):
    population = graftax.vmap(Member)(jax.random.split(jax.random.key(0), MEMBERS))
    scores = [generation(population, key) for key in jax.random.split(jax.random.key(1), generations)]
    assert population.model.layers[1] is population.model.layers[2], "still one layer"
    assert population.model.middle.w.shape == (MEMBERS, 16, 16) and generation.cache_info().traces <= 1
    members = graftax.unstack(population)
    assert len(members) == MEMBERS and members[0].model.layers[1] is members[0].model.middle
    return [float(score.min()) for score in scores], [float(score.max()) for score in scores], members


if __name__ == "__main__":
    best, worst, members = main()
    assert best[-1] < 0.1 * best[0] and worst[-1] < 10 * best[-1], "the best one learns, and the others are its copies"
    print(f"best {best[0]:.3f}, worst {worst[0]:.3f} before; best {best[-1]:.3f}, worst {worst[-1]:.3f} after")
