# SPDX-License-Identifier: Apache-2.0
"""The read set of a function by value: it notes only what code asks numbers for."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any, Protocol

from graftax._capture.bytecode import names_of
from graftax._capture.code_by_identity import MetCode
from graftax._capture.code_owner import is_never_asked, is_users_code
from graftax._capture.constant_values import cells_of
from graftax._capture.read_set import ReadSet
from graftax._capture.trace_local import Begun


class Constants(Protocol):
    """Notes what code reads outside of its arguments, where another process is to compare it."""

    def begin_trace(self) -> None:
        """A trace begins."""

    def add(self, code: types.CodeType, scope: dict[str, Any], function: object, stays: bool = True) -> None:
        """Notes code that runs in the trace."""

    def see(self, value: type | types.ModuleType) -> None:
        """Notes the class of an object that code may read, or a module."""

    def look_up(self) -> None:
        """Notes what the code asks classes for."""


class OfSymbols(ReadSet):
    """The read set of a function by value, whose closure and globals are constants as in JAX.

    What code asks numbers for counts in it, and nothing else. The rest is told to `constants`, if there are any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.constants: Constants | None = None

    def tell(self, constants: Constants) -> None:
        """From now on tells `constants` what the code reads."""
        # As if no code were known: so the hook tells of all of it once more.
        self.constants, self.known, self.of_graph = constants, MetCode(), MetCode()

    def begin(self, begun: Begun) -> None:
        super().begin(begun)
        if self.constants is not None:
            self.constants.begin_trace()

    def add(self, code: types.CodeType, scope: dict[str, Any], function: object, stays: bool = True) -> None:
        if not is_never_asked(code.co_filename):
            users, names, cells = is_users_code(code, scope), names_of(code), cells_of(function)
            self.builtins.note(code, scope, cells, names, users)
            self.builtins.of_ids.clear()  # these two have nothing to do with numbers
            self.builtins.of_vars.clear()
            if users:
                self.impure.note(code, scope, cells, names)
            if self.constants is not None:
                self.constants.add(code, scope, function, stays)

    # Captures are constants here, so there are none that host functions, callbacks or refused roots could hide.

    def see_hosts(self, function: types.FunctionType, hosts: set[types.CodeType]) -> bool:
        return False

    def see_receivers(self, function: types.FunctionType) -> bool:
        return False

    def see_named(self, named: Iterable[type | types.ModuleType]) -> bool:
        if self.constants is not None:
            for value in named:
                self.constants.see(value)
        return super().see_named(named)

    def hide_inner(self, code: types.CodeType) -> bool:
        return False

    def _add_class(self, cls: type) -> None:
        """A class counts as it was when the function was traced: `constants` alone is told of it."""
        if self.constants is not None:
            self.constants.see(cls)

    def _look_up(self) -> None:
        super()._look_up()
        if self.constants is not None:
            self.constants.look_up()
