// SPDX-License-Identifier: Apache-2.0
#include "graph/kind.h"

#include <structmember.h>

#include <algorithm>

#include "python/hooks.h"
#include "python/jax_registry.h"
#include "python/type_cache.h"

namespace graftax {

Runtime runtime;

namespace {

using Kinds = TypeTable<Kind>;

// The nearest base that no class statement made: it decides how instances are laid out.
PyTypeObject* solid_base(PyTypeObject* type) {
  // A class statement gives its class this deallocator. Classes of C that add nothing to `object` are passed over, too.
  auto no_layout_of_its_own = [](PyTypeObject* t) {
    if ((t->tp_flags & Py_TPFLAGS_HEAPTYPE) && t->tp_dealloc == runtime.python_dealloc) return true;
    return t->tp_base == &PyBaseObject_Type && t->tp_basicsize == t->tp_base->tp_basicsize &&
           t->tp_itemsize == 0;  // Generic
  };
  while (type->tp_base && no_layout_of_its_own(type)) type = type->tp_base;
  return type;
}

void make_node(Kind& kind, const NodeKind& node) {
  kind.leaf = Leaf::none;
  kind.node = &node;
  kind.items = node.items;
}

// The slots of a class and its bases, those of a base first.
void collect_slots(Kind& kind) {
  PyObject* mro = kind.type->tp_mro;
  for (Py_ssize_t i = PyTuple_GET_SIZE(mro) - 1; i >= 0; --i) {
    auto* cls = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(mro, i));
    if (!(cls->tp_flags & Py_TPFLAGS_HEAPTYPE)) continue;
    Owned dict = own(attribute(reinterpret_cast<PyObject*>(cls), "__dict__"));
    Owned values = own(PyMapping_Values(dict.get()));
    std::vector<Slot> own_slots;
    for (Py_ssize_t j = 0; j < PyList_GET_SIZE(values.get()); ++j) {
      PyObject* value = PyList_GET_ITEM(values.get(), j);
      if (!Py_IS_TYPE(value, &PyMemberDescr_Type)) continue;
      PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(value)->d_member;
      // Only what __slots__ makes: other members of a C struct belong to the type, and may not be written.
      if (member->type != T_OBJECT_EX || (member->flags & READONLY)) continue;
      // A class may list another class's descriptor under a second name; only its own slots count.
      if (reinterpret_cast<PyDescrObject*>(value)->d_type != cls) continue;
      PyObject* name = Py_NewRef(reinterpret_cast<PyDescrObject*>(value)->d_name);
      PyUnicode_InternInPlace(&name);
      own_slots.push_back({name, member->offset});
    }
    // In the order of memory, which no change of the class's dict can alter.
    std::sort(own_slots.begin(), own_slots.end(), [](const Slot& a, const Slot& b) { return a.offset < b.offset; });
    for (const Slot& s : own_slots) {
      bool is_listed =
          std::any_of(kind.slots.begin(), kind.slots.end(), [&](const Slot& t) { return t.offset == s.offset; });
      if (!is_listed) kind.slots.push_back(s);
    }
  }
}

void make_static(Kind& kind, How how, bool immortal) {
  kind.leaf = Leaf::statics;
  kind.how = how;
  kind.immortal_value = immortal;
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
    kind.leaf = Leaf::array;
  } else {
    const NodeKind* node = node_kind_of(t);
    if (!node || t == &PyBaseObject_Type || t == runtime.namespace_type || t == runtime.local_type) return false;
    make_node(kind, *node);
    kind.solid = t;
    kind.tracked = !node->is_whole;
    kind.handed = node->is_handed;
    kind.has_dict = node->has_fields || t == runtime.odict_type;  // an instance takes attributes
  }
  return true;
}

// What `describe` says of a type, read by the names of its fields.
class Description {
 public:
  Description(PyObject* obj, PyTypeObject* solid) : answer_(hooks::describe(obj, reinterpret_cast<PyObject*>(solid))) {}

  Owned field(const char* name) const { return own(attribute(answer_.get(), name)); }
  bool is_true(const char* name) const { return field(name).get() == Py_True; }
  std::string text(const char* name) const { return utf8(field(name).get()); }
  // A new reference that is kept for ever, or null where the field is None.
  PyObject* kept(const char* name) const {
    Owned value = field(name);
    return value.get() == Py_None ? nullptr : value.release();
  }

 private:
  Owned answer_;
};

