// SPDX-License-Identifier: Apache-2.0
#include "graphdef.h"

#include <memory>
#include <unordered_map>

#include "path.h"
#include "static_key.h"

namespace graftax {

uint32_t Program::item_keys(const Instr& n) const {
  switch (n.kind->base) {
    case Base::dict:
    case Base::odict:
    case Base::defaultdict: return n.items;
    case Base::set: return n.arg;
    default: return 0;
  }
}

void Program::clear() {
  code.clear();
  roots = 0;
  owned.clear();
  statics.clear();
  keys.clear();
  layout = nullptr;
}

int Program::traverse(visitproc visit, void* arg) const {
  for (size_t i = 0; i < owned.size(); ++i) Py_VISIT(owned[i]);
  for (const Static& s : statics)
    if (s.state)
      if (int stop = s.state->traverse(visit, arg)) return stop;
  return 0;
}

namespace {

Py_hash_t mix(Py_hash_t h, size_t x) {
  auto u = static_cast<size_t>(h);
  u ^= x + 0x9e3779b97f4a7c15ULL + (u << 6) + (u >> 2);
  return static_cast<Py_hash_t>(u);
}

Py_hash_t hash_instr(const Program& p, const Instr& n, Py_hash_t h) {
  h = mix(h, static_cast<size_t>(n.op));
  switch (n.op) {
    case Op::leaf: return h;
    case Op::stat: return mix(h, static_cast<size_t>(p.statics[n.arg].hash));
    case Op::node: {
      h = mix(h, reinterpret_cast<size_t>(n.type));
      h = mix(h, (static_cast<size_t>(n.items) << 20) ^ (n.fields << 8) ^ n.slots);
      uint32_t own_keys = p.item_keys(n);
      size_t sum = 0;  // a set has no order
      for (uint32_t i = 0; i < own_keys; ++i) {
        auto key = static_cast<size_t>(p.statics[p.keys[n.keys + i]].hash);
        if (n.kind->base == Base::set) sum += key * 0x9e3779b97f4a7c15ULL;
        else h = mix(h, key);
      }
      for (uint32_t i = 0; i < n.fields + n.slots; ++i)
        h = mix(h, static_cast<size_t>(p.statics[p.keys[n.keys + own_keys + i]].hash));
      if (n.payload != NONE) h = mix(h, static_cast<size_t>(p.statics[n.payload].hash));
      return mix(h, sum);
    }
    default: return mix(h, n.arg);
  }
}

bool sets_equal(const Program& a, const Instr& x, const Program& b, const Instr& y) {
  std::unordered_multimap<Py_hash_t, uint32_t> left;
  for (uint32_t j = 0; j < y.arg; ++j) left.emplace(b.statics[b.keys[y.keys + j]].hash, b.keys[y.keys + j]);
  for (uint32_t i = 0; i < x.arg; ++i) {
    uint32_t id = a.keys[x.keys + i];
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
  if (x.op != Op::node) return x.arg == y.arg;
  if (x.type != y.type || x.kind->base != y.kind->base || x.track != y.track || x.items != y.items ||
      x.fields != y.fields || x.slots != y.slots || x.has_extra != y.has_extra || x.arg != y.arg ||
      (x.payload == NONE) != (y.payload == NONE) || (x.flags & HANDED) != (y.flags & HANDED))
    return false;
  if (x.payload != NONE && !statics_equal(a, x.payload, b, y.payload)) return false;
  uint32_t own_keys = a.item_keys(x), first = 0, n = own_keys + x.fields + x.slots;
  if (x.kind->base == Base::set) {
    if (!sets_equal(a, x, b, y)) return false;
    first = own_keys;
  }
  for (uint32_t i = first; i < n; ++i)
    if (!statics_equal(a, a.keys[x.keys + i], b, b.keys[y.keys + i])) return false;
  return true;
}

}  // namespace

void Program::finish() {
  Py_hash_t h = 0x345678;
  for (const Instr& n : code) h = hash_instr(*this, n, h);
  if (layout) {
    Py_hash_t own_hash = PyObject_Hash(layout);
    if (own_hash == -1) raise_python();
    h = mix(h, static_cast<size_t>(own_hash));
  }
  hash = h == -1 ? -2 : h;
}

bool operator==(const Program& a, const Program& b) {
  if (&a == &b) return true;
  if (a.hash != b.hash || a.code.size() != b.code.size() || a.roots != b.roots || a.leaves != b.leaves) return false;
  if ((a.layout == nullptr) != (b.layout == nullptr)) return false;
  if (a.layout) {
    int same = PyObject_RichCompareBool(a.layout, b.layout, Py_EQ);
    check(same);
    if (!same) return false;
  }
  for (size_t i = 0; i < a.code.size(); ++i)
    if (!instrs_equal(a, a.code[i], b, b.code[i])) return false;
  return true;
}

uint32_t only_static_that_differs(const Program& a, const Program& b) {
  if (a.code.size() != b.code.size()) return NONE;
  uint32_t found = NONE;
  for (uint32_t i = 0; i < a.code.size(); ++i) {
    if (instrs_equal(a, a.code[i], b, b.code[i])) continue;
    if (found != NONE || a.code[i].op != Op::stat || b.code[i].op != Op::stat) return NONE;
    found = i;
  }
  return found;
}

Program weakened(const Program& p) {
  Program out;
  out.code = p.code;
  out.statics = p.statics;
  out.keys = p.keys;
  out.elements = p.elements;
  out.track_pc = p.track_pc;
  out.roots = p.roots;
  out.leaves = p.leaves;
  out.has_same = p.has_same;
  out.kinds = p.kinds;
  out.hash = p.hash;
  for (Instr& n : out.code) {
    if (n.type) out.keep_type(n.type);
    if (n.whole) out.owned.push(n.whole);
    if (n.treedef) out.owned.push(n.treedef);
  }
  for (Static& s : out.statics) {
    out.keep_type(s.type);
    if (s.snapshot) out.owned.push(s.snapshot);
    if (s.state) s.state = std::make_shared<Program>(weakened(*s.state));
    if (s.weak || s.how != How::identity || !PyType_SUPPORTS_WEAKREFS(s.type)) {
      out.owned.push(s.obj);
      continue;
    }
    Owned ref = Owned::steal(PyWeakref_NewRef(s.obj, nullptr));
    if (ref) {
      s.obj = out.keep(std::move(ref));
      s.weak = true;
    } else {
      PyErr_Clear();
      out.owned.push(s.obj);
    }
  }
  if (p.layout) out.layout = out.keep(Owned::borrow(p.layout));
  return out;
}

bool is_dead(const Program& p) {
  for (const Static& s : p.statics)
    if (s.weak && !static_object(s)) return true;
  return false;
}

// ---- repr

namespace {

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

