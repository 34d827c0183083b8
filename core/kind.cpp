// SPDX-License-Identifier: Apache-2.0
#include "kind.h"

#include <structmember.h>

#include <algorithm>

#include "tree/treekind.h"
#include "type_table.h"

namespace graftax {

Runtime runtime;

namespace {

using Kinds = TypeTable<Kind>;

// The nearest base that no class statement made: it decides how instances are laid out.
PyTypeObject* solid_base(PyTypeObject* type) {
  auto no_layout_of_its_own = [](PyTypeObject* t) {
    if ((t->tp_flags & Py_TPFLAGS_HEAPTYPE) && t->tp_dealloc == runtime.python_dealloc) return true;
    return t->tp_base == &PyBaseObject_Type && t->tp_basicsize == t->tp_base->tp_basicsize &&
           t->tp_itemsize == 0;  // Generic
  };
  while (type->tp_base && no_layout_of_its_own(type)) type = type->tp_base;
  return type;
}

bool is_dict_view(PyTypeObject* type) {
  return type == &PyDictKeys_Type || type == &PyDictValues_Type || type == &PyDictItems_Type ||
         type == &PyODictKeys_Type || type == &PyODictValues_Type || type == &PyODictItems_Type;
}

// An exception type that adds nothing to the layout of BaseException.
bool is_plain_exception(PyTypeObject* type) {
  auto* base = reinterpret_cast<PyTypeObject*>(PyExc_BaseException);
  return PyType_IsSubtype(type, base) && type->tp_basicsize == base->tp_basicsize;
}

Base base_of_solid(PyTypeObject* solid) {
  if (solid == &PyList_Type) return Base::list;
  if (solid == &PyTuple_Type) return Base::tuple;
  if (solid == &PyDict_Type) return Base::dict;
  if (solid == runtime.odict_type) return Base::odict;
  if (solid == runtime.defaultdict_type) return Base::defaultdict;
  if (solid == runtime.deque_type) return Base::deque;
  if (solid == &PySet_Type || solid == &PyFrozenSet_Type) return Base::set;
  if (solid == &PyByteArray_Type || solid == runtime.array_array_type) return Base::buffer;
  if (solid == &PyFunction_Type) return Base::function;
  if (solid == &PyCell_Type) return Base::cell;
  if (solid == &PyMethod_Type) return Base::method;
  if (solid == runtime.partial_type) return Base::partial;
  if (solid == &_PyWeakref_RefType || solid == &_PyWeakref_ProxyType || solid == &_PyWeakref_CallableProxyType)
    return Base::weakref;
  if (solid == &PyDictProxy_Type || is_dict_view(solid)) return Base::proxy;
  if (solid == &PyCFunction_Type || solid == runtime.method_wrapper_type) return Base::builtin;
  if (is_plain_exception(solid)) return Base::exception;
  if (solid == &PyBaseObject_Type || solid == runtime.namespace_type) return Base::none;
  return Base::statics;
}

void collect_slots(Kind& kind) {
  PyObject* mro = kind.type->tp_mro;
  for (Py_ssize_t i = PyTuple_GET_SIZE(mro) - 1; i >= 0; --i) {
    auto* cls = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(mro, i));
    if (!(cls->tp_flags & Py_TPFLAGS_HEAPTYPE)) continue;
    Owned dict = own(PyObject_GetAttrString(reinterpret_cast<PyObject*>(cls), "__dict__"));
    Owned values = own(PyMapping_Values(dict.get()));
    std::vector<Slot> own_slots;
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(values.get()); ++j) {
      PyObject* value = PyList_GET_ITEM(values.get(), j);
      if (!Py_IS_TYPE(value, &PyMemberDescr_Type)) continue;
      PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(value)->d_member;
      if (member->type != T_OBJECT_EX || (member->flags & READONLY)) continue;
      // A class may list another class's descriptor under a second name; only its own slots count.
      if (reinterpret_cast<PyDescrObject*>(value)->d_type != cls) continue;
      PyObject* name = Py_NewRef(reinterpret_cast<PyDescrObject*>(value)->d_name);
      PyUnicode_InternInPlace(&name);
      own_slots.push_back({name, member->offset});
    }
    std::sort(own_slots.begin(), own_slots.end(), [](const Slot& a, const Slot& b) { return a.offset < b.offset; });
    for (const Slot& s : own_slots) {
      bool known =
          std::any_of(kind.slots.begin(), kind.slots.end(), [&](const Slot& t) { return t.offset == s.offset; });
      if (!known) kind.slots.push_back(s);
    }
  }
}