void resolve_node(Kind& kind, const Description& answer, const NodeKind& node, PyTypeObject* solid) {
  make_node(kind, node);
  kind.dynamic = answer.text("role") == "dynamic";
  if (kind.reduce) kind.how = How::reduce;
  kind.solid = solid;
  kind.has_dict = !node.hides_attributes && (kind.type->tp_dictoffset != 0 || solid == runtime.local_type);
  // Which fields are static, traced or of the context, and in which order they are walked.
  Owned names = answer.field("static_fields"), order = answer.field("order");
  if (names.get() != Py_None && PyObject_IsTrue(names.get())) kind.static_fields = names.release();
  kind.dynamic_fields = answer.kept("dynamic_fields");
  Owned of_context = answer.field("context_fields");
  if (PyDict_CheckExact(of_context.get())) kind.context_fields = of_context.release();
  for (Py_ssize_t i = 0; PyTuple_Check(order.get()) && i < PyTuple_GET_SIZE(order.get()); ++i) {
    PyObject* name = Py_NewRef(PyTuple_GET_ITEM(order.get(), i));
    PyUnicode_InternInPlace(&name);
    bool items = node.is_registered || node.items == Items::tuple;
    (items ? kind.item_names : kind.order).push_back(name);
  }
  kind.absent = answer.kept("absent");
  if (!node.is_ignored && !node.hides_attributes) collect_slots(kind);
  bool fields_alone = node.items == Items::none && !node.has_content;
  kind.by_name = answer.is_true("by_name") && fields_alone && kind.has_dict && kind.slots.empty();
  kind.arrays_only = kind.by_name || answer.is_true("arrays_only");
  // A tuple cannot change, but the attributes of a subclass can.
  kind.tracked = !answer.is_true("frozen") && (!node.is_whole || (kind.has_fields() && !node.is_weak));
  Owned has_del = Owned::steal(attribute(reinterpret_cast<PyObject*>(kind.type), "__del__"));
  if (!has_del) PyErr_Clear();
  kind.has_del = static_cast<bool>(has_del);
}

void resolve_by_description(Kind& kind, PyObject* obj) {
  PyTypeObject* solid = solid_base(kind.type);
  Description answer(obj, solid);
  std::string role = answer.text("role");
  bool frozen = answer.is_true("frozen");
  kind.handed = answer.is_true("handed");
  kind.reason = answer.text("reason");
  kind.sentinel = answer.is_true("sentinel");
  kind.own_equality = answer.is_true("own_equality");
  kind.unique = answer.is_true("unique");
  kind.expires = answer.is_true("expires");
  kind.reduce = answer.kept("reduce");
  if (role == "array") {
    kind.leaf = Leaf::array;
  } else if (role == "ref") {  // mutable: has an identity
    kind.leaf = Leaf::array;
    kind.tracked = true;
  } else if (role == "numpy") {
    kind.leaf = Leaf::numpy;
    kind.how = How::reduce;
    kind.tracked = !frozen;
    kind.solid = kind.type;
  } else if (role == "identity") {
    make_static(kind, How::identity, false);
  } else if (role == "equal" || role == "shape") {
    make_static(kind, How::equal, false);
    kind.shape = role == "shape";
  } else if (role == "reduce") {
    make_static(kind, How::reduce, frozen);
  } else if (role == "symbol" || role == "scalar symbol") {
    make_static(kind, How::identity, false);
    kind.symbolic = true;
    kind.scalar = role == "scalar symbol";
  } else if (role == "context") {
    make_static(kind, How::context, false);
  } else if (role == "refused") {
    kind.leaf = Leaf::refused;
    kind.opaque = answer.is_true("opaque");
  } else {
    // The layout decides for what is a node as it is; other roles are the names of node kinds.
    bool by_layout = role == "node" || role == "dynamic";
    const NodeKind* node = by_layout ? node_kind_of(solid) : node_kind_named(role);
    if (!node)
      raise_error(PyExc_TypeError, by_layout ? "describe() called an opaque type a node"
                                             : "describe() returned the unknown role '" + role + "'");
    resolve_node(kind, answer, *node, solid);
  }
}

}  // namespace

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
  const NodeKind* node = node_kind_of(solid);
  Owned args =
      solid == runtime.ndarray_type ? own(Py_BuildValue("(i)", 0)) : (node ? node : &leaf_node)->empty_arguments();
  return own(solid->tp_new(type, args.get(), nullptr));
}

}  // namespace

const Kind& kind_of(PyObject* obj) {
  if (const Kind* known = known_kind(Py_TYPE(obj))) return *known;
  follow_registry();  // a kind is never older than what the registry was looked at for
  auto kind = std::make_shared<Kind>();
  kind->type = Py_TYPE(obj);
  if (!resolve_builtin(*kind)) resolve_by_description(*kind, obj);
  return remember(std::move(kind));
}

const Kind& text_array_kind() {
  static std::shared_ptr<Kind>* text = nullptr;  // never destroyed: at the end of the process there is no interpreter
  if (!text) {
    // What `describe` says of NumPy arrays, but as a node: these have an identity.
    const Kind& array = kind_of_type(runtime.ndarray_type);
    text = new std::shared_ptr<Kind>(std::make_shared<Kind>(array));
    make_node(**text, text_array_node);
    (*text)->tracked = true;
  }
  return **text;
}

