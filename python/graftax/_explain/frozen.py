# SPDX-License-Identifier: Apache-2.0
"""Refuses calls of a frozen function that would compile."""

from __future__ import annotations

from typing import Any, NoReturn

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._explain.history import History
from graftax._explain.log import cause_lines
from graftax._explain.variant import Variant

FROZEN = (
    "{name} is frozen, and this call would compile:\n{causes}\nPass arguments that it was compiled for, warm it for "
    "this call before freeze(), or let it compile again with unfreeze()."
)


class RecompileError(GraftaxError):
    """A call of a frozen function would have compiled; the message says why."""


def refuse(table: Any, name: str, recording: _core.Recording) -> NoReturn:
    """Raises for a call without a program."""
    call = Variant.from_call(name, recording.graphdef, recording.names, recording.leaves, table.reads)
    refuse_variant(table.history, call)


def refuse_variant(history: History, call: Variant) -> NoReturn:
    number, causes = history.explain(call)
    raise RecompileError(FROZEN.format(name=call.name, causes="\n".join(cause_lines(number, causes, "  "))))
