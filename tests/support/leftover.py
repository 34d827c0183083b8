# SPDX-License-Identifier: Apache-2.0
"""What of the core nobody holds any more when a process ends: `pytest -p leftover`.

An object may stay: JAX never lets go of a registered class, nor so of what its methods see. But each of its references
has to be in an object that the garbage collector knows. One more is one that the core has taken and not given back.
"""

from __future__ import annotations

import atexit
import gc
import sys
from collections import Counter

import jax

from graftax import _core

KEPT = {"PyTreeDef": 16}  # what the core itself keeps, a reference of each: core/tree/cache.cpp
KINDS = tuple(kind for kind in vars(_core).values() if isinstance(kind, type))


def look() -> None:
    jax.clear_caches()  # those of compiled functions are not in Python
    gc.unfreeze()
    gc.collect()
    gc.collect()
    left = {id(o): o for o in gc.get_objects() if isinstance(o, KINDS)}
    everything = (held for o in gc.get_objects() if o is not left for held in gc.get_referents(o))
    others = Counter(id(held) for held in everything if id(held) in left)
    others.update(map(id, _core.kept_structures()))  # the core has a reference of each
    left[id(left)] = object()  # shows what this function itself adds
    more = {key: sys.getrefcount(o) - others[key] for key, o in left.items()}
    own = more.pop(id(left))
    lost = Counter[str]()
    for key, references in more.items():
        lost[type(left[key]).__name__] += max(references - own, 0)
    for name, n in lost.items():
        if n > KEPT.get(name, 0):
            print(f"held by nobody: {n} of {name}", file=sys.stderr, flush=True)


atexit.register(look)
