// SPDX-License-Identifier: Apache-2.0
// Bound methods, bound methods of builtin types, bound jitted functions, and functools.partial.
#include "graph/commit.h"
#include "graph/rebuild.h"

namespace graftax {

namespace {

const char* const method_names[] = {"__func__", "__self__", nullptr};

struct MethodKind final : NodeKind {
  MethodKind() : NodeKind("method", Items::asked) {
    is_whole = begins_with_its_call = true;
    item_names = method_names;
    nameless = &PyMethod_Type;
  }

  bool is_of(PyTypeObject* solid) const override { return solid == &PyMethod_Type; }
  Listed open(PyObject*, const Kind&, Opened*) const override { return {{}, {}, 2}; }
  Py_ssize_t size(PyObject*) const override { return 2; }
  PyObject* item(PyObject* obj, Py_ssize_t i) const override {
    return i == 0 ? PyMethod_GET_FUNCTION(obj) : PyMethod_GET_SELF(obj);
  }
  bool is_valid(const Program&, const Instr& n) const override { return n.node->items == 2; }
  Owned make(const Content& c) const override { return own(PyMethod_New(c.items()[0], c.items()[1])); }
};

const char* const builtin_names[] = {"__name__", "__self__", nullptr};

struct BuiltinKind final : NodeKind {
  BuiltinKind() : NodeKind("builtin", Items::listed) {
    is_whole = is_handed = begins_with_its_call = true;
    item_names = builtin_names;
  }

  bool is_of(PyTypeObject* solid) const override {
    return solid == &PyCFunction_Type || solid == runtime.method_wrapper_type;
  }
  // A function of a module, or a method of an object that cannot be opened. A method of a refused object is refused.
  bool is_itself(PyObject* obj) const override {
    Owned self = own(attribute(obj, "__self__"));
    if (PyModule_Check(self.get())) return true;
    const Kind& kind = kind_of(self.get());
    if (kind.leaf == Leaf::refused) return is_name_of_module(obj, self.get());
    return !kind.is_node();
  }
  // A module's function that is really a method of an object in it, as `random.random` is.
  static bool is_name_of_module(PyObject* method, PyObject* self) {
    Owned module_name = own(attribute(reinterpret_cast<PyObject*>(Py_TYPE(self)), "__module__"));
    Owned name = own(attribute(method, "__name__"));
    PyObject* module = dict_get(PyImport_GetModuleDict(), module_name.get());
    return module && PyModule_Check(module) && dict_get(PyModule_GetDict(module), name.get()) == method;
  }
  bool is_valid(const Program&, const Instr& n) const override { return n.node->items == 2; }
  Owned make(const Content& c) const override { return own(PyObject_GetAttr(c.items()[1], c.items()[0])); }
};

const char* const bound_names[] = {"_bound_to", nullptr};

// A jitted function that has its first arguments already: a method, or the jit of a method, a partial or an object.
struct BoundJitKind final : NodeKind {
  BoundJitKind() : NodeKind("bound jit", Items::listed) {
    is_whole = is_handed = hides_attributes = reads_children = true;
    extra = "_bound_by";  // the function of the class, or the options
    item_names = bound_names;
  }

  // Any other jitted function has nothing below it.
  bool is_itself(PyObject* obj) const override {
    Owned prefix = own(attribute(obj, "_prefix"));
    return PyTuple_GET_SIZE(prefix.get()) == 0;
  }
  // Read past Python's properties: this happens in each call.
  Listed open(PyObject* obj, const Kind&, Opened*) const override {
    static PyObject* const method_of = interned("_method_of");
    static PyObject* const self = interned("__self__");
    static PyObject* const options = interned("_options");
    static PyObject* const wrapped = interned("__wrapped__");
    Owned attributes = instance_dict(obj);
    PyObject* bound_by = dict_get(attributes.get(), method_of);
    PyObject* bound_to = dict_get(attributes.get(), bound_by ? self : wrapped);
    if (!bound_by) bound_by = dict_get(attributes.get(), options);
    if (!bound_by || !bound_to) raise_error(PyExc_AttributeError, "a jitted function lacks what it is made of");
    return {own(PyTuple_Pack(1, bound_to)), Owned::borrow(bound_by), 1};
  }
  bool is_valid(const Program&, const Instr& n) const override { return n.node->has_extra && n.node->items == 1; }
  Owned make(const Content& c) const override {
    static PyObject* const rebound = interned("_rebound");
    auto* type = reinterpret_cast<PyObject*>(c.n.node->type);
    return own(PyObject_CallMethodObjArgs(type, rebound, c.values[0], c.items()[0], nullptr));
  }
};

const char* const partial_names[] = {"func", "args", "keywords", nullptr};

struct PartialKind final : NodeKind {
  PartialKind() : NodeKind("partial", Items::listed) {
    has_fields = is_handed = begins_with_its_call = true;
    item_names = partial_names;
  }

  bool is_of(PyTypeObject* solid) const override { return solid == runtime.partial_type; }
  Owned empty_arguments() const override {
    return own(PyTuple_Pack(1, reinterpret_cast<PyObject*>(&PyBaseObject_Type)));
  }
  bool is_valid(const Program&, const Instr& n) const override { return n.node->items == 3; }

  void fill(const Content& c, PyObject* shell) const override { set_parts(shell, c.items(), 3); }
  void write(Commit& commit, const Content& c, PyObject* node, const Touched&) const override {
    commit.parts(c.n, node, c.items());
  }
  // __setstate__ takes the keywords themselves, where the constructor copies them.
  void set_parts(PyObject* partial, PyObject* const* parts, Py_ssize_t) const override {
    Owned old = open_attributes(partial, partial_names).items;  // released last, when the partial is whole again
    if (std::equal(parts, parts + 3, reinterpret_cast<PyTupleObject*>(old.get())->ob_item)) return;
    Owned state = own(PyTuple_Pack(4, parts[0], parts[1], parts[2], instance_dict(partial).get()));
    call_base(runtime.partial_type, "__setstate__", partial, state.get());
  }
};

const MethodKind method_kind;
const BuiltinKind builtin_kind;
const BoundJitKind bound_jit_kind;
const PartialKind partial_kind;

}  // namespace

}  // namespace graftax