void make_static(Kind& kind, How how, bool immortal) {
  kind.base = Base::statics;
  kind.how = how;
  kind.immortal_value = immortal;
}

// Can the items of an instance be changed in place?
bool can_change(PyTypeObject* solid, Base base) {
  switch (base) {
    case Base::tuple:
    case Base::method:
    case Base::weakref:
    case Base::builtin:
    case Base::proxy: return false;
    case Base::set: return solid == &PySet_Type;
    default: return true;
  }
}

// The builtin types that need no question to Python.
bool resolve_builtin(Kind& kind) {
  PyTypeObject* t = kind.type;
  if (t == Py_TYPE(Py_None) || t == &PyBool_Type || t == &PyEllipsis_Type || t == Py_TYPE(Py_NotImplemented)) {
    make_static(kind, How::identity, true);
  } else if (t == &PyLong_Type) {
    make_static(kind, How::integer, true);
  } else if (t == &PyFloat_Type) {
    make_static(kind, How::floating, true);
  } else if (t == &PyComplex_Type) {
    make_static(kind, How::complex, true);
  } else if (t == &PyUnicode_Type) {
    make_static(kind, How::string, true);
  } else if (t == &PyBytes_Type) {
    make_static(kind, How::bytes, true);
  } else if (t == runtime.array_type) {
    kind.base = Base::array;
  } else {
    Base base = base_of_solid(t);
    if (base == Base::statics || base == Base::none) return false;
    kind.base = base;
    kind.solid = t;
    kind.tracked = can_change(t, base);
    kind.handed = base == Base::function || base == Base::partial || base == Base::builtin ||
                  base == Base::exception;  // == compares them by identity
    kind.has_dict = base == Base::partial || base == Base::function || base == Base::exception;
  }
  return true;
}

std::string text_at(PyObject* tuple, Py_ssize_t i) {
  PyObject* item = PyTuple_GetItem(tuple, i);
  return item && PyUnicode_Check(item) ? utf8(item) : std::string();
}

