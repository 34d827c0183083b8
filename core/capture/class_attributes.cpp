// SPDX-License-Identifier: Apache-2.0
#include "capture/class_attributes.h"

namespace graftax {

namespace {

// A dict by (id of the class, name): the descriptors that running traces put in the place of attributes; kept for ever.
PyObject* shown = nullptr;
PyObject* missing = nullptr;  // what stands for no value; kept for ever

Owned scope_of(PyObject* cls) {
#if PY_VERSION_HEX >= 0x030C0000  // that of a built-in class is kept elsewhere
  return own(PyType_GetDict(reinterpret_cast<PyTypeObject*>(cls)));
#else
  return Owned::borrow(reinterpret_cast<PyTypeObject*>(cls)->tp_dict);
#endif
}

PyObject* in_class(PyObject* cls, PyObject* name) { return dict_get(scope_of(cls).get(), name); }  // borrowed

bool is_any_shown() { return shown && PyDict_GET_SIZE(shown) > 0; }

Owned key_of(PyObject* cls, PyObject* name) {
  Owned id = own(PyLong_FromVoidPtr(cls));
  return own(PyTuple_Pack(2, id.get(), name));
}

bool is_of_this_thread(PyObject* attribute_shown) {
  Owned thread = own(attribute(attribute_shown, "thread"));
  return PyLong_AsUnsignedLong(thread.get()) == PyThread_get_thread_ident();
}

// What a trace shows in the place of an attribute, unless that is of this thread and assigned by now; or null.
Owned shown_for(PyObject* cls, PyObject* name) {
  if (!is_any_shown()) return {};
  Owned descriptor = Owned::borrow(dict_get(shown, key_of(cls, name).get()));
  if (!descriptor || in_class(cls, name) == descriptor.get()) return descriptor;
  return is_of_this_thread(descriptor.get()) ? Owned() : std::move(descriptor);
}

Owned original_of(PyObject* attribute_shown) {
  Owned value = own(attribute(attribute_shown, "original"));
  return value.get() == missing ? Owned() : std::move(value);
}

void set_original(PyObject* attribute_shown, PyObject* value) {
  check(PyObject_SetAttrString(attribute_shown, "original", value ? value : missing));
}

// Below the metaclass's own __setattr__, which is the user's. Deletes what is there where `value` is null.
void put(PyObject* cls, PyObject* name, PyObject* value) {
  if (value || in_class(cls, name)) check(PyType_Type.tp_setattro(cls, name, value));
}

const PyGetSetDef* dict_of_type = nullptr;  // the interpreter's own `type.__dict__['__dict__']`
PyGetSetDef dict_with_shown;                // the same, while traces show something

// The names of a class with what this thread finds there; null where no trace shows anything in the class.
Owned seen_dict(PyObject* cls) {
  Owned names, id = own(PyLong_FromVoidPtr(cls));
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(shown, &at, &key, &value);) {
    PyObject* name = PyTuple_GET_ITEM(key, 1);
    if (!equal(PyTuple_GET_ITEM(key, 0), id.get()) || in_class(cls, name) != value) continue;
    if (!names) names = own(PyDict_Copy(scope_of(cls).get()));
    Owned attribute_seen = is_of_this_thread(value) ? own(attribute(value, "value")) : original_of(value);
    check(PyDict_SetItem(names.get(), name, attribute_seen.get()));
  }
  return names;
}

PyObject* get_dict(PyObject* cls, void* closure) {
  try {
    Owned names = seen_dict(cls);
    return names ? PyDictProxy_New(names.get()) : dict_of_type->get(cls, closure);
  } catch (nb::python_error& e) {
    e.restore();
    return nullptr;
  }
}

// While traces show something, `cls.__dict__` is answered here: its values would be what stands in the class for them.
void answer_for_dicts(bool are_shown) {
  Owned descriptor = Owned::borrow(in_class(reinterpret_cast<PyObject*>(&PyType_Type), interned("__dict__")));
  if (!Py_IS_TYPE(descriptor.get(), &PyGetSetDescr_Type)) return;  // an interpreter that keeps it otherwise
  auto* getset = reinterpret_cast<PyGetSetDescrObject*>(descriptor.get());
  if (!dict_of_type) {
    dict_of_type = getset->d_getset;
    dict_with_shown = *dict_of_type;
    dict_with_shown.get = get_dict;
  }
  getset->d_getset = are_shown ? &dict_with_shown : const_cast<PyGetSetDef*>(dict_of_type);
}

// What it returns stands there again when `uncover` is given it: another trace of this thread shows it.
Owned cover(PyObject* cls, PyObject* name, PyObject* attribute_shown, bool stands) {
  Owned key = key_of(cls, name), outer = Owned::borrow(dict_get(shown, key.get())),
        own_value = class_attribute(cls, name);
  set_original(attribute_shown, own_value.get());
  check(PyDict_SetItem(shown, key.get(), attribute_shown));
  answer_for_dicts(true);
  if (own_value && stands) put(cls, name, attribute_shown);
  return outer ? std::move(outer) : Owned::borrow(Py_None);
}

void uncover(PyObject* cls, PyObject* name, PyObject* attribute_shown, PyObject* outer) {
  Owned key = key_of(cls, name), original = original_of(attribute_shown);
  if (outer != Py_None) check(PyDict_SetItem(shown, key.get(), outer));
  else if (PyDict_DelItem(shown, key.get()) < 0) raise_python();
  answer_for_dicts(is_any_shown());
  put(cls, name, original.get());
}

}  // namespace

