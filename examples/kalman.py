# SPDX-License-Identifier: Apache-2.0
"""A Kalman filter as an object that changes, run by `scan`; its noise is learned: `python examples/kalman.py`."""

import jax
import jax.numpy as jnp
import optax

import graftax


class Motion:
    """Something that moves with an almost constant speed, and how it is seen."""

    def __init__(self, push=0.3, blur=1.0):
        self.dynamics = jnp.asarray([[1.0, 1.0], [0.0, 1.0]])
        self.camera = jnp.asarray([[1.0, 0.0]])
        self.log_push, self.log_blur = jnp.log(push), jnp.log(blur)

    @property
    def push(self):
        """How the place and the speed are disturbed between two pictures."""
        return jnp.exp(self.log_push) ** 2 * jnp.asarray([[0.25, 0.5], [0.5, 1.0]]) + 1e-6 * jnp.eye(2)

    @property
    def blur(self):
        return jnp.exp(self.log_blur) ** 2 * jnp.eye(1)


class Filter:
    """What is believed of the state: a mean and a covariance, which each picture changes."""

    def __init__(self, motion):
        self.motion = motion
        self.mean, self.covariance = jnp.zeros(2), 100.0 * jnp.eye(2)
        self.evidence, self.seen = jnp.asarray(0.0), jnp.asarray(0)

    def predict(self):
        a = self.motion.dynamics
        self.mean = a @ self.mean
        self.covariance = a @ self.covariance @ a.T + self.motion.push

    def correct(self, picture):
        c = self.motion.camera
        surprise, spread = picture - c @ self.mean, c @ self.covariance @ c.T + self.motion.blur
        gain = jnp.linalg.solve(spread, c @ self.covariance).T
        self.mean = self.mean + gain @ surprise
        self.covariance = (jnp.eye(2) - gain @ c) @ self.covariance
        self.evidence += jax.scipy.stats.multivariate_normal.logpdf(surprise, jnp.zeros(1), spread)
        self.seen += 1

    def run(self, pictures):
        """The means after each picture, whose first axis is time."""

        def step(_, picture):
            self.predict()
            self.correct(picture)
            return None, self.mean

        return graftax.scan(step, None, pictures)[1]


def record(key, motion, steps=400):
    """Places and pictures of something that moves so."""

    def step(state, key):
        keys = jax.random.split(key)
        state = jax.random.multivariate_normal(keys[0], motion.dynamics @ state, motion.push)
        return state, (state, jax.random.multivariate_normal(keys[1], motion.camera @ state, motion.blur))

    return jax.lax.scan(step, jnp.zeros(2), jax.random.split(key, steps))[1]


def loss_of(motion, pictures):
    belief = Filter(motion)
    belief.run(pictures)
    return -belief.evidence / len(pictures)


@graftax.jit
def train(motion, opt, pictures):
    loss, grads = graftax.value_and_grad(loss_of)(motion, pictures)
    opt.update(motion, grads)
    return loss


def main(rounds=150):
    truth = Motion(push=0.1, blur=3.0)
    states, pictures = record(jax.random.key(0), truth)
    motion = Motion()
    opt = graftax.optimizer(optax.adam(5e-2), motion, wrt=("log_push", "log_blur"))
    losses = [float(train(motion, opt, pictures)) for _ in range(rounds)]

    belief = Filter(motion)
    means = graftax.jit(Filter.run)(belief, pictures)
    assert belief.seen == len(pictures) and (belief.mean == means[-1]).all(), "the filter has moved on"
    assert train.cache_info().traces <= 1 and (motion.camera == truth.camera).all()
    errors = [float(jnp.sqrt(jnp.mean((x - states[:, 0]) ** 2))) for x in (pictures[:, 0], means[:, 0])]
    return losses, errors, motion


if __name__ == "__main__":
    losses, (blurred, filtered), motion = main()
    assert filtered < 0.6 * blurred and abs(float(jnp.exp(motion.log_blur)) - 3) < 0.5
    print(f"error of the pictures {blurred:.2f}, of the filter {filtered:.2f}; loss {losses[0]:.2f}, {losses[-1]:.2f}")
