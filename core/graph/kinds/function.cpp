// SPDX-License-Identifier: Apache-2.0
// Functions: defaults, keyword defaults and cells are their items. And the cells.
#include "graph/kinds/function.h"
#include "python/function_events.h"

#include "graph/commit.h"
#include "graph/rebuild.h"
#include "graph/static_equality.h"

namespace graftax {

namespace {

// What a function is apart from its children.
struct FunctionView {
  Owned code;
  PyObject* globals = nullptr;
  PyObject* name = nullptr;
  PyObject* qualname = nullptr;
  PyObject* doc = nullptr;
  PyObject* module = nullptr;
};

FunctionView view(PyObject* function) {
  auto* f = reinterpret_cast<PyFunctionObject*>(function);
  return {Owned::borrow(f->func_code), f->func_globals, f->func_name, f->func_qualname, f->func_doc, f->func_module};
}

// Of a static that `weaken_function` has made weak: its code by a weak reference, its globals by one to their module.
FunctionView view(const Static& s) {
  if (!s.weak) return view(s.obj);
  FunctionView v{static_object(s)};
  PyObject* holder = PyTuple_GET_ITEM(s.snapshot, 0);
  if (PyWeakref_Check(holder)) {
    // Without globals the view equals no other: the module is gone, and so is what the function read.
    Owned alive = weak_target(holder);
    v.globals = alive ? PyModule_GetDict(alive.get()) : nullptr;
  } else {
    v.globals = holder;
  }
  v.name = PyTuple_GET_ITEM(s.snapshot, 1);
  v.qualname = PyTuple_GET_ITEM(s.snapshot, 2);
  v.doc = PyTuple_GET_ITEM(s.snapshot, 3);
  v.module = PyTuple_GET_ITEM(s.snapshot, 4);
  return v;
}

// A weak view has None where the function has nothing.
bool equal_objects(PyObject* a, PyObject* b) {
  if (a == b || (!a && b == Py_None) || (!b && a == Py_None)) return true;
  if (!a || !b) return false;
  return equal(a, b);
}

// __doc__ and __module__ may be anything: what is no text counts by identity.
bool equal_texts(PyObject* a, PyObject* b) {
  if (a && b && a != b && !(PyUnicode_CheckExact(a) && PyUnicode_CheckExact(b))) return false;
  return equal_objects(a, b);
}

bool equal_views(const FunctionView& a, const FunctionView& b) {
  return a.globals && a.globals == b.globals && equal_objects(a.code.get(), b.code.get()) &&
         equal_objects(a.name, b.name) && equal_objects(a.qualname, b.qualname) && equal_texts(a.doc, b.doc) &&
         equal_texts(a.module, b.module);
}

void copy_names(PyFunctionObject* from, PyFunctionObject* to) {
  auto set = [](PyObject*& place, PyObject* value) {
    if (place == value) return;
    Py_XINCREF(value);
    // Released when the new value is in its place: that may run code which reads the function.
    Owned old = Owned::steal(std::exchange(place, value));
  };
  set(to->func_name, from->func_name);
  set(to->func_qualname, from->func_qualname);
  set(to->func_doc, from->func_doc);
  set(to->func_module, from->func_module);
  set(to->func_annotations, from->func_annotations);
#if PY_VERSION_HEX >= 0x030C0000
  set(to->func_typeparams, from->func_typeparams);
#endif
#if PY_VERSION_HEX >= 0x030E0000
  set(to->func_annotate, from->func_annotate);  // what makes the annotations when they are asked for
#endif
}

// A function with the code, globals and names of `function`, and nothing else of it: the function itself would keep
// the arrays in its defaults and cells alive.
Owned bare_twin(PyObject* function) {
  auto* f = reinterpret_cast<PyFunctionObject*>(function);
  Owned out = own(PyFunction_NewWithQualName(f->func_code, f->func_globals, f->func_qualname));
  tell_function_made(out.get());
  copy_names(f, reinterpret_cast<PyFunctionObject*>(out.get()));
  return out;
}

}  // namespace

bool is_plain_function(PyObject* function) {
  auto* f = reinterpret_cast<PyFunctionObject*>(function);
  if (f->func_closure || f->func_kwdefaults) return false;
  // The table of compiled entries, which may be its one attribute, is not the user's.
  if (f->func_dict && PyDict_GET_SIZE(f->func_dict) != PyDict_Contains(f->func_dict, runtime.tables)) return false;
  for (Py_ssize_t i = 0; f->func_defaults && i < PyTuple_GET_SIZE(f->func_defaults); ++i)
    if (!kind_of(PyTuple_GET_ITEM(f->func_defaults, i)).immortal_value) return false;
  return true;
}

bool made_in_a_call(PyObject* function) {
  return utf8(reinterpret_cast<PyFunctionObject*>(function)->func_qualname).find("<locals>") != std::string::npos;
}

uint32_t add_function(Program& p, PyObject* obj) {
  Static s;
  s.how = How::function;
  s.type = &PyFunction_Type;
  s.obj = p.keep(bare_twin(obj));
  Py_hash_t code = hash_of(PyFunction_GET_CODE(obj));
  // Names are compared and not hashed: the code tells most functions apart.
  s.hash = code ^ static_cast<Py_hash_t>(reinterpret_cast<uintptr_t>(PyFunction_GET_GLOBALS(obj)) >> 4);
  return p.add(s);
}

bool function_matches(const Static& s, PyObject* function) { return equal_views(view(s), view(function)); }

bool functions_equal(const Static& a, const Static& b) { return equal_views(view(a), view(b)); }

void weaken_function(Program& p, Static& s) {
  FunctionView v = view(s);
  Owned holder;
  PyObject* name = PyDict_GetItemString(v.globals, "__name__");
  PyObject* module = name ? dict_get(PyImport_GetModuleDict(), name) : nullptr;
  // A dict has no weak reference: its module stands for it.
  if (module && PyModule_Check(module) && PyModule_GetDict(module) == v.globals)
    holder = own(PyWeakref_NewRef(module, nullptr));
  else holder = Owned::borrow(v.globals);
  Owned code = own(PyWeakref_NewRef(v.code.get(), nullptr));
  auto text = [](PyObject* t) { return t ? t : Py_None; };
  s.snapshot = p.keep(own(PyTuple_Pack(5, holder.get(), v.name, v.qualname, text(v.doc), text(v.module))));
  s.obj = p.keep(std::move(code));
  s.weak = true;
}

PyObject* code_item_name(PyObject* code, Py_ssize_t i) {
  static PyObject* const fixed[] = {interned("__defaults__"), interned("__kwdefaults__")};
  if (i < 2) return fixed[i];
  Owned names = own(PyCode_GetFreevars(reinterpret_cast<PyCodeObject*>(code)));
  return i - 2 < PyTuple_GET_SIZE(names.get()) ? PyTuple_GET_ITEM(names.get(), i - 2) : nullptr;
}

PyObject* function_item_name(const Static& s, uint32_t i) {
  FunctionView v = view(s);
  return v.code ? code_item_name(v.code.get(), i) : nullptr;
}

void restore_code(const Static& s, PyObject* function) {
  check(PyObject_SetAttrString(function, "__code__", PyFunction_GET_CODE(s.obj)));
  copy_names(reinterpret_cast<PyFunctionObject*>(s.obj), reinterpret_cast<PyFunctionObject*>(function));
}

namespace {

struct FunctionKind final : NodeKind {
  FunctionKind() : NodeKind("function", Items::asked) {
    is_function = has_content = has_fields = is_handed = true;
    nameless = &PyFunction_Type;
  }