Owned class_attribute(PyObject* cls, PyObject* name) {
  Owned hiding = shown_for(cls, name);
  return hiding ? original_of(hiding.get()) : Owned::borrow(in_class(cls, name));
}

void set_class_attribute(PyObject* cls, PyObject* name, PyObject* value) {
  if (Owned hiding = shown_for(cls, name)) set_original(hiding.get(), value);
  else put(cls, name, value);
}

Owned inherited_attribute(PyTypeObject* cls, PyObject* name) {
  PyObject* value =
      _PyType_Lookup(cls, name);  // asked first: a class tells its watchers of a change only after a lookup
  if (!is_any_shown()) return Owned::borrow(value);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(cls->tp_mro); ++i)
    if (Owned value = class_attribute(PyTuple_GET_ITEM(cls->tp_mro, i), name)) return value;
  return {};
}

Owned class_names(PyObject* cls) {
  Owned names = own(PyDict_Keys(scope_of(cls).get()));
  if (!is_any_shown()) return names;
  Owned own_names = own(PyList_New(0)), id = own(PyLong_FromVoidPtr(cls));
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(shown, &at, &key, &value);) {  // the trace may have deleted it
    PyObject* name = PyTuple_GET_ITEM(key, 1);
    if (equal(PyTuple_GET_ITEM(key, 0), id.get()) && !in_class(cls, name)) check(PyList_Append(names.get(), name));
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(names.get()); ++i) {
    PyObject* name = PyList_GET_ITEM(names.get(), i);
    if (!PyUnicode_Check(name) || class_attribute(cls, name)) check(PyList_Append(own_names.get(), name));
  }
  return own_names;
}

void bind_class_attributes(nb::module_& m) {
  shown = check(PyDict_New());
  m.def(
      "use_missing", [](nb::object value) { missing = value.release().ptr(); }, nb::arg("missing"),
      "What stands for an attribute that a class has not got.");
  m.def(
      "class_attribute",
      [](nb::handle cls, nb::handle name) {
        Owned value = class_attribute(cls.ptr(), name.ptr());
        return nb::borrow(value ? value.get() : missing);
      },
      nb::arg("cls"), nb::arg("name"), nb::sig("def class_attribute(cls: type, name: str) -> Any"),
      "What stands in a class itself, whatever traces show there; `MISSING` where there is nothing.");
  m.def(
      "class_names", [](nb::handle cls) { return nb::steal(class_names(cls.ptr()).release()); }, nb::arg("cls"),
      nb::sig("def class_names(cls: type) -> list[str]"), "The names of a class itself, whatever traces show there.");
  m.def(
      "set_class_attribute",
      [](nb::handle cls, nb::handle name, nb::handle value) {
        set_class_attribute(cls.ptr(), name.ptr(), value.ptr() == missing ? nullptr : value.ptr());
      },
      nb::arg("cls"), nb::arg("name"), nb::arg("value").none(),
      nb::sig("def set_class_attribute(cls: type, name: str, value: object) -> None"),
      "Puts a value there, whatever the metaclass says, once no trace shows anything; `MISSING` deletes it.");
  m.def(
      "cover_class_attribute",
      [](nb::handle cls, nb::handle name, nb::handle attribute_shown, bool stands) {
        return nb::steal(cover(cls.ptr(), name.ptr(), attribute_shown.ptr(), stands).release());
      },
      nb::arg("cls"), nb::arg("name"), nb::arg("shown"), nb::arg("stands"),
      nb::sig("def cover_class_attribute(cls: type, name: str, shown: Any, stands: bool) -> Any"),
      "A trace shows something from now on; its `original` becomes what the class holds. Without `stands`, or where "
      "that "
      "is nothing, only other threads are kept from what the trace assigns. Returns what is shown there already.");
  m.def(
      "uncover_class_attribute",
      [](nb::handle cls, nb::handle name, nb::handle attribute_shown, nb::handle outer) {
        uncover(cls.ptr(), name.ptr(), attribute_shown.ptr(), outer.ptr());
      },
      nb::arg("cls"), nb::arg("name"), nb::arg("shown"), nb::arg("outer").none(),
      nb::sig("def uncover_class_attribute(cls: type, name: str, shown: Any, outer: Any) -> None"),
      "The class has its `original` again. `outer` is what `cover_class_attribute` returned.");
}

}  // namespace graftax
