// SPDX-License-Identifier: Apache-2.0
// How `jax.tree` sees a type: as a leaf, or as a node of which role.
#pragma once

#include "python/jax_registry.h"
#include "python/type_cache.h"

namespace graftax {

enum class Role : uint8_t {
  leaf,
  none,
  list,
  tuple,
  dict,         // children in the order of sorted keys; data: the keys
  odict,        // data: the keys
  defaultdict,  // data: (factory, keys)
  namedtuple,
  fields,      // read and written by name; data: a tuple of what is no child
  registered,  // through the functions given to JAX; data: the aux data
};

// Who names the children of a registered node.
enum class Names : uint8_t {
  unknown,
  asked,  // a function: it may give other names for each object
  flat,   // nobody: JAX numbers them
};

inline bool is_dict_role(Role s) { return s == Role::dict || s == Role::odict || s == Role::defaultdict; }

struct Schemas;

struct TreeKind : std::enable_shared_from_this<TreeKind> {
  Role role = Role::leaf;
  PyTypeObject* type = nullptr;  // kept alive by JAX's registry, or by whoever holds a node of it
  Owned flatten;                 // registered, fields: the functions that JAX has
  Owned unflatten;
  mutable Names names = Names::unknown;
  mutable Owned with_keys;  // asked: the function that names the children, where it is known; or null
  // fields (and the names of a named tuple)
  std::vector<PyObject*> children;  // names, interned and kept for ever
  std::vector<PyObject*> others;    // names of what is data
  std::vector<uint32_t> order;      // in which to assign: children first, then others, as numbers; empty: by unflatten
  Owned absent;          // stands for a child or an attribute that is not there; null: reading it is an error
  Owned no_data;         // the data of a node that has none; absent ones come first: see `field_data`
  Py_ssize_t size = -1;  // attributes an instance has; with more of them it goes through `flatten`
  bool in_dict = false;  // the names are found in the instance dictionary, and nowhere before it
  std::shared_ptr<Schemas> schemas;  // registered: how instances are read by attribute; null: by the functions only
  bool by_version = false;           // the above holds for one version of the type
  unsigned int version = 0;          // that one
  mutable std::vector<PyObject*> entries;  // key path entries of the children, once asked for; kept for ever

  bool is_node() const { return role != Role::leaf; }
};

// The kind of a type if it is known, without Python; else null. A class that was changed since is looked at anew; one
// that was changed too often has no version any more.
inline const TreeKind* known_tree_kind(PyTypeObject* type) {
  const TreeKind* kind = TypeTable<TreeKind>::find(type);
  bool stale = kind && kind->by_version && (kind->version != type->tp_version_tag || kind->version == 0);
  return stale ? nullptr : kind;
}

const TreeKind& find_out_tree_kind(PyTypeObject* type);

// The same; calls Python for a type seen for the first time.
inline const TreeKind& tree_kind_of(PyTypeObject* type) {
  const TreeKind* known = known_tree_kind(type);
  return known ? *known : find_out_tree_kind(type);
}

// For the time of a walk: user code that runs in it may change a class, and what is known of that, but no TreeKind goes.
// The structure that comes out of it has to hold its kinds before this ends.
class Walking {
 public:
  Walking() { follow_registry(); }

 private:
  TypeTable<TreeKind>::Hold hold_;
};

}  // namespace graftax
