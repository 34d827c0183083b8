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
  if (again_) {
    for (; known_ < parts_.size(); known_ += 3) at_.emplace(parts_[known_], known_);
    auto found = at_.find(node);
    if (found != at_.end()) return {parts_[found->second + 1], parts_[found->second + 2]};
  }
  Owned pair = open_registered(node);
  Parts out{PyTuple_GET_ITEM(pair.get(), 0), PyTuple_GET_ITEM(pair.get(), 1)};
  parts_.push(node);
  parts_.push(out.children);
  parts_.push(out.aux);
  return out;
}

void Opened::walk_again() { again_ = true; }

void Opened::clear() {
  at_.clear();
  known_ = 0;
  parts_.clear();
}

}  // namespace graftax
