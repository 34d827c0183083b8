// SPDX-License-Identifier: Apache-2.0
// Instances of a subclass of str, int, a date, a path... that have attributes: an immutable value, and fields. The
// payload is the plain value.
#include "graph/rebuild.h"
#include "graph/static_equality.h"
#include "python/hooks.h"

namespace graftax {

namespace {

// The plain value of an instance of a subclass of str, int, float, complex or bytes, without asking the subclass; for
// other solid bases (dates, paths, fractions) what the registry's function makes of it.
Owned plain_value(PyObject* obj, const Kind& kind) {
  if (kind.solid == &PyUnicode_Type) return own(PyUnicode_FromObject(obj));
  if (kind.solid == &PyLong_Type) return own(PyLong_Type.tp_as_number->nb_positive(obj));  // a plain int of any size
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

struct ValueKind final : NodeKind {
  ValueKind() : NodeKind("value", Items::none) { has_content = is_leaf_for_jax = true; }

  uint32_t add_payload(Program& p, PyObject* obj, const Kind& kind) const override {
    Owned plain = plain_value(obj, kind);
    uint32_t id = add_static(p, plain.get(), kind_of(plain.get()));
    if (!has_plain_base(kind)) {  // to rebuild with: not `obj`, whose attributes may hold arrays
      try {
        p.statics[id].snapshot = p.keep(hooks::copied_value(obj));
      } catch (nb::python_error&) {  // one that cannot be made anew is rebuilt from the live object only
      }
    }
    return id;
  }
  bool content_matches(const Program& p, const Instr& n, PyObject* obj) const override {
    return static_matches(p, n.node->payload, plain_value(obj, *n.node->kind).get());
  }
  // An enum member is itself in a copy, too, with the attributes that it has by then.
  PyObject* unique_object(const Program& p, const Instr& n) const override {
    return n.node->kind->unique ? p.statics[n.node->payload].snapshot : nullptr;
  }
  bool is_valid(const Program&, const Instr& n) const override { return n.node->payload != NONE; }
  std::string content_text(const Program& p, const Instr& n) const override {
    return static_text(p, n.node->payload) + (n.node->fields + n.node->slots ? ", " : "");
  }

  // Its own constructor makes a date or a path anew: it does so from the recorded one, attributes included.
  bool can_hold_arrays(const Kind& kind) const override { return has_plain_base(kind); }
  Owned shell(const Program& p, const Instr& n, PyObject* live) const override {
    if (has_plain_base(*n.node->kind)) {
      Owned args = own(PyTuple_Pack(1, p.statics[n.node->payload].obj));
      return own(n.node->kind->solid->tp_new(n.node->type, args.get(), nullptr));
    }
    PyObject* original = live ? live : p.statics[n.node->payload].snapshot;
    if (original) return hooks::copied_value(original);
    raise_graftax("UnsupportedValueError",
                  std::string("an instance of ") + n.node->type->tp_name +
                      " cannot be rebuilt: copy.copy of it fails, or this structure comes from a "
                      "pickle or a file. Mend its __reduce__, or flatten it in this process.");
  }
};

const ValueKind value_kind;

}  // namespace

}  // namespace graftax
