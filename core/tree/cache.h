// SPDX-License-Identifier: Apache-2.0
// What is kept of the structures that came last: steps of training, masks and logs bring the same one again and again.
#pragma once

#include <array>

#include "tree/treedef.h"

namespace graftax {

// A PyTreeDef of this structure: the one that is kept, or a new one.
nb::object treedef_of(Structure&& t);

// Memory of structures that are gone, for the next walk.
extern std::vector<TreeNode> node_pool;

// A hash of kinds and arities alone: equal structures have the same.
size_t cache_hash(const Structure& t);

// The key paths of the leaves of structures that came twice. They depend on kinds, arities and keys alone.
class KeptPaths {
 public:
  static KeptPaths& slot(size_t hash) { return slots_[hash % slots_.size()]; }

  // Pushes the paths of a structure that is kept; else false.
  bool take(const Structure& t, OwnedList& out) const;

  // Keeps the paths of a structure that comes for the second time, up to `most_leaves` in all.
  void see(const Structure& t, size_t hash, const OwnedList& paths);

 private:
  static constexpr size_t most_leaves = 1 << 17;  // of all slots: some ten megabytes
  static size_t leaves_kept();
  static std::array<KeptPaths, 8>& slots_;

  size_t hash_ = 0;  // of the structure that came last
  std::vector<TreeNode> nodes_;
  std::vector<std::shared_ptr<const TreeKind>> kinds_;
  OwnedList data_, paths_;
};

}  // namespace graftax
