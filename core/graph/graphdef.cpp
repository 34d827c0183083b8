// SPDX-License-Identifier: Apache-2.0
#include "graph/graphdef.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <unordered_map>

#include "graph/key_path.h"
#include "graph/kinds/function.h"
#include "graph/program_rows.h"
#include "graph/static_equality.h"
#include "python/hooks.h"

namespace graftax {

void Program::clear() {
  code.clear();
  roots = 0;
  owned.clear();
  statics.clear();
  keys.clear();
  layout = nullptr;
}

void Program::show_held(Visitor& visit) const {
  visit(owned);
  for (const Static& s : statics)
    if (s.contents) s.contents->show_held(visit);
}

namespace {

Py_hash_t mix(Py_hash_t h, size_t x) {
  auto u = static_cast<size_t>(h);
  u ^= x + 0x9e3779b97f4a7c15ULL + (u << 6) + (u >> 2);
  return static_cast<Py_hash_t>(u);
}

// Reads nothing that a weak copy lacks: a static keeps its hash when its value is gone.
Py_hash_t hash_instr(const Program& p, const Instr& n, Py_hash_t h) {
  h = mix(h, static_cast<size_t>(n.op));
  switch (n.op) {
    // Of a leaf only what tells two structures apart: whether it is an array of before, or a number.
    case Op::leaf: return mix(h, n.flags & (ALIAS | NUMBER) ? n.flags & (ALIAS | NUMBER) : 0);
    case Op::stat: return mix(h, static_cast<size_t>(p.statics[n.arg].hash));
    case Op::node: {
      h = mix(h, reinterpret_cast<size_t>(n.node->type));
      h = mix(h, (static_cast<size_t>(n.node->items) << 20) ^ (n.node->fields << 8) ^ n.node->slots);
      uint32_t own_keys = p.item_keys(n);
      size_t sum = 0;  // of the hashes of elements: equal sets may list them in another order
      for (uint32_t i = 0; i < own_keys; ++i) {
        auto key = static_cast<size_t>(p.statics[p.keys[n.node->keys + i]].hash);
        if (n.node->kind->node->keys == Keys::elements) sum += key * 0x9e3779b97f4a7c15ULL;
        else h = mix(h, key);
      }
      for (uint32_t i = 0; i < n.node->fields + n.node->slots; ++i)
        h = mix(h, static_cast<size_t>(p.statics[p.keys[n.node->keys + own_keys + i]].hash));
      if (n.node->payload != NONE) h = mix(h, static_cast<size_t>(p.statics[n.node->payload].hash));
      if (n.node->own != NONE) h = mix(h, static_cast<size_t>(p.statics[n.node->own].hash));
      return mix(h, sum);
    }
    default: return mix(h, n.arg);
  }
}

// Elements are paired by their hashes. Each is taken once: two nan objects are two elements.
bool sets_equal(const Program& a, const Instr& x, const Program& b, const Instr& y) {
  std::unordered_multimap<Py_hash_t, uint32_t> left;
  for (uint32_t j = 0; j < y.arg; ++j) left.emplace(b.statics[b.keys[y.node->keys + j]].hash, b.keys[y.node->keys + j]);
  for (uint32_t i = 0; i < x.arg; ++i) {
    uint32_t id = a.keys[x.node->keys + i];
    auto [it, end] = left.equal_range(a.statics[id].hash);
    while (it != end && !statics_equal(a, id, b, it->second)) ++it;
    if (it == end) return false;
    left.erase(it);
  }
  return true;
}

bool instrs_equal(const Program& a, const Instr& x, const Program& b, const Instr& y) {
  if (x.op != y.op) return false;
  if (x.op == Op::stat) return statics_equal(a, x.arg, b, y.arg);
  if (x.op != Op::node) return x.arg == y.arg && ((x.flags ^ y.flags) & (ALIAS | NUMBER)) == 0;
  // Tracked indices count: they say which nodes are one object.
  if (x.node->type != y.node->type || x.node->kind->node != y.node->kind->node || x.node->track != y.node->track ||
      x.node->items != y.node->items || x.node->fields != y.node->fields || x.node->slots != y.node->slots ||
      x.node->has_extra != y.node->has_extra || x.arg != y.arg ||
      (x.node->payload == NONE) != (y.node->payload == NONE) || (x.node->own == NONE) != (y.node->own == NONE) ||
      ((x.flags ^ y.flags) & (HANDED_OVER | OWN_DICT)))
    return false;
  if (x.node->payload != NONE && !statics_equal(a, x.node->payload, b, y.node->payload)) return false;
  if (x.node->own != NONE && !statics_equal(a, x.node->own, b, y.node->own)) return false;
  uint32_t own_keys = a.item_keys(x), first = 0, n = own_keys + x.node->fields + x.node->slots;
  if (x.node->kind->node->keys == Keys::elements) {
    if (!sets_equal(a, x, b, y)) return false;
    first = own_keys;
  }
  for (uint32_t i = first; i < n; ++i)
    if (!statics_equal(a, a.keys[x.node->keys + i], b, b.keys[y.node->keys + i])) return false;
  return true;
}

}  // namespace

std::vector<uint32_t> Program::parents() const {
  std::vector<uint32_t> out, open;
  out.reserve(code.size());
  for (uint32_t pc = 0; pc < code.size(); ++pc) {
    // In pre-order the parent is the innermost node whose subtree has not ended.
    while (!open.empty() && code[open.back()].node->next <= pc) open.pop_back();
    out.push_back(open.empty() ? NONE : open.back());
    if (code[pc].op == Op::node) open.push_back(pc);
  }
  return out;
}

void Program::finish() {
  Py_hash_t h = 0x345678;
  for (const Instr& n : code) h = hash_instr(*this, n, h);
  if (layout) {
    Py_hash_t own_hash = hash_of(layout);
    h = mix(h, static_cast<size_t>(own_hash));
  }
  // To Python -1 is an error, and no hash.
  hash = h == -1 ? -2 : h;
  // It lives as long as its entry: what the vectors have in reserve would stay allocated.
  code.shrink_to_fit();
  statics.shrink_to_fit();
  keys.shrink_to_fit();
  track_pc.shrink_to_fit();
  set_tables.shrink_to_fit();
  owned.shrink_to_fit();
}

bool operator==(const Program& a, const Program& b) {
  if (&a == &b) return true;
  if (a.hash != b.hash || a.code.size() != b.code.size() || a.roots != b.roots || a.leaves != b.leaves) return false;
  if ((a.layout == nullptr) != (b.layout == nullptr)) return false;
  if (a.layout && !equal(a.layout, b.layout)) return false;
  for (size_t i = 0; i < a.code.size(); ++i)
    if (!instrs_equal(a, a.code[i], b, b.code[i])) return false;
  return true;
}

bool begins_with(const Program& longer, const Program& p) {
  // What keys are made of stands behind the roots, where the longer program has more of these.
  bool fits = p.key_roots.empty() && longer.code.size() >= p.code.size() && longer.roots >= p.roots &&
              longer.track_pc.size() >= p.track_pc.size() &&
              std::equal(p.track_pc.begin(), p.track_pc.end(), longer.track_pc.begin());
  for (size_t i = 0; fits && i < p.code.size(); ++i) fits = instrs_equal(p, p.code[i], longer, longer.code[i]);
  return fits;
}

bool same_but_for_leaves(const Program& a, const Program& b) {
  if (a.code.size() != b.code.size() || a.roots != b.roots || a.leaves != b.leaves) return false;
  for (size_t i = 0; i < a.code.size(); ++i) {
    const Instr &x = a.code[i], &y = b.code[i];
    if ((x.flags & AUX) != (y.flags & AUX)) return false;
    bool leaves = x.op == Op::leaf && y.op == Op::leaf && x.arg == y.arg;
    if (!leaves && !instrs_equal(a, x, b, y)) return false;
  }
  return true;
}

uint32_t only_static_that_differs(const Program& a, const Program& b) {
  if (a.code.size() != b.code.size()) return NONE;
  uint32_t different = NONE;
  for (uint32_t i = 0; i < a.code.size(); ++i) {
    if (instrs_equal(a, a.code[i], b, b.code[i])) continue;
    if (different != NONE || a.code[i].op != Op::stat || b.code[i].op != Op::stat) return NONE;
    different = i;
  }
  return different;
}

namespace {

// Lets a static of a copy hold its object weakly, where that can be; otherwise the copy owns it.
void weaken_static(Program& out, Static& s) {
  // Its contents would otherwise be shared with the strong program, whose own statics would stay alive.
  if (s.contents) s.contents = std::make_shared<Program>(weakened(*s.contents));
  if (s.how == How::function && !s.weak) return weaken_function(out, s);
  Owned ref;
  if (!s.weak && s.how == How::identity && PyType_SUPPORTS_WEAKREFS(s.type)) {
    ref = Owned::steal(PyWeakref_NewRef(s.obj, nullptr));
    if (!ref) PyErr_Clear();  // this instance refuses, and is held strongly: the bound of the table limits how many
  }
  if (!ref) return out.owned.push(s.obj);
  s.obj = out.keep(std::move(ref));
  s.weak = true;
}

// `chosen`: the statics that are weakened; without it all that can be.
Program weak_copy(const Program& p, const std::vector<bool>* chosen) {
  Program out;
  out.code = p.code;
  out.statics = p.statics;
  out.keys = p.keys;
  out.elements = p.elements;
  out.track_pc = p.track_pc;
  out.set_tables = p.set_tables;
  out.key_roots = p.key_roots;
  out.roots = p.roots;
  out.leaves = p.leaves;
  out.has_same = p.has_same;
  out.cyclic = p.cyclic;
  out.aliases = p.aliases;
  out.shapes = p.shapes;
  out.kinds = p.kinds;
  out.hash = p.hash;
  auto is_node = [](const Instr& n) { return n.op == Op::node; };
  out.nodes.reserve(static_cast<size_t>(std::count_if(out.code.begin(), out.code.end(), is_node)));
  // Nodes are the copy's own, and each reference that they hold has to be in its `owned`.
  for (Instr& n : out.code) {
    if (!is_node(n)) continue;
    Node& node = *(n.node = out.nodes.add(*n.node));
    out.keep_type(node.type);
    if (node.whole) out.owned.push(node.whole);
    if (!node.treedef) continue;
    // Aux data that is rebuilt is not kept here: it may lead to what the first call was given, or to tracers.
    const Instr& aux = (&n)[1];
    if (!chosen || (aux.op == Op::node && aux.node->track == NONE && !aux.node->whole)) node.treedef = nullptr;
    else out.owned.push(node.treedef);
  }
  for (Static& s : out.statics) {
    out.keep_type(s.type);
    // What statics are compared by stays. A snapshot that only a rebuild reads stays in an Outcome alone.
    bool to_rebuild = s.how != How::reduce && !s.weak;
    if (s.snapshot && !to_rebuild) out.owned.push(s.snapshot);
    if (s.snapshot && to_rebuild && !chosen) s.snapshot = nullptr;
    if (chosen && !(*chosen)[static_cast<size_t>(&s - out.statics.data())]) {
      out.owned.push(s.obj);
      if (s.snapshot && to_rebuild) out.owned.push(s.snapshot);
      continue;
    }
    weaken_static(out, s);
  }
  out.weak = std::any_of(out.statics.begin(), out.statics.end(), [](const Static& s) { return s.weak; });
  if (p.layout) out.layout = out.keep(Owned::borrow(p.layout));
  return out;
}

}  // namespace

// The number that a static is, where it may be the id() of an object; else 0.
static long long id_in(const Static& s) {
  constexpr long long smallest = 1LL << 32;  // objects lie above
  if (s.type != &PyLong_Type) return 0;
  Owned number = static_object(s);
  int overflow = 0;
  long long value = number ? PyLong_AsLongLongAndOverflow(number.get(), &overflow) : 0;
  if (overflow) return std::numeric_limits<long long>::max();
  return value >= smallest ? value : 0;
}

bool holds_ids(const Program& p) { return std::any_of(p.statics.begin(), p.statics.end(), id_in); }

bool holds_ids_of(const Program& p, std::vector<PyObject*> objects) {
  std::sort(objects.begin(), objects.end(), std::less<>());
  return std::any_of(p.statics.begin(), p.statics.end(), [&](const Static& s) {
    return std::binary_search(objects.begin(), objects.end(), reinterpret_cast<PyObject*>(id_in(s)), std::less<>());
  });
}

bool same_order(const Program& a, const Program& b) {
  for (const Instr& n : a.code) {
    if (n.op != Op::node) continue;
    const Instr& m = b.code[static_cast<size_t>(&n - a.code.data())];
    if (n.node->kind->node->keys != Keys::elements) {  // a frozenset may be a key, or in one
      for (uint32_t i = 0; i < a.item_keys(n); ++i) {
        uint32_t id = a.keys[n.node->keys + i];
        if (a.statics[id].how != How::tuple && a.statics[id].how != How::contents) continue;
        Owned key = static_object(b.statics[b.keys[m.node->keys + i]]);
        if (!key || !static_matches(a, id, key.get())) return false;
      }
      continue;
    }
    // Element by element, in the order of iteration.
    OwnedList elements;
    bool same = true;
    for (uint32_t i = 0; i < n.arg; ++i) {
      Owned element = static_object(b.statics[b.keys[m.node->keys + i]]);
      if (!element) return false;
      same = same && static_matches(a, a.keys[n.node->keys + i], element.get());
      elements.push_stolen(std::move(element));
    }
    if (!same && !hash_apart(a, n.node->keys, elements.data(), n.arg)) return false;
    const SetTable *table = a.set_table(n), *other = b.set_table(m);
    // Equal elements in the same order: what their tables do with the next element has to be the same too.
    if (same && table && other && !serves(*table, *other)) return false;
  }
  return true;
}

Program weakened(const Program& p) { return weak_copy(p, nullptr); }

bool is_weak_already(const Program& p) {
  if (std::any_of(p.code.begin(), p.code.end(), [](const Instr& n) { return n.node->treedef; })) return false;
  return std::none_of(p.statics.begin(), p.statics.end(), [](const Static& s) {
    bool to_rebuild = s.snapshot && s.how != How::reduce && !s.weak;
    bool by_identity = s.how == How::identity && PyType_SUPPORTS_WEAKREFS(s.type);
    return to_rebuild || s.contents || (!s.weak && (by_identity || s.how == How::function));
  });
}

Program weakened_inputs(const Program& p, const Program& inputs) {
  std::vector<PyObject*> input_objects;
  for (const Static& s : inputs.statics)
    if (s.how == How::identity && !s.weak) input_objects.push_back(s.obj);
  std::sort(input_objects.begin(), input_objects.end());
  std::vector<bool> chosen(p.statics.size());
  for (const Instr& n : p.code) {
    if (n.op != Op::stat) continue;
    const Static& s = p.statics[n.arg];
    chosen[n.arg] = s.how == How::identity && std::binary_search(input_objects.begin(), input_objects.end(), s.obj);
  }
  return weak_copy(p, &chosen);
}

std::vector<uint32_t> numbers_in(const Program& p) {
  std::vector<uint32_t> out;
  for (uint32_t pc = 0, end = p.end_of_roots(); pc < end; ++pc) {
    const Instr& n = p.code[pc];
    if (n.op != Op::stat) continue;
    PyTypeObject* type = p.statics[n.arg].type;
    if (type == &PyLong_Type || type == &PyFloat_Type) out.push_back(pc);
  }
  return out;
}

Program without_numbers(const Program& p) {
  Program out = weakened(p);
  for (uint32_t pc : numbers_in(p)) {
    out.code[pc].op = Op::leaf;
    out.code[pc].flags = NUMBER;
    // All alike, so that structures which differ in these numbers alone are equal.
    out.code[pc].arg = 0;
  }
  out.finish();
  return out;
}

bool is_dead(const Program& p) {
  if (!p.weak) return false;
  for (const Static& s : p.statics)
    if (s.weak && !static_object(s)) return true;
  return false;
}

// ---- repr

namespace {

std::string type_name(PyTypeObject* type) {
  std::string name = type->tp_name;
  return name.substr(name.rfind('.') + 1);
}

}  // namespace

std::string static_text(const Program& p, uint32_t id) {
  const Static& s = p.statics[id];
  if (s.how == How::context) return is_context_field(s) ? "..." : type_name(s.type) + "()";
  Owned value = static_object(s);
  return value ? short_repr(value.get()) : std::string("<gone>");
}

namespace {

// Jobs on a stack and no recursion, as in every walk: a graph may be deeper than the stack of C.
struct Printer {
  const Program& p;
  std::vector<bool> referenced;
  std::string out;
  struct Job {
    uint32_t pc;
    std::string text;  // printed when pc is NONE
  };
  std::vector<Job> jobs;

