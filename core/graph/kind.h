// SPDX-License-Identifier: Apache-2.0
// A Kind says how to open one value and how to rebuild it. Resolved once per type and cached by type.
#pragma once

#include <memory>

#include "graph/flatten_memo.h"
#include "graph/kinds/node_kind.h"
#include "python/type_cache.h"

namespace graftax {

// What a value is that is not opened.
enum class Leaf : uint8_t {
  none,     // a node
  array,    // dynamic leaf: a jax.Array or a tracer
  numpy,    // dynamic leaf when its dtype is numeric, else static by value
  statics,  // static leaf
  refused,  // a clear error: hidden state that cannot be replayed
};

// How two static leaves of one type are compared.
enum class How : uint8_t {
  identity,  // by pointer
  integer,
  floating,  // by bits; every nan equals every nan
  complex,
  string,
  bytes,
  tuple,     // only for dict keys and set elements: element by element
  reduce,    // by the plain value that the registry's function makes of it
  equal,     // by the type's own == (called here, guarded)
  contents,  // only for dict keys and set elements: by what it is made of (and by pointer, unless it defines ==)
  copied,    // Outcome only: a NumPy array, copied for each call
  function,  // a function without its children: its code, globals and names
  input,     // Outcome only: a key that is one of the caller's nodes (`first` is its tracked index)
  context,   // not at all: it says where the program is running (NNX's trace state), and is made anew by a rebuild
  hashed,    // declared static: by the __eq__ and __hash__ that its class defines, both asked each time, as in jax.jit
};

struct Slot {
  PyObject* name;  // interned, kept for the life of the process
  Py_ssize_t offset;
};

struct Kind : std::enable_shared_from_this<Kind> {
  PyTypeObject* type = nullptr;
  Leaf leaf = Leaf::none;
  Items items = Items::none;  // as in `node`
  const NodeKind* node = &leaf_node;
  How how = How::identity;
  bool tracked = false;  // can be mutated: has an identity in the graph
  bool handed = false;   // an instance of an unregistered class: handed over when no array is below
  bool has_dict = false;
  bool has_del = false;
  bool sentinel = false;      // the class has no methods: an instance without fields counts by identity
  bool opaque = false;        // refused, because C code keeps the state of its instances
  bool own_equality = false;  // the class defines both __eq__ and __hash__
  bool shape = false;         // a jax.ShapeDtypeStruct: a leaf where nothing is run
  bool dynamic = false;       // Python numbers below it are traced
  bool symbolic = false;      // stands for a Python number while a function is traced
  bool scalar = false;        // or for a NumPy scalar, which is an array to a transform inside
  // Its type was registered, or described anew, since: what was recorded with it matches nothing.
  mutable bool stale = false;
  bool unique = false;            // never copied: an instance stands for itself wherever it is rebuilt
  bool expires = false;           // changes only by being used up, which a call by value may drop
  bool immortal_value = false;    // an immutable value: the same pointer is the same value
  PyTypeObject* solid = nullptr;  // whose tp_new makes an empty shell
  std::vector<Slot> slots;
  PyObject* static_fields = nullptr;   // a container of the names of static fields, or null
  PyObject* dynamic_fields = nullptr;  // the same of fields in which Python numbers are traced
  PyObject* context_fields = nullptr;  // a dict: field -> function that makes its value (How::context), or null
  std::vector<PyObject*> order;        // field names whose order is the class's, not the instance's
  // As given to `register`, of a registered node's children; of a named tuple's items.
  std::vector<PyObject*> item_names;
  bool by_name = false;        // it has fields and no slots; they are walked sorted by name, whatever their order
  bool arrays_only = false;    // fields that are no arrays are part of its type for JAX, no leaves
  PyObject* absent = nullptr;  // a field with this value counts as not there
  PyObject* reduce = nullptr;  // How::reduce; How::context: makes a new one
  std::string reason;          // Leaf::refused: why, and the way out

