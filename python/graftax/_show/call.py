# SPDX-License-Identifier: Apache-2.0
"""What a call of a jitted function would do with its arguments: traced, captured, donated, forwarded, written back."""

from __future__ import annotations

from typing import Any, cast

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._graph.path import Graph
from graftax._graph.structure import Op, Row, Structure
from graftax._jit.donation import donated_leaves
from graftax._jit.jitted import Jitted
from graftax._show.format import cut, short_bytes, short_number, size_of, some, value_text
from graftax._show.model import Marks, Picture

CAPTURED, DONATED, FORWARDED, WRITTEN = "captured", "donated", "forwarded", "written back"
STATIC_ARGUMENT, TRACED_NUMBER, SYMBOLIC = "static", "traced number", "symbolic"
RESULT = "the result"


class _Call:
    """One call, traced and not run: what goes in, and what would come out."""

    def __init__(self, jitted: Jitted[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        traced = jitted.trace(*args, **kwargs)
        staging = traced._staging
        self.name, self.names, self.graphdef = staging.plan.name, staging.names, staging.graphdef
        self.roots, self.layout = jitted._bind_arguments(args, kwargs)
        walked = _core.walk(self.graphdef, self.roots)
        if walked is None:
            raise GraftaxError(f"the arguments of {self.name} changed while it was traced")
        self.leaves, self.nodes = walked
        results, written, number = traced._stage.out_info
        self.outputs = *results, *written
        self.outcome = staging.entry.outcomes[_core.decode(number)]
        structure = Structure(self.outcome)
        self.result = self._own(structure, structure.roots[0], jitted.eval_shape(*args, **kwargs))
        plan = jitted._plan
        self.arguments = plan.signature.arguments(self.layout)
        donates = plan.donates(self.roots, self.layout)
        self.donated = donated_leaves(plan, self.roots, self.layout, self.graphdef) if donates else []
        self.static = plan.signature.flags(self.layout, plan.options.static)
        numbers = None
        if jitted._takes_symbols:
            numbers = jitted._table.numbers.would_be_symbolic(plan.record(self.roots, self.layout))
        self.symbolic = [] if numbers is None else list(numbers.places)
        self.counts: dict[str, int] = {}

    def _own(self, structure: Structure, row: Row, value: Any) -> Any:
        """The result around shapes, with the caller's own objects and arrays in its containers where they come back."""
        if row.op is Op.input:
            return self.nodes[row.track]
        if row.op is Op.forward:
            return self.leaves[row.leaf]
        below = list(structure.children(row)) if row.op is Op.node else []
        if type(value) in (list, tuple):
            return type(value)(self._own(structure, r, x) for r, x in zip(below, value, strict=True))
        if type(value) is dict:
            items = zip(below, cast("dict[Any, Any]", value).items(), strict=True)
            return {key: self._own(structure, r, x) for r, (key, x) in items}
        return value

    def marks(self, graph: Graph) -> Marks:
        """The words beside the places of the roots."""
        marks = Marks({}, {}, {})
        self._mark_leaves(marks)
        self._mark_roots(graph, marks)
        self._mark_writes(marks)
        return marks

    def _mark_leaves(self, marks: Marks) -> None:
        structure = Structure(self.outcome)
        forwarded = [row.leaf for row in structure.below(structure.roots[0]) if row.op is Op.forward]
        for which, word in ((self._donated(), DONATED), (sorted(set(forwarded)), FORWARDED)):
            self.counts[word] = len(which)
            for i in which:
                marks.objects.setdefault(id(self.leaves[i]), []).append(word)

    def _donated(self) -> list[int]:
        return [i for i, donated in enumerate(self.donated) if donated]

    def _mark_roots(self, graph: Graph, marks: Marks) -> None:
        for i, (_, number) in enumerate(graph.key_entries(0)[: len(self.roots)]):
            if i >= self.arguments:
                marks.rows.setdefault(number, []).append(CAPTURED)
                self.counts[CAPTURED] = self.counts.get(CAPTURED, 0) + 1
            elif self.static[i]:
                marks.rows.setdefault(number, []).append(STATIC_ARGUMENT)
        structure = Structure(self.graphdef)
        of_numbers = [(structure.place(row), TRACED_NUMBER) for row in structure.rows if row.is_number]
        of_numbers += [(place, SYMBOLIC) for place in self.symbolic]
        self.counts[SYMBOLIC] = len(self.symbolic)
        for (root, path), word in of_numbers:
            number = graph.number((graph.key_entries(0)[root][0], *path))
            marks.rows.setdefault(number, []).append(word)

    def _mark_writes(self, marks: Marks) -> None:
        structure = Structure(self.outcome)
        _, _, written = self.outcome.inputs()
        self.counts[WRITTEN] = len(written)
        for root, track in zip(structure.roots[1:], written, strict=True):
            node = self.nodes[track]
            before = dict(_core.children_with_keys(node))
            words = marks.objects.setdefault(id(node), [])
            words.append(WRITTEN)
            after = {row.key_entry: row for row in structure.children(root)}
            for entry, row in after.items():
                word = self._change(row, before, entry)
                if word is not None and entry in before:
                    marks.children.setdefault((id(node), entry), []).append(word)
                elif word is not None:
                    words.append(f"gets {_entry_text(entry)}")
            words += [f"loses {_entry_text(entry)}" for entry in before if entry not in after]

    def _change(self, row: Row, before: dict[Any, Any], entry: Any) -> str | None:
        """What is written in the place of a child; None where it stays."""
        old = before.get(entry)
        if row.op is Op.leaf:
            new = self.outputs[row.leaf]
            same = (getattr(old, "shape", None), getattr(old, "dtype", None)) == (new.shape, new.dtype)
            return WRITTEN if same else f"{WRITTEN} as {new.dtype}{list(new.shape)}"
        if row.op is Op.static:
            value = row.value
            return (
                None if value is old or (type(value) is type(old) and value == old) else f"becomes {value_text(value)}"
            )
        if row.op is Op.input:
            return None if entry in before and self.nodes[row.track] is old else "replaced"
        if row.op is Op.forward:
            return None if entry in before and self.leaves[row.leaf] is old else "replaced"
        return "replaced" if row.op is Op.node else None

    def notes(self) -> list[str]:
        sizes = [size_of(leaf) or (0, 0) for leaf in self.leaves]
        weight = f"{short_number(sum(p for p, _ in sizes))} parameters, {short_bytes(sum(b for _, b in sizes))}"
        told = [f"{some(len(self.leaves), 'array')} traced ({weight}), all other values static"]
        of = ((SYMBOLIC, "number"), (CAPTURED, "root"), (DONATED, "array"), (FORWARDED, "array"), (WRITTEN, "object"))
        told += [f"{some(self.counts[word], what)} {word}" for word, what in of if self.counts.get(word)]
        return [f"A call of {self.name}: {'; '.join(told)}."]


def _entry_text(entry: Any) -> str:
    return cut(str(entry), 40)


def call_picture(
    jitted: Jitted[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], values: bool
) -> tuple[Picture, list[str]]:
    """The picture of a call, and the lines in front of it."""
    call = _Call(jitted, args, kwargs)
    names = [*call.names, RESULT]
    picture = Picture(
        (*call.roots, call.result), title=call.name, values=values, names=names, marks=call.marks, shapes=True
    )
    return picture, call.notes()