// Asks _registry.describe for (role, frozen, handed, static field names, reduce, reason, sentinel,
// order of fields, absent value, expires, whether fields go by name).
void resolve_with_registry(Kind& kind, PyObject* obj) {
  PyTypeObject* solid = solid_base(kind.type);
  Owned answer = own(PyObject_CallMethod(runtime.registry, "describe", "OO", obj, reinterpret_cast<PyObject*>(solid)));
  if (!PyTuple_Check(answer.get()) || PyTuple_GET_SIZE(answer.get()) != 11)
    raise_error(PyExc_TypeError, "describe() must return a tuple of eleven");
  std::string role = text_at(answer.get(), 0);
  bool frozen = PyTuple_GET_ITEM(answer.get(), 1) == Py_True;
  kind.handed = PyTuple_GET_ITEM(answer.get(), 2) == Py_True;
  PyObject* names = PyTuple_GET_ITEM(answer.get(), 3);
  PyObject* reduce = PyTuple_GET_ITEM(answer.get(), 4);
  kind.reason = text_at(answer.get(), 5);
  kind.sentinel = PyTuple_GET_ITEM(answer.get(), 6) == Py_True;
  kind.expires = PyTuple_GET_ITEM(answer.get(), 9) == Py_True;
  if (role == "array") {
    kind.base = Base::array;
  } else if (role == "ref") {  // mutable: has an identity
    kind.base = Base::array;
    kind.tracked = true;
  } else if (role == "numpy") {
    kind.base = Base::numpy;
    kind.tracked = !frozen;
    kind.solid = kind.type;
    kind.reduce = Py_NewRef(reduce);
  } else if (role == "identity") {
    make_static(kind, How::identity, false);
  } else if (role == "equal" || role == "shape") {
    make_static(kind, How::equal, false);
    kind.shape = role == "shape";
  } else if (role == "reduce") {
    make_static(kind, How::reduce, frozen);
    kind.reduce = Py_NewRef(reduce);
  } else if (role == "context") {
    make_static(kind, How::context, false);
    kind.reduce = Py_NewRef(reduce);
  } else if (role == "refused") {
    kind.base = Base::refused;
  } else if (role == "registered" || role == "node" || role == "value" || role == "dynamic") {
    kind.dynamic = role == "dynamic";
    Base base = role == "value" ? Base::value : base_of_solid(solid);
    kind.base = role == "registered" ? Base::registered : base;
    if (role == "value") kind.reduce = Py_NewRef(reduce);
    if (role != "registered" && base == Base::statics)
      raise_error(PyExc_TypeError, "describe() called an opaque type a node");
    kind.solid = solid;
    kind.has_dict = kind.type->tp_dictoffset != 0;
    if (names != Py_None && PyObject_IsTrue(names)) kind.static_fields = Py_NewRef(names);
    PyObject* order = PyTuple_GET_ITEM(answer.get(), 7);
    for (Py_ssize_t i = 0; PyTuple_Check(order) && i < PyTuple_GET_SIZE(order); ++i) {
      PyObject* name = Py_NewRef(PyTuple_GET_ITEM(order, i));
      PyUnicode_InternInPlace(&name);
      bool items = kind.base == Base::registered || kind.base == Base::tuple;
      (items ? kind.item_names : kind.order).push_back(name);
    }
    PyObject* absent = PyTuple_GET_ITEM(answer.get(), 8);
    if (absent != Py_None) kind.absent = Py_NewRef(absent);
    collect_slots(kind);
    kind.by_name =
        PyTuple_GET_ITEM(answer.get(), 10) == Py_True && base == Base::none && kind.has_dict && kind.slots.empty();
    // A tuple cannot change, but the attributes of a subclass can.
    kind.tracked =
        !frozen && (can_change(solid, base) || role == "registered" || (kind.has_fields() && base != Base::weakref));
    Owned has_del = Owned::steal(PyObject_GetAttrString(reinterpret_cast<PyObject*>(kind.type), "__del__"));
    if (!has_del) PyErr_Clear();
    kind.has_del = static_cast<bool>(has_del);
  } else {
    raise_error(PyExc_TypeError, "describe() returned the unknown role '" + role + "'");
  }
}

}  // namespace

const char* const* part_names(Base base) {
  static const char* const method[] = {"__func__", "__self__", nullptr};
  static const char* const partial[] = {"func", "args", "keywords", nullptr};
  static const char* const weakref[] = {"referent", "__callback__", nullptr};
  static const char* const proxy[] = {"mapping", nullptr};
  static const char* const builtin[] = {"__name__", "__self__", nullptr};
  static const char* const exception[] = {"args", "__cause__", "__context__", nullptr};
  switch (base) {
    case Base::method: return method;
    case Base::partial: return partial;
    case Base::weakref: return weakref;
    case Base::proxy: return proxy;
    case Base::builtin: return builtin;
    case Base::exception: return exception;
    default: return nullptr;
  }
}

const Kind* known_kind(PyTypeObject* type) { return Kinds::find(type); }

namespace {

const Kind& remember(std::shared_ptr<Kind> kind) {
  PyTypeObject* type = kind->type;
  return Kinds::remember(type, std::move(kind));
}

// An instance of a type, made to look at its kind.
Owned sample_of(PyTypeObject* type) {
  PyTypeObject* solid = solid_base(type);
  if (!solid->tp_new) raise_error(PyExc_TypeError, std::string("no instance of ") + type->tp_name + " can be made");
  Owned args = Owned::borrow(runtime.empty_tuple), nobody;
  if (solid == &_PyWeakref_RefType) {
    nobody = own(PySet_New(nullptr));
    args = own(PyTuple_Pack(1, nobody.get()));
  } else if (solid == runtime.array_array_type) {
    args = own(Py_BuildValue("(s)", "b"));
  } else if (solid == runtime.ndarray_type) {
    args = own(Py_BuildValue("(i)", 0));
  }
  return own(solid->tp_new(type, args.get(), nullptr));
}

}  // namespace