  explicit Printer(const Program& program) : p(program), referenced(program.track_pc.size(), false) {
    for (const Instr& n : p.code)
      if (n.op == Op::ref) referenced[n.arg] = true;
  }

  std::string name_of(uint32_t id) { return utf8(p.statics[id].obj); }

  void node(uint32_t pc) {
    const Instr& n = p.code[pc];
    const NodeKind& kind = *n.node->kind->node;
    std::string open = kind.brackets ? std::string(1, kind.brackets[0]) : "", close = kind.closing_text(p, n);
    bool plain = n.node->type == &PyList_Type || n.node->type == &PyTuple_Type || n.node->type == &PyDict_Type;
    if (!plain) {
      open = kind.is_registered ? "CustomNode(" + type_name(n.node->type) : type_name(n.node->type) + "(" + open;
      close += ")";
    }
    if (n.node->track != NONE && referenced[n.node->track]) open = "#" + std::to_string(n.node->track) + "=" + open;
    out += open + kind.content_text(p, n);

    // The texts between the children are jobs too, and are pushed in reverse: the stack gives the last one first.
    std::vector<Job> todo;
    uint32_t child = pc + 1, count = p.children(pc), key = p.child_keys(n);
    bool first = true;
    for (uint32_t i = 0; i < count; ++i, child = p.after(child)) {
      std::string before;
      bool extra = i < n.node->has_extra, item = !extra && i < n.node->has_extra + n.node->items;
      if (n.node->items && i == n.node->has_extra + n.node->items && !kind.is_registered && !plain &&
          close.size() > 1) {
        before = close.substr(0, close.size() - 1);  // the items end here, attributes follow
        close = ")";
      }
      if (!first) before += ", ";
      if (item && kind.keys == Keys::items) before += static_text(p, p.keys[key++]) + ": ";
      else if (!extra && !item) before += name_of(p.keys[key++]) + "=";
      if (extra && kind.is_registered) before += "[";
      todo.push_back({NONE, before});
      todo.push_back({child, {}});
      first = false;
      if (extra && kind.is_registered) {
        todo.push_back({NONE, "], ["});
        first = true;
      }
    }
    todo.push_back({NONE, close});
    for (auto it = todo.rbegin(); it != todo.rend(); ++it) jobs.push_back(std::move(*it));
  }

