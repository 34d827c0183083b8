// SPDX-License-Identifier: Apache-2.0
#include "tree/treedef.h"

#include <algorithm>

#include "python/collected.h"
#include "python/hooks.h"
#include "tree/serialize.h"
#include "tree/walk.h"

namespace graftax {

std::vector<std::shared_ptr<const TreeKind>> kinds_of(const std::vector<TreeNode>& nodes) {
  std::vector<std::shared_ptr<const TreeKind>> kinds;
  for (const TreeNode& n : nodes) {
    // Kinds of builtin containers live as long as the process. Sorted by address, so that each is listed once.
    if (!n.kind || n.role < Role::namedtuple || (!kinds.empty() && kinds.back().get() == n.kind)) continue;
    auto place = std::lower_bound(kinds.begin(), kinds.end(), n.kind,
                                  [](const auto& k, const TreeKind* t) { return k.get() < t; });
    if (place == kinds.end() || place->get() != n.kind) kinds.insert(place, n.kind->shared_from_this());
  }
  return kinds;
}

void Structure::keep_kinds() {
  kinds = kinds_of(nodes);
  for (const auto& kind : kinds) owned.push(reinterpret_cast<PyObject*>(kind->type));
}

void Structure::set_data(uint32_t node, PyObject* data) {
  TreeNode& n = nodes[node];
  n.data = data;
  if (data && data != n.kind->no_data.get()) owned.push(data);  // the kind holds that one
}

bool Structure::append(const Structure& other, uint32_t node, bool run) {
  const TreeNode& first = other.nodes[node];
  if (first.role == Role::leaf) {
    add_leaves(1, run);
    return true;
  }
  // Its records as they are, but for where each subtree ends; node data get an owner here.
  auto shift = static_cast<uint32_t>(nodes.size()) - node;
  for (uint32_t i = node; i < first.next; ++i) {
    TreeNode n = other.nodes[i];
    if (n.data && n.data != n.kind->no_data.get()) owned.push(n.data);
    n.next += shift;
    nodes.push_back(n);
  }
  leaves += first.leaves;
  return false;
}

size_t Structure::num_nodes() const {
  size_t n = leaves;
  for (const TreeNode& node : nodes) n += node.role != Role::leaf;
  return n;
}

// Leaves one leaf behind: a structure that matches anything, and reads nothing that is gone.
void Structure::clear() {
  nodes.clear();
  leaves = 0;
  hash = -1;
  add_leaves(1, false);
  owned.clear();
}

PyObject* keys_of(const TreeNode& n) { return n.role == Role::defaultdict ? PyTuple_GET_ITEM(n.data, 1) : n.data; }

namespace {

bool same_kind_of_node(const TreeNode& a, const TreeNode& b) {
  if (a.role != b.role || a.arity != b.arity) return false;
  return a.kind == b.kind || (a.kind && b.kind && a.kind->type == b.kind->type);
}

// Calls user code: == of data.
bool same_data(const TreeNode& a, const TreeNode& b) {
  if (!a.data || !b.data) return false;
  int equal = PyObject_RichCompareBool(a.data, b.data, Py_EQ);
  if (equal < 0) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) raise_python();
    nb::python_error cause;
    nb::raise_from(cause, PyExc_ValueError,
                   "the node data of two trees cannot be compared: == raised an error for those of a %s. "
                   "Arrays are no node data: make them children.",
                   a.kind->type->tp_name);
  }
  return equal != 0;
}

}  // namespace

bool operator==(const Structure& a, const Structure& b) {
  if (&a == &b) return true;
  if (a.nodes.size() != b.nodes.size() || a.leaves != b.leaves) return false;
  size_t n = a.nodes.size();
  PyObject *x_data = nullptr, *y_data = nullptr;  // the pair that was equal last
  for (size_t i = 0; i < n; ++i) {
    const TreeNode &x = a.nodes[i], &y = b.nodes[i];
    if (x.next != y.next || !same_kind_of_node(x, y)) return false;
    if (x.data == y.data || (x.data == x_data && y.data == y_data)) continue;
    // Read before the comparison, which may run user code and so the collector.
    PyObject *x_new = x.data, *y_new = y.data;
    if (!same_data(x, y)) return false;
    if (a.nodes.size() != n || b.nodes.size() != n) return false;  // collected meanwhile
    x_data = x_new;
    y_data = y_new;
  }
  return true;
}

