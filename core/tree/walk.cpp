// SPDX-License-Identifier: Apache-2.0
#include "tree/walk.h"

#include <algorithm>
#include <unordered_map>

#include "python/hooks.h"
#include "tree/attribute_schema.h"
#include "tree/build.h"
#include "tree/cache.h"
#include "tree/sorted_keys.h"

namespace graftax {

namespace {

// A field of an instance, borrowed or newly made; empty where it is absent.
Owned read_field(PyObject* obj, PyObject* dict, PyObject* name, const TreeKind& kind) {
  if (dict) {
    PyObject* value = dict_get(dict, name);
    if (value) return Owned::borrow(value);
    if (kind.absent) return Owned::borrow(kind.absent.get());
  }
  return own(PyObject_GetAttr(obj, name));
}

// The names in `dict` one after the other, as long as the dictionary has them in this order: a pointer comparison for
// each, no lookup.
class FieldReader {
 public:
  FieldReader(PyObject* obj, const TreeKind& kind) : obj_(obj), kind_(kind) {
    if (kind.in_dict) dict_ = instance_dict(obj);
  }
  PyObject* dict() const { return dict_.get(); }

  // Calls take(value) for each name that comes next in the dictionary; how many these are.
  template <class Take>
  size_t read_in_step(const std::vector<PyObject*>& names, Take take) {
    if (!dict_) return 0;
    PyObject *key, *value;
    size_t n = 0;
    for (Py_ssize_t next = pos_; n < names.size() && PyDict_Next(dict_.get(), &next, &key, &value) && key == names[n];
         ++n) {
      pos_ = next;
      take(value);
    }
    return n;
  }
  Owned read(PyObject* name) { return read_field(obj_, dict_.get(), name, kind_); }

 private:
  PyObject* obj_;
  const TreeKind& kind_;
  Owned dict_;
  Py_ssize_t pos_ = 0;
};

// What a registered flatten gave: (children, aux data), the children listed.
template <class Sink>
Owned call_flatten(PyObject* obj, const TreeKind& kind, Sink& children) {
  Owned pair = own(PyObject_CallOneArg(kind.flatten.get(), obj));
  if (!PyTuple_Check(pair.get()) || PyTuple_GET_SIZE(pair.get()) != 2)
    raise_error(PyExc_ValueError, std::string("the flatten function of ") + kind.type->tp_name +
                                      " must return a tuple (children, aux_data), and returned " +
                                      short_repr(pair.get()));
  Owned listed = Owned::steal(PySequence_Tuple(PyTuple_GET_ITEM(pair.get(), 0)));
  if (!listed) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) raise_python();
    PyErr_Clear();
    raise_error(PyExc_ValueError,
                std::string("the flatten function of ") + kind.type->tp_name +
                    " must return a tuple (children, aux_data) whose children can be iterated over, and "
                    "returned " +
                    short_repr(pair.get()));
  }
  follow_registry();  // flatten may have registered the types of its children
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(listed.get()); ++i) children.push(PyTuple_GET_ITEM(listed.get(), i));
  return Owned::borrow(PyTuple_GET_ITEM(pair.get(), 1));
}

template <class Sink>
Owned open_fields(PyObject* obj, const TreeKind& kind, Sink& children) {
  FieldReader reader(obj, kind);
  // An instance with other attributes than its fields is opened by the class's own function.
  if (kind.size >= 0 && (!reader.dict() || PyDict_GET_SIZE(reader.dict()) != kind.size))
    return call_flatten(obj, kind, children);
  size_t count = reader.read_in_step(kind.children, [&](PyObject* value) { children.push(value); });
  for (; count < kind.children.size(); ++count) children.push_stolen(reader.read(kind.children[count]));
  if (kind.no_data) return Owned::borrow(kind.no_data.get());
  Py_ssize_t first = kind.absent ? 1 : 0;
  Owned data = own(PyTuple_New(first + static_cast<Py_ssize_t>(kind.others.size())));
  if (first) PyTuple_SET_ITEM(data.get(), 0, Py_NewRef(kind.absent.get()));
  size_t read = reader.read_in_step(kind.others,
                                    [&](PyObject* value) { PyTuple_SET_ITEM(data.get(), first++, Py_NewRef(value)); });
  for (; read < kind.others.size(); ++read)
    PyTuple_SET_ITEM(data.get(), first++, reader.read(kind.others[read]).release());
  return data;
}

