# SPDX-License-Identifier: Apache-2.0
"""Every case of the table: the forms with their sizes."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.inputs import (
    BLOCKS,
    BRAINSTATE,
    DEEP,
    DICT,
    EQUINOX,
    FLAREJAX,
    LIST,
    NNX,
    OBJECT,
    ONE,
    SHARED,
    TIED,
    Case,
    Form,
)
from benchmarks.models import (
    ADAM,
    GPT,
    GPT_ADAMW,
    GPT_EQUINOX,
    GPT_NNX,
    Template,
    gpt,
    gpt_and_adamw,
    gpt_equinox,
    gpt_nnx,
    mlp_and_adam,
)

_SIZES = (1, 10, 100, 1000)


def _filled(count: int, size: int) -> Callable[[], list[np.ndarray[Any, Any]]]:
    return lambda: [np.full(size, i % 7, np.float32) for i in range(count)]


def _sized(form: Form, *sizes: int) -> list[Case]:
    return [Case(f"{form.name} {size}", form, size) for size in sizes]


def cases() -> list[Case]:
    """Every case of the table, small ones first."""
    return [
        Case("one array", ONE, 1),
        *_sized(LIST, *_SIZES),
        *_sized(DICT, *_SIZES),
        *_sized(EQUINOX, *_SIZES),
        *_sized(OBJECT, *_SIZES),
        *_sized(NNX, 100),
        *_sized(BRAINSTATE, 100),
        *_sized(FLAREJAX, 100),
        Case("deep 100", DEEP, 100),
        Case("shared 100", SHARED, 100),
        Case("tied 2", TIED, 2),
        Case("many 2000", BLOCKS, 2000),
        Case("dict 1000 of 64", DICT, 1000, template=_filled(1000, 64)),
        Case("dict 300 of 1024", DICT, 300, template=_filled(300, 1024)),
        Case("adam", ADAM, 49, template=_leaves(mlp_and_adam)),
        Case("gpt dicts", GPT, 148, template=_leaves(gpt)),
        Case("gpt eqx.nn", GPT_EQUINOX, 148, template=_leaves(gpt_equinox)),
        Case("gpt nnx", GPT_NNX, 148, template=_leaves(gpt_nnx)),
        Case("gpt adamw", GPT_ADAMW, 445, template=_leaves(gpt_and_adamw)),
    ]


def _leaves(template: Callable[[], Template]) -> Callable[[], list[np.ndarray[Any, Any]]]:
    return lambda: list(template()[0])


def case(name: str) -> Case:
    """The case with this name."""
    return {c.name: c for c in cases()}[name]
