# SPDX-License-Identifier: Apache-2.0
"""Changes of fields that the flatten of a registered class leaves out.

In a trace, such a field has the value that unflatten gives it. A new value is written back to the caller's object, but
the next call does not begin with it: code that also reads the field would compute something else than plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from graftax._base.errors import MutationError
from graftax._capture.code_owner import is_users_class

LEFT_OUT = (
    "{name} changes the field {field!r} of {path}, which the flatten of {cls} leaves out. It is no input of a compiled "
    "function: {why}. Make it one of the children or of the aux data, or keep it in an object whose class is not "
    "registered with JAX."
)
_IN_PLACE = "what is changed inside it would be lost"
_READ = "the code, which reads it as well, would find what unflatten gives it, not what the last call left there"


def refuse_left_out(
    name: str, fields: Iterable[tuple[str, type, str, bool]], is_read: Callable[[str], bool] | None
) -> None:
    """Raises MutationError if such a change would be lost, or if code reads the field, which has another value then.

    Args:
        name: of the function.
        fields: as `Trace.left_out` gives them.
        is_read: does code ask for the value of an attribute of this name? None where that is not known.
    """
    for path, cls, field, in_place in fields:
        if is_users_class(cls) and (in_place or is_read is None or is_read(field)):
            why = _IN_PLACE if in_place else _READ
            raise MutationError(LEFT_OUT.format(name=name, field=field, path=path, cls=cls.__name__, why=why))
