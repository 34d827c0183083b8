# SPDX-License-Identifier: Apache-2.0
"""`graftax.jit`: any object, changes come back."""

from collections.abc import Callable
from typing import Any

import jax

from benchmarks.inputs import Form
from graftax import _core, optimizer
from graftax import combine as combine
from graftax import copy as copy
from graftax import equal as equal
from graftax import flatten as flatten
from graftax import jit as jit
from graftax import partition as _partition
from graftax import to_dict as _to_dict
from graftax import unflatten as unflatten
from graftax import update as merge  # noqa: F401 (a measure's)
from graftax import value_and_grad as value_and_grad

NAME = "graftax.jit"
DISTRIBUTION = "graftax"


def accepts(form: Form) -> bool:
    return True


def taken_as(form: Form) -> Form:
    return form


def in_place(form: Form, change: Callable[[Any], None]) -> Callable[[Any], None]:
    return jit(change)


def partition(obj: Any) -> tuple[Any, Any]:
    return _partition(obj, jax.Array)


def to_dict(obj: Any) -> Any:
    return _to_dict(obj).values()


def replay(structure: Any, obj: Any) -> list[Any]:
    walked = _core.walk(structure, (obj,))
    if walked is None:
        raise ValueError("replay did not recognise the structure it was recorded from")
    return walked[0]


def trained(model: Any, grads: Any, rate: float) -> Callable[[], Any]:
    import optax

    opt = optimizer(optax.adam(rate), model)

    @jit
    def step(model: Any, opt: Any, grads: Any) -> None:
        opt.update(model, grads)

    def call() -> Any:
        step(model, opt, grads)
        return model

    return call