// By schema, where there is one for this instance. With `entries`, also the key path entries of the children.
template <class Sink>
Owned open_by_schema(PyObject* obj, const TreeKind& kind, Sink& children, OwnedList* entries = nullptr) {
  if (!kind.schemas) return {};
  AttributeValues values;
  Schema* schema = schema_of(obj, kind, values);
  if (!schema) return {};
  for (uint32_t i : schema->children) children.push(values[i]);
  for (Py_ssize_t i = 0; entries && i < PyTuple_GET_SIZE(schema->entries.get()); ++i)
    entries->push(PyTuple_GET_ITEM(schema->entries.get(), i));
  return data_by_schema(kind, *schema, values);
}

template <class Sink>
void push_items(PyObject* obj, Sink& children) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(obj); ++i) children.push(PyTuple_GET_ITEM(obj, i));
}

Owned push_sorted(PyObject* dict, OwnedList& children) { return sorted_items(dict, children); }

template <class Sink>
Owned push_sorted(PyObject* dict, Sink& children) {
  OwnedList values;
  Owned keys = sorted_items(dict, values);
  for (size_t i = 0; i < values.size(); ++i) children.push_stolen(Owned::steal(values.release(i)));
  return keys;
}

// The children of a node, pushed in order. The result is its data; empty where its role has none.
template <class Sink>
Owned open_node(PyObject* obj, const TreeKind& kind, Sink& children) {
  switch (kind.role) {
    case Role::leaf:
    case Role::none: return {};
    case Role::list:
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(obj); ++i) children.push(PyList_GET_ITEM(obj, i));
      return {};
    case Role::tuple:
    case Role::namedtuple: push_items(obj, children); return {};
    case Role::dict: return push_sorted(obj, children);
    case Role::defaultdict: {
      Owned keys = push_sorted(obj, children);
      Owned factory = own(attribute(obj, "default_factory"));
      return own(PyTuple_Pack(2, factory.get(), keys.get()));
    }
    case Role::odict: {
      Owned keys = own(PySequence_Tuple(obj));
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keys.get()); ++i) {
        PyObject* value = dict_get(obj, PyTuple_GET_ITEM(keys.get(), i));
        if (!value) raise_error(PyExc_RuntimeError, "an OrderedDict changed while it was flattened");
        children.push(value);
      }
      return keys;
    }
    case Role::fields: return open_fields(obj, kind, children);
    case Role::registered: {
      Owned data = open_by_schema(obj, kind, children);
      return data ? std::move(data) : call_flatten(obj, kind, children);
    }
  }
  return {};
}

// The walk: a stack of values to visit, and of the nodes that are open.
class TreeWalk {
 public:
  explicit TreeWalk(const WalkRequest& request) : request_(request), structure_(request.structure) {
    if (structure_) {
      structure_->nodes.swap(node_pool);
      structure_->nodes.reserve(16);  // a small tree needs one allocation
    }
    open_.swap(pool_);
  }
  ~TreeWalk() {
    open_.clear();
    if (open_.capacity() < deep) open_.swap(pool_);
  }

  void run(PyObject* tree) {
    visit(Owned::borrow(tree));
    while (!open_.empty()) {
      Open& top = open_.back();
      if (top.left == 0) {
        if (structure_) structure_->close(top.node);
        open_.pop_back();
        if (request_.is_leaf_takes_path) open_entries_.pop_back();
        run_of_leaves_ = false;
        continue;
      }
      if (request_.is_leaf_takes_path) top_entry(top.left);
      --top.left;
      visit(pending_.take());
    }
    if (structure_ && structure_->nodes.size() >= large)
      last_large_ = {structure_->nodes.size(), request_.leaves->size()};
  }

 private:
  struct Open {
    uint32_t node;
    uint32_t left;  // children that wait in `pending_`
    Owned obj;
  };

