# SPDX-License-Identifier: Apache-2.0
"""An agent that learns to balance a pole, with plain objects for both: `python examples/agent.py`."""

import jax
import jax.numpy as jnp
import optax

import graftax

STEPS, POLES = 200, 64


class CartPole:
    """A pole on a cart. It falls at 12 degrees, or where the cart leaves the track; each step until then is worth 1."""

    def __init__(self, key):
        self.x, self.v, self.angle, self.spin = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
        self.stands = jnp.asarray(True)

    def seen(self):
        return jnp.stack([self.x, self.v, self.angle, self.spin])

    def push(self, right):
        force = jnp.where(right, 10.0, -10.0)
        sin, cos = jnp.sin(self.angle), jnp.cos(self.angle)
        pull = (force + 0.05 * self.spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * pull) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        self.x, self.angle = self.x + 0.02 * self.v, self.angle + 0.02 * self.spin
        self.v, self.spin = self.v + 0.02 * (pull - 0.05 * turn * cos / 1.1), self.spin + 0.02 * turn
        self.stands &= (jnp.abs(self.angle) < 0.2095) & (jnp.abs(self.x) < 2.4)
        return self.stands.astype(float)


class Linear:
    def __init__(self, key, inputs, outputs):
        self.w, self.b = jax.random.normal(key, (inputs, outputs)) / inputs**0.5, jnp.zeros(outputs)

    def __call__(self, x):
        return x @ self.w + self.b


class Policy:
    def __init__(self, key):
        keys = jax.random.split(key)
        self.first, self.second = Linear(keys[0], 4, 32), Linear(keys[1], 32, 2)

    def __call__(self, seen):
        return jax.nn.log_softmax(self.second(jnp.tanh(self.first(seen))))


def play(policy, key):
    """One pole until it falls: rewards, and the logarithms of the probabilities of what was done."""
    pole = CartPole(key)

    def step(_, key):
        chances = policy(pole.seen())
        action = jax.random.categorical(key, chances)
        return None, (pole.push(action == 1), chances[action])  # what the pole became stays with it

    return graftax.scan(step, None, jax.random.split(key, STEPS))[1]


class Agent:
    def __init__(self, key):
        self.policy = Policy(key)
        self.opt = graftax.optimizer(optax.adam(2e-2), self.policy)
        self.key = key

    @graftax.jit
    def train(self):
        self.key, key = jax.random.split(self.key)

        def loss(policy):
            rewards, chances = graftax.vmap(play, in_axes=(None, 0))(policy, jax.random.split(key, POLES))
            ahead = jnp.cumsum(rewards[:, ::-1], 1)[:, ::-1]
            better = (ahead - ahead.mean(0)) / (ahead.std(0) + 1e-6)
            return -(rewards * better * chances).sum() / rewards.sum(), rewards.sum(1).mean()

        grads, reached = graftax.grad(loss, has_aux=True)(self.policy)
        self.opt.update(self.policy, grads)
        return reached


def main(rounds=50):
    agent = Agent(jax.random.key(0))
    return [float(agent.train()) for _ in range(rounds)]


if __name__ == "__main__":
    returns = main()
    assert returns[0] < 40 and sum(returns[-10:]) / 10 > 170, "it stands for 170 of 200 steps"
    print(f"it stood for {returns[0]:.0f} steps of {STEPS} before, for {returns[-1]:.0f} after")
