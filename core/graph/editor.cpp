// SPDX-License-Identifier: Apache-2.0
#include "graph/editor.h"

#include <unordered_map>

#include "graph/commit.h"
#include "graph/key_path.h"
#include "graph/rebuild.h"
#include "graph/record.h"
#include "graph/static_equality.h"

namespace graftax {

namespace {

// Other values for some rows, owned by the dict that they come from.
struct Changes {
  std::vector<PyObject*> by_row;  // nullptr: it stays
  std::vector<uint32_t> rows;

  bool empty() const { return rows.empty(); }
  bool has(uint32_t pc) const { return by_row[pc]; }
};

constexpr const char* NO_SUCH_ROW = "no such row in this graph";

struct GraphEditor {
  RecordedGraph rec;
  std::vector<uint32_t> parent;                      // by instruction
  std::unordered_multimap<uint32_t, uint32_t> refs;  // node -> where it is referred to

  explicit GraphEditor(RecordedGraph recorded) : rec(std::move(recorded)) {
    parent = rec.program.parents();
    for (uint32_t pc = 0; pc < end(); ++pc)
      if (at(pc).op == Op::ref) refs.emplace(target(pc), pc);
  }

  // Instructions after the root are keys: no rows.
  uint32_t end() const { return rec.program.code.empty() ? 0 : rec.program.after(0); }
  const Instr& at(uint32_t pc) const { return rec.program.code[pc]; }
  uint32_t target(uint32_t pc) const { return at(pc).op == Op::ref ? rec.program.track_pc[at(pc).arg] : pc; }

  // Is this node made empty and filled later, or can it take over the attributes of another one? A registered class that
  // holds items besides its attributes (a subclass of list) cannot: what its flatten makes of them is not known.
  bool is_mutable(uint32_t pc) const {
    const Instr& n = at(pc);
    if (n.op != Op::node || n.node->track == NONE) return false;
    if (!n.node->kind->node->is_registered) return is_shell_kind(*n.node->kind);
    return n.node->kind->has_fields() && n.node->kind->solid == &PyBaseObject_Type;
  }

  // Every node that contains a replaced row, by any way; with `up_to_mutable` only as far as the first mutable one,
  // which is not among them but in `written`. A node that is replaced itself is none: another one stands there, and it
  // stays what it is where else it is referred to.
  std::vector<bool> spine(const Changes& changes, bool up_to_mutable, std::vector<uint32_t>* written) const {
    std::vector<bool> in(end(), false);
    std::vector<uint32_t> work;
    std::vector<bool> seen(end(), false);
    auto add_above = [&](uint32_t pc) {
      uint32_t up = parent[pc];
      if (up == NONE || seen[up]) return;
      seen[up] = true;
      if (up_to_mutable && is_mutable(up)) return written->push_back(up);
      in[up] = true;
      work.push_back(up);
    };
    // Upwards from each replaced row: to the node around it, and to the nodes around each reference to that node.
    for (uint32_t pc : changes.rows) add_above(pc);
    while (!work.empty()) {
      uint32_t pc = work.back();
      work.pop_back();
      if (!changes.has(pc)) add_above(pc);
      auto [first, last] = refs.equal_range(pc);
      for (auto it = first; it != last; ++it)
        if (!changes.has(it->second)) add_above(it->second);
    }
    return in;
  }
};

// For the time of one build: nodes of the spine are made anew, all others are themselves.
class RebuildSpine {
 public:
  RebuildSpine(GraphEditor& graph, const std::vector<bool>& spine) : code_(graph.rec.program.code) {
    before_.reserve(code_.size());
    for (uint32_t pc = 0; pc < code_.size(); ++pc) {
      Instr& n = code_[pc];
      bool is_node = n.op == Op::node;
      before_.push_back({n.flags, is_node ? n.node->whole : nullptr, is_node ? n.node->own : NONE});
      if (!is_node) continue;
      if (pc < spine.size() && spine[pc]) {
        // These flags let a Builder take the recorded object in place of a new one.
        n.flags &= static_cast<uint16_t>(~(HANDED_OVER | SELF_CONTAINED | TARGET));
        n.node->whole = nullptr;
        // One that counts by its identity, because it is a key as well, is made anew all the same. A mark stays itself.
        if (!n.node->kind->sentinel || n.node->items + n.node->fields > 0) n.node->own = NONE;
      } else {
        n.flags |= HANDED_OVER;
      }
    }
  }
  RebuildSpine(const RebuildSpine&) = delete;
  RebuildSpine& operator=(const RebuildSpine&) = delete;
  ~RebuildSpine() {
    for (size_t pc = 0; pc < code_.size(); ++pc) {
      code_[pc].flags = before_[pc].flags;
      if (code_[pc].op != Op::node) continue;
      code_[pc].node->whole = before_[pc].whole;
      code_[pc].node->own = before_[pc].own;
    }
  }

