// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "python/py.h"

namespace graftax {

// What the threads are in the middle of, a thread's innermost last. The interpreter's lock guards it: a thread's own
// storage is slow to reach from a library that was loaded late, and the hook asks for each frame.
template <typename T>
class PerThread {
 public:
  struct Of {
    PyThreadState* thread;
    T* what;
  };

  void enter(T* what) { all_.push_back({PyThreadState_Get(), what}); }
  void leave(T* what) {
    for (size_t i = all_.size(); i-- > 0;)
      if (all_[i].what == what) {
        all_.erase(all_.begin() + static_cast<std::ptrdiff_t>(i));
        return;
      }
  }
  T* innermost(PyThreadState* thread) const {
    for (size_t i = all_.size(); i-- > 0;)
      if (all_[i].thread == thread) return all_[i].what;
    return nullptr;
  }
  const std::vector<Of>& all() const { return all_; }

 private:
  std::vector<Of> all_;
};

}  // namespace graftax