  bool is_leaf() const { return leaf != Leaf::none; }
  bool is_node() const { return leaf == Leaf::none; }
  bool has_fields() const { return has_dict || !slots.empty(); }
};

// Is a node of this kind made empty first and filled later? Then it has an identity.
inline bool is_shell_kind(const Kind& kind) {
  return kind.tracked && !kind.node->is_registered && !kind.node->is_whole;
}

// Can its items be counted without opening it? raw_size() does.
inline bool is_sized(const Kind& kind) { return kind.items <= Items::dict; }

inline Py_ssize_t raw_size(PyObject* obj, const Kind& kind) {
  switch (kind.items) {
    case Items::list: return PyList_GET_SIZE(obj);
    case Items::tuple: return PyTuple_GET_SIZE(obj);
    case Items::dict: return PyDict_GET_SIZE(obj);
    default: return 0;
  }
}

// The kind of `obj`. May call Python for a type seen for the first time.
const Kind& kind_of(PyObject* obj);

// The same for a type of which no instance is at hand: makes an empty one.
const Kind& kind_of_type(PyTypeObject* type);

// The kind if it is known already, else null. Runs no Python code.
const Kind* known_kind(PyTypeObject* type);

// NumPy arrays of text, bytes and dates: their content is static, and can be changed in place.
const Kind& text_array_kind();

// While one lives, a kind that is forgotten stays readable: a walk that runs user code holds one.
using KindHold = TypeTable<Kind>::Hold;

// The next instance is looked at anew.
void forget_kind(PyTypeObject* type);

void init_kinds();
void bind_kinds(nb::module_& m);

// An empty mutable node of this kind (or an immutable one with fields only), without running user code.
Owned make_shell(const Kind& kind, PyTypeObject* type);

inline PyObject* slot_value(PyObject* obj, const Slot& slot) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(obj) + slot.offset);
}

// Iterates over the children of one open node, in the order of the program: the extra child (aux data of a
// registered node, factory of a defaultdict), the items, the instance dictionary, the slots.
// The node is held; a child is borrowed from it and must be held by whoever runs user code before using it.
class Cursor {
 public:
  enum class Stage : uint8_t { extra, items, fields, slots, done };

  // With `opened`, a registered class that a walk before has asked is not asked again.
  Cursor(PyObject* obj, const Kind& kind, Opened* opened = nullptr);

  // The next child, or false at the end. `key` is the dict key or field name, null for sequence items.
  bool next(PyObject*& child, PyObject*& key) {
    bool more = advance(child, key);
    key_ = key;
    return more;
  }

  // Goes on over plain children as long as `take(child, key)` accepts them; the first one that it does not accept is
  // the next one still. `take` runs no Python code. Children that must be asked for or sorted are left to `next`.
  template <class Take>
  void skim(Take take) {
    if (stage_ == Stage::extra && !extra_) stage_ = Stage::items;
    if (stage_ == Stage::items) skim_items(take);
    if (stage_ == Stage::fields && !dict_) stage_ = Stage::slots;
    if (stage_ == Stage::fields && !kind_->by_name && !hidden_) skim_fields(take);
    if (stage_ == Stage::slots && !kind_->node->is_registered) skim_slots(take);
  }

  Stage stage() const { return child_stage_; }  // of the child returned last
  Py_ssize_t items() const { return size_; }
  Py_ssize_t fields() const { return fields_; }
  Py_ssize_t index() const { return index_; }  // of the child returned last, within its stage
  PyObject* object() const { return obj_.get(); }
  const Kind& kind() const { return *kind_; }
  // Kinds whose fields go by name: one field, borrowed; null where it is not there.
  PyObject* named(PyObject* name) const { return dict_get(dict_.get(), name); }
  PyObject* key() const { return key_; }  // of the child returned last; borrowed
  bool started() const { return index_ >= 0; }
  PyObject* materialised() const { return items_.get(); }
  PyObject* extra() const { return extra_.get(); }
  // Is the node its own instance dictionary? Then it has no fields but its items.
  bool own_dict() const { return own_dict_; }
  // The instance dictionary where something else than the node and this cursor holds it, else null.
  PyObject* shared_dict() const { return dict_ && Py_REFCNT(dict_.get()) > 2 ? dict_.get() : nullptr; }
  // False when the sizes read at opening no longer hold: user code changed the node meanwhile.
  bool intact() const;
  // Was every slot met, or is there none?
  bool slots_met() const {
    return kind_->slots.empty() || (stage_ == Stage::slots && static_cast<size_t>(i_) == kind_->slots.size());
  }
  bool fields_intact() const { return !dict_ || PyDict_GET_SIZE(dict_.get()) == dict_size_; }