const Kind& kind_of(PyObject* obj) {
  if (const Kind* known = known_kind(Py_TYPE(obj))) return *known;
  follow_registry();  // a kind is never older than what the registry was looked at for
  auto kind = std::make_shared<Kind>();
  kind->type = Py_TYPE(obj);
  if (!resolve_builtin(*kind)) resolve_with_registry(*kind, obj);
  return remember(std::move(kind));
}

const Kind& text_array_kind() {
  static std::shared_ptr<Kind>* text = nullptr;
  if (!text) {
    const Kind& array = kind_of_type(runtime.ndarray_type);
    text = new std::shared_ptr<Kind>(std::make_shared<Kind>(array));
    (*text)->base = Base::buffer;
    (*text)->tracked = true;
  }
  return **text;
}

void forget_kind(PyTypeObject* type) {
  if (const Kind* known = known_kind(type)) known->stale = true;
  Kinds::forget(type);
}

const Kind& kind_of_type(PyTypeObject* type) {
  if (!PyType_Check(reinterpret_cast<PyObject*>(type))) raise_error(PyExc_TypeError, "expected a class");
  if (const Kind* known = known_kind(type)) return *known;
  auto kind = std::make_shared<Kind>();
  kind->type = type;
  if (resolve_builtin(*kind)) return remember(std::move(kind));
  return kind_of(sample_of(type).get());
}

Owned make_shell(const Kind& kind, PyTypeObject* type) {
  Owned args = Owned::borrow(runtime.empty_tuple);
  if (kind.base == Base::partial) args = own(PyTuple_Pack(1, reinterpret_cast<PyObject*>(&PyBaseObject_Type)));
  return own(kind.solid->tp_new(type, args.get(), nullptr));
}

namespace {

// A list of what an iterator of the base type yields: a subclass's own __iter__ is never asked.
Owned list_items(PyObject* obj, PyTypeObject* base) {
  Owned iterator = own(base->tp_iter(obj));
  return own(PySequence_List(iterator.get()));
}

// (referent,) or (referent, callback) of a weak reference that is alive, else ().
Owned referent_of(PyObject* ref) {
  Owned referent = weak_target(ref);
  if (!referent) return Owned::borrow(runtime.empty_tuple);
  PyObject* callback = reinterpret_cast<PyWeakReference*>(ref)->wr_callback;
  if (!callback || !PyWeakref_CheckRef(ref)) return own(PyTuple_Pack(1, referent.get()));
  return own(PyTuple_Pack(2, referent.get(), callback));
}

// (mapping,) of a mappingproxy: what its tp_traverse visits.
Owned mapping_of(PyObject* proxy) {
  PyObject* mapping = nullptr;
  visitproc take = [](PyObject* seen, void* out) {
    if (!PyType_Check(seen)) *static_cast<PyObject**>(out) = seen;
    return 0;
  };
  Py_TYPE(proxy)->tp_traverse(proxy, take, &mapping);
  if (!mapping) raise_error(PyExc_RuntimeError, "a mappingproxy without a mapping");
  return own(PyTuple_Pack(1, mapping));
}

}  // namespace