  void print(uint32_t start) {
    jobs.push_back({start, {}});
    while (!jobs.empty()) {
      Job job = std::move(jobs.back());
      jobs.pop_back();
      if (job.pc == NONE) {
        out += job.text;
        continue;
      }
      const Instr& n = p.code[job.pc];
      switch (n.op) {
        case Op::leaf: out += "*"; break;
        case Op::stat: out += static_text(p, n.arg); break;
        case Op::ref: out += "#" + std::to_string(n.arg); break;
        case Op::same: jobs.push_back({n.arg, {}}); break;
        case Op::input: out += "input#" + std::to_string(n.arg); break;
        case Op::forward: out += "input*" + std::to_string(n.arg); break;
        case Op::node: node(job.pc); break;
      }
      // An equal part is printed wherever it stands, so that the text can be far longer than the program.
      if (out.size() > 1000000) {
        out += "...";
        return;
      }
    }
  }
};

}  // namespace

std::string program_repr(const Program& program) {
  Printer printer(program);
  uint32_t pc = 0;
  for (uint32_t r = 0; r < program.roots; ++r, pc = program.after(pc)) {
    if (r) printer.out += ", ";
    printer.print(pc);
  }
  return "GraphDef(" + printer.out + ")";
}

// ---- binding

namespace {

void show_graphdef(const GraphDef& g, Visitor& visit) { g.program.show_held(visit); }

void clear_graphdef(GraphDef& g) { g.program.clear(); }

size_t num_nodes(const GraphDef& g) {
  size_t n = 0;
  for (const Instr& in : g.program.code) n += in.op == Op::node || in.op == Op::leaf || in.op == Op::stat;
  return n;
}

}  // namespace

void bind_graphdef(nb::module_& m) {
  nb::class_<GraphDef>(m, "GraphDef", nb::type_slots(Collected<GraphDef, show_graphdef, clear_graphdef>::slots),
                       nb::is_weak_referenceable(), nb::is_final(),
                       "The recorded structure of an object graph: immutable, hashable, comparable, printable.")
      .def(
          "numbers",
          [](const GraphDef& g) {
            nb::list out;
            for (uint32_t pc : numbers_in(g.program))
              out.append(nb::make_tuple(pc, nb::borrow(g.program.statics[g.program.code[pc].arg].obj)));
            return out;
          },
          nb::sig("def numbers(self) -> list[tuple[int, int | float]]"),
          "The number of the row and the value of each `int` and `float` that can change by itself.")
      .def(
          "without_numbers", [](const GraphDef& g) { return GraphDef{without_numbers(g.program)}; },
          "The same structure, whatever these numbers are.")
      .def(
          "__eq__",
          [](const GraphDef& a, nb::handle b) {
            return nb::isinstance<GraphDef>(b) && a.program == nb::cast<const GraphDef&>(b).program;
          },
          nb::arg("other").none(), nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def(
          "__ne__",
          [](const GraphDef& a, nb::handle b) {
            return !nb::isinstance<GraphDef>(b) || !(a.program == nb::cast<const GraphDef&>(b).program);
          },
          nb::arg("other").none(), nb::sig("def __ne__(self, other: object, /) -> bool"))
      .def("__hash__", [](const GraphDef& g) { return g.program.hash; })
      .def("__repr__", [](const GraphDef& g) { return program_repr(g.program); })
      .def(
          "__reduce__", [](nb::handle self) { return hooks::reduce_graphdef.object()(self); },
          nb::sig("def __reduce__(self) -> tuple[Any, ...]"))
      .def(
          "_state", [](const GraphDef& g) { return nb::steal(program_state(g.program).release()); },
          nb::sig("def _state(self) -> tuple[Any, ...]"))
      .def_static(
          "_from_state", [](nb::handle state) { return GraphDef{program_from_state(state.ptr(), false)}; },
          nb::arg("state").none(), nb::sig("def _from_state(state: object, /) -> GraphDef"))
      .def_static(
          "_instruction", [] { return nb::steal(instruction_fields().release()); },
          nb::sig("def _instruction() -> dict[str, Any]"),
          "An empty instruction of a state, by the names of its fields.")
      .def("_alive", [](const GraphDef& g) { return !is_dead(g.program); })
      .def_prop_ro(
          "num_leaves", [](const GraphDef& g) { return g.program.leaves; }, "The number of dynamic leaves.")
      .def_prop_ro("num_nodes", &num_nodes,
                   "The number of nodes and leaves, as in JAX; a node that is met again counts once.")
      .def_prop_ro("_shares",
                   [](const GraphDef& g) {
                     return std::any_of(g.program.code.begin(), g.program.code.end(),
                                        [](const Instr& n) { return n.op == Op::ref || n.op == Op::same; });
                   })
      .def_prop_ro(
          "_layout", [](const GraphDef& g) { return or_none(g.program.layout); },
          nb::sig("def _layout(self) -> tuple[Any, ...] | None"))
      .def(
          "_static_change",
          [](const GraphDef& a, const GraphDef& b) -> nb::object {
            uint32_t pc = only_static_that_differs(a.program, b.program);
            if (pc == NONE) return nb::none();
            Owned value = static_object(b.program.statics[b.program.code[pc].arg]);
            return nb::make_tuple(nb::steal(place_of(b.program, pc).release()), or_none(value.get()));
          },
          nb::arg("other"),
          nb::sig("def _static_change(self, other: GraphDef, /) -> tuple[tuple[int, tuple[Any, ...]], object] | None"))
      .def(
          "leaf_paths",
          [](const GraphDef& g) {
            nb::list out;
            for (nb::handle place : leaf_places(g.program)) out.append(place[1]);
            return out;
          },
          nb::sig("def leaf_paths(self) -> list[tuple[Any, ...]]"),
          "The key path of every dynamic leaf from its root, in order.")
      .def(
          "leaf_places", [](const GraphDef& g) { return leaf_places(g.program); },
          nb::sig("def leaf_places(self) -> list[tuple[int, tuple[Any, ...]]]"),
          "The place of every dynamic leaf, in order: the number of its root, and its key path from there.")
      .def(
          "_leaf_names", [](const GraphDef& g, const nb::tuple& names) { return leaf_names(g.program, names); },
          nb::sig("def _leaf_names(self, root_names: tuple[str, ...], /) -> list[str]"),
          "The name of every dynamic leaf, in order: that of its root, and the text of its key path.")
      .def(
          "_node_place",
          [](const GraphDef& g, uint32_t track) { return nb::steal(node_place(g.program, track).release()); },
          nb::arg("track"), nb::sig("def _node_place(self, track: int) -> tuple[int, tuple[Any, ...]]"))
      .def(
          "fingerprint", [](nb::handle self) { return hooks::fingerprint.object()(self); },
          nb::sig("def fingerprint(self) -> str"),
          "A text that equal structures share in every process: classes and functions count by qualified name.")
      .def(
          "children", [](nb::handle self) { return hooks::graphdef_children.object()(self); },
          nb::sig("def children(self) -> list[GraphDef]"),
          "The GraphDef of each child of the root by itself: a reference that leads out of a child is spelled out "
          "there.")
      .def(
          "_types",
          [](const GraphDef& g) {
            nb::dict nodes;
            nb::set statics;
            for (const Instr& n : g.program.code) {
              if (n.op != Op::node) continue;
              auto* type = reinterpret_cast<PyObject*>(n.node->type);
              PyObject* count = dict_get(nodes.ptr(), type);
              nodes[nb::borrow(type)] = 1 + (count ? nb::cast<size_t>(nb::handle(count)) : 0);
            }
            for (const Static& s : g.program.statics)
              if (PyTypeObject* type = s.obj && !s.weak ? Py_TYPE(s.obj) : s.type)
                statics.add(nb::borrow(reinterpret_cast<PyObject*>(type)));
            return nb::make_tuple(nodes, statics);
          },
          nb::sig("def _types(self) -> tuple[dict[type, int], set[type]]"),
          "(how many nodes of each type it has, the types of its statics), without a look at its rows.")
      .def("rows", &rows_of<GraphDef>, nb::sig("def rows(self) -> list[Row]"),
           "The structure as records: one a node, leaf, static or reference.");
  m.def(
      "weaken",
      [](nb::handle_t<GraphDef> graphdef) {
        const Program& program = nb::inst_ptr<GraphDef>(graphdef)->program;
        return is_weak_already(program) ? nb::borrow(graphdef) : nb::cast(GraphDef{weakened(program)});
      },
      nb::arg("graphdef"), nb::sig("def weaken(graphdef: GraphDef) -> GraphDef"),
      "An equal GraphDef that holds its identity statics weakly, where their type allows it; the same one where it has "
      "none.");
}

}  // namespace graftax
