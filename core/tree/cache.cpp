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
    if (!is_dict_shape(n.shape)) continue;
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
struct KnownTreeDef {
  size_t print = 0;  // of the structure that came last
  nb::object treedef;

  bool fits(const Structure& t) const {
    if (!treedef.is_valid()) return false;
    const std::vector<TreeNode>& known = nb::inst_ptr<TreeDef>(treedef)->tree.nodes;
    if (known.size() != t.nodes.size()) return false;
    for (size_t i = 0; i < known.size(); ++i)
      if (!same_node(t.nodes[i], known[i]) || !same_data(t.nodes[i].data, known[i].data)) return false;
    return true;
  }
};

// The class of a named tuple is held by nobody else: a treedef that is kept would keep it alive.
bool may_be_kept(const Structure& t) {
  constexpr size_t most_records = 1024;  // in larger ones the object is a small part of the work
  if (t.nodes.size() > most_records) return false;
  for (const TreeNode& n : t.nodes)
    if (n.shape == Shape::namedtuple || (n.data && n.data != n.kind->no_data.get() && !is_plain(n.data))) return false;
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
  static auto& slots = *new std::array<KnownTreeDef, 16>();
  size_t print = cache_hash(t);
  KnownTreeDef& slot = slots[print % slots.size()];
  if (slot.print == print && slot.fits(t)) {
    t.nodes.clear();
    t.nodes.swap(node_pool);
    return slot.treedef;
  }
  bool again = std::exchange(slot.print, print) == print && may_be_kept(t);
  t.keep_kinds();
  if (t.nodes.capacity() > 2 * std::max<size_t>(t.nodes.size(), 16)) t.nodes.shrink_to_fit();
  nb::object made = nb::cast(TreeDef{std::move(t)});
  if (again) {
    nb::object gone = std::exchange(slot.treedef, made);  // released last: what it holds may have code
  }
  return made;
}

bool KnownPaths::take(const Structure& t, OwnedList& out) const {
  if (nodes_.size() != t.nodes.size() || paths_.size() != t.leaves) return false;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const TreeNode &n = t.nodes[i], &known = nodes_[i];
    if (!same_node(n, known)) return false;
    if (is_dict_shape(n.shape) && !same_items(keys_of(n), keys_of(known))) return false;
  }
  out.reserve(t.leaves);
  for (size_t i = 0; i < paths_.size(); ++i) out.push(paths_[i]);
  return true;
}

void KnownPaths::see(const Structure& t, size_t print, const OwnedList& paths) {
  if (std::exchange(print_, print) != print || t.leaves > most_leaves || !keys_are_plain(t)) return;
  KnownPaths fresh;
  fresh.print_ = print;
  fresh.nodes_ = t.nodes;
  fresh.kinds_ = kinds_of(t.nodes);
  for (const TreeNode& n : t.nodes)
    if (is_dict_shape(n.shape)) fresh.data_.push(n.data);
  fresh.paths_.reserve(t.leaves);
  for (size_t i = 0; i < paths.size(); ++i) fresh.paths_.push(paths[i]);
  std::vector<KnownPaths> gone;  // released last: what it holds may have code
  if (leaves_kept() + t.leaves > most_leaves)
    for (KnownPaths& other : slots_) gone.push_back(std::exchange(other, {}));
  gone.push_back(std::exchange(*this, std::move(fresh)));
}

size_t KnownPaths::leaves_kept() {
  size_t n = 0;
  for (const KnownPaths& s : slots_) n += s.paths_.size();
  return n;
}

std::array<KnownPaths, 8>& KnownPaths::slots_ = *new std::array<KnownPaths, 8>();

}  // namespace graftax
