// SPDX-License-Identifier: Apache-2.0
#include "tree/cache.h"

namespace graftax {

namespace {

// Values that hold nothing else alive, however long they are kept.
bool is_plain(PyObject* value, int depth = 3) {
  if (value == Py_None || PyBool_Check(value) || PyUnicode_CheckExact(value) || PyLong_CheckExact(value) ||
      PyFloat_CheckExact(value) || PyBytes_CheckExact(value))
    return true;
  if (!PyTuple_CheckExact(value) || depth == 0) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i)
    if (!is_plain(PyTuple_GET_ITEM(value, i), depth - 1)) return false;
  return true;
}

bool keys_are_plain(const Structure& t) {
  for (const TreeNode& n : t.nodes) {
    if (!is_dict_role(n.role)) continue;
    for (uint32_t i = 0; i < n.arity; ++i)
      if (!is_plain(PyTuple_GET_ITEM(keys_of(n), i))) return false;
  }
  return true;
}

bool same_node(const TreeNode& a, const TreeNode& b) {
  return a.kind == b.kind && a.arity == b.arity && a.next == b.next;
}

bool same_data(PyObject* a, PyObject* b) {
  return a == b || (a && b && PyTuple_CheckExact(a) && PyTuple_CheckExact(b) && same_items(a, b));
}

// One slot of the treedefs that are kept.
struct KeptTreeDef {
  size_t hash = 0;  // of the structure that came last
  nb::object treedef;

  bool fits(const Structure& t) const {
    if (!treedef.is_valid()) return false;
    const std::vector<TreeNode>& kept = nb::inst_ptr<TreeDef>(treedef)->tree.nodes;
    if (kept.size() != t.nodes.size()) return false;
    for (size_t i = 0; i < kept.size(); ++i)
      if (!same_node(t.nodes[i], kept[i]) || !same_data(t.nodes[i].data, kept[i].data)) return false;
    return true;
  }
};

// The class of a named tuple is held by nobody else: a treedef that is kept would keep it alive.
bool may_be_kept(const Structure& t) {
  constexpr size_t most_records = 1024;  // in larger ones the object is a small part of the work
  if (t.nodes.size() > most_records) return false;
  for (const TreeNode& n : t.nodes)
    if (n.role == Role::namedtuple || (n.data && n.data != n.kind->no_data.get() && !is_plain(n.data))) return false;
  return true;
}

}  // namespace

std::vector<TreeNode> node_pool;

size_t cache_hash(const Structure& t) {
  size_t h = t.leaves;
  for (const TreeNode& n : t.nodes) h = (h ^ n.arity ^ reinterpret_cast<size_t>(n.kind)) * 0x9e3779b97f4a7c15ULL;
  return h ^ (h >> 32);
}

nb::object treedef_of(Structure&& t) {
  static auto& slots = *new std::array<KeptTreeDef, 16>();
  size_t hash = cache_hash(t);
  KeptTreeDef& slot = slots[hash % slots.size()];
  if (slot.hash == hash && slot.fits(t)) {
    // The memory of the new structure goes to the next walk.
    t.nodes.clear();
    t.nodes.swap(node_pool);
    return slot.treedef;
  }
  bool comes_again = std::exchange(slot.hash, hash) == hash && may_be_kept(t);
  t.keep_kinds();
  if (t.nodes.capacity() > 2 * std::max<size_t>(t.nodes.size(), 16)) t.nodes.shrink_to_fit();
  nb::object made = nb::cast(TreeDef{std::move(t)});
  if (comes_again) {
    nb::object gone = std::exchange(slot.treedef, made);  // released last: what it holds may have code
  }
  return made;
}

bool KeptPaths::take(const Structure& t, OwnedList& out) const {
  if (nodes_.size() != t.nodes.size() || paths_.size() != t.leaves) return false;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const TreeNode &n = t.nodes[i], &kept = nodes_[i];
    if (!same_node(n, kept)) return false;
    if (is_dict_role(n.role) && !same_items(keys_of(n), keys_of(kept))) return false;
  }
  out.reserve(t.leaves);
  for (size_t i = 0; i < paths_.size(); ++i) out.push(paths_[i]);
  return true;
}

void KeptPaths::see(const Structure& t, size_t hash, const OwnedList& paths) {
  if (std::exchange(hash_, hash) != hash || t.leaves > most_leaves || !keys_are_plain(t)) return;
  KeptPaths fresh;
  fresh.hash_ = hash;
  fresh.nodes_ = t.nodes;
  fresh.kinds_ = kinds_of(t.nodes);
  for (const TreeNode& n : t.nodes)
    if (is_dict_role(n.role)) fresh.data_.push(n.data);
  fresh.paths_.reserve(t.leaves);
  for (size_t i = 0; i < paths.size(); ++i) fresh.paths_.push(paths[i]);
  std::vector<KeptPaths> gone;  // released last: what it holds may have code
  if (leaves_kept() + t.leaves > most_leaves)
    for (KeptPaths& other : slots_) gone.push_back(std::exchange(other, {}));
  gone.push_back(std::exchange(*this, std::move(fresh)));
}

size_t KeptPaths::leaves_kept() {
  size_t n = 0;
  for (const KeptPaths& s : slots_) n += s.paths_.size();
  return n;
}

std::array<KeptPaths, 8>& KeptPaths::slots_ = *new std::array<KeptPaths, 8>();

}  // namespace graftax