  // The last entry of the current path becomes that of the child that comes next.
  void top_entry(uint32_t left) {
    const OwnedList& top = open_entries_.back();
    entries_.resize(open_.size() - 1);
    entries_.push(top[top.size() - left]);
  }

  void leaf(Owned obj) {
    request_.leaves->push_stolen(std::move(obj));
    if (structure_) structure_->add_leaves(1, run_of_leaves_);
    run_of_leaves_ = true;
  }

  bool stops_here(PyObject* obj) const {
    if (!request_.is_leaf) return false;
    Owned answer;
    if (request_.is_leaf_takes_path) {
      Owned path = tuple_of(entries_.data(), entries_.size());
      answer = own(PyObject_CallFunctionObjArgs(request_.is_leaf, path.get(), obj, nullptr));
    } else {
      answer = own(PyObject_CallOneArg(request_.is_leaf, obj));
    }
    follow_registry();  // is_leaf may have registered a type
    if (answer.get() == Py_True) return true;
    if (answer.get() != Py_False && answer.get() != Py_None)
      raise_error(PyExc_ValueError, "is_leaf must return a bool, and returned " + short_repr(answer.get()));
    return false;
  }

  void visit(Owned obj) {
    if (stops_here(obj.get())) return leaf(std::move(obj));
    const TreeKind& kind = tree_kind_of(Py_TYPE(obj.get()));
    if (!kind.is_node()) return leaf(std::move(obj));
    size_t floor = pending_.size();
    if (structure_ && structure_->nodes.size() >= large && structure_->nodes.size() + 2 > structure_->nodes.capacity())
      make_room();
    uint32_t node = structure_ ? structure_->open(kind, 0, nullptr) : 0;
    uint32_t leading = 0;
    if (request_.is_leaf) {
      open_children(node, obj.get(), kind, pending_);
    } else {
      // Leaves before the first node among the children are taken at once.
      Leading sink{*this};
      open_children(node, obj.get(), kind, sink);
      leading = sink.leaves;
      if (leading && structure_) structure_->add_leaves(leading, false);
    }
    run_of_leaves_ = leading != 0;
    auto rest = static_cast<uint32_t>(pending_.size() - floor);
    if (structure_) structure_->nodes[node].arity = leading + rest;
    if (rest == 0) {
      if (structure_) structure_->close(node);
      run_of_leaves_ = false;
      return;
    }
    // The next value to visit is the last one.
    std::reverse(pending_.data() + floor, pending_.data() + floor + rest);
    open_.push_back({node, rest, std::move(obj)});
    if (request_.is_leaf_takes_path) entries_of(node, open_entries_.emplace_back());
    // At each doubling of the depth, so that the search for cycles takes no more time than the walk.
    if (open_.size() >= deep && (open_.size() & (open_.size() - 1)) == 0) refuse_cycles();
  }

  // Where the children of a node go as they are found: leaves to the leaves, until the first node.
  struct Leading {
    TreeWalk& walk;
    uint32_t leaves = 0;
    bool over = false;
    PyTypeObject* leaf_type = nullptr;  // of the child before: often that of the next one

    void push(PyObject* p) { (is_leaf(p) ? *walk.request_.leaves : walk.pending_).push(p); }
    // Moved: taking a reference and dropping it at once stalls, because the count is written in one size and read in
    // another.
    void push_stolen(Owned p) { (is_leaf(p.get()) ? *walk.request_.leaves : walk.pending_).push_stolen(std::move(p)); }

    bool is_leaf(PyObject* p) {
      if (over) return false;
      if (Py_TYPE(p) != leaf_type) {
        const TreeKind* kind = known_tree_kind(Py_TYPE(p));
        over = !kind || kind->is_node();
        if (over) return false;
        leaf_type = Py_TYPE(p);
      }
      ++leaves;
      return true;
    }
  };

