# SPDX-License-Identifier: Apache-2.0
"""Weak references. A value is a list: the thing itself, so that it lives, and what refers to it weakly."""

from __future__ import annotations

import weakref

from values.record import Kind


class Thing:
    def __init__(self, w, n):
        self.w, self.n = w, n


OUTSIDE = {n: Thing(None, n) for n in ("a", "b")}


def assign(v, w, n):
    v[0].w, v[0].n = w, n


def refers(w, n):
    thing = Thing(w, n)
    return [thing, weakref.ref(thing)]


def read_reference(v):
    thing = v[1]()
    return thing.w, thing.n, thing is v[0]


def to_itself(w, n):
    thing = Thing(w, n)
    thing.me = weakref.ref(thing)
    return [thing]


def to_parent(w, n):
    parent, child = Thing(w, n), Thing(w, n)
    parent.child, child.parent = child, weakref.ref(parent)
    return parent


def dead(w, n):
    thing = Thing(w, n)
    reference = weakref.ref(thing)
    del thing
    return [w, n, reference]


def dies(v, w, n):
    v[0], v[1] = w, n


def outside(w, n):
    return [w, weakref.ref(OUTSIDE[n])]


def change_outside(v, w, n):
    v[0], v[1] = w, weakref.ref(OUTSIDE[n])


def values(w, n):
    thing = Thing(w, n)
    return [thing, weakref.WeakValueDictionary(first=thing, second=thing)]


def keys(w, n):
    return [weakref.WeakKeyDictionary({OUTSIDE["a"]: [w, n]})]


def change_keys(v, w, n):
    v[0][OUTSIDE["a"]][:] = [w, n]


def a_set(w, n):
    return [weakref.WeakSet([OUTSIDE["a"]]), w, n]


def beside_set(v, w, n):
    v[1], v[2] = w, n


def method(w, n):
    thing = Reader(w, n)
    return [thing, weakref.WeakMethod(thing.both)]


class Reader(Thing):
    def both(self):
        return self.w, self.n


KINDS = [
    Kind("`weakref.ref`, the referent in the graph", refers, read_reference, assign),
    Kind("`weakref.ref` to the object that holds it", to_itself, lambda v: (v[0].w, v[0].n, v[0].me() is v[0]), assign),
    Kind(
        "`weakref.ref` to a parent",
        to_parent,
        lambda v: (v.w, v.n, v.child.w, v.child.parent() is v),
        lambda v, w, n: (setattr(v.child.parent(), "w", w), setattr(v, "n", n))[1],
    ),
    Kind("`weakref.ref`, dead", dead, lambda v: (v[0], v[1], v[2]()), dies, note="It stays dead."),
    Kind(
        "`weakref.ref`, the referent elsewhere",
        outside,
        lambda v: (v[0], v[1]().n, v[1]() is OUTSIDE[v[1]().n]),
        change_outside,
        statics=("a", "b"),
        inside=False,
        without={"round trip": "nothing holds it"},
        note="The referent is walked like any other object, but the reference does not keep it alive.",
    ),
    Kind(
        "`WeakValueDictionary`",
        values,
        lambda v: (v[1]["first"].w, v[1]["second"].n, v[1]["first"] is v[0], len(v[1])),
        assign,
    ),
    Kind(
        "`WeakKeyDictionary`",
        keys,
        lambda v: (*v[0][OUTSIDE["a"]], len(v[0])),
        change_keys,
        note="Keys are compared by identity, and must not hold arrays.",
    ),
    Kind(
        "`WeakSet`",
        a_set,
        lambda v: (OUTSIDE["a"] in v[0], len(v[0]), v[1], v[2]),
        beside_set,
        note="As for keys.",
    ),
    Kind("`weakref.WeakMethod`", method, lambda v: (*v[1]()(), v[1]().__self__ is v[0]), assign),
]