 private:
  struct Before {
    uint16_t flags;
    PyObject* whole;
    uint32_t own;
  };
  std::vector<Instr>& code_;
  std::vector<Before> before_;
};

Changes read_changes(const GraphEditor& g, nb::dict replacements) {
  Changes out{std::vector<PyObject*>(g.rec.program.code.size()), {}};  // also for keys, which are no rows
  for (auto [key, value] : replacements) {
    auto pc = nb::cast<uint32_t>(key);
    if (pc >= g.end()) raise_error(PyExc_IndexError, NO_SUCH_ROW);
    if (!out.by_row[pc]) out.rows.push_back(pc);
    out.by_row[pc] = value.ptr();
  }
  return out;
}

Sources sources_of(const GraphEditor& g, const Changes& changes) {
  return {g.rec.leaves.data(), nullptr, nullptr, g.rec.live.data(), false, changes.by_row.data()};
}

// The root with other values for some rows; what holds none of them stays itself, unless all of it is made anew.
nb::object build(GraphEditor& g, nb::dict replacements, bool all) {
  Changes changes = read_changes(g, replacements);
  if (changes.empty() && !all) return nb::borrow(g.rec.live[0]);
  RebuildSpine scope(g, all ? std::vector<bool>(g.end(), true) : g.spine(changes, false, nullptr));
  Builder builder(g.rec.program, sources_of(g, changes));
  Owned root = builder.build(0);
  builder.drain();
  return nb::steal(root.release());
}

// Writes other values into the caller's own nodes. Everything is made before the first write. False, and nothing is
// written, where no mutable object holds one of the rows.
bool write_changes(GraphEditor& g, const Changes& changes) {
  std::vector<uint32_t> written;
  std::vector<bool> spine = g.spine(changes, true, &written);
  // A root that would have to be made anew cannot be written into.
  if (!changes.empty() && (changes.has(0) || spine[0])) return false;
  struct Write {
    uint32_t pc;
    OwnedList values;
    Owned whole;  // a registered node, made by its own unflatten
  };
  std::vector<Write> writes;
  {
    RebuildSpine scope(g, spine);
    Builder builder(g.rec.program, sources_of(g, changes));
    for (uint32_t pc : written) {
      Write w{pc, {}, {}};
      if (g.at(pc).node->kind->node->is_registered) {
        w.whole = builder.make(pc);
        if (Py_TYPE(w.whole.get()) != g.at(pc).node->type)
          raise_error(PyExc_TypeError, std::string("the unflatten of ") + g.at(pc).node->type->tp_name + " makes a " +
                                           Py_TYPE(w.whole.get())->tp_name +
                                           ": what it holds cannot be written into the instance that is there");
      } else builder.build_children(pc, w.values);
      writes.push_back(std::move(w));
    }
    builder.drain();
  }
  // By here everything is built, and the flags are as they were: no unflatten runs from here on.
  Commit commit;
  for (Write& w : writes) {
    PyObject* obj = g.rec.live[w.pc];
    if (w.whole) commit.move_fields(w.whole.get(), obj, *g.at(w.pc).node->kind);
    else commit.content(g.rec.program, w.pc, obj, w.values.data());
  }
  commit.run();
  return true;
}

bool write(GraphEditor& g, nb::dict replacements) { return write_changes(g, read_changes(g, replacements)); }

// Writes what `source` has in its leaves, but for None. False, and nothing is written, where a closer look is needed: the
// structures are not known to be the same, or no mutable object holds a leaf.
bool update(GraphEditor& g, nb::handle source) {
  Walk theirs;
  theirs.any_value = true;
  PyObject* root = source.ptr();
  try {
    if (!replay(g.rec.program, &root, 1, theirs)) return false;
  } catch (nb::python_error& raised) {  // by user code: who looks closer meets it again, and knows where
    if (!PyErr_GivenExceptionMatches(raised.value().ptr(), PyExc_Exception)) throw;
    return false;
  }
  Changes changes{std::vector<PyObject*>(g.rec.program.code.size()), {}};
  for (uint32_t pc = 0; pc < g.end(); ++pc) {
    const Instr& n = g.at(pc);
    if (n.op != Op::leaf) continue;
    PyObject* value = theirs.leaves[n.arg];
    // The same object needs no write. Another one in static data means that the structures differ after all.
    if (value == g.rec.live[pc]) continue;
    if (n.flags & AUX) return false;
    if (value != Py_None) changes.by_row[pc] = value, changes.rows.push_back(pc);
  }
  return changes.empty() || write_changes(g, changes);
}

// A copy of the whole graph with other values for some rows, and what each row is in it.
nb::tuple twin(GraphEditor& g, nb::dict replacements) {
  Changes changes = read_changes(g, replacements);
  RebuildSpine scope(g, std::vector<bool>(g.end(), true));
  Builder builder(g.rec.program, sources_of(g, changes));
  builder.record_built();
  Owned root = builder.build(0);
  builder.drain();
  nb::list built;
  for (uint32_t pc = 0; pc < g.end(); ++pc) {
    PyObject* obj = builder.built()[pc];
    built.append(obj ? nb::borrow(obj) : nb::none());
  }
  return nb::make_tuple(nb::steal(root.release()), built);
}

// The first field of a row.
struct RowNames {
  Owned array = named("array"), value = named("value"), ref = named("ref"), node = named("node");

