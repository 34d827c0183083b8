// SPDX-License-Identifier: Apache-2.0
#include "capture/named_scopes.h"

#include <cstring>

#include "graph/key_path.h"
#include "python/hooks.h"
#include "python/thread_stack.h"

namespace graftax {

namespace {

PerThread<Named> graphs;  // those that the threads trace

// Does it stand for what is in it, as a library's box around one array does?
bool is_unspoken(const Program& p, const Instr& n) {
  uint32_t own_keys = p.item_keys(n);
  for (uint32_t i = 0; i < n.node->fields; ++i)
    if (PySet_Contains(hooks::unspoken.get(), p.statics[p.keys[n.node->keys + own_keys + i]].obj) == 1) return true;
  return false;
}

}  // namespace

void Named::enter(const Program& program, const OwnedList& built, PyObject* root_names) {
  program_ = &program, built_ = &built, root_names_ = root_names;
  graphs.enter(this);
}

void Named::leave() {
  graphs.leave(this);
  is_found_ = false;
  places_.clear();
  paths_.clear();
}

void Named::renew(const Program& program, PyObject* root_names) {
  program_ = &program, root_names_ = root_names;
  is_found_ = false;
  places_.clear();
}

void Named::find() {
  is_found_ = true;
  const Program& p = *program_;
  for (uint32_t pc = 0; pc < p.code.size() && pc < built_->size(); ++pc) {
    const Instr& n = p.code[pc];
    // Instances of static types are left out: their methods run no Python frame.
    bool is_object = n.op == Op::node && (*built_)[pc] && (n.node->type->tp_flags & Py_TPFLAGS_HEAPTYPE);
    if (is_object && !n.node->kind->node->is_ignored && !is_unspoken(p, n)) places_.emplace((*built_)[pc], pc);
  }
}

PyObject* Named::path(PyObject* obj) {
  if (!is_found_) find();
  auto place = places_.find(obj);
  if (place == places_.end()) return nullptr;
  Owned& path = paths_[place->second];
  if (!path) path = own(PyUnicode_FromString(path_text(*program_, place->second, root_names_).c_str()));
  return path.get();
}

bool is_of_method(PyCodeObject* code) {
  if (code->co_argcount == 0 || code->co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR)) return false;
  const char* name = PyUnicode_AsUTF8(code->co_name);
  Owned names = Owned::steal(PyCode_GetVarnames(code));
  if (!name || !names) {
    PyErr_Clear();
    return false;
  }
  bool is_special = std::strncmp(name, "__", 2) == 0 && std::strcmp(name, "__call__") != 0;
  return !is_special && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names.get(), 0), "self") == 0;
}

Owned enter_scope(PyThreadState* thread, PyObject* obj) {
  // The innermost trace that has the object: it may be in the graphs of several.
  const auto& all = graphs.all();
  for (size_t i = all.size(); i-- > 0;) {
    PyObject* path = all[i].thread == thread ? all[i].value->path(obj) : nullptr;
    if (!path) continue;
    Owned scope = hooks::named_scope(path);
    own(PyObject_CallMethod(scope.get(), "__enter__", nullptr));
    return scope;
  }
  return {};
}

bool leave_scope(const Owned& scope) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  Owned left = Owned::steal(PyObject_CallMethod(scope.get(), "__exit__", "OOO", Py_None, Py_None, Py_None));
  if (!left && !PyErr_ExceptionMatches(PyExc_Exception)) {  // an interrupt
    Py_XDECREF(type), Py_XDECREF(value), Py_XDECREF(traceback);
    return false;
  }
  PyErr_Restore(type, value, traceback);
  return true;
}

}  // namespace graftax
