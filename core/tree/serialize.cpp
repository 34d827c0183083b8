// SPDX-License-Identifier: Apache-2.0
#include "tree/serialize.h"

#include "python/hooks.h"
#include "tree/walk.h"

namespace graftax {

namespace {

// Do its class and the number of its children say all?
bool has_no_data(const TreeKind& kind) { return kind.role < Role::dict || kind.role == Role::namedtuple; }

}  // namespace

Owned kept_data(const TreeKind& kind, PyObject* data) {
  if (kind.role == Role::dict) return own(PySequence_Tuple(data));  // node data have a list: JAX's own do
  if (has_no_data(kind)) return {};
  return Owned::borrow(data);
}

void check_data(const TreeKind& kind, PyObject* data, size_t arity) {
  PyObject* keys = data;
  if (kind.role == Role::defaultdict) {
    bool pair = data && PyTuple_Check(data) && PyTuple_GET_SIZE(data) == 2;
    keys = pair ? PyTuple_GET_ITEM(data, 1) : nullptr;
  }
  bool good = true;
  if (is_dict_role(kind.role))
    good = keys && PyTuple_Check(keys) && PyTuple_GET_SIZE(keys) == static_cast<Py_ssize_t>(arity);
  if (kind.role == Role::none) good = arity == 0;
  if (kind.role == Role::fields)
    good = data && PyTuple_Check(data) && arity == kind.children.size() &&
           PyTuple_GET_SIZE(data) == static_cast<Py_ssize_t>(kind.others.size() + (kind.absent ? 1 : 0));
  if (!good)
    raise_error(PyExc_ValueError, std::string("these are not the node data of a ") + kind.type->tp_name + " with " +
                                      std::to_string(arity) + " children: " + (data ? short_repr(data) : "nothing"));
}

const TreeKind& kind_of_node_data(PyObject* pair) {
  if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2 || !PyType_Check(PyTuple_GET_ITEM(pair, 0)))
    raise_error(PyExc_TypeError, "node data are a pair (type, data), or None for a leaf");
  const TreeKind& kind = tree_kind_of(reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(pair, 0)));
  if (!kind.is_node()) raise_error(PyExc_ValueError, std::string(kind.type->tp_name) + " is no node type");
  return kind;
}

namespace {

// Node data with what stands for an absent field replaced: that is one object in each process, and no pickle keeps it.
Owned with_mark(const TreeKind& kind, PyObject* data, bool back) {
  if (!data) return Owned::borrow(Py_None);
  if (kind.role != Role::fields || !kind.absent) return Owned::borrow(data);
  nb::object replaced = hooks::replaced.object(), mark = hooks::absent_mark.object().attr("ABSENT");
  nb::object absent = nb::borrow(kind.absent.get());
  nb::object out = back ? replaced(nb::handle(data), mark, absent) : replaced(nb::handle(data), absent, mark);
  return Owned::steal(out.release().ptr());
}

[[noreturn]] void refuse_records() { raise_error(PyExc_ValueError, "this is not a pickled tree structure"); }

// A structure made of its records, given in pre-order. They may come from a damaged file: what is counted here is what
// the walks rely on, so that none leaves the arrays.
class FromRecords {
 public:
  // Leaves side by side, of one parent.
  void leaves(uint32_t count) {
    // Not behind the end, and no more than the parent has children.
    if (done_ || count == 0 || (open_.empty() ? count != 1 : open_.back().second < count)) refuse_records();
    out_.tree.add_leaves(count, run_);
    run_ = true;
    if (!open_.empty()) open_.back().second -= count;
    close();
  }
  void node(const TreeKind& kind, uint32_t arity, PyObject* data) {
    if (done_ || (!open_.empty() && open_.back().second == 0)) refuse_records();
    // What walks read unchecked is checked: data of dicts, fields and the like, and that None has no children.
    bool empty = has_no_data(kind);
    if (!empty || kind.role == Role::none) check_data(kind, data, arity);
    if (!open_.empty()) --open_.back().second;
    open_.emplace_back(out_.tree.open(kind, arity, empty ? nullptr : data), arity);
    run_ = false;
    close();
  }
  TreeDef take() {
    if (!done_) refuse_records();
    out_.tree.keep_kinds();
    return std::move(out_);
  }

 private:
  void close() {
    while (!open_.empty() && open_.back().second == 0) {
      out_.tree.close(open_.back().first);
      open_.pop_back();
      run_ = false;
    }
    done_ = open_.empty();
  }

  TreeDef out_;
  std::vector<std::pair<uint32_t, uint32_t>> open_;  // record, children still to come
  bool run_ = false, done_ = false;
};

}  // namespace

nb::list state_of(const TreeDef& def) {
  nb::list out;
  for (const TreeNode& n : def.tree.nodes) {
    if (!n.kind) {
      out.append(nb::make_tuple(0, n.arity, nb::none(), nb::none()));
      continue;
    }
    nb::object data = nb::steal(with_mark(*n.kind, n.data, false).release());
    out.append(
        nb::make_tuple(static_cast<int>(n.role), n.arity, nb::borrow(reinterpret_cast<PyObject*>(n.kind->type)), data));
  }
  return out;
}

TreeDef from_state(nb::list state) {
  Walking walking;
  FromRecords out;
  for (nb::handle h : state) {
    if (!PyTuple_Check(h.ptr()) || PyTuple_GET_SIZE(h.ptr()) != 4) refuse_records();
    auto role = nb::cast<int>(h[0]);
    auto arity = nb::cast<uint32_t>(h[1]);
    PyObject *type = PyTuple_GET_ITEM(h.ptr(), 2), *data = PyTuple_GET_ITEM(h.ptr(), 3);
    if (role == 0) {
      out.leaves(arity);
      continue;
    }
    if (!PyType_Check(type)) refuse_records();
    const TreeKind& kind = tree_kind_of(reinterpret_cast<PyTypeObject*>(type));
    // The data of another registration would be given to the wrong constructor.
    if (static_cast<int>(kind.role) != role)
      raise_error(PyExc_ValueError, std::string(kind.type->tp_name) +
                                        " is registered in another way than when this structure was pickled");
    out.node(kind, arity, with_mark(kind, data, true).get());
  }
  return out.take();
}

nb::list records_of(const TreeDef& def) {
  nb::list out;
  for (const TreeNode& n : def.tree.nodes) out.append(nb::make_tuple(node_data(n), n.arity));
  return out;
}

TreeDef from_records(nb::list records) {
  Walking walking;
  FromRecords out;
  for (nb::handle h : records) {
    if (!PyTuple_Check(h.ptr()) || PyTuple_GET_SIZE(h.ptr()) != 2) refuse_records();
    PyObject* data = PyTuple_GET_ITEM(h.ptr(), 0);
    auto arity = nb::cast<uint32_t>(h[1]);
    if (data == Py_None) {
      out.leaves(arity);
      continue;
    }
    const TreeKind& kind = kind_of_node_data(data);
    out.node(kind, arity, kept_data(kind, PyTuple_GET_ITEM(data, 1)).get());
  }
  return out.take();
}

}  // namespace graftax