namespace {

size_t mix(size_t h, size_t x) { return h ^ (x + 0x9e3779b97f4a7c15ULL + (h << 6) + (h >> 2)); }

Py_hash_t structure_hash(const Structure& t) {
  if (t.hash != -1) return t.hash;
  size_t h = t.leaves;
  for (size_t i = 0; i < t.nodes.size(); ++i) {
    const TreeNode n = t.nodes[i];  // a copy: __hash__ of data may collect, which clears the structure
    h = mix(h, (static_cast<size_t>(n.arity) << 4) + static_cast<size_t>(n.role));
    if (n.kind) h = mix(h, reinterpret_cast<size_t>(n.kind->type));
    if (!n.data) continue;
    Py_hash_t data = PyObject_Hash(n.data);
    if (data == -1) {  // aux data that cannot be hashed is compared only
      if (!PyErr_ExceptionMatches(PyExc_TypeError)) raise_python();
      PyErr_Clear();
    }
    h = mix(h, static_cast<size_t>(data));
  }
  t.hash = static_cast<Py_hash_t>(h);
  if (t.hash == -1) t.hash = -2;  // -1 is an error in Python, and here: not known yet
  return t.hash;
}

std::string text(PyObject* obj) { return utf8(own(PyObject_Str(obj)).get()); }
std::string repr_of(PyObject* obj) { return utf8(own(PyObject_Repr(obj)).get()); }

std::string type_name(const TreeNode& n) {
  return utf8(own(attribute(reinterpret_cast<PyObject*>(n.kind->type), "__name__")).get());
}

// Opening and closing text of a node; the children of a dict are preceded by their keys.
std::pair<std::string, std::string> brackets(const TreeNode& n) {
  switch (n.role) {
    case Role::none: return {"None", ""};
    case Role::list: return {"[", "]"};
    case Role::tuple: return {"(", n.arity == 1 ? ",)" : ")"};
    case Role::dict: return {"{", "}"};
    case Role::namedtuple: return {"CustomNode(namedtuple[" + type_name(n) + "], [", "])"};
    default: return {"CustomNode(" + type_name(n) + "[" + (n.data ? text(n.data) : "None") + "], [", "])"};
  }
}

std::string structure_repr(const Structure& t) {
  struct Open {
    uint32_t node, child;
    std::string end;
  };
  std::vector<Open> stack;
  std::string out = "PyTreeDef(";
  auto before_child = [&] {
    if (stack.empty()) return;
    Open& top = stack.back();
    if (top.child) out += ", ";
    const TreeNode& n = t.nodes[top.node];
    if (n.role == Role::dict) out += repr_of(PyTuple_GET_ITEM(n.data, top.child)) + ": ";
    ++top.child;
  };
  for (uint32_t i = 0; i < t.nodes.size(); ++i) {
    const TreeNode& n = t.nodes[i];
    if (n.role == Role::leaf) {
      for (uint32_t k = 0; k < n.arity; ++k) {
        before_child();
        out += "*";
      }
    } else {
      before_child();
      auto [begin, end] = brackets(n);
      out += begin;
      stack.push_back({i, 0, end});
    }
    while (!stack.empty() && t.nodes[stack.back().node].next == i + 1) {
      out += stack.back().end;
      stack.pop_back();
    }
  }
  return out + ")";
}

}  // namespace

nb::object node_data(const TreeNode& n) {
  if (n.role == Role::leaf) return nb::none();
  nb::object data = n.data ? nb::borrow(n.data) : nb::none();
  if (n.role == Role::dict) data = nb::steal(check(PySequence_List(n.data)));
  return nb::make_tuple(nb::borrow(reinterpret_cast<PyObject*>(n.kind->type)), data);
}

nb::object as_treedef(nb::handle treedef) {
  if (nb::isinstance<TreeDef>(treedef)) return nb::borrow(treedef);
  return hooks::from_jax.object()(treedef);
}

