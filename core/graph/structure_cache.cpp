// SPDX-License-Identifier: Apache-2.0
#include "graph/structure_cache.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace graftax {

namespace {

constexpr Py_ssize_t longest_text = 256;     // characters or bytes that are kept
constexpr size_t longest_program = 1 << 16;  // instructions that are kept

PyObject* module_scope(PyObject* name) {
  if (!name || !PyUnicode_CheckExact(name)) return nullptr;
  PyObject* module = dict_get(PyImport_GetModuleDict(), name);
  return module && PyModule_Check(module) ? PyModule_GetDict(module) : nullptr;
}

// What a module holds under a qualified name; null where there is nothing. Runs no code of a user.
PyObject* held_as(PyObject* module, PyObject* qualname) {
  PyObject* scope = module_scope(module);
  if (!scope || !qualname || !PyUnicode_CheckExact(qualname)) return nullptr;
  static PyObject* const dot = interned(".");
  Owned names = Owned::steal(check(PyUnicode_Split(qualname, dot, -1)));
  PyObject* value = nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(names.get()); ++i) {
    if (value) scope = PyType_Check(value) ? reinterpret_cast<PyTypeObject*>(value)->tp_dict : nullptr;
    value = scope ? dict_get(scope, PyList_GET_ITEM(names.get(), i)) : nullptr;
    if (!value) return nullptr;
  }
  return value;
}

// A structure owns a bare twin of a function: its code and globals, without defaults and variables.
bool is_held(PyFunctionObject* twin) {
  PyObject* value = held_as(twin->func_module, twin->func_qualname);
  if (!value || !PyFunction_Check(value) || twin->func_closure || twin->func_defaults || twin->func_kwdefaults)
    return value == reinterpret_cast<PyObject*>(twin);
  auto* function = reinterpret_cast<PyFunctionObject*>(value);
  return function->func_code == twin->func_code && function->func_globals == twin->func_globals;
}

PyObject* own_module(PyTypeObject* type) {
  static PyObject* const name = interned("__module__");
  return type->tp_dict ? dict_get(type->tp_dict, name) : nullptr;
}

// A function that JAX's decorators made, as `jax.nn.relu` is.
bool is_of_jax(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  PyObject* module = own_module(type);
  const char* text = module && PyUnicode_CheckExact(module) ? PyUnicode_AsUTF8(module) : nullptr;
  if (!text || strncmp(text, "jax", 3) != 0) return PyErr_Clear(), false;
  Owned home = Owned::steal(attribute(value, "__module__"));
  Owned name = home ? Owned::steal(attribute(value, "__qualname__")) : Owned();
  if (!name) return PyErr_Clear(), false;
  return held_as(home.get(), name.get()) == value;
}

bool is_held(PyTypeObject* type) {
  if (!(type->tp_flags & Py_TPFLAGS_HEAPTYPE)) return true;
  PyObject* qualname = reinterpret_cast<PyHeapTypeObject*>(type)->ht_qualname;
  return held_as(own_module(type), qualname) == reinterpret_cast<PyObject*>(type);
}

// A value that holds nothing else alive, however long it is kept. A class may be kept until a full collection begins;
// beyond that if a module holds it, for else only the collector would free it.
enum class Until { collection, end };
bool may_be_kept(PyObject* value, Until until, int depth = 3) {
  if (!value || value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
      PyComplex_CheckExact(value))
    return true;
  if (PyUnicode_CheckExact(value)) return PyUnicode_GET_LENGTH(value) <= longest_text;
  if (PyBytes_CheckExact(value)) return PyBytes_GET_SIZE(value) <= longest_text;
  static PyObject* const own_name = interned("__name__");
  if (PyDict_CheckExact(value)) return module_scope(dict_get(value, own_name)) == value;
  if (PyCode_Check(value)) return true;
  if (PyType_Check(value)) return until == Until::collection || is_held(reinterpret_cast<PyTypeObject*>(value));
  if (PyFunction_Check(value)) return is_held(reinterpret_cast<PyFunctionObject*>(value));
  if (!PyTuple_CheckExact(value)) return is_of_jax(value);
  if (depth == 0) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i)
    if (!may_be_kept(PyTuple_GET_ITEM(value, i), until, depth - 1)) return false;
  return true;
}