void forget_kind(PyTypeObject* type) {
  // Programs still hold it: they see that it has been replaced.
  if (const Kind* known = known_kind(type)) known->stale = true;
  Kinds::forget(type);
}

const Kind& kind_of_type(PyTypeObject* type) {
  if (!PyType_Check(reinterpret_cast<PyObject*>(type))) raise_error(PyExc_TypeError, "expected a class");
  if (const Kind* known = known_kind(type)) return *known;
  auto kind = std::make_shared<Kind>();
  kind->type = type;
  // Python describes a type by one of its instances.
  if (resolve_builtin(*kind)) return remember(std::move(kind));
  return kind_of(sample_of(type).get());
}

Owned make_shell(const Kind& kind, PyTypeObject* type) {
  return own(kind.solid->tp_new(type, kind.node->empty_arguments().get(), nullptr));
}

Cursor::Cursor(PyObject* obj, const Kind& kind, Opened* opened)
    : obj_(Owned::borrow(obj)), kind_(&kind), size_(raw_size(obj, kind)) {
  const NodeKind& node = *kind.node;
  // Items that cannot be read in place are listed now; user code may run here.
  if (!is_sized(kind) || node.extra) {
    Listed listed = node.open(obj, kind, opened);
    items_ = std::move(listed.items);
    extra_ = std::move(listed.extra);
    size_ = listed.size;
    if (node.is_registered) return;
  }
  if (node.is_function) {  // its dict is made on demand, and may hold what is compiled for it
    dict_ = Owned::borrow(reinterpret_cast<PyFunctionObject*>(obj)->func_dict);
    if (!dict_) return;
    fields_ = dict_size_ = PyDict_GET_SIZE(dict_.get());
    if (fields_ && dict_get(dict_.get(), runtime.tables)) hidden_ = runtime.tables, --fields_;
  } else if (kind.has_dict) {
    dict_ = instance_dict(obj);
    if (dict_.get() == obj) {  // its items are its attributes: they are met as items
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
  if (kind_->items == Items::listed) return true;
  return size_ == (is_sized(*kind_) ? raw_size(obj_.get(), *kind_) : kind_->node->size(obj_.get()));
}

void init_kinds() {
  auto type_in = [](const char* module, const char* name) {
    nb::object type = nb::module_::import_(module).attr(name);
    return reinterpret_cast<PyTypeObject*>(type.release().ptr());
  };
  runtime.deque_type = type_in("collections", "deque");
  runtime.defaultdict_type = type_in("collections", "defaultdict");
  runtime.odict_type = &PyODict_Type;
  runtime.namespace_type = type_in("types", "SimpleNamespace");
  runtime.local_type = type_in("threading", "local");
  runtime.partial_type = type_in("functools", "partial");
  runtime.array_array_type = type_in("array", "array");
  runtime.tables = PyUnicode_InternFromString("__graftax_tables__");
  runtime.ndarray_type = type_in("numpy", "ndarray");
  runtime.method_wrapper_type = type_in("types", "MethodWrapperType");
  runtime.empty_tuple = PyTuple_New(0);
  nb::dict scope;
  scope["__builtins__"] = nb::module_::import_("builtins");
  // The deallocator that every class statement gives its class: how such classes are told from those of C.
  nb::exec("class Probe: pass", scope);
  runtime.python_dealloc = reinterpret_cast<PyTypeObject*>(nb::object(scope["Probe"]).ptr())->tp_dealloc;
}

void bind_kinds(nb::module_& m) {
  on_registry_growth([](PyTypeObject* type) {
    if (type) forget_kind(type);
  });
  m.def(
      "forget_kind",
      [](nb::handle type) {
        if (PyType_Check(type.ptr())) forget_kind(reinterpret_cast<PyTypeObject*>(type.ptr()));
      },
      nb::arg("type"), nb::sig("def forget_kind(type: type) -> None"), "Looks at the next instance of a class anew.");
  m.def(
      "kind_info",
      [](nb::handle type) {
        static const char* leaves[] = {"", "array", "numpy", "static", "refused"};
        auto* cls = reinterpret_cast<PyTypeObject*>(type.ptr());
        const Kind& kind = cls == runtime.ndarray_type ? text_array_kind() : kind_of_type(cls);
        nb::list slots;
        for (const Slot& s : kind.slots) slots.append(nb::borrow(s.name));
        return nb::make_tuple(kind.is_node() ? kind.node->name : leaves[static_cast<int>(kind.leaf)], kind.tracked,
                              slots);
      },
      nb::arg("type"), nb::sig("def kind_info(type: type) -> tuple[str, bool, list[str]]"),
      "(base, has an identity, slot names) of a class.");
}

}  // namespace graftax
