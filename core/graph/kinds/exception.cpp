// SPDX-License-Identifier: Apache-2.0
// Exceptions: args, cause, context, and what a builtin class keeps besides. The traceback is not part of the value.
#include "graph/commit.h"
#include "graph/rebuild.h"

namespace graftax {

namespace {

constexpr Py_ssize_t common_parts = 3;  // the first names of each family: those in PARTS

struct ExceptionKind final : NodeKind {
  // The builtin exception `base`, and those below it that add nothing to its layout.
  ExceptionKind(const char* name, PyObject* const* base, const char* const* names)
      : NodeKind(name, Items::listed), base_(base) {
    has_fields = is_handed = true;
    item_names = names;
    while (names[count_]) ++count_;
  }

  bool is_of(PyTypeObject* solid) const override {
    auto* base = reinterpret_cast<PyTypeObject*>(*base_);
    return PyType_IsSubtype(solid, base) && solid->tp_basicsize == base->tp_basicsize;
  }
  bool is_valid(const Program&, const Instr& n) const override {
    return n.node->items == static_cast<uint32_t>(count_);
  }

  // Through the base's own descriptors: a subclass may have a property of that name.
  Listed open(PyObject* exception, const Kind&, Opened*) const override {
    Listed out = open_attributes(exception, base_names);
    Owned items = own(PyTuple_New(count_));
    for (Py_ssize_t i = 0; i < count_; ++i)
      PyTuple_SET_ITEM(
          items.get(), i,
          i < common_parts ? Py_NewRef(PyTuple_GET_ITEM(out.items.get(), i)) : read(exception, i).release());
    out.items = std::move(items);
    out.size = count_;
    return out;
  }

  void fill(const Content& c, PyObject* shell) const override { set_parts(shell, c.items(), count_); }
  void write(Commit& commit, const Content& c, PyObject* node, const Touched&) const override {
    commit.parts(c.n, node, c.items());
  }
  void set_parts(PyObject* exception, PyObject* const* parts, Py_ssize_t count) const override {
    static PyObject* const args = interned("args");
    OwnedList old;  // released last, when the exception is whole again
    old.push_stolen(own(PyObject_GenericGetAttr(exception, args)));
    check(PyObject_GenericSetAttr(exception, args, parts[0]));
    auto or_none = [](PyObject* value) { return value == Py_None ? nullptr : Py_NewRef(value); };
    old.push_stolen(Owned::steal(PyException_GetCause(exception)));
    old.push_stolen(Owned::steal(PyException_GetContext(exception)));
    // Setting a cause sets __suppress_context__ too: it gets its value back.
    char suppress = reinterpret_cast<PyBaseExceptionObject*>(exception)->suppress_context;
    PyException_SetCause(exception, or_none(parts[1]));
    PyException_SetContext(exception, or_none(parts[2]));
    reinterpret_cast<PyBaseExceptionObject*>(exception)->suppress_context = suppress;
    for (Py_ssize_t i = common_parts; i < count; ++i) {
      old.push_stolen(read(exception, i));
      if (old.back() != parts[i]) set(exception, i, parts[i]);
    }
  }

  static constexpr const char* base_names[] = {"args", "__cause__", "__context__", nullptr};

 private:
  // What the builtin class has under this name; null where this Python has none.
  Owned descriptor(Py_ssize_t i) const {
    Owned out = Owned::steal(PyObject_GetAttrString(*base_, item_names[i]));
    if (!out) PyErr_Clear();
    return out;
  }
  // A field that is not set is None.
  Owned read(PyObject* exception, Py_ssize_t i) const {
    Owned d = descriptor(i);
    if (!d) return Owned::borrow(Py_None);
    Owned value = Owned::steal(Py_TYPE(d.get())->tp_descr_get(d.get(), exception, *base_));
    if (value) return value;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) raise_python();
    PyErr_Clear();
    return Owned::borrow(Py_None);
  }
  void set(PyObject* exception, Py_ssize_t i, PyObject* value) const {
    Owned d = descriptor(i);
    if (d) check(Py_TYPE(d.get())->tp_descr_set(d.get(), exception, value == Py_None ? nullptr : value));
  }

  PyObject* const* base_;
  Py_ssize_t count_ = 0;
};

#define PARTS "args", "__cause__", "__context__"

const char* const of_any[] = {PARTS, nullptr};
const char* const of_os[] = {PARTS, "errno", "strerror", "filename", "filename2", "characters_written", nullptr};
const char* const of_import[] = {PARTS, "msg", "name", "path", "name_from", nullptr};
const char* const of_name[] = {PARTS, "name", nullptr};
const char* const of_attribute[] = {PARTS, "obj", "name", nullptr};
const char* const of_unicode[] = {PARTS, "encoding", "object", "start", "end", "reason", nullptr};
const char* const of_exit[] = {PARTS, "code", nullptr};
const char* const of_stop[] = {PARTS, "value", nullptr};
// No SyntaxError: its __str__ looks at the type of its line, which may be a number that is traced.
const ExceptionKind kinds[] = {
    {"exception", &PyExc_BaseException, of_any},
    {"OSError", &PyExc_OSError, of_os},
    {"ImportError", &PyExc_ImportError, of_import},
    {"NameError", &PyExc_NameError, of_name},
    {"AttributeError", &PyExc_AttributeError, of_attribute},
    {"UnicodeEncodeError", &PyExc_UnicodeEncodeError, of_unicode},
    {"UnicodeDecodeError", &PyExc_UnicodeDecodeError, of_unicode},
    {"UnicodeTranslateError", &PyExc_UnicodeTranslateError, of_unicode},
    {"SystemExit", &PyExc_SystemExit, of_exit},
    {"StopIteration", &PyExc_StopIteration, of_stop},
};

}  // namespace

}  // namespace graftax
