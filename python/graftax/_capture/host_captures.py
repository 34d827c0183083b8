# SPDX-License-Identifier: Apache-2.0
"""Variables and globals that only host functions of a traced function read. They run later, so these are not roots."""

from __future__ import annotations

import types

from graftax._capture.bytecode import nested_codes
from graftax._capture.code_by_identity import IdentitySet
from graftax._capture.constant_values import content
from graftax._capture.host_callback_names import only_in, passed_hosts, receivers
from graftax._capture.read_names import ReadNames


class HostCaptures:
    """Decides which names of the traced function are hidden from its trace (`names.hidden`)."""

    def __init__(self, names: ReadNames) -> None:
        self._names = names
        self._functions: dict[int, tuple[types.CellType, str]] = {}  # by id: hidden variables, with their names
        self.on_host = IdentitySet[types.CodeType]()  # of functions that code gives to callbacks alone
        self._receivers: set[str] = set()  # hidden names of objects whose methods are given to callbacks
        self._receiving = IdentitySet[types.CodeType]()  # the code that gives them
        self._was_refused = False  # has `hide_inner` been asked?

    @property
    def cells(self) -> list[types.CellType]:
        """The hidden variables. If one gets another value, it may have to be a root."""
        return [cell for cell, _ in list(self._functions.values())]

    def is_receiver(self, name: str) -> bool:
        """Is a name hidden because callbacks are given methods of its value?"""
        return name in self._receivers and name in self._names.hidden

    def is_receiver_in(self, name: str, code: types.CodeType) -> bool:
        """Does this code name it to give its methods to callbacks?"""
        return name in self._receivers and code in self._receiving

    def reveal(self, code: types.CodeType, is_inner: bool) -> bool:
        """Code begins to run in a trace, so not only the host runs it: what it reads may be a root after all.

        `is_inner` says whether code that is known makes functions of it. True where something was hidden.
        """
        hosts = {name: content(cell) for cell, name in list(self._functions.values())}
        revealed = {name for name, host in hosts.items() if getattr(host, "__code__", None) is code}
        if is_inner:
            revealed |= self._names.hidden.intersection(code.co_freevars) - hosts.keys()
        revealed &= self._names.hidden
        self._names.hidden -= revealed
        return bool(revealed)

    def reveal_cell(self, cell: types.CellType) -> bool:
        """A variable holds something else by now. False where it was not hidden."""
        if id(cell) not in self._functions:
            return False
        if self._functions[id(cell)][1] not in self._receivers:  # another function, which may run in the trace, too
            self._names.hidden.discard(self._functions.pop(id(cell))[1])
        return True

    def hide_inner(self, code: types.CodeType) -> bool:
        """Hides what only functions inside of this one read: they may be host functions, which can take any value.

        Asked once, after a root was refused. If such a function runs in a trace, what it reads is a root again.
        """
        if self._was_refused:
            return False
        self._was_refused = True
        return self._hide(code, {constant for constant in code.co_consts if isinstance(constant, types.CodeType)})

    def note_functions(self, function: types.FunctionType, hosts: set[types.CodeType]) -> bool:
        """Hides what a function has for these host functions alone. True where that is new."""
        names = self._names
        # What the host functions read, where they are defined in the function.
        is_new = self._hide(function.__code__, hosts)
        # Host functions with state that were taken for origins.
        for origin in [known for known in names.origins if known.name is None and known.holder.__code__ in hosts]:
            names.drop([origin])
            self.on_host.add(origin.holder.__code__)
            is_new = True
        # Host functions that are defined outside, in variables of the function.
        for cell, name in passed_hosts(function, hosts) if hosts else ():
            if name not in names.shared and name not in names.hidden:
                self._functions[id(cell)] = cell, name
                names.hidden.add(name)
                is_new = True
        return is_new

    def note_receivers(self, function: types.FunctionType) -> list[object]:
        """Hides what the function names only to give its methods to callbacks of JAX. Returns the newly hidden values.

        The name is still compared, so that another object under it is noticed.
        """
        names, values = self._names, list[object]()
        for cell, name, value in receivers(function):
            if name in names.hidden or name in names.shared or name in names.assigned_own:
                continue
            names.hidden.add(name)
            self._receivers.add(name)
            self._receiving.update(nested_codes(function.__code__))
            if cell is not None:
                self._functions[id(cell)] = cell, name
            else:
                names.bindings.append((names.guarded(function.__globals__), name))
            names.compared = None
            values.append(value)
        return values

    def _hide(self, code: types.CodeType, inner_codes: set[types.CodeType]) -> bool:
        """Hides what only this code inside of a function's code reads. True where that is new."""
        return bool(inner_codes) and self._names.hide(only_in(code, inner_codes))
