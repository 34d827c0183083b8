# SPDX-License-Identifier: Apache-2.0
"""Warns where a gradient counts uses of an object that `jax.grad` would take for constants.

An object that is differentiated may be reached from elsewhere, too: from a variable that the function captures, or from
another argument. It is one object, so its gradient counts every use. Whether the function uses it there is not seen in
a trace, where both ways lead to the same arrays. What tells is the code: which attributes it names.
"""

from __future__ import annotations

import dis
import itertools
import warnings
from collections.abc import Callable, Collection, Set
from typing import Any, NamedTuple

from jax.tree_util import GetAttrKey

from graftax._base.errors import SharedGradientWarning
from graftax._base.given_warnings import note_warning
from graftax._capture.bytecode import names_of, nested_codes
from graftax._capture.code_owner import is_users_class
from graftax._capture.reachable_code import ReachableCode
from graftax._graph.structure import Op, Row, Structure, place_name
from graftax._jax.tracebacks import caller_level
from graftax.transforms._engine.program import Program

SHARED = (
    "{name}: {argument} is also {other}, and its gradient counts the uses there, too: it is one object. jax.grad "
    "treats them as constants. If you want that, pass graftax.copy({argument}), or apply jax.lax.stop_gradient to "
    "what is computed from {other}."
)


class Step(NamedTuple):
    """A part of a path through a structure."""

    key_entry: Any
    node: int  # the number of the row that it leads away from


# These make new objects. Those of the program exist already, so what such a method names is no use of them.
_MAKES = ("__init__", "__new__", "__post_init__")


def warn_of_other_uses(program: Program, leaves: Set[int], roots: Collection[int]) -> None:
    """Warns if the function can use differentiated leaves through a root other than those of the gradient."""
    # Most programs share nothing, and need no walk.
    if not program.graphdef._shares:  # pyright: ignore[reportPrivateUsage]
        return
    structure = Structure(program.graphdef)
    other_roots = [row for i, row in enumerate(structure.roots) if i not in roots]
    candidates = leaves & structure.reachable_leaves(other_roots)
    if not candidates or not any(_is_read(program, root) for root in roots):
        return
    names_attribute = _attribute_test(program, structure)
    for row in other_roots:
        paths = _paths_to_leaves(structure, row, names_attribute)
        leaf = next((leaf for leaf in paths if leaf in candidates), None)
        if leaf is not None:
            _warn(program, structure, leaf, (row.root, paths[leaf]), roots)
            return


def _is_read(program: Program, root: int) -> bool:
    """Does the function read this operand itself? If not, only the uses from elsewhere can be meant."""
    # Some instructions of CPython 3.13 and newer load two variables: their argument is a tuple of names.
    name = program.names[root]
    return any(
        name in (instruction.argval if type(instruction.argval) is tuple else (instruction.argval,))
        for function in program.functions
        for part in nested_codes(function.__code__)
        for instruction in dis.get_instructions(part)
        if "LOAD_FAST" in instruction.opname or "LOAD_DEREF" in instruction.opname
    )


def _attribute_test(program: Program, structure: Structure) -> Callable[[Row, Any], bool]:
    """Tells whether code of the program may follow an entry from a node: an attribute of a user's class by its name."""
    reachable, named, computes = ReachableCode(_MAKES), set[str](), False
    # Methods of the objects count: the function may call them.
    for function in program.functions:
        reachable.add(function)
    for row in structure.rows:
        if row.type is not None:
            reachable.add(row.type)
    for code, _ in reachable.codes():
        names = names_of(code)
        named |= names.attributes
        # Code that computes names of attributes, as `getattr(x, name)` does, may read any.
        computes = computes or names.computes or "vars" in names.loaded

    # Only attributes of a user's class tell: any code may go through a container or a library's object.
    def may_follow(node: Row, entry: Any) -> bool:
        by_name = type(entry) is GetAttrKey and node.type is not None and is_users_class(node.type)
        return not by_name or computes or entry.name in named

    return may_follow


def _paths_to_leaves(structure: Structure, root: Row, may_follow: Callable[[Row, Any], bool]) -> dict[int, list[Step]]:
    """The first path from a root to each leaf that code may reach from there."""
    paths, visited, stack = dict[int, list[Step]](), set[int](), [(root, list[Step]())]
    while stack:
        row, path = stack.pop()
        row = structure.target(row)
        if row.op is Op.leaf:
            paths.setdefault(row.leaf, path)
        elif row.number not in visited:
            visited.add(row.number)
            children = [child for child in structure.children(row) if may_follow(row, child.key_entry)]
            stack.extend((child, [*path, Step(child.key_entry, row.number)]) for child in reversed(children))
    return paths


def _warn(
    program: Program, structure: Structure, leaf: int, root_path: tuple[int, list[Step]], roots: Collection[int]
) -> None:
    """Warns of a differentiated leaf that is reached by `root_path` (a root and the steps from it), too."""
    root, path = root_path
    own_root, own_path = next(
        (i, paths[leaf])
        for i, row in enumerate(structure.roots)
        if i in roots and leaf in (paths := _paths_to_leaves(structure, row, lambda node, entry: True))
    )
    # Below the object that is reached twice, both paths take the same steps: the message names that object.
    pairs = zip(reversed(path), reversed(own_path), strict=False)
    shared_steps = sum(1 for _ in itertools.takewhile(lambda steps: steps[0] == steps[1], pairs))
    argument, elsewhere = (
        place_name((number, tuple(step.key_entry for step in steps[: len(steps) - shared_steps])), program.names)
        for number, steps in ((own_root, own_path), (root, path))
    )
    note_warning()
    message = SHARED.format(name=program.name, argument=argument, other=elsewhere)
    warnings.warn(message, SharedGradientWarning, caller_level())