Cursor::Cursor(PyObject* obj, const Kind& kind, Opened* opened) : obj_(Owned::borrow(obj)), kind_(&kind) {
  switch (kind.base) {
    case Base::odict:
      items_ = list_items(obj, kind.solid);
      size_ = PyList_GET_SIZE(items_.get());
      break;
    case Base::deque:
      items_ = list_items(obj, kind.solid);
      size_ = PyList_GET_SIZE(items_.get());
      break;
    case Base::method: size_ = 2; break;
    case Base::weakref:
      items_ = referent_of(obj);
      size_ = PyTuple_GET_SIZE(items_.get());
      break;
    case Base::proxy:
      items_ = mapping_of(obj);
      size_ = 1;
      break;
    case Base::builtin:
    case Base::exception:
    case Base::partial: {
      const char* const* names = part_names(kind.base);
      while (names[size_]) ++size_;
      items_ = own(PyTuple_New(size_));
      for (Py_ssize_t i = 0; i < size_; ++i)
        PyTuple_SET_ITEM(items_.get(), i, check(PyObject_GetAttrString(obj, names[i])));
      break;
    }
    case Base::registered: {
      Owned pair = opened ? Owned() : open_registered(obj);
      Opened::Parts parts =
          opened ? opened->of(obj) : Opened::Parts{PyTuple_GET_ITEM(pair.get(), 0), PyTuple_GET_ITEM(pair.get(), 1)};
      items_ = Owned::borrow(parts.children);
      size_ = PySequence_Fast_GET_SIZE(items_.get());
      extra_ = Owned::borrow(parts.aux);
      return;
    }
    case Base::defaultdict: {
      static PyObject* name = PyUnicode_InternFromString("default_factory");
      extra_ = own(PyObject_GenericGetAttr(obj, name));
      size_ = PyDict_GET_SIZE(obj);
      break;
    }
    default: size_ = raw_size(obj, kind.base);
  }
  if (kind.base == Base::function) {  // its dict is made on demand, and may hold what is compiled for it
    dict_ = Owned::borrow(reinterpret_cast<PyFunctionObject*>(obj)->func_dict);
    if (!dict_) return;
    fields_ = dict_size_ = PyDict_GET_SIZE(dict_.get());
    if (fields_ && dict_get(dict_.get(), runtime.tables)) hidden_ = runtime.tables, --fields_;
  } else if (kind.has_dict) {
    dict_ = instance_dict(obj);
    if (dict_.get() == obj) {
      own_dict_ = true;
      dict_ = Owned();
      return;
    }
    fields_ = dict_size_ = PyDict_GET_SIZE(dict_.get());
    if (kind.absent && static_cast<size_t>(fields_) > kind.order.size()) {
      PyObject *name, *value;
      for (Py_ssize_t pos = 0; PyDict_Next(dict_.get(), &pos, &name, &value);) fields_ -= value == kind.absent;
    }
  }
}

bool Cursor::next_named(PyObject*& child, PyObject*& key) {
  if (!items_) {
    items_ = own(PyDict_Keys(dict_.get()));
    check(PyList_Sort(items_.get()));
  }
  if (i_ >= PyList_GET_SIZE(items_.get())) return false;
  key = PyList_GET_ITEM(items_.get(), i_);
  child = named(key);
  return child != nullptr;
}

bool Cursor::intact() const {
  if (!fields_intact()) return false;
  switch (kind_->base) {
    case Base::registered:
    case Base::method:
    case Base::partial:
    case Base::weakref:
    case Base::proxy:
    case Base::builtin:
    case Base::exception:
    case Base::deque: return true;
    default: return raw_size(obj_.get(), kind_->base) == size_ || kind_->base == Base::set;
  }
}

void init_kinds() {
  nb::module_ collections = nb::module_::import_("collections");
  runtime.deque_type = reinterpret_cast<PyTypeObject*>(nb::object(collections.attr("deque")).release().ptr());
  runtime.defaultdict_type =
      reinterpret_cast<PyTypeObject*>(nb::object(collections.attr("defaultdict")).release().ptr());
  runtime.odict_type = &PyODict_Type;
  runtime.namespace_type = reinterpret_cast<PyTypeObject*>(
      nb::object(nb::module_::import_("types").attr("SimpleNamespace")).release().ptr());
  runtime.partial_type =
      reinterpret_cast<PyTypeObject*>(nb::object(nb::module_::import_("functools").attr("partial")).release().ptr());
  runtime.array_array_type =
      reinterpret_cast<PyTypeObject*>(nb::object(nb::module_::import_("array").attr("array")).release().ptr());
  runtime.tables = PyUnicode_InternFromString("__graftax_tables__");
  runtime.ndarray_type =
      reinterpret_cast<PyTypeObject*>(nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr());
  runtime.method_wrapper_type = reinterpret_cast<PyTypeObject*>(
      nb::object(nb::module_::import_("types").attr("MethodWrapperType")).release().ptr());
  runtime.empty_tuple = PyTuple_New(0);
  nb::dict scope;
  scope["__builtins__"] = nb::module_::import_("builtins");
  nb::exec("class Probe: pass", scope);
  runtime.python_dealloc = reinterpret_cast<PyTypeObject*>(nb::object(scope["Probe"]).ptr())->tp_dealloc;
}

}  // namespace graftax