  template <class Sink>
  void open_children(uint32_t node, PyObject* obj, const TreeKind& kind, Sink& sink) {
    // Only where somebody wants key paths is a registered class asked for the names of its children.
    bool wants_names = kind.role == Role::registered && (request_.named || request_.is_leaf_takes_path);
    bool named = wants_names && kind.names != Names::flat;
    Owned data = named ? open_named(node, obj, kind, sink) : open_node(obj, kind, sink);
    if (!structure_) return;
    if (kind.role == Role::fields && data_ && PyTuple_CheckExact(data.get()) && same_items(data.get(), data_)) {
      structure_->nodes[node].data = data_;  // one tuple for all modules with the same static fields
    } else {
      structure_->set_data(node, data.get());
      data_ = kind.role == Role::fields && PyTuple_CheckExact(data.get()) ? data.get() : nullptr;
    }
  }

  // A node that may name its children itself.
  template <class Sink>
  Owned open_named(uint32_t node, PyObject* obj, const TreeKind& kind, Sink& sink) {
    OwnedList entries, children;
    Owned data = open_by_schema(obj, kind, sink, &entries);
    if (data) {
      named().push_back({node, std::move(entries)});
      return data;
    }
    data = open_with_keys(obj, kind, entries, children);
    if (!data) return open_node(obj, kind, sink);
    for (size_t i = 0; i < children.size(); ++i) sink.push_stolen(Owned::steal(children.release(i)));
    if (kind.names != Names::flat) named().push_back({node, std::move(entries)});
    return data;
  }

  // As much as the last large tree took: often it is the same one. Growing step by step touches twice the memory.
  void make_room() {
    structure_->nodes.reserve(std::max(2 * structure_->nodes.size(), last_large_.first));
    request_.leaves->reserve(last_large_.second);
  }

  NamedNodes& named() { return request_.named ? *request_.named : own_named_; }

  void entries_of(uint32_t node, OwnedList& entries) {
    if (named().empty() || named().back().node != node) return child_entries(structure_->nodes[node], entries);
    const OwnedList& own = named().back().entries;
    for (size_t i = 0; i < own.size(); ++i) entries.push(own[i]);
  }

  // A node that is met below itself makes a tree without end. So do flatten functions that make new nodes at every
  // level: such nodes are held by this walk and by one another alone. Either would fill the memory.
  void refuse_cycles() const {
    size_t made = 0;
    for (const Open& o : open_) {
      Py_ssize_t refs = Py_REFCNT(o.obj.get());
      made = refs == 1 || (refs == 2 && made) ? made + 1 : 0;
    }
    if (made >= deep)
      raise_error(PyExc_RecursionError,
                  "this is no tree: the flatten function of " + short_repr_of_type(open_.back().obj.get()) +
                      " makes new nodes without end, " + std::to_string(open_.size()) + " levels of them.");
    std::unordered_map<PyObject*, size_t> seen;
    for (size_t i = 0; i < open_.size(); ++i) {
      auto [first, is_new] = seen.emplace(open_[i].obj.get(), i);
      if (is_new) continue;
      std::string steps;
      for (size_t k = first->second; k < i && k < first->second + 6; ++k) {
        steps += std::string(steps.empty() ? "" : " > ") + Py_TYPE(open_[k].obj.get())->tp_name;
      }
      raise_error(PyExc_RecursionError, "this is no tree: " + short_repr_of_type(open_[i].obj.get()) +
                                            " contains itself (by way of " + steps +
                                            "). graftax.flatten and graftax.jit take graphs with cycles.");
    }
  }

  static std::string short_repr_of_type(PyObject* obj) { return std::string("a ") + Py_TYPE(obj)->tp_name; }

  static constexpr size_t deep = 1024;
  static constexpr size_t large = 1024;  // records
  inline static std::pair<size_t, size_t> last_large_{};

  const WalkRequest& request_;
  Structure* structure_;  // null: not wanted
  NamedNodes own_named_;
  OwnedList pending_;  // values to visit, the next one last
  OwnedList entries_;  // the current path, where is_leaf takes paths
  std::vector<Open> open_;
  inline static std::vector<Open> pool_;  // memory for the next walk; a walk within a walk finds none
  std::vector<OwnedList> open_entries_;   // of the children of open nodes, where is_leaf takes paths
  PyObject* data_ = nullptr;              // of the node with fields that was opened last; the structure holds it
  bool run_of_leaves_ = false;
};