  PyObject* of(const Instr& n) const {
    if (n.op == Op::leaf) return (n.flags & PLAIN_VALUE ? value : array).get();
    return (n.op == Op::stat ? value : n.op == Op::ref ? ref : node).get();
  }
  static Owned named(const char* text) { return own(PyUnicode_InternFromString(text)); }
};

// Instances of `cls`, a class derived from tuple: (what, is it part of the structure for JAX, parent, where the node
// stands that is referred to, the object) by number.
nb::list rows_as(const GraphEditor& g, nb::handle cls) {
  auto* type = reinterpret_cast<PyTypeObject*>(cls.ptr());
  if (!PyType_Check(cls.ptr()) || !PyType_IsSubtype(type, &PyTuple_Type))
    raise_error(PyExc_TypeError, "expected a class derived from tuple");
  const RowNames names;
  nb::list out;
  for (uint32_t pc = 0; pc < g.end(); ++pc) {
    const Instr& n = g.at(pc);
    int64_t up = g.parent[pc] == NONE ? -1 : static_cast<int64_t>(g.parent[pc]);
    Owned row = own(type->tp_alloc(type, 5));  // below the class's own __new__, which would be a call for each row
    PyTuple_SET_ITEM(row.get(), 0, Py_NewRef(names.of(n)));
    PyTuple_SET_ITEM(row.get(), 1, PyBool_FromLong((n.flags & AUX) != 0));
    PyTuple_SET_ITEM(row.get(), 2, check(PyLong_FromLongLong(up)));
    PyTuple_SET_ITEM(row.get(), 3, check(PyLong_FromUnsignedLong(g.target(pc))));
    PyTuple_SET_ITEM(row.get(), 4, Py_NewRef(g.rec.live[pc]));
    out.append(nb::borrow(row.get()));
  }
  return out;
}

// Rows, but for references, whose objects are instances of a type or of one of several, by number in order.
nb::list instances(const GraphEditor& g, nb::handle kinds) {
  nb::list out;
  for (uint32_t pc = 0; pc < g.end(); ++pc) {
    if (g.at(pc).op == Op::ref) continue;
    int is_one = PyObject_IsInstance(g.rec.live[pc], kinds.ptr());
    check(is_one);
    if (is_one) out.append(pc);
  }
  return out;
}

// These rows and all rows below them; for a reference, its node.
nb::set descendants(const GraphEditor& g, nb::iterable tops) {
  std::vector<bool> reached(g.end());
  std::vector<uint32_t> stack;
  nb::set out;
  for (nb::handle top : tops) {
    auto pc = nb::cast<uint32_t>(top);
    if (pc >= g.end()) raise_error(PyExc_IndexError, NO_SUCH_ROW);
    stack.push_back(pc);
    while (!stack.empty()) {
      uint32_t from = g.target(stack.back());
      stack.pop_back();
      if (reached[from]) continue;
      uint32_t past = g.rec.program.after(from);
      for (uint32_t row = from; row < past; ++row) {
        if (g.at(row).op == Op::ref) stack.push_back(row);
        else if (!reached[row]) out.add(nb::int_(row)), reached[row] = true;
      }
    }
  }
  return out;
}

// (numbers, objects) of the values that are no part of the structure for JAX.
nb::tuple values(const GraphEditor& g) {
  nb::list numbers, objects;
  for (uint32_t pc = 0; pc < g.end(); ++pc) {
    const Instr& n = g.at(pc);
    if ((n.op != Op::leaf && n.op != Op::stat) || (n.flags & AUX)) continue;
    numbers.append(pc);
    objects.append(nb::borrow(g.rec.live[pc]));
  }
  return nb::make_tuple(numbers, objects);
}

// Do two graphs differ in values at most that are no part of the structure for JAX?
bool is_alike(const GraphEditor& a, const GraphEditor& b) {
  if (!same_but_for_leaves(a.rec.program, b.rec.program)) return false;
  for (uint32_t pc = 0; pc < a.end(); ++pc)
    if (a.at(pc).op == Op::leaf && (a.at(pc).flags & AUX) && a.rec.live[pc] != b.rec.live[pc]) return false;
  return true;
}

void show_graph(const GraphEditor& g, Visitor& visit) {
  visit(g.rec.live, g.rec.leaves);
  g.rec.program.show_held(visit);
}

void clear_graph(GraphEditor& g) {
  g.rec.program.clear();
  g.rec.live.clear();
  g.rec.leaves.clear();
}

// `visit(cursor, child)` is called for each child of a node, one level down; a value has none.
template <typename Visit>
void each_child(nb::handle obj, Visit visit) {
  KindHold kinds;
  const Kind& kind = kind_of(obj.ptr());
  if (!kind.is_node()) return;
  Cursor cursor(obj.ptr(), kind);
  PyObject *child = nullptr, *key = nullptr;
  while (cursor.next(child, key)) {
    Owned hold = Owned::borrow(child), hold_key = Owned::borrow(key);
    visit(std::as_const(cursor), child);
  }
}

GraphEditor editor_of(nb::handle obj) {
  RecordOptions options;
  options.everything = true;
  Recorder recorder(options);
  recorder.root(obj.ptr());
  return GraphEditor(recorder.finish(nullptr));
}

}  // namespace

void bind_surgery(nb::module_& m) {
  nb::class_<GraphEditor>(
      m, "GraphEditor", nb::type_slots(Collected<GraphEditor, show_graph, clear_graph>::slots), nb::is_final(),
      "An object graph with every value in it as a leaf. Rows have numbers: nodes, values and references.")
      .def(
          "__init__", [](GraphEditor* self, nb::handle obj) { new (self) GraphEditor(editor_of(obj)); },
          nb::arg("obj").none(), nb::sig("def __init__(self, obj: object) -> None"))
      .def("rows", &rows_as, nb::arg("cls"), nb::sig("def rows(self, cls: type[Any]) -> list[Any]"),
           "(array, value, node or ref; part of the structure for JAX; parent; node that is referred to; object), by "
           "number, as tuples of this class.")
      .def("instances", &instances, nb::arg("kinds"),
           nb::sig("def instances(self, kinds: type[Any] | tuple[type[Any], ...]) -> list[int]"),
           "The numbers of the nodes and values that are instances of these types.")
      .def("descendants", &descendants, nb::arg("tops"),
           nb::sig("def descendants(self, tops: Iterable[int]) -> set[int]"),
           "These rows and all rows below them, by number; references are followed.")
      .def("values", &values, nb::sig("def values(self) -> tuple[list[int], list[Any]]"),
           "(numbers, objects) of the values that are no part of the structure for JAX.")
      .def("is_alike", &is_alike, nb::arg("other"), nb::sig("def is_alike(self, other: GraphEditor) -> bool"),
           "Do they differ in the objects of `values` at most? False may mean that a closer look is needed.")
      .def("build", &build, nb::arg("changes"), nb::arg("all") = false,
           nb::sig("def build(self, changes: dict[int, Any], all: bool = False) -> Any"),
           "The root with other values for some rows. Nodes that hold none of them stay themselves, or all are made "
           "anew.")
      .def("write", &write, nb::arg("changes"), nb::sig("def write(self, changes: dict[int, Any]) -> bool"),
           "Writes other values into the nodes themselves; immutable ones on the way are made anew. False: no mutable "
           "object holds one of the rows, and nothing was written.")
      .def("update", &update, nb::arg("source").none(), nb::sig("def update(self, source: object) -> bool"),
           "Writes what another graph of the same structure has in its leaves, but for None. False: nothing was "
           "written, and a closer look is needed.")
      .def("twin", &twin, nb::arg("changes"),
           nb::sig("def twin(self, changes: dict[int, Any]) -> tuple[Any, list[Any]]"),
           "A copy with other values for some rows, and the object of each row in it.");
  m.def(
      "is_node", [](nb::handle obj) { return kind_of(obj.ptr()).is_node(); }, nb::arg("obj").none(),
      nb::sig("def is_node(obj: object) -> bool"), "Is this value one that a walk looks into?");
  m.def(
      "children",
      [](nb::handle obj) {
        nb::list out;
        each_child(obj, [&](const Cursor& cursor, PyObject* child) {
          if (cursor.stage() != Cursor::Stage::extra) out.append(nb::borrow(child));
        });
        return out;
      },
      nb::arg("obj").none(), nb::sig("def children(obj: object) -> list[Any]"),
      "The children of a node, one level down.");
  m.def(
      "children_with_keys",
      [](nb::handle obj) {
        nb::list out;
        each_child(obj, [&](const Cursor& cursor, PyObject* child) {
          Owned entry = key_entry(step_of(cursor));
          out.append(nb::make_tuple(nb::borrow(entry.get()), nb::borrow(child)));
        });
        return out;
      },
      nb::arg("obj").none(), nb::sig("def children_with_keys(obj: object) -> list[tuple[Any, Any]]"),
      "The children of a node with their key path entries, one level down.");
}

}  // namespace graftax
