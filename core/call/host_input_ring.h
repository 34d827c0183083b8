// SPDX-License-Identifier: Apache-2.0
// Host memory that an executable on the CPU reads in place: the inputs that the host computes for it, without a transfer.
// See docs/internals/direct.md.
#pragma once

#include <memory>
#include <vector>

#include "python/py.h"

namespace graftax {

class Ring {
 public:
  // Arrays over memory of ours, one for each input, and what tells that nothing reads them any more.
  struct Slot {
    std::vector<Owned> arrays;
    std::vector<void*> memory;
    Owned witness;      // a result of the call that read them last
    size_t result = 0;  // which one it is
    bool busy = false;  // a call is about to read them, or has failed: nobody knows whether they are still read
  };

  // Of what `_ring` in `_jax/fast_dispatch.py` returns. Null for None.
  static std::unique_ptr<Ring> of(PyObject* description);

  // A slot that nothing reads, or null. It is the caller's until `give_back`.
  std::shared_ptr<Slot> claim();
  // Writes numbers, a tuple of int or float, to the first elements of an input.
  void write(Slot& slot, size_t input, PyObject* numbers) const;
  void give_back(Slot& slot, PyObject* outputs) const;

 private:
  // The witness was donated since, and cannot tell: another result may, from now on.
  void lose(const std::shared_ptr<Slot>& slot);

  struct Element {
    bool floating;
    Py_ssize_t bytes, count;
  };

  std::vector<size_t> witnesses_;  // numbers of results that can be witnesses, the best first
  std::vector<Element> elements_;  // of the array of each input
  std::vector<std::shared_ptr<Slot>> slots_;
  size_t used_ = 2, next_ = 0;  // few slots while few calls wait: their memory is near
};

}  // namespace graftax