  bool is_of(PyTypeObject* solid) const override { return solid == &PyFunction_Type; }

  Listed open(PyObject* obj, const Kind&, Opened*) const override { return {{}, {}, size(obj)}; }
  Py_ssize_t size(PyObject* obj) const override {
    PyObject* closure = PyFunction_GET_CLOSURE(obj);
    return 2 + (closure ? PyTuple_GET_SIZE(closure) : 0);
  }
  PyObject* item(PyObject* obj, Py_ssize_t i) const override {
    if (i >= size(obj)) return nullptr;
    PyObject* out = i == 0   ? PyFunction_GET_DEFAULTS(obj)
                    : i == 1 ? PyFunction_GET_KW_DEFAULTS(obj)
                             : PyTuple_GET_ITEM(PyFunction_GET_CLOSURE(obj), i - 2);
    return out ? out : Py_None;
  }
  std::string item_name(Py_ssize_t i, PyObject* key) const override {
    std::string name = key ? utf8(key) : "cell " + std::to_string(i - 2);
    return i < 2 ? name : "__closure__['" + name + "']";
  }

  uint32_t add_payload(Program& p, PyObject* obj, const Kind&) const override { return add_function(p, obj); }
  bool content_matches(const Program& p, const Instr& n, PyObject* obj) const override {
    return function_matches(p.statics[n.node->payload], obj);
  }
  bool is_valid(const Program& p, const Instr& n) const override {
    if (n.node->payload == NONE || p.statics[n.node->payload].how != How::function) return false;
    auto* code = reinterpret_cast<PyCodeObject*>(PyFunction_GET_CODE(p.statics[n.node->payload].obj));
    return n.node->items == 2 + static_cast<uint32_t>(code->co_nfreevars);
  }
  std::string content_text(const Program& p, const Instr& n) const override {
    const Static& s = p.statics[n.node->payload];
    PyObject* name =
        s.weak ? PyTuple_GET_ITEM(s.snapshot, 2) : reinterpret_cast<PyFunctionObject*>(s.obj)->func_qualname;
    return utf8(name) + (p.children(static_cast<uint32_t>(&n - p.code.data())) ? ", " : "");
  }

