// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "python/py.h"

namespace graftax {

// What the threads are in the middle of, such as their traces; of one thread the innermost comes last. One list for all
// threads, which the interpreter's lock guards: a thread's own storage is slow to reach from a library that was loaded
// late, and the frame hook looks here for each frame.
template <typename T>
class PerThread {
 public:
  struct Entry {
    PyThreadState* thread;
    T* value;
  };

  void enter(T* value) { all_.push_back({PyThreadState_Get(), value}); }
  void leave(T* value) {
    for (size_t i = all_.size(); i-- > 0;)
      if (all_[i].value == value) {
        all_.erase(all_.begin() + static_cast<std::ptrdiff_t>(i));
        return;
      }
  }
  T* innermost(PyThreadState* thread) const {
    for (size_t i = all_.size(); i-- > 0;)
      if (all_[i].thread == thread) return all_[i].value;
    return nullptr;
  }
  const std::vector<Entry>& all() const { return all_; }

 private:
  std::vector<Entry> all_;
};

}  // namespace graftax
