# SPDX-License-Identifier: Apache-2.0
"""What code asks of numbers, where that is all that a function's code is noted for."""

from __future__ import annotations

import types
from typing import Any

from graftax._capture.bytecode import cells_of, is_never_asked, is_users_code, names_of
from graftax._capture.read_set import ReadSet


class OfSymbols(ReadSet):
    """That of a function by value, whose closure and globals are as in JAX: only what code asks of numbers counts."""

    def add(self, code: types.CodeType, scope: dict[str, Any], function: object, stays: bool = True) -> None:
        if not is_never_asked(code.co_filename):
            users, names, cells = is_users_code(code, scope), names_of(code), cells_of(function)
            self.builtins.note(code, scope, cells, names, users)
            self.builtins.of_ids.clear()
            self.builtins.of_vars.clear()
            if users:
                self.impure.note(code, scope, cells, names)

    def see_hosts(self, function: types.FunctionType, hosts: set[types.CodeType]) -> bool:
        return False

    def see_receivers(self, function: types.FunctionType) -> bool:
        return False

    def hide_inner(self, code: types.CodeType) -> bool:
        return False

    def _add_class(self, cls: type) -> None:
        """It counts as it is."""