// What a registered class gave is asked for once a walk; a replay that fails would have asked once too often.
bool may_be_kept(const Program& p, Until until) {
  if (p.code.size() > longest_program) return false;
  for (const Instr& in : p.code)
    if (in.op == Op::node && in.node->kind->node->is_registered) return false;
  for (size_t i = 0; i < p.owned.size(); ++i)
    if (!may_be_kept(p.owned[i], until)) return false;
  return true;
}

// The structures that objects of some types had last, the newest first.
struct Bucket {
  struct Slot {
    PyTypeObject* type = nullptr;  // of the root; only compared
    nb::object graphdef;
  };
  std::array<Slot, 4> slots;
  std::array<Py_hash_t, 4> recorded = {};  // hashes of those recorded last, as a ring: what comes twice is kept
  size_t last = 0;

  bool comes_again(Py_hash_t hash) {
    if (std::find(recorded.begin(), recorded.end(), hash) != recorded.end()) return true;
    recorded[++last % recorded.size()] = hash;
    return false;
  }

  void insert(PyTypeObject* type, nb::object graphdef) {
    nb::object gone = std::move(slots.back().graphdef);  // released last: what it holds may have code
    std::move_backward(slots.begin(), slots.end() - 1, slots.end());
    slots.front() = {type, std::move(graphdef)};
  }
};

std::array<Bucket, 8>& buckets() {
  static auto& all = *new std::array<Bucket, 8>();  // never destroyed: at the end there is no interpreter
  return all;
}

Bucket& bucket_of(PyTypeObject* type) { return buckets()[(reinterpret_cast<uintptr_t>(type) >> 4) % buckets().size()]; }

// A full collection begins: what is kept would hide from it which classes nobody else holds.
void let_go_of_kept(const char* phase, nb::handle info) {
  if (strcmp(phase, "start") != 0 || nb::cast<int>(info["generation"]) < 2) return;
  std::vector<nb::object> gone;  // what it holds may have code
  for (Bucket& bucket : buckets())
    for (Bucket::Slot& slot : bucket.slots)
      if (slot.graphdef && !may_be_kept(nb::inst_ptr<GraphDef>(slot.graphdef)->program, Until::end)) {
        gone.push_back(std::move(slot.graphdef));
        slot = {};
      }
}

}  // namespace

// A structure that is kept costs a replay. Only where none fits is the object recorded.
nb::tuple flatten(nb::handle obj) {
  PyTypeObject* type = Py_TYPE(obj.ptr());
  Bucket& bucket = bucket_of(type);
  Walk walk;
  walk.order = Order::of_iteration;
  for (size_t i = 0; i < bucket.slots.size(); ++i) {
    if (bucket.slots[i].type != type) continue;
    nb::object graphdef = bucket.slots[i].graphdef;  // a comparison may run code, which may flatten
    PyObject* root = obj.ptr();
    if (!replay(nb::inst_ptr<GraphDef>(graphdef)->program, &root, 1, walk)) continue;
    // The newest first, unless other code has filled the slot meanwhile.
    if (i > 0 && bucket.slots[i].graphdef.is(graphdef))
      std::rotate(bucket.slots.begin(), bucket.slots.begin() + i, bucket.slots.begin() + i + 1);
    return nb::make_tuple(handed_over(walk.leaves), graphdef);
  }
  Recorder recorder({});
  recorder.root(obj.ptr());
  RecordedGraph recorded = recorder.finish(nullptr);
  Py_hash_t hash = recorded.program.hash;
  bool keep = bucket.comes_again(hash) && may_be_kept(recorded.program, Until::collection);
  nb::object graphdef = nb::cast(GraphDef{std::move(recorded.program)});
  if (keep) bucket.insert(type, graphdef);
  return nb::make_tuple(handed_over(recorded.leaves), graphdef);
}

void bind_kept(nb::module_& m) {
  m.def("let_go_of_kept", &let_go_of_kept, nb::arg("phase"), nb::arg("info"),
        nb::sig("def let_go_of_kept(phase: str, info: dict[str, int]) -> None"),
        "For `gc.callbacks`: a full collection finds no structure kept with a class that no module holds.");
  m.def(
      "kept_structures",
      [] {
        nb::list out;
        for (Bucket& bucket : buckets())
          for (Bucket::Slot& slot : bucket.slots)
            if (slot.graphdef) out.append(slot.graphdef);
        return out;
      },
      nb::sig("def kept_structures() -> list[GraphDef]"), "The structures that `flatten` keeps.");
}

}  // namespace graftax
