# SPDX-License-Identifier: Apache-2.0
"""`graftax.jit` on packed state: the object goes in and comes out as a handle on a few buffers."""

import dataclasses
from typing import Any

from benchmarks.inputs import Form
from benchmarks.subjects.graftax_jit import DISTRIBUTION as DISTRIBUTION
from benchmarks.subjects.graftax_jit import flatten as flatten
from benchmarks.subjects.graftax_jit import in_place as in_place
from benchmarks.subjects.graftax_jit import jit as jit
from benchmarks.subjects.graftax_jit import replay as replay
from benchmarks.subjects.graftax_jit import unflatten as unflatten
from graftax import Packed, pack

NAME = "graftax.jit, packed"
# Its walks are those of `graftax.jit`; a handle that is changed in place is not the object that the measure reads.
WITHOUT = ("flatten", "replay", "unflatten", "write_back")


def accepts(form: Form) -> bool:
    return form.name.startswith("dict") or "adam" in form.name.lower()  # where there are many small arrays


def taken_as(form: Form) -> Form:
    def inside(obj: Any) -> Any:
        return obj.unpack() if isinstance(obj, Packed) else obj

    return dataclasses.replace(
        form,
        # The measures use one handle again and again: a handle that donates would be used up.
        build=lambda arrays: pack(form.build(arrays), donate=False),
        arrays=lambda obj: form.arrays(inside(obj)),
        probe=lambda obj: obj._arrays[0],
    )
