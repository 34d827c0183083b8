# SPDX-License-Identifier: Apache-2.0
"""A network on a graph of objects that know their neighbours, cycles and all: `python examples/graph_network.py`.

Rooms of a building exchange heat through doors. Each room is an object with a list of doors, each door knows its two
rooms, and the building is learned from what thermometers show: how well each door conducts, how each room loses heat,
and one rule that all rooms share.
"""

import jax.numpy as jnp
import optax

import graftax


class Rule:
    """What every room does with the heat that comes in: one object, held by all of them."""

    def __init__(self):
        self.gain = jnp.asarray(0.5)

    def __call__(self, flow):
        return self.gain * flow


class Door:
    def __init__(self, one, other, conducts):
        self.rooms = (one, other)
        self.log_conducts = jnp.log(conducts)
        for room in self.rooms:
            room.doors.append(self)  # a cycle: the room knows the door that knows the room

    def flow_into(self, room):
        one, other = self.rooms
        across = other if room is one else one  # identity holds in compiled code, too
        return jnp.exp(self.log_conducts) * (across.heat - room.heat)


class Room:
    def __init__(self, name, rule, heat, loss):
        self.name, self.rule, self.doors = name, rule, []
        self.heat, self.loss = jnp.asarray(heat), jnp.asarray(loss)

    def change(self):
        return self.rule(sum(door.flow_into(self) for door in self.doors)) - self.loss * self.heat


class Building:
    def __init__(self, conducts=0.3, loss=0.05):
        rule = Rule()
        heats = {"hall": 2.0, "kitchen": 5.0, "study": 1.0, "bath": 4.0, "attic": 0.0}
        self.rooms = {name: Room(name, rule, heat, loss) for name, heat in heats.items()}
        plan = ["hall kitchen", "kitchen study", "study hall", "hall bath", "bath attic", "attic hall"]
        self.doors = [Door(*(self.rooms[name] for name in pair.split()), conducts) for pair in plan]

    def step(self):
        changes = {name: room.change() for name, room in self.rooms.items()}
        for name, room in self.rooms.items():
            room.heat = room.heat + 0.2 * changes[name]
        return jnp.stack([room.heat for room in self.rooms.values()])


def watch(building, steps=40):
    """What the thermometers show: (steps, rooms). The heat that is left stays in the rooms."""
    return graftax.scan(lambda _, __: (None, building.step()), None, length=steps)[1]


def loss_of(building, shown):
    return jnp.mean((watch(graftax.copy(building)) - shown) ** 2)


@graftax.jit
def train(building, opt, shown):
    loss, grads = graftax.value_and_grad(loss_of)(building, shown)
    opt.update(building, grads)
    return loss


def main(rounds=400):
    real = Building()
    for i, door in enumerate(real.doors):
        door.log_conducts = jnp.log(0.1 + 0.15 * i)
    real.rooms["attic"].loss = jnp.asarray(0.2)
    shown = watch(graftax.copy(real))

    building = Building()
    learned = graftax.labels({"**.heat": "fixed", "**": "learned"})
    tx = optax.multi_transform({"learned": optax.adam(2e-2), "fixed": optax.set_to_zero()}, learned)
    opt = graftax.optimizer(tx, building)
    losses = [float(train(building, opt, shown)) for _ in range(rounds)]

    hall = building.rooms["hall"]
    assert all(hall in door.rooms for door in hall.doors) and len(hall.doors) == 4, "still the same graph"
    assert len({id(room.rule) for room in building.rooms.values()}) == 1, "still one rule"
    assert train.cache_info().traces <= 1 and float(hall.heat) == 2.0
    gain = building.rooms["hall"].rule.gain
    return losses, [float(gain * jnp.exp(door.log_conducts)) for door in building.doors], building


if __name__ == "__main__":
    losses, found, _ = main()
    assert losses[-1] < 1e-4 * losses[0], "the building is known"
    print(f"loss {losses[0]:.2g} before, {losses[-1]:.2g} after; doors: {', '.join(f'{x:.2f}' for x in found)}")