  std::string text_of(uint32_t id) {
    const Static& s = p.statics[id];
    if (s.how == How::context) return type_name(s.type) + "()";
    Owned value = static_object(s);
    return value ? short_repr(value.get()) : std::string("<gone>");
  }
  std::string name_of(uint32_t id) { return utf8(p.statics[id].obj); }

  static std::string type_name(PyTypeObject* type) {
    std::string name = type->tp_name;
    return name.substr(name.rfind('.') + 1);
  }

  void node(uint32_t pc) {
    const Instr& n = p.code[pc];
    Base base = n.kind->base;
    std::string open, close;
    bool plain = n.type == &PyList_Type || n.type == &PyTuple_Type || n.type == &PyDict_Type;
    uint32_t own_keys = p.item_keys(n);
    switch (base) {
      case Base::list: open = "[", close = "]"; break;
      case Base::tuple: open = "(", close = n.items == 1 && plain ? ",)" : ")"; break;
      case Base::dict: case Base::odict: case Base::defaultdict: open = "{", close = "}"; break;
      case Base::deque:
        open = "[", close = n.payload == NONE ? "]" : "], maxlen=" + text_of(n.payload);
        break;
      case Base::set: open = "{", close = "}"; break;
      case Base::registered: open = "[", close = "]"; break;
      default: break;
    }
    if (!plain) {
      open = (base == Base::registered ? "CustomNode(" : "") + type_name(n.type) +
             (base == Base::registered ? "" : "(" + open);
      close += ")";
    }
    if (n.track != NONE && referenced[n.track]) open = "#" + std::to_string(n.track) + "=" + open;
    out += open;
    if (base == Base::bytearray) out += text_of(n.payload);
    if (base == Base::set)
      for (uint32_t i = 0; i < n.arg; ++i) out += (i ? ", " : "") + text_of(p.keys[n.keys + i]);

    std::vector<Job> todo;
    uint32_t child = pc + 1, count = p.children(pc), key = n.keys + (base == Base::set ? own_keys : 0);
    bool first = true;
    for (uint32_t i = 0; i < count; ++i, child = p.after(child)) {
      std::string before;
      bool extra = i < n.has_extra, item = !extra && i < n.has_extra + n.items;
      if (!extra && base != Base::registered && !item && first && n.items && !plain && close.size() > 1) {
        before = close.substr(0, close.size() - 1);  // the items end here, attributes follow
        close = ")";
      }
      if (!first) before += ", ";
      if (item && own_keys && base != Base::set) before += text_of(p.keys[key++]) + ": ";
      else if (!extra && !item) before += name_of(p.keys[key++]) + "=";
      if (extra && base == Base::registered) before += "[";
      todo.push_back({NONE, before});
      todo.push_back({child, {}});
      first = false;
      if (extra && base == Base::registered) {
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
        case Op::stat: out += text_of(n.arg); break;
        case Op::ref: out += "#" + std::to_string(n.arg); break;
        case Op::same: jobs.push_back({n.arg, {}}); break;
        case Op::input: out += "input#" + std::to_string(n.arg); break;
        case Op::forward: out += "input*" + std::to_string(n.arg); break;
        case Op::node: node(job.pc); break;
      }
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

// ---- pickle

namespace {

nb::object borrowed(PyObject* p) { return p ? nb::borrow(p) : nb::none(); }

[[noreturn]] void malformed(const char* what) {
  raise_error(PyExc_ValueError, std::string("malformed GraphDef state: ") + what);
}

template <class T>
T field(const nb::tuple& t, size_t i) {
  if (i >= t.size()) malformed("a record is too short");
  T out{};
  if (!nb::try_cast<T>(t[i], out)) malformed("a field has the wrong type");
  return out;
}

nb::tuple as_tuple(nb::handle h) {
  if (!nb::isinstance<nb::tuple>(h)) malformed("a tuple was expected");
  return nb::borrow<nb::tuple>(h);
}

// Every index in range and every subtree nested, so that no walk can leave the arrays.
void validate(Program& p) {
  auto key_ok = [&](uint32_t id) { if (id >= p.statics.size()) malformed("static id"); };
  for (uint32_t id : p.keys) key_ok(id);
  for (uint32_t i = 0; i < p.statics.size(); ++i) {
    const Static& s = p.statics[i];
    if (s.how == How::tuple && (s.first > p.elements.size() || s.count > p.elements.size() - s.first)) malformed("tuple");
    for (uint32_t j = 0; s.how == How::tuple && j < s.count; ++j)
      if (p.elements[s.first + j] >= i) malformed("tuple element");
  }
  uint32_t leaf = 0, n = static_cast<uint32_t>(p.code.size());
  for (const Instr& in : p.code)
    if (in.op == Op::node && in.track != NONE) p.track_pc.push_back(NONE);
  struct Open { uint32_t end, left; };
  std::vector<Open> open;
  uint32_t roots = 0;
  for (uint32_t pc = 0; pc < n; ++pc) {
    while (!open.empty() && open.back().left == 0) {
      if (open.back().end != pc) malformed("subtree end");
      open.pop_back();
    }
    if (open.empty()) ++roots;
    else --open.back().left;
    const Instr& in = p.code[pc];
    switch (in.op) {
      case Op::leaf: if (in.arg != leaf++) malformed("leaf order"); break;
      case Op::stat: key_ok(in.arg); break;
      case Op::ref: if (in.arg >= p.track_pc.size() || p.track_pc[in.arg] == NONE) malformed("reference"); break;
      case Op::same: if (in.arg >= pc || p.code[in.arg].op != Op::node || !(p.code[in.arg].flags & CLOSED) || p.code[in.arg].next > pc) malformed("shared subtree");
        p.code[in.arg].flags |= TARGET;
        break;
      case Op::node: {
        if (in.track != NONE) {
          if (in.track >= p.track_pc.size() || p.track_pc[in.track] != NONE) malformed("tracked index");
          p.track_pc[in.track] = pc;
        }
        uint64_t keys = uint64_t{p.item_keys(in)} + in.fields + in.slots;
        if (keys && (in.keys > p.keys.size() || keys > p.keys.size() - in.keys)) malformed("keys");
        for (uint64_t k = p.item_keys(in); k < keys; ++k)
          if (p.statics[p.keys[in.keys + k]].how != How::string) malformed("field name");
        if (in.payload != NONE) key_ok(in.payload);
        if (in.kind->base == Base::bytearray && (in.payload == NONE || p.statics[in.payload].how != How::bytes))
          malformed("bytearray");
        if (in.kind->base == Base::registered && !in.treedef) malformed("treedef");
        if (in.has_extra != (in.kind->base == Base::registered || in.kind->base == Base::defaultdict)) malformed("extra child");
        uint64_t children = uint64_t{in.has_extra} + in.items + in.fields + in.slots;
        if (in.next <= pc || in.next > n || children > n) malformed("subtree end");
        open.push_back({in.next, static_cast<uint32_t>(children)});
        break;
      }
      default: malformed("operation");
    }
  }
  while (!open.empty() && open.back().left == 0) {
    if (open.back().end != n) malformed("subtree end");
    open.pop_back();
  }
  if (!open.empty() || roots != p.roots || leaf != p.leaves) malformed("counts");
}

}  // namespace

Owned program_state(const Program& p) {
  nb::list code, statics, keys, elements;
  for (const Instr& n : p.code)
    code.append(nb::make_tuple(static_cast<int>(n.op), n.flags, n.arg, n.next, n.track, n.items, n.fields, n.slots,
                               n.has_extra, n.keys, n.payload, borrowed(reinterpret_cast<PyObject*>(n.type)),
                               borrowed(n.treedef)));
  for (const Static& s : p.statics) {
    Owned value = static_object(s);
    if (!value) raise_error(PyExc_ReferenceError, "a static of this GraphDef no longer exists");
    statics.append(nb::make_tuple(static_cast<int>(s.how), borrowed(value.get()), s.first, s.count));
  }
  for (uint32_t k : p.keys) keys.append(k);
  for (uint32_t e : p.elements) elements.append(e);
  nb::tuple out = nb::make_tuple(1, p.roots, p.leaves, borrowed(p.layout), nb::tuple(code), nb::tuple(statics),
                                 nb::tuple(keys), nb::tuple(elements));
  return Owned::steal(out.release().ptr());
}

Program program_from_state(PyObject* state_obj) {
  nb::tuple state = as_tuple(state_obj);
  if (state.size() != 8 || field<int>(state, 0) != 1) malformed("unknown version");
  Program p;
  p.roots = field<uint32_t>(state, 1);
  p.leaves = field<uint32_t>(state, 2);
  if (!nb::object(state[3]).is_none()) {
    if (!nb::isinstance<nb::tuple>(state[3])) malformed("layout");
    p.layout = p.keep(Owned::borrow(nb::object(state[3]).ptr()));
  }
  for (nb::handle h : as_tuple(state[7])) p.elements.push_back(nb::cast<uint32_t>(h));
  for (nb::handle h : as_tuple(state[5])) {
    nb::tuple t = as_tuple(h);
    int how = field<int>(t, 0);
    nb::object value = t[1];
    if (how < 0 || how > static_cast<int>(How::context)) malformed("static");
    if (static_cast<How>(how) == How::tuple) {
      Static s;
      s.how = How::tuple;
      s.type = &PyTuple_Type;
      if (!PyTuple_CheckExact(value.ptr())) malformed("tuple key");
      s.obj = p.keep(Owned::borrow(value.ptr()));
      s.first = field<uint32_t>(t, 2);
      s.count = field<uint32_t>(t, 3);
      if (uint64_t{s.first} + s.count > p.elements.size()) malformed("tuple key");
      s.hash = 17;
      for (uint32_t i = 0; i < s.count; ++i) {
        uint32_t e = p.elements[s.first + i];
        if (e >= p.statics.size()) malformed("tuple key");
        s.hash = static_cast<Py_hash_t>(static_cast<size_t>(s.hash) * 31 + static_cast<size_t>(p.statics[e].hash));
      }
      p.statics.push_back(s);
    } else {
      const Kind& kind = kind_of(value.ptr());
      if (kind.base == Base::statics || kind.base == Base::numpy) add_static(p, value.ptr(), kind);
      else add_key(p, value.ptr());
    }
  }
  for (nb::handle h : as_tuple(state[6])) p.keys.push_back(nb::cast<uint32_t>(h));
  for (nb::handle h : as_tuple(state[4])) {
    nb::tuple t = as_tuple(h);
    Instr n;
    int op = field<int>(t, 0);
    if (op < 0 || op > static_cast<int>(Op::node)) malformed("operation");
    n.op = static_cast<Op>(op);
    n.flags = static_cast<uint8_t>(field<int>(t, 1) & (HANDED | CLOSED));
    n.arg = field<uint32_t>(t, 2);
    n.next = field<uint32_t>(t, 3);
    n.track = field<uint32_t>(t, 4);
    n.items = field<uint32_t>(t, 5);
    n.fields = field<uint32_t>(t, 6);
    n.slots = field<uint32_t>(t, 7);
    n.has_extra = field<uint32_t>(t, 8);
    n.keys = field<uint32_t>(t, 9);
    n.payload = field<uint32_t>(t, 10);
    if (n.op == Op::node) {
      nb::object type = t[11];
      if (!PyType_Check(type.ptr())) malformed("type");
      n.type = p.keep_type(reinterpret_cast<PyTypeObject*>(type.ptr()));
      n.kind = &kind_of_type(n.type);
      p.keep_kind(*n.kind);
      if (!n.kind->is_node()) malformed("a type is not a node any more");
      if (!nb::object(t[12]).is_none()) n.treedef = p.keep(Owned::borrow(nb::object(t[12]).ptr()));
    }
    if (n.op == Op::same) p.has_same = true;
    p.code.push_back(n);
  }
  validate(p);
  p.finish();
  return p;
}

// ---- binding

namespace {

int graphdef_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  return nb::inst_ptr<GraphDef>(self)->program.traverse(visit, arg);
}

int graphdef_clear(PyObject* self) {
  if (nb::inst_ready(self)) nb::inst_ptr<GraphDef>(self)->program.clear();
  return 0;
}

PyType_Slot graphdef_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(graphdef_traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(graphdef_clear)},
                                {0, nullptr}};

size_t num_nodes(const GraphDef& g) {
  size_t n = 0;
  for (const Instr& in : g.program.code) n += in.op == Op::node || in.op == Op::leaf || in.op == Op::stat;
  return n;
}

}  // namespace

void bind_graphdef(nb::module_& m) {
  nb::class_<GraphDef>(m, "GraphDef", nb::type_slots(graphdef_slots), nb::is_weak_referenceable(), nb::is_final(),
                       "The recorded structure of an object graph: immutable, hashable, comparable, printable.")
      .def("__eq__", [](const GraphDef& a, nb::handle b) {
        return nb::isinstance<GraphDef>(b) && a.program == nb::cast<const GraphDef&>(b).program;
      }, nb::arg("other").none(), nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__ne__", [](const GraphDef& a, nb::handle b) {
        return !nb::isinstance<GraphDef>(b) || !(a.program == nb::cast<const GraphDef&>(b).program);
      }, nb::arg("other").none(), nb::sig("def __ne__(self, other: object, /) -> bool"))
      .def("__hash__", [](const GraphDef& g) { return g.program.hash; })
      .def("__repr__", [](const GraphDef& g) { return program_repr(g.program); })
      .def("__reduce__", [](nb::handle self) {
        return nb::borrow(runtime.registry).attr("reduce_graphdef")(self);
      }, nb::sig("def __reduce__(self) -> tuple[Any, ...]"))
      .def("_state", [](const GraphDef& g) { return nb::steal(program_state(g.program).release()); },
           nb::sig("def _state(self) -> tuple[Any, ...]"))
      .def_static("_from_state", [](nb::handle state) { return GraphDef{program_from_state(state.ptr())}; },
                  nb::sig("def _from_state(state: object, /) -> GraphDef"))
      .def("_alive", [](const GraphDef& g) { return !is_dead(g.program); })
      .def_prop_ro("num_leaves", [](const GraphDef& g) { return g.program.leaves; }, "The number of dynamic leaves.")
      .def_prop_ro("num_nodes", &num_nodes, "The number of nodes and leaves, as in JAX; a node that is met again counts once.")
      .def_prop_ro("_layout", [](const GraphDef& g) { return borrowed(g.program.layout); },
                   nb::sig("def _layout(self) -> tuple[Any, ...] | None"))
      .def("_static_change", [](const GraphDef& a, const GraphDef& b) -> nb::object {
        uint32_t pc = only_static_that_differs(a.program, b.program);
        if (pc == NONE) return nb::none();
        Owned value = static_object(b.program.statics[b.program.code[pc].arg]);
        return nb::make_tuple(nb::steal(path_of(b.program, pc).release()), borrowed(value.get()));
      }, nb::arg("other"), nb::sig("def _static_change(self, other: GraphDef, /) -> tuple[tuple[Any, ...], object] | None"))
      .def("leaf_paths", [](const GraphDef& g) { return nb::steal(leaf_paths(g.program).release()); },
           nb::sig("def leaf_paths(self) -> list[tuple[Any, ...]]"),
           "The key path of every dynamic leaf, in order. With several roots the first entry is the root's number.")
      .def("fingerprint", [](nb::handle self) { return nb::borrow(runtime.registry).attr("fingerprint")(self); },
           nb::sig("def fingerprint(self) -> str"),
           "A text that equal structures share in every process: classes and functions count by qualified name.")
      .def("children", [](nb::handle self) { return nb::borrow(runtime.registry).attr("graphdef_children")(self); },
           nb::sig("def children(self) -> list[GraphDef]"),
           "The GraphDef of each child of the root by itself: a reference that leads out of a child is spelled out there.")
      .def("instructions", [](const GraphDef& g) { return nb::steal(instructions(g.program).release()); },
           nb::sig("def instructions(self) -> list[tuple[Any, ...]]"),
           "One record an instruction: (path, op, type, argument), op in leaf, static, ref, node; the argument is the "
           "leaf's index, the static's value, the first path of the node met again, or what the node needs beside its "
           "children.");
}

}  // namespace graftax