namespace {

nb::list children(const TreeDef& def) {
  nb::list out;
  const std::vector<TreeNode>& nodes = def.tree.nodes;
  for (uint32_t i = 1; i < nodes[0].next; i = nodes[i].next) {
    uint32_t times = nodes[i].role == Role::leaf ? nodes[i].arity : 1;  // a run of leaves is as many children
    for (uint32_t k = 0; k < times; ++k) {
      TreeDef child;
      child.tree.append(def.tree, i, false);
      child.tree.keep_kinds();
      out.append(nb::cast(std::move(child)));
    }
  }
  return out;
}

TreeDef composed(const TreeDef& outer, const TreeDef& inner) {
  TreeDef out;
  std::vector<std::pair<uint32_t, uint32_t>> open;  // record in `out`, and where its subtree ends in `outer`
  const Structure& t = outer.tree;
  bool run = false;
  for (uint32_t i = 0; i < t.nodes.size(); ++i) {
    const TreeNode& n = t.nodes[i];
    if (n.role == Role::leaf) {
      for (uint32_t k = 0; k < n.arity; ++k) run = out.tree.append(inner.tree, 0, run);
    } else {
      open.emplace_back(out.tree.open(*n.kind, n.arity, n.data), n.next);
      run = false;
    }
    while (!open.empty() && open.back().second == i + 1) {
      out.tree.close(open.back().first);
      open.pop_back();
      run = false;
    }
  }
  out.tree.keep_kinds();
  return out;
}

TreeDef from_node_data_and_children(nb::object, nb::handle data, nb::iterable children) {
  std::vector<nb::object> parts;
  for (nb::handle child : children) parts.push_back(as_treedef(child));
  TreeDef out;
  if (data.is_none()) {
    if (!parts.empty()) raise_error(PyExc_ValueError, "a leaf has no children");
    out.tree.add_leaves(1, false);
    return out;
  }
  Walking walking;
  const TreeKind& kind = kind_of_node_data(data.ptr());
  Owned kept = kept_data(kind, PyTuple_GET_ITEM(data.ptr(), 1));
  check_data(kind, kept.get(), parts.size());
  uint32_t node = out.tree.open(kind, static_cast<uint32_t>(parts.size()), kept.get());
  bool run = false;
  for (nb::object& part : parts) run = out.tree.append(nb::cast<const TreeDef&>(part).tree, 0, run);
  out.tree.close(node);
  out.tree.keep_kinds();
  return out;
}

void show_treedef(const TreeDef& t, Visitor& visit) { visit(t.tree.owned); }

void clear_treedef(TreeDef& t) { t.tree.clear(); }

using CollectedTreeDef = Collected<TreeDef, show_treedef, clear_treedef>;

// For the slots of a type: a C++ exception becomes the Python error that is set.
template <class Result, class Body>
Result or_set_error(Result failed, Body body) {
  try {
    return body();
  } catch (nb::python_error& e) {
    e.restore();
  } catch (nb::builtin_exception& e) {
    PyErr_SetString(PyExc_TypeError, e.what());
  } catch (std::exception& e) {
    PyErr_SetString(PyExc_SystemError, e.what());
  }
  return failed;
}

// Of PyTreeDef.__new__ alone there is no structure.
const Structure& structure_in(PyObject* self) {
  if (!nb::inst_ready(self)) raise_error(PyExc_TypeError, "this PyTreeDef was not made by graftax");
  return nb::inst_ptr<TreeDef>(self)->tree;
}

// As slots: nanobind's own call of a method costs more than the comparison.
PyObject* treedef_compare(PyObject* self, PyObject* other, int op) {
  if (op != Py_EQ && op != Py_NE) Py_RETURN_NOTIMPLEMENTED;
  return or_set_error<PyObject*>(nullptr, [&]() -> PyObject* {
    const Structure& ours = structure_in(self);
    if (!nb::isinstance<TreeDef>(other)) {
      if (op == Py_EQ) Py_RETURN_NOTIMPLEMENTED;
      // JAX's own != says False to what is no treedef of its own
      return Py_NewRef(equal(self, other) ? Py_False : Py_True);
    }
    bool same = ours == nb::inst_ptr<TreeDef>(other)->tree;
    return Py_NewRef(same == (op == Py_EQ) ? Py_True : Py_False);
  });
}

Py_hash_t treedef_hash(PyObject* self) {
  return or_set_error<Py_hash_t>(-1, [&] { return structure_hash(structure_in(self)); });
}

PyType_Slot treedef_slots[] = {{Py_tp_richcompare, reinterpret_cast<void*>(treedef_compare)},
                               {Py_tp_hash, reinterpret_cast<void*>(treedef_hash)},
                               {Py_tp_traverse, reinterpret_cast<void*>(CollectedTreeDef::traverse)},
                               {Py_tp_clear, reinterpret_cast<void*>(CollectedTreeDef::clear)},
                               {0, nullptr}};

}  // namespace

