// SPDX-License-Identifier: Apache-2.0
#include "graph/flatten_memo.h"

#include "graph/kind.h"

namespace graftax {

Owned open_registered(PyObject* node) {
  Owned pair = own(PyObject_CallOneArg(runtime.flatten_one_level, node));
  if (!PyTuple_Check(pair.get()) || PyTuple_GET_SIZE(pair.get()) != 2)
    raise_error(PyExc_TypeError, "a flatten function must return (children, aux data)");
  PyObject* children = PyTuple_GET_ITEM(pair.get(), 0);
  if (PyList_Check(children) || PyTuple_Check(children)) return pair;
  Owned listed = own(PySequence_Fast(children, "the children of a registered node must be iterable"));
  return own(PyTuple_Pack(2, listed.get(), PyTuple_GET_ITEM(pair.get(), 1)));
}

Opened::Parts Opened::of(PyObject* node) {
  if (is_indexed_) {
    for (; indexed_ < parts_.size(); indexed_ += 3) index_.emplace(parts_[indexed_], indexed_);
    auto place = index_.find(node);
    if (place != index_.end()) return {parts_[place->second + 1], parts_[place->second + 2]};
  }
  Owned pair = open_registered(node);
  Parts out{PyTuple_GET_ITEM(pair.get(), 0), PyTuple_GET_ITEM(pair.get(), 1)};
  // The node is held too: another one at its address would be given its parts.
  parts_.push(node);
  parts_.push(out.children);
  parts_.push(out.aux);
  return out;
}

void Opened::walk_again() { is_indexed_ = true; }

void Opened::clear() {
  index_.clear();
  indexed_ = 0;
  parts_.clear();
}

}  // namespace graftax
