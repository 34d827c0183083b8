# SPDX-License-Identifier: Apache-2.0
"""What code asks of numbers, where that is all that a function's code is noted for."""

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
    """Notes what code reads outside of its arguments."""

    def begin_trace(self) -> None: ...

    def add(self, code: types.CodeType, scope: dict[str, Any], function: object, stays: bool = True) -> None:
        """This code runs in it."""
        ...

    def see(self, value: type | types.ModuleType) -> None:
        """An object of this class, or this module, is there."""
        ...

    def look_up(self) -> None:
        """Notes what the code asks classes for."""
        ...


class OfSymbols(ReadSet):
    """That of a function by value, whose closure and globals are as in JAX: only what code asks of numbers counts.

    What else it reads is told to `constants`, where another process is to compare it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.constants: Constants | None = None

    def tell(self, constants: Constants) -> None:
        """From now on `constants` is told what the code reads. Code that is known is heard of again."""
        self.constants, self.known, self.of_graph = constants, MetCode(), MetCode()

    def begin(self, begun: Begun) -> None:
        super().begin(begun)
        if self.constants is not None:
            self.constants.begin_trace()

    def add(self, code: types.CodeType, scope: dict[str, Any], function: object, stays: bool = True) -> None:
        if not is_never_asked(code.co_filename):
            users, names, cells = is_users_code(code, scope), names_of(code), cells_of(function)
            self.builtins.note(code, scope, cells, names, users)
            self.builtins.of_ids.clear()
            self.builtins.of_vars.clear()
            if users:
                self.impure.note(code, scope, cells, names)
            if self.constants is not None:
                self.constants.add(code, scope, function, stays)

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
        """It counts as it is."""
        if self.constants is not None:
            self.constants.see(cls)

    def _look_up(self) -> None:
        super()._look_up()
        if self.constants is not None:
            self.constants.look_up()