 private:
  template <class Take>
  void skim_items(Take take);
  template <class Take>
  void skim_fields(Take take);
  template <class Take>
  void skim_slots(Take take);
  bool advance(PyObject*& child, PyObject*& key);
  bool next_item(PyObject*& child, PyObject*& key);
  bool next_ordered(PyObject*& child, PyObject*& key);
  bool next_named(PyObject*& child, PyObject*& key);

  Owned obj_;
  const Kind* kind_;
  // What had to be listed: keys of an ordered dict, sorted names, items of a deque, children of a registered node.
  Owned items_;
  Owned extra_;
  Owned dict_;
  PyObject* hidden_ = nullptr;  // the name of an instance attribute that is skipped
  Py_ssize_t size_ = 0;
  Py_ssize_t fields_ = 0;
  Py_ssize_t dict_size_ = 0;
  Py_ssize_t fields_returned_ = 0;
  bool own_dict_ = false;
  bool in_step_ = true;  // so far the instance dictionary has the class's order, and is iterated instead of asked
  Py_ssize_t pos_ = 0;   // of PyDict_Next, in the dict of the present stage
  Py_ssize_t i_ = 0;     // the next child of the present stage
  Py_ssize_t index_ = -1;
  PyObject* key_ = nullptr;
  Stage stage_ = Stage::extra;        // of the child that comes next
  Stage child_stage_ = Stage::extra;  // of the child returned last
};

inline bool is_number(PyObject* obj, const Kind& kind) {
  return kind.leaf == Leaf::statics && (kind.symbolic || kind.how == How::integer || kind.how == How::floating ||
                                        kind.how == How::complex || PyBool_Check(obj));
}

// Has this object neither attributes nor filled slots?
inline bool is_bare(PyObject* obj, const Kind& kind) {
  for (const Slot& slot : kind.slots)
    if (slot_value(obj, slot)) return false;
  return !kind.has_dict || PyDict_GET_SIZE(instance_dict(obj).get()) == 0;
}

template <class Take>
inline void Cursor::skim_items(Take take) {
  PyObject *obj = obj_.get(), *child = nullptr, *key = nullptr;
  switch (kind_->items) {
    case Items::none: stage_ = Stage::fields; break;
    case Items::dict:
      for (Py_ssize_t at = pos_; PyDict_Next(obj, &at, &key, &child) && take(child, key); ++i_) pos_ = at;
      break;
    case Items::list:
      while (i_ < PyList_GET_SIZE(obj) && (child = PyList_GET_ITEM(obj, i_)) && take(child, nullptr)) ++i_;
      break;
    case Items::tuple:
      while (i_ < size_ && (child = PyTuple_GET_ITEM(obj, i_)) && take(child, nullptr)) ++i_;
      break;
    default: break;
  }
}

template <class Take>
inline void Cursor::skim_fields(Take take) {
  PyObject *dict = dict_.get(), *child = nullptr, *key = nullptr;
  const std::vector<PyObject*>& order = kind_->order;
  if (order.empty()) {
    for (Py_ssize_t at = pos_; PyDict_Next(dict, &at, &key, &child) && take(child, key); ++i_) pos_ = at;
    return;
  }
  // Only as long as the instance dictionary has the names in the class's order: for others each name is looked up.
  if (!in_step_ || static_cast<size_t>(i_) >= order.size()) return;
  PyObject *const *const first = order.data() + i_, *const *const end = order.data() + order.size();
  PyObject* const* name = first;
  PyObject* const absent = kind_->absent;
  for (Py_ssize_t at = pos_; name != end; ++name) {
    if (!PyDict_Next(dict, &at, &key, &child) || key != *name || child == absent || !take(child, key)) break;
    pos_ = at;
  }
  i_ += name - first;
  fields_returned_ += name - first;
}

template <class Take>
inline void Cursor::skim_slots(Take take) {
  for (; static_cast<size_t>(i_) < kind_->slots.size(); ++i_) {
    const Slot& slot = kind_->slots[static_cast<size_t>(i_)];
    PyObject* child = slot_value(obj_.get(), slot);
    if (child && !take(child, slot.name)) return;
  }
}

