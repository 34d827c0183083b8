// SPDX-License-Identifier: Apache-2.0
// Pointer -> number for one walk: open addressing with generation stamps, so that clearing is one increment.
// One per walk from a per-thread pool: a walk inside user code of another walk must not disturb it.
#pragma once

#include <memory>

#include "py.h"

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

  void reset() {
    used_ = 0;
    if (++stamp_ == 0) {
      for (Slot& s : slots_) s.stamp = 0;
      stamp_ = 1;
    }
  }

 private:
  struct Slot {
    const void* key = nullptr;
    uint32_t stamp = 0;
    uint32_t value = 0;
  };

  size_t slot(const void* p) const {
    auto x = reinterpret_cast<uintptr_t>(p) >> 4;
    return (x * 0x9e3779b97f4a7c15ULL >> 20) & mask_;
  }

  void grow() {
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

// A table on loan from the thread's pool.
class IdLease {
 public:
  IdLease() {
    auto& p = pool();
    if (p.empty()) {
      table_ = std::make_unique<IdTable>();
    } else {
      table_ = std::move(p.back());
      p.pop_back();
    }
    table_->reset();
  }
  IdLease(const IdLease&) = delete;
  IdLease& operator=(const IdLease&) = delete;
  ~IdLease() {
    if (pool().size() < 8) pool().push_back(std::move(table_));
  }
  IdTable* operator->() { return table_.get(); }
  IdTable& operator*() { return *table_; }

 private:
  static std::vector<std::unique_ptr<IdTable>>& pool() {
    thread_local std::vector<std::unique_ptr<IdTable>> tables;
    return tables;
  }
  std::unique_ptr<IdTable> table_;
};

}  // namespace graftax
