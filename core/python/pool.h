// SPDX-License-Identifier: Apache-2.0
// Tables and lists that each walk needs and that are expensive to allocate: lent to a walk, and used again by the next.
#pragma once

#include <memory>
#include <vector>

namespace graftax {

constexpr size_t most_kept = 1 << 15;  // elements of one list between two walks

// A T from a pool, or a new one where all are out: a walk inside user code of another walk has its own. The
// interpreter's lock guards the pool. `reset()` empties a T before it goes back; false where it has grown too large.
template <typename T>
class Lease {
 public:
  Lease() {
    auto& free = pool();
    if (free.empty()) {
      lent_ = std::make_unique<T>();
    } else {
      lent_ = std::move(free.back());
      free.pop_back();
    }
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease() {
    if (lent_->reset() && pool().size() < most) pool().push_back(std::move(lent_));
  }
  T* operator->() { return lent_.get(); }
  T& operator*() { return *lent_; }

 private:
  static constexpr size_t most = 8;

  static std::vector<std::unique_ptr<T>>& pool() {
    static auto* const all = [] {  // never destroyed: at the end of the process there is no interpreter
      auto out = std::make_unique<std::vector<std::unique_ptr<T>>>();
      out->reserve(most);
      return out.release();
    }();
    return *all;
  }
  std::unique_ptr<T> lent_;
};

}  // namespace graftax
