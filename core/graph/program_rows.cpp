// SPDX-License-Identifier: Apache-2.0
#include "graph/program_rows.h"

#include "graph/key_path.h"
#include "graph/static_equality.h"

namespace graftax {

namespace {

struct Row {
  Owned owner;  // holds the program; null once the garbage collector cleared this row
  const Program* program;
  uint32_t number;
  uint32_t parent;  // NONE for a root
  uint32_t child;   // which child of the parent this is
  uint32_t root;
  Owned entry = {};  // once it was asked for

  // The program, which the garbage collector may have cleared while Python still held the row.
  const Program& all() const {
    if (!owner || number >= program->code.size()) raise_error(PyExc_ReferenceError, "this structure no longer exists");
    return *program;
  }
  const Instr& at() const { return all().code[number]; }
};

int number_or_none(uint32_t x) { return x == NONE ? -1 : static_cast<int>(x); }

nb::object static_value(const Program& p, uint32_t id) {
  Owned value = static_object(p.statics[id]);
  if (!value) raise_error(PyExc_ReferenceError, "a static of this GraphDef no longer exists");
  return nb::steal(value.release());
}

nb::object value_of(const Row& row) {
  const Program& p = row.all();
  const Instr& n = p.code[row.number];
  if (n.op == Op::stat) return static_value(p, n.arg);
  if (n.op != Op::node) return nb::none();
  if (n.node->kind->node->keys == Keys::elements) {
    nb::list elements;
    for (uint32_t i = 0; i < n.arg; ++i) elements.append(static_value(p, p.keys[n.node->keys + i]));
    return elements;
  }
  if (n.node->payload != NONE) {
    // Of a function that stays itself, the function, and not the bare twin that it is compared by.
    bool self_contained = (n.flags & SELF_CONTAINED) && !p.statics[n.node->payload].weak;
    return self_contained ? nb::borrow(p.statics[n.node->payload].snapshot) : static_value(p, n.node->payload);
  }
  return n.node->treedef ? nb::borrow(n.node->treedef) : nb::none();
}

// An array that a static holds may have been changed in place since: this is what it was.
nb::object plain_value_of(const Row& row) {
  const Program& p = row.all();
  const Instr& n = p.code[row.number];
  if (n.op != Op::stat || p.statics[n.arg].how != How::reduce) return nb::none();
  PyObject* plain = p.statics[n.arg].snapshot;
  return plain ? nb::borrow(plain) : nb::none();
}

uint32_t target_of(const Row& row) {
  const Program& p = row.all();
  const Instr& n = p.code[row.number];
  return n.op == Op::ref ? p.track_pc[n.arg] : n.op == Op::same ? n.arg : row.number;
}

// Made on the first request: most rows are never shown.
nb::object key_entry_of(Row& row) {
  if (row.parent == NONE) return nb::none();
  if (!row.entry) row.entry = key_entry(step_to(row.all(), row.parent, row.child));
  return nb::borrow(row.entry.get());
}

void show_row(const Row& row, Visitor& visit) { visit(row.owner, row.entry); }

void clear_row(Row& row) { Row gone = std::move(row); }  // releasing may run code that sees this row

bool has(const Row& row, uint8_t flag) { return (row.at().flags & flag) != 0; }

}  // namespace

nb::list rows(nb::handle owner, const Program& p) {
  struct Open {
    uint32_t number, children;
  };
  std::vector<Open> open;
  nb::list out;
  uint32_t pc = 0;
  for (uint32_t root = 0; root < p.roots; ++root) {
    for (uint32_t end = p.after(pc); pc < end; ++pc) {
      while (!open.empty() && p.after(open.back().number) <= pc) open.pop_back();
      // Rows are in pre-order: the parent is the innermost node that has not ended.
      bool top = open.empty();
      out.append(nb::cast(Row{Owned::borrow(owner.ptr()), &p, pc, top ? NONE : open.back().number,
                              top ? 0 : open.back().children++, root}));
      if (p.code[pc].op == Op::node) open.push_back({pc, 0});
    }
  }
  return out;
}

nb::list identities(const Program& p) {
  nb::list out;
  for (uint32_t id = 0; id < p.statics.size(); ++id) {
    const Static& s = p.statics[id];
    if (s.how == How::identity || is_identity_key(s)) out.append(static_value(p, id));
  }
  return out;
}

void bind_rows(nb::module_& m) {
  nb::enum_<Op>(m, "Op", nb::is_arithmetic(), "What a row of a recorded structure is.")
      .value("leaf", Op::leaf, "A dynamic leaf.")
      .value("static", Op::stat, "A static.")
      .value("ref", Op::ref, "A node met before.")
      .value("same", Op::same, "An equal immutable, array-free subtree met before.")
      .value("node", Op::node, "A node and its children.")
      .value("input", Op::input, "In an Outcome: one of the caller's nodes.")
      .value("forward", Op::forward, "In an Outcome: one of the caller's leaves.");
  nb::enum_<How>(m, "How", nb::is_arithmetic(), "How a static of a state is compared, of what is put together by hand.")
      .value("identity", How::identity)
      .value("tuple", How::tuple)
      .value("function", How::function);
  nb::class_<Row>(m, "Row", nb::type_slots(Collected<Row, show_row, clear_row>::slots), nb::is_final(),
                  "One instruction of a recorded structure.")
      .def_prop_ro("op", [](const Row& r) { return r.at().op; })
      .def_prop_ro(
          "number", [](const Row& r) { return r.number; }, "Its number among the rows.")
      .def_prop_ro(
          "root", [](const Row& r) { return r.root; }, "The number of the root that it is below.")
      .def_prop_ro(
          "parent", [](const Row& r) { return number_or_none(r.parent); }, "The row above; -1 for a root.")
      .def_prop_ro(
          "end", [](const Row& r) { return r.all().after(r.number); }, "The first row that is not below.")
      .def_prop_ro("key_entry", &key_entry_of, nb::sig("def key_entry(self) -> Any"),
                   "The key entry that leads here; None: a root.")
      .def_prop_ro("target", &target_of, "The row itself; of a reference or a repetition, the row that was met first.")
      .def_prop_ro(
          "type",
          [](const Row& r) {
            PyTypeObject* type = r.at().node->type;
            return type ? nb::borrow(reinterpret_cast<PyObject*>(type)) : nb::none();
          },
          nb::sig("def type(self) -> type | None"), "A node's.")
      .def_prop_ro(
          "track",
          [](const Row& r) {
            const Instr& n = r.at();
            if (n.op == Op::node) return number_or_none(n.node->track);
            return number_or_none(n.op == Op::ref || n.op == Op::input ? n.arg : NONE);
          },
          "The number of a node that has an identity, of the one that a reference means, or of the caller's; else -1.")
      .def_prop_ro(
          "leaf",
          [](const Row& r) {
            const Instr& n = r.at();
            return number_or_none(n.op == Op::leaf || n.op == Op::forward ? n.arg : NONE);
          },
          "The number of a leaf, of the caller's where it is forwarded; else -1.")
      .def_prop_ro(
          "is_number", [](const Row& r) { return has(r, NUMBER); }, "A Python number that is traced?")
      .def_prop_ro(
          "own",
          [](const Row& r) {
            const Instr& n = r.at();
            return n.op == Op::node && n.node->own != NONE ? static_value(r.all(), n.node->own) : nb::none();
          },
          nb::sig("def own(self) -> Any"), "The object itself, of a node that counts by identity; else None.")
      .def_prop_ro(
          "plain_value", &plain_value_of, nb::sig("def plain_value(self) -> Any"),
          "The plain value that a static is compared by, as it was recorded; None if it is compared otherwise.")
      .def_prop_ro("value", &value_of, nb::sig("def value(self) -> Any"),
                   "A static's value; what a node needs beside its children.");
}

}  // namespace graftax
