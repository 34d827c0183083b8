// SPDX-License-Identifier: Apache-2.0
// Exceptions: args, cause and context. The traceback is not part of the value.
#include "commit.h"
#include "rebuild.h"

namespace graftax {

namespace {

const char* const names[] = {"args", "__cause__", "__context__", nullptr};

struct ExceptionKind final : NodeKind {
  ExceptionKind() : NodeKind("exception", Items::listed) {
    has_fields = is_handed = true;
    item_names = names;
  }

  // Those that add nothing to the layout of BaseException.
  bool is_of(PyTypeObject* solid) const override {
    auto* base = reinterpret_cast<PyTypeObject*>(PyExc_BaseException);
    return PyType_IsSubtype(solid, base) && solid->tp_basicsize == base->tp_basicsize;
  }
  bool is_valid(const Program&, const Instr& n) const override { return n.items == 3; }

  void fill(const Content& c, PyObject* shell) const override { set_parts(shell, c.items(), 3); }
  void write(Commit& commit, const Content& c, PyObject* node, const Touched&) const override {
    commit.parts(c.n, node, c.items());
  }
  void set_parts(PyObject* exception, PyObject* const* parts, Py_ssize_t) const override {
    static PyObject* const args = interned("args");
    OwnedList old;  // released last
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
  }
};

const ExceptionKind exception_kind;

}  // namespace

}  // namespace graftax
