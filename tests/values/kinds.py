# SPDX-License-Identifier: Apache-2.0
"""Every kind of value that docs/values.md lists, by group. A new kind joins one of the lists and meets every law."""

from __future__ import annotations

import dataclasses

from values import arrays, classes, containers, functions, libraries, refused, statics, weak
from values.record import LAWS, Kind

GROUPS = {
    "Functions": functions.KINDS,
    "Containers": containers.KINDS,
    "Classes derived from containers": containers.SUBCLASSES,
    "Objects": classes.PLAIN,
    "Dataclasses": classes.DATA,
    "attrs": classes.ATTRS,
    "Registered with JAX": libraries.REGISTERED,
    "Libraries": libraries.LIBRARIES,
    "Arrays, and what JAX puts beside them": arrays.KINDS,
    "Weak references": weak.KINDS,
    "Numbers and text": statics.NUMBERS,
    "Times, names and places": statics.TIMES,
    "Enums, classes, sentinels": statics.NAMES,
}
KINDS: list[Kind] = [dataclasses.replace(kind, group=group) for group, kinds in GROUPS.items() for kind in kinds]
REFUSED = refused.KINDS
__all__ = ["GROUPS", "KINDS", "LAWS", "REFUSED"]