void bind_treedef(nb::module_& m) {
  nb::class_<TreeDef>(m, "PyTreeDef", nb::type_slots(treedef_slots), nb::is_weak_referenceable(), nb::is_final(),
                      "The structure of a tree: immutable, hashable, comparable, printable.")
      .def("__repr__", [](const TreeDef& d) { return structure_repr(d.tree); })
      .def(
          "__reduce__",
          [](const TreeDef& d) {
            return nb::make_tuple(hooks::treedef_from_state.object(), nb::make_tuple(state_of(d)));
          },
          nb::sig("def __reduce__(self) -> tuple[Any, ...]"))
      .def_static("_from_state", &from_state, nb::arg("state"),
                  nb::sig("def _from_state(state: list[Any]) -> PyTreeDef"))
      .def("_records", &records_of, nb::sig("def _records(self) -> list[tuple[tuple[type, Any] | None, int]]"),
           "(node data, number of children) of each node in pre-order; leaves side by side are one (None, number).")
      .def_static("_from_records", &from_records, nb::arg("records"),
                  nb::sig("def _from_records(records: list[tuple[tuple[type, Any] | None, int]]) -> PyTreeDef"))
      .def_prop_ro("num_leaves", [](const TreeDef& d) { return d.tree.leaves; })
      .def_prop_ro(
          "num_nodes", [](const TreeDef& d) { return d.tree.num_nodes(); }, "Nodes and leaves.")
      .def(
          "is_leaf", [](const TreeDef& d) { return d.tree.is_leaf(); }, "Is this the structure of one leaf?")
      .def("children", &children, nb::sig("def children(self) -> list[PyTreeDef]"))
      .def(
          "compose",
          [](const TreeDef& d, nb::handle inner) {
            nb::object ours = as_treedef(inner);
            return composed(d, nb::cast<const TreeDef&>(ours));
          },
          nb::arg("inner").none(), nb::sig("def compose(self, inner: Any) -> PyTreeDef"),
          "Each leaf replaced by the structure `inner`.")
      .def(
          "from_iterable_tree",
          [](nb::handle self, nb::handle tree) { return hooks::from_iterable_tree.object()(self, tree); },
          nb::arg("tree").none(), nb::sig("def from_iterable_tree(self, tree: Any, /) -> Any"),
          "Builds the tree from one of the same structure in which any iterable may stand for a node.")
      .def(
          "serialize_using_proto",
          [](nb::handle self) {
            return nb::steal(
                check(attribute(nb::object(hooks::to_jax.object()(self)).ptr(), "serialize_using_proto")))();
          },
          nb::sig("def serialize_using_proto(self) -> bytes"), "As JAX's own: containers of Python only.")
      .def_static(
          "deserialize_using_proto",
          [](nb::handle registry, nb::handle data) { return hooks::deserialize_using_proto.object()(registry, data); },
          nb::arg("registry"), nb::arg("data"),
          nb::sig("def deserialize_using_proto(registry: object, data: bytes) -> PyTreeDef"))
      .def(
          "node_data", [](const TreeDef& d) { return node_data(d.tree.nodes[0]); },
          nb::sig("def node_data(self) -> tuple[type, Any] | None"), "(type, aux data) of the root, None for a leaf.")
      .def_static("from_node_data_and_children", &from_node_data_and_children, nb::arg("registry").none(),
                  nb::arg("node_data").none(), nb::arg("children"),
                  nb::sig("def from_node_data_and_children(registry: object, node_data: tuple[type, Any] | None, "
                          "children: Iterable[Any]) -> PyTreeDef"));
}

}  // namespace graftax
