// SPDX-License-Identifier: Apache-2.0
#include "parts.h"

#include <structmember.h>

#include <cstring>

#include "exchange.h"
#include "rebuild.h"
#include "static_key.h"

namespace graftax {

namespace {

// bytes for a bytearray, (type code, bytes) for an array.array, what the registry makes of a NumPy array of text.
Owned buffer_content(PyObject* obj) {
  if (PyObject_TypeCheck(obj, runtime.ndarray_type)) return own(PyObject_CallOneArg(text_array_kind().reduce, obj));
  if (PyByteArray_Check(obj))
    return own(PyBytes_FromStringAndSize(PyByteArray_AS_STRING(obj), PyByteArray_GET_SIZE(obj)));
  Owned code = own(PyObject_GetAttrString(obj, "typecode"));
  Owned bytes = own(PyObject_CallMethod(reinterpret_cast<PyObject*>(runtime.array_array_type), "tobytes", "O", obj));
  return own(PyTuple_Pack(2, code.get(), bytes.get()));
}

bool buffer_matches(PyObject* content, PyObject* obj) {
  if (PyByteArray_Check(obj))
    return PyByteArray_GET_SIZE(obj) == PyBytes_GET_SIZE(content) &&
           memcmp(PyByteArray_AS_STRING(obj), PyBytes_AS_STRING(content),
                  static_cast<size_t>(PyBytes_GET_SIZE(content))) == 0;
  Owned now = buffer_content(obj);
  return equal(now.get(), content);
}

// The plain value of an instance of a subclass of str, int, float, complex or bytes, without asking the subclass; for
// other solid bases (dates, paths, fractions) what the registry's function makes of it.
Owned plain_value(PyObject* obj, const Kind& kind) {
  if (kind.solid == &PyUnicode_Type) return own(PyUnicode_FromObject(obj));
  if (kind.solid == &PyLong_Type) return own(PyLong_Type.tp_as_number->nb_positive(obj));
  if (kind.solid == &PyFloat_Type) return own(PyFloat_FromDouble(PyFloat_AS_DOUBLE(obj)));
  if (kind.solid == &PyComplex_Type) {
    auto* z = reinterpret_cast<PyComplexObject*>(obj);
    return own(PyComplex_FromCComplex(z->cval));
  }
  if (kind.solid == &PyBytes_Type) return own(PyBytes_FromStringAndSize(PyBytes_AS_STRING(obj), PyBytes_GET_SIZE(obj)));
  return own(PyObject_CallOneArg(kind.reduce, obj));
}

bool has_plain_base(const Kind& kind) {
  PyTypeObject* s = kind.solid;
  return s == &PyUnicode_Type || s == &PyLong_Type || s == &PyFloat_Type || s == &PyComplex_Type || s == &PyBytes_Type;
}

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

FunctionView view(const Static& s) {
  if (!s.weak) return view(s.obj);
  FunctionView v{static_object(s)};
  PyObject* holder = PyTuple_GET_ITEM(s.snapshot, 0);
  if (PyWeakref_Check(holder)) {
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
}

// A function with the code, globals and names of `function`, and nothing else of it.
Owned bare_twin(PyObject* function) {
  auto* f = reinterpret_cast<PyFunctionObject*>(function);
  Owned out = own(PyFunction_NewWithQualName(f->func_code, f->func_globals, f->func_qualname));
  copy_names(f, reinterpret_cast<PyFunctionObject*>(out.get()));
  return out;
}

Owned dead_reference(PyTypeObject* type) {
  Owned nobody = own(PySet_New(nullptr));
  Owned args = own(PyTuple_Pack(1, nobody.get()));
  if (type == &_PyWeakref_ProxyType || type == &_PyWeakref_CallableProxyType)
    return own(PyWeakref_NewProxy(nobody.get(), nullptr));
  return own(_PyWeakref_RefType.tp_new(type, args.get(), nullptr));
}

}  // namespace

bool is_plain_function(PyObject* function) {
  auto* f = reinterpret_cast<PyFunctionObject*>(function);
  if (f->func_closure || f->func_kwdefaults) return false;
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
  Py_hash_t code = PyObject_Hash(PyFunction_GET_CODE(obj));
  if (code == -1) raise_python();
  s.hash = code ^ static_cast<Py_hash_t>(reinterpret_cast<uintptr_t>(PyFunction_GET_GLOBALS(obj)) >> 4);
  p.statics.push_back(s);
  return static_cast<uint32_t>(p.statics.size() - 1);
}

bool is_remade(const Kind& kind) { return !has_plain_base(kind); }

uint32_t add_payload(Program& p, PyObject* obj, const Kind& kind) {
  switch (kind.base) {
    case Base::function: return add_function(p, obj);
    case Base::deque: {
      Owned maxlen = own(PyObject_GetAttrString(obj, "maxlen"));
      return maxlen.get() == Py_None ? NONE : add_static(p, maxlen.get(), kind_of(maxlen.get()));
    }
    case Base::buffer: {
      Owned content = buffer_content(obj);
      return add_key(p, content.get());
    }
    case Base::value: {
      Owned plain = plain_value(obj, kind);
      uint32_t id = add_static(p, plain.get(), kind_of(plain.get()));
      if (!has_plain_base(kind)) {  // to rebuild with: not `obj`, whose attributes may hold arrays
        Owned bare = Owned::steal(PyObject_CallMethod(runtime.statics, "remade", "O", obj));
        if (bare) p.statics[id].snapshot = p.keep(std::move(bare));
        else PyErr_Clear();
      }
      return id;
    }
    default: return NONE;
  }
}

bool payload_matches(const Program& p, const Instr& n, PyObject* obj) {
  switch (n.kind->base) {
    case Base::function: return function_matches(p.statics[n.payload], obj);
    case Base::buffer: return buffer_matches(p.statics[n.payload].obj, obj);
    case Base::value: return static_matches(p, n.payload, plain_value(obj, *n.kind).get());
    case Base::deque: {
      Owned maxlen = own(PyObject_GetAttrString(obj, "maxlen"));
      return n.payload == NONE ? maxlen.get() == Py_None : static_matches(p, n.payload, maxlen.get());
    }
    default: return true;
  }
}

bool function_matches(const Static& s, PyObject* function) { return equal_views(view(s), view(function)); }

bool functions_equal(const Static& a, const Static& b) { return equal_views(view(a), view(b)); }

void weaken_function(Program& p, Static& s) {
  FunctionView v = view(s);
  Owned holder;
  PyObject* name = PyDict_GetItemString(v.globals, "__name__");
  PyObject* module = name ? dict_get(PyImport_GetModuleDict(), name) : nullptr;
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
  static PyObject* const fixed[] = {PyUnicode_InternFromString("__defaults__"),
                                    PyUnicode_InternFromString("__kwdefaults__")};
  if (i < 2) return fixed[i];
  Owned names = own(PyCode_GetFreevars(reinterpret_cast<PyCodeObject*>(code)));
  return i - 2 < PyTuple_GET_SIZE(names.get()) ? PyTuple_GET_ITEM(names.get(), i - 2) : nullptr;
}

PyObject* function_item_name(const Program& p, const Instr& n, uint32_t i) {
  FunctionView v = view(p.statics[n.payload]);
  return v.code ? code_item_name(v.code.get(), i) : nullptr;
}

Owned make_node_shell(const Program& p, const Instr& n, PyObject* live) {
  switch (n.kind->base) {
    case Base::function: return bare_twin(live ? live : p.statics[n.payload].obj);
    case Base::value: {
      if (!has_plain_base(*n.kind)) {
        PyObject* original = live ? live : p.statics[n.payload].snapshot;
        if (original) return own(PyObject_CallMethod(runtime.statics, "remade", "O", original));
        raise_graftax("UnsupportedValueError", std::string("an instance of ") + n.type->tp_name +
                                                   " cannot be rebuilt from a pickle. Flatten it in this process.");
      }
      Owned args = own(PyTuple_Pack(1, p.statics[n.payload].obj));
      return own(n.kind->solid->tp_new(n.type, args.get(), nullptr));
    }
    case Base::buffer:
      if (n.kind->solid == runtime.ndarray_type)
        return own(PyObject_CallMethod(runtime.statics, "text_array", "(O)", p.statics[n.payload].obj));
      if (n.kind->solid == runtime.array_array_type) {
        Owned args = own(PyTuple_Pack(1, PyTuple_GET_ITEM(p.statics[n.payload].obj, 0)));
        return own(n.kind->solid->tp_new(n.type, args.get(), nullptr));
      }
      [[fallthrough]];
    default: {
      Owned shell = make_shell(*n.kind, n.type);
      if (n.flags & OWN_DICT) check(PyObject_GenericSetDict(shell.get(), shell.get(), nullptr));
      return shell;
    }
  }
}

Owned construct_part(const Program& p, const Instr& n, PyObject* const* items, PyObject* const* inputs) {
  switch (n.kind->base) {
    case Base::method: return own(PyMethod_New(items[0], items[1]));
    case Base::builtin: return own(PyObject_GetAttr(items[1], items[0]));
    case Base::proxy: {
      if (n.type == &PyDictProxy_Type) return own(PyDictProxy_New(items[0]));
      bool ordered = n.type == &PyODictKeys_Type || n.type == &PyODictValues_Type || n.type == &PyODictItems_Type;
      bool keys = n.type == &PyDictKeys_Type || n.type == &PyODictKeys_Type;
      bool values = n.type == &PyDictValues_Type || n.type == &PyODictValues_Type;
      auto* dict = reinterpret_cast<PyObject*>(ordered ? runtime.odict_type : &PyDict_Type);
      return own(PyObject_CallMethod(dict, keys ? "keys" : values ? "values" : "items", "O", items[0]));
    }
    case Base::weakref: {
      if (n.items == 0) return dead_reference(n.type);
      if (n.type == &_PyWeakref_ProxyType || n.type == &_PyWeakref_CallableProxyType)
        return own(PyWeakref_NewProxy(items[0], nullptr));
      Owned args = own(PyTuple_New(n.items));
      for (uint32_t i = 0; i < n.items; ++i) PyTuple_SET_ITEM(args.get(), i, Py_NewRef(items[i]));
      return own(_PyWeakref_RefType.tp_new(n.type, args.get(), nullptr));
    }
    case Base::set: {  // a frozenset
      Owned elements = own(PyList_New(0));
      for (uint32_t i = 0; i < n.arg; ++i)
        check(PyList_Append(elements.get(), key_object(p, p.keys[n.keys + i], inputs).get()));
      Owned args = own(PyTuple_Pack(1, elements.get()));
      return own(PyFrozenSet_Type.tp_new(n.type, args.get(), nullptr));
    }
    default: raise_error(PyExc_SystemError, "this node is not made of parts");
  }
}

void restore_code(const Static& s, PyObject* function) {
  check(PyObject_SetAttrString(function, "__code__", PyFunction_GET_CODE(s.obj)));
  copy_names(reinterpret_cast<PyFunctionObject*>(s.obj), reinterpret_cast<PyFunctionObject*>(function));
}

void write_function(PyObject* function, const Instr& n, PyObject* const* items, OwnedList& graveyard) {
  auto* f = reinterpret_cast<PyFunctionObject*>(function);
  if (function_item(function, 0) != items[0]) {
    graveyard.push(f->func_defaults);
    check(PyFunction_SetDefaults(function, items[0]));
  }
  if (function_item(function, 1) != items[1]) {
    graveyard.push(f->func_kwdefaults);
    check(PyFunction_SetKwDefaults(function, items[1]));
  }
  if (n.items == 2) return;
  bool same = f->func_closure && PyTuple_GET_SIZE(f->func_closure) == static_cast<Py_ssize_t>(n.items) - 2;
  for (uint32_t i = 2; same && i < n.items; ++i) same = PyTuple_GET_ITEM(f->func_closure, i - 2) == items[i];
  if (same) return;
  Owned cells = own(PyTuple_New(n.items - 2));
  for (uint32_t i = 2; i < n.items; ++i) {
    if (!PyCell_Check(items[i])) raise_error(PyExc_TypeError, "the closure of a function is made of cells");
    PyTuple_SET_ITEM(cells.get(), i - 2, Py_NewRef(items[i]));
  }
  graveyard.push(f->func_closure);
  check(PyFunction_SetClosure(function, cells.get()));
}

void write_exception(PyObject* exception, PyObject* const* items, OwnedList& graveyard) {
  static PyObject* const args = PyUnicode_InternFromString("args");
  graveyard.push_stolen(own(PyObject_GenericGetAttr(exception, args)));
  check(PyObject_GenericSetAttr(exception, args, items[0]));
  auto or_none = [](PyObject* value) { return value == Py_None ? nullptr : Py_NewRef(value); };
  graveyard.push_stolen(Owned::steal(PyException_GetCause(exception)));
  graveyard.push_stolen(Owned::steal(PyException_GetContext(exception)));
  // Setting a cause also says that the context is not to be shown: that stays as it is.
  char suppress = reinterpret_cast<PyBaseExceptionObject*>(exception)->suppress_context;
  PyException_SetCause(exception, or_none(items[1]));
  PyException_SetContext(exception, or_none(items[2]));
  reinterpret_cast<PyBaseExceptionObject*>(exception)->suppress_context = suppress;
}

// __setstate__ takes the keywords themselves, where the constructor copies them.
void write_partial(PyObject* partial, PyObject* const* items, OwnedList& graveyard) {
  const char* const* names = part_names(Base::partial);
  bool same = true;
  for (int i = 0; names[i]; ++i) {
    Owned old = own(PyObject_GetAttrString(partial, names[i]));
    same = same && old.get() == items[i];
    graveyard.push(old.get());
  }
  if (same) return;
  Owned state = own(PyTuple_Pack(4, items[0], items[1], items[2], instance_dict(partial).get()));
  Owned done = own(PyObject_CallMethod(reinterpret_cast<PyObject*>(runtime.partial_type), "__setstate__", "OO", partial,
                                       state.get()));
}

void fill_buffer(PyObject* content, PyObject* shell) {
  if (PyByteArray_Check(shell)) {
    Owned made = own(PyByteArray_FromObject(content));
    return exchange(shell, made.get(), Base::buffer);
  }
  if (PyObject_TypeCheck(shell, runtime.ndarray_type)) {
    Owned(own(PyObject_CallMethod(runtime.statics, "write_text_array", "OO", shell, content)));
    return;
  }
  auto* type = reinterpret_cast<PyObject*>(runtime.array_array_type);
  Owned(own(PyObject_CallMethod(type, "frombytes", "OO", shell, PyTuple_GET_ITEM(content, 1))));
}

Owned new_buffer(PyObject* content) {
  if (PyBytes_Check(content)) return own(PyByteArray_FromObject(content));
  Owned out = own(PyObject_CallFunctionObjArgs(reinterpret_cast<PyObject*>(runtime.array_array_type),
                                               PyTuple_GET_ITEM(content, 0), nullptr));
  fill_buffer(content, out.get());
  return out;
}

// A member of the C struct: set there, whatever a subclass calls by its name.
Py_ssize_t default_factory_offset() {
  static const Py_ssize_t offset = [] {
    Owned member =
        own(PyObject_GetAttrString(reinterpret_cast<PyObject*>(runtime.defaultdict_type), "default_factory"));
    return reinterpret_cast<PyMemberDescrObject*>(member.get())->d_member->offset;
  }();
  return offset;
}

void set_default_factory(PyObject* shell, PyObject* factory) {
  auto** place = reinterpret_cast<PyObject**>(reinterpret_cast<char*>(shell) + default_factory_offset());
  Owned old = Owned::steal(std::exchange(*place, Py_NewRef(factory)));
}

}  // namespace graftax