// Are these the children of a node like `n`? Pushes them, the first one last.
bool match_node(const TreeNode& n, PyObject* obj, OwnedList& pending) {
  const TreeKind& kind = tree_kind_of(Py_TYPE(obj));
  if (kind.role != n.role || kind.type != n.kind->type) return false;
  size_t floor = pending.size();
  Py_ssize_t arity = n.arity;
  switch (n.role) {
    case Role::none: return true;
    case Role::list:
      if (PyList_GET_SIZE(obj) != arity) return false;
      for (Py_ssize_t i = arity; i-- > 0;) pending.push(PyList_GET_ITEM(obj, i));
      return true;
    case Role::tuple:
    case Role::namedtuple:
      if (PyTuple_GET_SIZE(obj) != arity) return false;
      for (Py_ssize_t i = arity; i-- > 0;) pending.push(PyTuple_GET_ITEM(obj, i));
      return true;
    case Role::dict:
      if (PyDict_GET_SIZE(obj) != arity) return false;
      for (Py_ssize_t i = arity; i-- > 0;) {
        PyObject* value = dict_get(obj, PyTuple_GET_ITEM(n.data, i));
        if (!value) return false;
        pending.push(value);
      }
      return true;
    default: {
      Owned data = open_node(obj, kind, pending);
      if (pending.size() - floor != n.arity) return false;
      if (data.get() != n.data && !equal(n.data, data.get())) return false;
      std::reverse(pending.data() + floor, pending.data() + floor + arity);
      return true;
    }
  }
}

}  // namespace

void take_up_to(const Structure& prefix, PyObject* tree, OwnedList& out) {
  // In step with the records of the prefix: the next value belongs to the next record.
  OwnedList pending;
  pending.push(tree);
  for (const TreeNode& n : prefix.nodes) {
    if (n.role == Role::leaf) {
      for (uint32_t k = 0; k < n.arity; ++k) out.push_stolen(pending.take());
      continue;
    }
    Owned obj = pending.take();
    if (!match_node(n, obj.get(), pending)) throw Mismatch{};
  }
}

void walk_tree(PyObject* tree, const WalkRequest& request) { TreeWalk(request).run(tree); }

Owned open_with_keys(PyObject* obj, const TreeKind& kind, OwnedList& entries, OwnedList& children) {
  if (hooks::open_with_keys.get() == Py_None) return {};
  // By the class's own function for it, once that is known; the first object shows whether there is one.
  Owned opened;
  if (kind.with_keys) {
    opened = own(PyObject_CallOneArg(kind.with_keys.get(), obj));
  } else if (kind.names == Names::unknown) {
    Owned answer = hooks::open_first(kind.flatten.get(), obj);
    opened = Owned::borrow(PyTuple_GET_ITEM(answer.get(), 0));
    PyObject* who = PyTuple_GET_ITEM(answer.get(), 1);
    if (who != Py_None) kind.names = who == Py_False ? Names::flat : Names::asked;
    if (who != Py_None && !PyBool_Check(who)) kind.with_keys = Owned::borrow(who);
  } else {
    opened = hooks::open_with_keys(obj);
  }
  auto is_pair = [](PyObject* p) { return PyTuple_Check(p) && PyTuple_GET_SIZE(p) == 2; };
  auto refuse = [&](PyObject* shown) {
    raise_error(PyExc_ValueError, std::string("the flatten function with keys of ") + Py_TYPE(obj)->tp_name +
                                      " must return (pairs of key and child, aux_data), and returned " +
                                      short_repr(shown));
  };
  if (!is_pair(opened.get())) refuse(opened.get());
  Owned pairs = own(PySequence_Tuple(PyTuple_GET_ITEM(opened.get(), 0)));
  follow_registry();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pairs.get()); ++i) {
    PyObject* pair = PyTuple_GET_ITEM(pairs.get(), i);
    if (!is_pair(pair)) refuse(pair);
    entries.push(PyTuple_GET_ITEM(pair, 0));
    children.push(PyTuple_GET_ITEM(pair, 1));
  }
  return Owned::borrow(PyTuple_GET_ITEM(opened.get(), 1));
}

Owned open_tree_node(PyObject* obj, const TreeKind& kind, OwnedList& children) {
  return open_node(obj, kind, children);
}

}  // namespace graftax
