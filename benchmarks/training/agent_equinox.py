# SPDX-License-Identifier: Apache-2.0
"""`examples/agent.py` as it is written with Equinox: states are values, and what changes is returned."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

STEPS, POLES = 200, 64


class CartPole(eqx.Module):
    """A pole on a cart. It falls at 12 degrees, or where the cart leaves the track; each step until then is worth 1."""

    x: jax.Array
    v: jax.Array
    angle: jax.Array
    spin: jax.Array
    stands: jax.Array

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
        x, angle = self.x + 0.02 * self.v, self.angle + 0.02 * self.spin
        v, spin = self.v + 0.02 * (pull - 0.05 * turn * cos / 1.1), self.spin + 0.02 * turn
        stands = self.stands & (jnp.abs(angle) < 0.2095) & (jnp.abs(x) < 2.4)
        where = lambda pole: (pole.x, pole.v, pole.angle, pole.spin, pole.stands)  # noqa: E731
        return eqx.tree_at(where, self, (x, v, angle, spin, stands)), stands.astype(float)


class Linear(eqx.Module):
    w: jax.Array
    b: jax.Array

    def __init__(self, key, inputs, outputs):
        self.w, self.b = jax.random.normal(key, (inputs, outputs)) / inputs**0.5, jnp.zeros(outputs)

    def __call__(self, x):
        return x @ self.w + self.b


class Policy(eqx.Module):
    first: Linear
    second: Linear

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first, self.second = Linear(keys[0], 4, 32), Linear(keys[1], 32, 2)

    def __call__(self, seen):
        return jax.nn.log_softmax(self.second(jnp.tanh(self.first(seen))))


def play(policy, key):
    """One pole until it falls: rewards, and the logarithms of the probabilities of what was done."""

    def step(pole, key):
        chances = policy(pole.seen())
        action = jax.random.categorical(key, chances)
        pole, reward = pole.push(action == 1)
        return pole, (reward, chances[action])

    return jax.lax.scan(step, CartPole(key), jax.random.split(key, STEPS))[1]


TX = optax.adam(2e-2)


@eqx.filter_jit
def train(policy, state, key):
    key, now = jax.random.split(key)

    def loss(policy):
        rewards, chances = eqx.filter_vmap(play, in_axes=(None, 0))(policy, jax.random.split(now, POLES))
        ahead = jnp.cumsum(rewards[:, ::-1], 1)[:, ::-1]
        better = (ahead - ahead.mean(0)) / (ahead.std(0) + 1e-6)
        return -(rewards * better * chances).sum() / rewards.sum(), rewards.sum(1).mean()

    grads, reached = eqx.filter_grad(loss, has_aux=True)(policy)
    updates, state = TX.update(grads, state, eqx.filter(policy, eqx.is_array))
    return eqx.apply_updates(policy, updates), state, key, reached


def main(rounds=50):
    key = jax.random.key(0)
    policy = Policy(key)
    state = TX.init(eqx.filter(policy, eqx.is_array))
    returns = []
    for _ in range(rounds):
        policy, state, key, reached = train(policy, state, key)
        returns.append(float(reached))
    return returns


if __name__ == "__main__":
    returns = main()
    assert returns[0] < 40 and sum(returns[-10:]) / 10 > 170, "it stands for 170 of 200 steps"
    print(f"it stood for {returns[0]:.0f} steps of {STEPS} before, for {returns[-1]:.0f} after")
