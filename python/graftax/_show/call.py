# SPDX-License-Identifier: Apache-2.0
"""What a call of a jitted function would do with its arguments: traced, captured, donated, forwarded, written back."""

from __future__ import annotations

from typing import Any, cast

from graftax import _core
from graftax._base.errors import GraftaxError
from graftax._base.size_text import count_text, short_bytes, short_number
from graftax._graph.path import Graph
from graftax._graph.structure import Op, Row, Structure
from graftax._jit.jitted import Jitted
from graftax._jit.requested_donation import donated_leaves
from graftax._jit.symbolic_call import would_be_symbolic
from graftax._show.format import cut, size_of, value_text
from graftax._show.picture import Marks, Picture

CAPTURED, DONATED, FORWARDED, WRITTEN = "captured", "donated", "forwarded", "written back"
STATIC_ARGUMENT, TRACED_NUMBER, SYMBOLIC = "static", "traced number", "symbolic"
RESULT = "the result"


class _Call:
    """One call that is traced and not run: its arguments, and what it would return and write back."""

    def __init__(self, jitted: Jitted[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The trace first: it may find further roots, such as a global that the function changes.
        traced = jitted.trace(*args, **kwargs)
        # Everything else is read from this trace, so that one structure gives the numbers of leaves and nodes.
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
        self.result = self._result_around_shapes(structure, structure.roots[0], jitted.eval_shape(*args, **kwargs))
        plan = jitted._plan
        self.arguments = plan.signature.arguments(self.layout)
        donates = plan.donates(self.roots, self.layout)
        self.donated = donated_leaves(plan, self.roots, self.layout, self.graphdef) if donates else []
        self.static = plan.signature.flags(self.layout, plan.options.static)
        recording = plan.record(self.roots, self.layout)
        numbers = would_be_symbolic(plan, jitted._table, jitted._function, recording)
        self.symbolic = [] if numbers is None else list(numbers.places)
        self.counts: dict[str, int] = {}

    def _result_around_shapes(self, structure: Structure, row: Row, value: Any) -> Any:
        """The result with shapes in place of arrays, and with the caller's own objects and arrays if returned."""
        if row.op is Op.input:
            return self.nodes[row.track]
        if row.op is Op.forward:
            return self.leaves[row.leaf]
        child_rows = list(structure.children(row)) if row.op is Op.node else []
        # Only plain containers are opened: an object of the result is drawn with the shapes that `eval_shape` gives it.
        if type(value) in (list, tuple):
            return type(value)(
                self._result_around_shapes(structure, r, x) for r, x in zip(child_rows, value, strict=True)
            )
        if type(value) is dict:
            items = zip(child_rows, cast("dict[Any, Any]", value).items(), strict=True)
            return {key: self._result_around_shapes(structure, r, x) for r, (key, x) in items}
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
        donated = [i for i, is_donated in enumerate(self.donated) if is_donated]
        forwarded = {row.leaf for row in structure.subtree(structure.roots[0]) if row.op is Op.forward}
        for numbers, mark in ((donated, DONATED), (sorted(forwarded), FORWARDED)):
            self.counts[mark] = len(numbers)
            for i in numbers:
                marks.objects.setdefault(id(self.leaves[i]), []).append(mark)

    def _mark_roots(self, graph: Graph, marks: Marks) -> None:
        # Behind the roots, the picture has one item more: the result.
        for i, (_, number) in enumerate(graph.key_entries(0)[: len(self.roots)]):
            if i >= self.arguments:
                marks.rows.setdefault(number, []).append(CAPTURED)
                self.counts[CAPTURED] = self.counts.get(CAPTURED, 0) + 1
            elif self.static[i]:
                marks.rows.setdefault(number, []).append(STATIC_ARGUMENT)
        structure = Structure(self.graphdef)
        marked = [(structure.root_path(row), TRACED_NUMBER) for row in structure.rows if row.is_number]
        marked += [(key_path, SYMBOLIC) for key_path in self.symbolic]
        self.counts[SYMBOLIC] = len(self.symbolic)
        for (root, path), mark in marked:
            number = graph.number((graph.key_entries(0)[root][0], *path))
            marks.rows.setdefault(number, []).append(mark)

    def _mark_writes(self, marks: Marks) -> None:
        structure = Structure(self.outcome)
        _, _, written = self.outcome.inputs()
        self.counts[WRITTEN] = len(written)
        # Behind the result, the Outcome has a root for each object that it writes to, with its children after the call.
        for root, track in zip(structure.roots[1:], written, strict=True):
            node = self.nodes[track]
            children_before = dict(_core.children_with_keys(node))
            object_marks = marks.objects.setdefault(id(node), [])
            object_marks.append(WRITTEN)
            rows_after = {row.key_entry: row for row in structure.children(root)}
            for entry, row in rows_after.items():
                mark = self._change(row, children_before, entry)
                if mark is not None and entry in children_before:
                    marks.children.setdefault((id(node), entry), []).append(mark)
                elif mark is not None:
                    object_marks.append(f"gets {_entry_text(entry)}")
            object_marks += [f"loses {_entry_text(entry)}" for entry in children_before if entry not in rows_after]

    def _change(self, row: Row, children_before: dict[Any, Any], entry: Any) -> str | None:
        """The mark for what is written to a child; None if the child stays."""
        old_value = children_before.get(entry)
        if row.op is Op.leaf:
            new_value = self.outputs[row.leaf]
            old_type = getattr(old_value, "shape", None), getattr(old_value, "dtype", None)
            # A value that was no array before has neither shape nor dtype, so the mark says what it becomes.
            is_same_type = old_type == (new_value.shape, new_value.dtype)
            return WRITTEN if is_same_type else f"{WRITTEN} as {new_value.dtype}{list(new_value.shape)}"
        if row.op is Op.static:
            value = row.value
            # The types first: True equals 1, and 1 equals 1.0.
            is_same = value is old_value or (type(value) is type(old_value) and value == old_value)
            return None if is_same else f"becomes {value_text(value)}"
        if row.op in (Op.input, Op.forward):
            value = self.nodes[row.track] if row.op is Op.input else self.leaves[row.leaf]
            return None if entry in children_before and value is old_value else "replaced"
        return "replaced" if row.op is Op.node else None

    def notes(self) -> list[str]:
        sizes = [size_of(leaf) or (0, 0) for leaf in self.leaves]
        weight = f"{short_number(sum(p for p, _ in sizes))} parameters, {short_bytes(sum(b for _, b in sizes))}"
        texts = [f"{count_text(len(self.leaves), 'array')} traced ({weight}), all other values static"]
        nouns = {SYMBOLIC: "number", CAPTURED: "root", DONATED: "array", FORWARDED: "array", WRITTEN: "object"}
        texts += [
            f"{count_text(self.counts[mark], noun)} {mark}" for mark, noun in nouns.items() if self.counts.get(mark)
        ]
        return [f"A call of {self.name}: {'; '.join(texts)}."]


def _entry_text(entry: object) -> str:
    return cut(str(entry), 40)


def call_picture(
    jitted: Jitted[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], values: bool
) -> tuple[Picture, list[str]]:
    """The picture of a call, and the lines above it."""
    call = _Call(jitted, args, kwargs)
    names = [*call.names, RESULT]
    picture = Picture(
        (*call.roots, call.result), title=call.name, values=values, names=names, marks=call.marks, shapes=True
    )
    return picture, call.notes()