inline bool Cursor::next_item(PyObject*& child, PyObject*& key) {
  PyObject* obj = obj_.get();
  switch (kind_->items) {
    case Items::list:
      if (i_ >= PyList_GET_SIZE(obj)) return false;
      child = PyList_GET_ITEM(obj, i_);
      break;
    case Items::tuple:
      if (i_ >= size_) return false;
      child = PyTuple_GET_ITEM(obj, i_);
      break;
    case Items::dict:
      if (!PyDict_Next(obj, &pos_, &key, &child)) return false;
      break;
    case Items::listed:
      if (i_ >= size_) return false;
      child = PySequence_Fast_GET_ITEM(items_.get(), i_);
      break;
    case Items::keyed:
      if (i_ >= size_) return false;
      key = PyList_GET_ITEM(items_.get(), i_);
      if (!(child = dict_get(obj, key))) return false;
      break;
    case Items::asked:
      if (i_ >= size_ || !(child = kind_->node->item(obj, i_))) return false;
      break;
    case Items::none: return false;
  }
  if (!child) raise_error(PyExc_RuntimeError, "a container was seen half filled");
  index_ = i_++;
  return true;
}

inline bool Cursor::advance(PyObject*& child, PyObject*& key) {
  key = nullptr;
  for (;;) {
    switch (stage_) {
      case Stage::extra:
        stage_ = Stage::items;
        if (extra_) {
          child = extra_.get();
          child_stage_ = Stage::extra;
          index_ = 0;
          return true;
        }
        break;
      case Stage::items:
        if (next_item(child, key)) {
          child_stage_ = Stage::items;
          return true;
        }
        stage_ = Stage::fields;
        pos_ = 0;
        i_ = 0;
        break;
      case Stage::fields:
        if (kind_->by_name) {
          if (next_named(child, key)) {
            child_stage_ = Stage::fields;
            index_ = i_++;
            return true;
          }
        } else if (!kind_->order.empty() && dict_) {  // slots have an order of their own
          if (next_ordered(child, key)) {
            child_stage_ = Stage::fields;
            index_ = fields_returned_ - 1;
            return true;
          }
        } else if (dict_ && PyDict_Next(dict_.get(), &pos_, &key, &child) &&
                   (!hidden_ || key != hidden_ || PyDict_Next(dict_.get(), &pos_, &key, &child))) {
          child_stage_ = Stage::fields;
          index_ = i_++;
          return true;
        }
        stage_ = Stage::slots;
        i_ = 0;
        break;
      case Stage::slots: {
        const auto& slots = kind_->slots;
        if (kind_->node->is_registered) {
          stage_ = Stage::done;
          return false;
        }
        while (static_cast<size_t>(i_) < slots.size()) {
          const Slot& slot = slots[static_cast<size_t>(i_++)];
          child = slot_value(obj_.get(), slot);
          if (!child) continue;
          key = slot.name;
          child_stage_ = Stage::slots;
          index_ = i_ - 1;
          return true;
        }
        stage_ = Stage::done;
        return false;
      }
      case Stage::done: return false;
    }
  }
}

inline bool Cursor::next_ordered(PyObject*& child, PyObject*& key) {
  const auto& order = kind_->order;
  while (static_cast<size_t>(i_) < order.size()) {
    PyObject* name = order[static_cast<size_t>(i_++)];
    // At the first name that is elsewhere in the dictionary, iterating ends, and names are looked up.
    in_step_ = in_step_ && PyDict_Next(dict_.get(), &pos_, &key, &child) && key == name;
    if (!in_step_) child = dict_get(dict_.get(), name);
    if (!child || child == kind_->absent) continue;
    key = name;
    ++fields_returned_;
    return true;
  }
  if (fields_returned_ == fields_) return false;
  if (i_ == static_cast<Py_ssize_t>(order.size())) {  // attributes that the class does not declare follow
    ++i_;
    pos_ = 0;
  }
  while (PyDict_Next(dict_.get(), &pos_, &key, &child)) {
    bool declared = child == kind_->absent;
    for (size_t k = 0; !declared && k < order.size(); ++k) declared = order[k] == key;
    if (declared) continue;
    ++fields_returned_;
    return true;
  }
  return false;
}

}  // namespace graftax
