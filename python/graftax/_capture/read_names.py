# SPDX-License-Identifier: Apache-2.0
"""The names that code reads outside of its arguments: which of them are bindings, and which lead to roots.

A *binding* is a name of a module or a class whose value is a function, a class, a module or a constant: it is watched,
and a change makes a new entry. An *origin* holds what can change by itself (arrays, containers, objects, functions with
state): its value is one more root of every call.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Collection, Iterable
from typing import Any

from graftax import _core
from graftax._capture.constant_values import OF_KEYS, in_class, is_constant
from graftax._capture.origin import Origin
from graftax._capture.trace_local import synchronized

Scope = dict[str, Any]
Variables = tuple[str, ...]  # a variable of a function; one of the function that it holds; and so on


class ReadNames:
    """Bindings and origins, each noted once, and the functions that were read with them."""

    def __init__(self, lock: threading.RLock) -> None:
        self.lock = lock
        self.origins: list[Origin] = []
        self.bindings: list[tuple[Any, str]] = []  # (dict, class, or a function with these globals; name)
        self.functions: dict[int, types.FunctionType] = {}  # whose code and defaults count
        self.keywords: dict[int, types.FunctionType] = {}  # by the dict of its keyword defaults
        self.jitted = set[int]()  # the dicts of jitted functions that bindings lead to
        self.cells: dict[int, tuple[types.CellType, types.FunctionType]] = {}  # with constants, and whose they are
        self.scope: Scope | None = None  # the globals of the traced function itself
        self.assigned_own: set[str] = set()  # those of them that are origins: code assigns them, or they were opened
        self.shared: set[str] = set()  # those that are roots, and that other code reads in a trace
        self.hidden: set[str] = set()  # variables and globals of the function that only its host functions read
        self.left_out: set[tuple[int, str | None]] = set()  # what `leave_out` has excluded: it is never an origin
        self.closures: dict[tuple[int, str], types.FunctionType] = {}  # the last ones that were read under these names
        # Origins of numbers that were seen to change, and of functions with these variables.
        self.changing: dict[tuple[int, str | None], frozenset[Variables]] = {}
        self.touched: set[tuple[int, str]] = set()  # names of globals and modules that the code noted last has
        # What an entry compares, with the sizes of what it was made of. None where it has to be made again.
        self.compared: tuple[tuple[int, ...], _core.Reads] | None = None
        self._noted: set[tuple[int, str | None]] = set()
        self.forgotten = 0  # how often noted names were dropped: then every class is looked at once more
        self._own_roots: set[tuple[int, str]] = set()  # globals of the function itself that are roots
        self._guards: dict[int, weakref.ref[types.FunctionType]] = {}

    @property
    def size(self) -> tuple[int, ...]:
        """Sizes of what makes a trace begin anew when it grows."""
        return len(self.origins), sum(origin.assigned for origin in self.origins), len(self.hidden)

    @property
    def compared_size(self) -> tuple[int, ...]:
        """Sizes of what a comparison is made of."""
        return len(self._noted), len(self.functions), len(self.cells)

    def is_noted(self, key: tuple[int, str | None]) -> bool:
        return key in self._noted

    # ---- globals that belong to no module

    def guard(self, scope: Scope, function: types.FunctionType) -> None:
        """Holds these globals weakly, by a function that has them: a dict takes no weak references."""
        # `exec` makes new globals each time that it runs, and nothing here may keep them alive.
        self._guards.setdefault(id(scope), weakref.ref(function))

    def is_guarded(self, scope: Scope) -> bool:
        return id(scope) in self._guards

    def guarded(self, holder: object) -> Any:
        """A weak reference to a function with these globals, where they are not kept alive, or the holder itself."""
        return self._guards.get(id(holder), holder)

    # ---- bindings

    def bind(self, holder: object, name: str) -> None:
        """Makes a binding of a name, unless it is noted already."""
        if (id(holder), name) not in self._noted:
            self._noted.add((id(holder), name))
            self.bindings.append((self.guarded(holder), name))

    def unbind(self, holder: object, name: str) -> None:
        """Drops a binding. When code reads the name again, it is noted anew."""
        guarded = self.guarded(holder)
        self.bindings = [b for b in self.bindings if b[0] is not guarded or b[1] != name]
        self._noted.discard((id(holder), name))
        self.forgotten += 1

    def forget_dead(self) -> None:
        """Drops the bindings of globals that nothing holds any more."""
        self.bindings = [b for b in self.bindings if type(b[0]) is not weakref.ref or b[0]() is not None]

    def keep_out(self, changing: set[tuple[int, Any]]) -> None:
        """Drops what traces themselves change: no program depends on it."""
        if changing:
            self.bindings = [b for b in self.bindings if (id(b[0]), b[1]) not in changing]

    def note(self, holder: object, name: str, value: object, can_be_root: bool) -> None:
        """Notes that code reads a name, which has this value now."""
        key = id(holder), name
        self.touched.add(key)
        # The first function that is seen under a name is what `_open_if_made_anew` compares later ones with.
        if isinstance(value, types.FunctionType) and value.__closure__:
            self.closures.setdefault(key, value)
        # Code in the trace reads a global of the traced function: a host function is not its only reader.
        if key in self._own_roots:
            self.shared.add(name)
            self.hidden.discard(name)
        if key in self._noted or self._is_fed(holder, name):
            return
        if can_be_root and not is_constant(value):
            self.add(Origin(holder, name))
        else:
            self.bind(holder, name)

    def _is_fed(self, holder: object, name: str) -> bool:
        """Does a class inherit this name from a base where the code assigns it?"""
        # The base's origin gives the value. A binding of the subclass would hold the old one, and always have changed.
        if not isinstance(holder, type):
            return False
        bases = [p.holder for p in self.origins if p.assigned and p.name == name and p.holder is not holder]
        return bool(bases) and in_class(holder, name)[0] in bases

    def note_keywords(self, function: types.FunctionType) -> None:
        """Makes bindings of a function's keyword defaults: their dict can change without the function."""
        keywords = function.__kwdefaults__
        if keywords and id(keywords) not in self.keywords:
            self.keywords[id(keywords)] = function
            self.bindings += [(keywords, name) for name in keywords]
            self.compared = None

    # ---- origins

    def add(self, origin: Origin) -> None:
        """Makes a root of an origin, where it is new."""
        if origin.key not in self._noted:
            self._noted.add(origin.key)
            self.origins.append(origin)
            if origin.name is None:  # as a root, a function brings its attributes: no binding compares their names
                attributes = vars(origin.holder)
                self.bindings = [b for b in self.bindings if b[1] != OF_KEYS or b[0] is not attributes]
                self.compared = None

    def drop(self, origins: Iterable[Origin]) -> None:
        """Takes these out of the roots. When code reads their names again, they are noted anew."""
        keys = {origin.key for origin in origins}
        self.origins = [origin for origin in self.origins if origin.key not in keys]
        self._noted -= keys
        self.forgotten += 1

    def assign(self, origin: Origin) -> None:
        """Makes a root of a name that the code assigns, so that each call assigns it."""
        if origin.key in self.left_out or any(known.what == origin.what for known in self.origins):
            return
        # A global of the function itself is a root of another kind until now: `Signature.globals`.
        if origin.key in self._own_roots:
            self._own_roots.discard((id(origin.holder), origin.name or ""))
            self.assigned_own.add(origin.name or "")
        self.origins = [known for known in self.origins if known.key != origin.key]
        # A binding that has its value from here would fail whenever the code assigns the name.
        unaffected = [b for b in self.bindings if b[1] != origin.name or not origin.feeds(b[0])]
        if isinstance(origin.holder, type):  # a subclass may get a value of its own: then it is noted again
            self._noted -= {(id(b[0]), b[1]) for b in self.bindings} - {(id(b[0]), b[1]) for b in unaffected}
        self.forgotten += 1
        self.bindings = unaffected
        self.compared = None
        self._noted.add(origin.key)
        self.origins.append(origin)

    @synchronized
    def set_own_globals(self, scope: Scope, names: Collection[str], stored: Iterable[str]) -> None:
        """Tells which globals the traced function names itself, and which of them it `stored`.

        They are roots by its signature, so no other code that reads one makes an origin of it.
        """
        self.scope = scope
        for name in set(stored) - self.hidden:
            self.assigned_own.add(name)
            self.assign(Origin(scope, name, True))
        # After `clear_cache`, a trace has made origins of them already.
        self.assigned_own |= {p.name for p in self.origins if p.holder is scope and p.name is not None} & {*names}
        keys = {(id(scope), name) for name in set(names) - self.assigned_own}
        self._own_roots |= keys
        self._noted |= keys
        self.forgotten += 1

    def open(self, origin: Origin, replaced: types.FunctionType) -> None:
        """Makes a root of the function under this name, with what its variables hold: its identity counts no more.

        Args:
            replaced: the function that had the name. Nothing depends on it any more, unless another name leads there.
        """
        self.forgotten += 1
        if origin.key in self._own_roots:
            self._own_roots.discard((id(origin.holder), origin.name or ""))
            self.assigned_own.add(origin.name or "")
            self._noted.discard(origin.key)
        else:
            self.unbind(origin.holder, origin.name or "")
        if not any(function is replaced for function in self.closures.values()):
            self.functions.pop(id(replaced), None)
            self.cells = {i: (cell, owner) for i, (cell, owner) in self.cells.items() if owner is not replaced}
        self.add(origin)

    @property
    def own_closures(self) -> list[str]:
        """The globals of the traced function that are functions with variables."""
        return [name for i, name in self.closures if (i, name) in self._own_roots]

    @synchronized
    def leave_out(self, origins: Iterable[Origin]) -> bool:
        """Excludes these from the roots: what a trace changes there happens once a trace. True where that is new."""
        new_keys = {origin.key for origin in origins} - self.left_out
        self.left_out |= new_keys
        self.origins = [origin for origin in self.origins if origin.key not in self.left_out]
        return bool(new_keys)

    def hide(self, names: set[str]) -> bool:
        """Takes names of the traced function out of its roots that only host functions read. True where that is new."""
        newly_hidden = names - self.shared - self.hidden
        self.hidden |= newly_hidden
        # A host function assigns them in the module itself, after the trace.
        self.assigned_own -= newly_hidden
        self.origins = [
            origin
            for origin in self.origins
            if not origin.assigned or origin.name not in newly_hidden or origin.holder is not self.scope
        ]
        return bool(newly_hidden)

    def touches_root(self) -> bool:
        """Does the code that was noted last read a root by its name?"""
        is_own = not self.touched.isdisjoint(self._own_roots)
        return is_own or any(origin.key in self.touched for origin in self.origins)
