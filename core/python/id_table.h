// SPDX-License-Identifier: Apache-2.0
// Pointer -> number for one walk: open addressing with generation stamps, so that clearing is one increment.
#pragma once

#include "python/pool.h"
#include "python/py.h"

namespace graftax {

class IdTable {
 public:
  // The number stored for `p`, or null.
  uint32_t* find(const void* p) {
    size_t i = slot(p);
    while (slots_[i].stamp == stamp_) {
      if (slots_[i].key == p) return &slots_[i].value;
      i = (i + 1) & mask_;
    }
    return nullptr;
  }

  // Stores `value` for `p`; false when `p` is there already.
  bool insert(const void* p, uint32_t value) {
    // At most half full: probes stay short, and each ends at a free slot.
    if (2 * (used_ + 1) > slots_.size()) grow();
    size_t i = slot(p);
    while (slots_[i].stamp == stamp_) {
      if (slots_[i].key == p) return false;
      i = (i + 1) & mask_;
    }
    slots_[i] = {p, stamp_, value};
    ++used_;
    return true;
  }

  bool reset() {
    used_ = 0;
    if (++stamp_ == 0) {
      // The stamp has come round: slots of a walk long ago would look like those of this one.
      for (Slot& s : slots_) s.stamp = 0;
      stamp_ = 1;
    }
    return true;
  }

 private:
  struct Slot {
    const void* key = nullptr;
    uint32_t stamp = 0;
    uint32_t value = 0;
  };

  size_t slot(const void* p) const {
    // Objects lie at multiples of 16. A multiplication spreads their addresses; its lowest bits are the least mixed.
    auto x = reinterpret_cast<uintptr_t>(p) >> 4;
    return (x * 0x9e3779b97f4a7c15ULL >> 20) & mask_;
  }

  void grow() {
    // `old` is made twice as large and swapped in, so that a failed allocation leaves the table as it was.
    std::vector<Slot> old(slots_.size() * 2);
    old.swap(slots_);
    mask_ = slots_.size() - 1;
    used_ = 0;
    for (const Slot& s : old)
      if (s.stamp == stamp_) insert(s.key, s.value);
  }

  std::vector<Slot> slots_ = std::vector<Slot>(64);
  size_t mask_ = 63;
  size_t used_ = 0;
  uint32_t stamp_ = 1;
};

using IdLease = Lease<IdTable>;

}  // namespace graftax
