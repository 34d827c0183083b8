// SPDX-License-Identifier: Apache-2.0
// What is known of types: one table for a process, each type asked about once. A type is referred to weakly and its
// record goes with it, so that a type at the same address later is a new one.
#pragma once

#include <array>
#include <memory>
#include <unordered_map>

#include "python/py.h"

namespace graftax {

template <class T>
class TypeTable {
 public:
  // Null when nothing is known yet. Runs no Python code; two loads on a hit.
  static const T* find(PyTypeObject* type) {
    Front& f = front_[slot(type)];
    if (f.type == type) return f.value;
    auto it = records().find(type);
    if (it == records().end()) return nullptr;
    f = {type, it->second.value.get()};
    return f.value;
  }

  // Keeps what was found out, unless code that ran meanwhile was faster.
  static const T& remember(PyTypeObject* type, std::shared_ptr<T> value) {
    // First, as making a weak reference may run the collector, and so code that asks about this type.
    Owned watcher = watch(type);
    if (const T* before = find(type)) return *before;
    Record& record = records()[type];
    record.value = std::move(value);
    if (!record.watcher) record.watcher = std::move(watcher);
    front_[slot(type)] = {type, record.value.get()};
    return *record.value;
  }

  static void forget(PyTypeObject* type) {
    front_[slot(type)] = {};
    auto it = records().find(type);
    if (it == records().end()) return;
    // Out of the table before it is released: releasing a record may run code that looks types up.
    Record gone = std::move(it->second);
    records().erase(it);
    if (holds_) retired().push_back(std::move(gone.value));
  }

  static void forget_all() {
    std::unordered_map<PyTypeObject*, Record> gone;
    gone.swap(records());
    front_ = {};
    if (holds_)
      for (auto& [type, record] : gone) retired().push_back(std::move(record.value));
  }

  // What is forgotten while one lives goes with the last of them.
  class Hold {
   public:
    Hold() { ++holds_; }
    Hold(const Hold&) = delete;
    Hold& operator=(const Hold&) = delete;
    ~Hold() {
      if (--holds_ || retired().empty()) return;
      std::vector<std::shared_ptr<T>> gone;
      gone.swap(retired());
    }
  };

 private:
  struct Record {
    std::shared_ptr<T> value;  // a recorded structure that names it holds it too
    Owned watcher;             // weak reference whose callback drops this record
  };

  // A direct-mapped front of the table.
  struct Front {
    PyTypeObject* type;
    const T* value;
  };

  static size_t slot(PyTypeObject* type) { return (reinterpret_cast<uintptr_t>(type) >> 4) % fronts; }

  static PyObject* type_died(PyObject* capsule, PyObject*) {
    forget(static_cast<PyTypeObject*>(PyCapsule_GetPointer(capsule, nullptr)));
    Py_RETURN_NONE;
  }

  static Owned watch(PyTypeObject* type) {
    static PyMethodDef def = {"_type_died", type_died, METH_O, nullptr};
    // A static type lives as long as the process.
    if (!(type->tp_flags & Py_TPFLAGS_HEAPTYPE)) return {};
    Owned capsule = own(PyCapsule_New(type, nullptr, nullptr));
    Owned callback = own(PyCFunction_New(&def, capsule.get()));
    return own(PyWeakref_NewRef(reinterpret_cast<PyObject*>(type), callback.get()));
  }

  static constexpr size_t fronts = 512;
  inline static std::array<Front, fronts> front_{};
  inline static size_t holds_ = 0;

  static std::vector<std::shared_ptr<T>>& retired() {
    static auto* all = new std::vector<std::shared_ptr<T>>();
    return *all;
  }

  static std::unordered_map<PyTypeObject*, Record>& records() {
    static auto* all = new std::unordered_map<PyTypeObject*, Record>();
    return *all;
  }
};

}  // namespace graftax