  Owned shell(const Program& p, const Instr& n, PyObject* live) const override {
    return bare_twin(live ? live : p.statics[n.node->payload].obj);
  }
  void fill(const Content& c, PyObject* shell) const override { set_parts(shell, c.items(), c.n.node->items); }
  void write(Commit& commit, const Content& c, PyObject* node, const Touched&) const override {
    commit.parts(c.n, node, c.items());
  }
  void set_parts(PyObject* function, PyObject* const* parts, Py_ssize_t count) const override {
    auto* f = reinterpret_cast<PyFunctionObject*>(function);
    Owned defaults = Owned::borrow(f->func_defaults), keywords = Owned::borrow(f->func_kwdefaults);
    Owned closure = Owned::borrow(f->func_closure);  // all three are released last
    if (item(function, 0) != parts[0]) check(PyFunction_SetDefaults(function, parts[0]));
    if (item(function, 1) != parts[1]) check(PyFunction_SetKwDefaults(function, parts[1]));
    if (count == 2) return;
    bool same = closure && PyTuple_GET_SIZE(closure.get()) == count - 2;
    for (Py_ssize_t i = 2; same && i < count; ++i) same = PyTuple_GET_ITEM(closure.get(), i - 2) == parts[i];
    if (same) return;
    for (Py_ssize_t i = 2; i < count; ++i)
      if (!PyCell_Check(parts[i])) raise_error(PyExc_TypeError, "the closure of a function is made of cells");
    check(PyFunction_SetClosure(function, tuple_of(parts + 2, static_cast<uint32_t>(count - 2)).get()));
  }
};

struct CellKind final : NodeKind {
  CellKind() : NodeKind("cell", Items::asked) {
    is_cell = true;
    nameless = &PyCell_Type;
  }

  bool is_of(PyTypeObject* solid) const override { return solid == &PyCell_Type; }
  Listed open(PyObject* obj, const Kind&, Opened*) const override { return {{}, {}, size(obj)}; }
  Py_ssize_t size(PyObject* obj) const override { return PyCell_GET(obj) != nullptr; }
  PyObject* item(PyObject* obj, Py_ssize_t) const override { return PyCell_GET(obj); }
  std::string item_name(Py_ssize_t, PyObject*) const override { return "cell_contents"; }
  bool is_valid(const Program&, const Instr& n) const override { return n.node->items <= 1; }

  void fill(const Content& c, PyObject* shell) const override {
    check(PyCell_Set(shell, c.n.node->items ? c.items()[0] : nullptr));
  }
  void write(Commit& commit, const Content& c, PyObject* node, const Touched&) const override {
    commit.slot(node, offsetof(PyCellObject, ob_ref), c.n.node->items ? c.items()[0] : nullptr);
  }
};

const FunctionKind function_kind;
const CellKind cell_kind;

}  // namespace

}  // namespace graftax
