# SPDX-License-Identifier: Apache-2.0
"""Bodies that refer to each other, integrated with `scan` and differentiated through: `python examples/planets.py`.

Each body knows the others, and the system knows its bodies: a cyclic graph of plain Python objects. The start of the
comet is found by gradient descent through the whole flight.
"""

import jax.numpy as jnp

import graftax

STEPS, DT = 200, 0.01


class Body:
    def __init__(self, name, mass, position, velocity):
        self.name = name
        self.mass = jnp.asarray(mass, jnp.float32)
        self.position = jnp.asarray(position, jnp.float32)
        self.velocity = jnp.asarray(velocity, jnp.float32)
        self.others = []

    def pull(self):
        """The acceleration by the other bodies."""
        total = jnp.zeros(2)
        for other in self.others:
            away = other.position - self.position
            total = total + other.mass * away / (away @ away + 1e-3) ** 1.5
        return total


class System:
    def __init__(self, *bodies):
        self.bodies = {body.name: body for body in bodies}
        for body in bodies:
            body.system = self
            body.others = [other for other in bodies if other is not body]

    def energy(self):
        moving = sum(0.5 * b.mass * b.velocity @ b.velocity for b in self.bodies.values())
        pairs = [(b, o) for b in self.bodies.values() for o in b.others if b.name < o.name]
        near = [
            b.mass * o.mass / jnp.sqrt((b.position - o.position) @ (b.position - o.position) + 1e-3) for b, o in pairs
        ]
        return moving - sum(near)


def advance(system, _):
    """One step of leapfrog: the bodies change in place."""
    bodies = system.bodies.values()
    for body in bodies:
        body.velocity = body.velocity + 0.5 * DT * body.pull()
    for body in bodies:
        body.position = body.position + DT * body.velocity
    for body in bodies:
        body.velocity = body.velocity + 0.5 * DT * body.pull()
    return system, system.bodies["comet"].position


def fly(system):
    """(the system after the flight, the path of the comet: float32 (STEPS, 2))"""
    return graftax.scan(advance, system, length=STEPS)


def start():
    return System(
        Body("sun", 1.0, (0, 0), (0, 0)),
        Body("earth", 0.01, (1, 0), (0, 1)),
        Body("comet", 1e-4, (-1.5, 0), (0, -0.8)),
    )


def miss(system, target):
    """How far from the target the comet ends, squared."""
    after, _ = fly(system)
    away = after.bodies["comet"].position - target
    return away @ away


def copy_of(system):
    """A new system with the same arrays."""
    leaves, graphdef = graftax.flatten(system)
    return graftax.unflatten(graphdef, leaves)


@graftax.jit
def improve(system, target, rate):
    """One step of gradient descent on the comet's first velocity. The gradient is a system of bodies, too."""
    # The flight changes the system that it is given, so it gets one of its own.
    error, slope = graftax.value_and_grad(miss)(copy_of(system), target)
    comet = system.bodies["comet"]
    comet.velocity = comet.velocity - rate * slope.bodies["comet"].velocity
    return error


def main():
    system = start()
    before = float(system.energy())
    after, path = graftax.jit(fly)(system)
    assert after is system and path.shape == (STEPS, 2)  # the caller's own objects, moved
    assert after.bodies["comet"].others[0] is after.bodies["sun"] and after.bodies["sun"].system is after
    drift = abs(float(after.energy()) - before)
    assert drift < 1e-3
    print(f"energy {before:.4f}, drift {drift:.1e} after {STEPS} steps")

    system, target = start(), path[-1] + jnp.asarray([0.05, 0.05])
    errors = [float(improve(system, target, 0.05)) for _ in range(40)]
    assert errors[-1] < 1e-2 * errors[0] and improve.cache_info().traces <= 1
    print(f"distance to the target {errors[0] ** 0.5:.3f} -> {errors[-1] ** 0.5:.3f}")


if __name__ == "__main__":
    main()
