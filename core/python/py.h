// SPDX-License-Identifier: Apache-2.0
// The only raw CPython of the core: owned references, checked access, version differences.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/eval.h>
#include <nanobind/nanobind.h>

#include "python/casters.h"

namespace graftax {

namespace nb = nanobind;

// One strong reference, released with the object. Destroying it may run arbitrary Python code.
class Owned {
 public:
  Owned() = default;
  Owned(const Owned& other) : ptr_(other.ptr_) { Py_XINCREF(ptr_); }
  Owned(Owned&& other) noexcept : ptr_(std::exchange(other.ptr_, nullptr)) {}
  Owned& operator=(Owned other) noexcept {
    std::swap(ptr_, other.ptr_);
    return *this;
  }
  ~Owned() { Py_XDECREF(ptr_); }

  static Owned steal(PyObject* p) {
    Owned out;
    out.ptr_ = p;
    return out;
  }
  static Owned borrow(PyObject* p) {
    Py_XINCREF(p);
    return steal(p);
  }

  PyObject* get() const { return ptr_; }
  PyObject* release() { return std::exchange(ptr_, nullptr); }
  explicit operator bool() const { return ptr_ != nullptr; }

 private:
  PyObject* ptr_ = nullptr;
};

// Several strong references in one array: what a walk collected, or what a GraphDef owns. A few need no allocation.
class OwnedList {
 public:
  OwnedList() = default;
  OwnedList(const OwnedList&) = delete;
  OwnedList& operator=(const OwnedList&) = delete;
  OwnedList(OwnedList&& other) noexcept { take(other); }
  // Swaps: nothing is released in an assignment, so that no code runs while the list is half assigned.
  OwnedList& operator=(OwnedList&& other) noexcept {
    OwnedList mine(std::move(*this));
    take(other);
    other.take(mine);
    return *this;
  }
  ~OwnedList() {
    clear();
    if (items_ != few_) PyMem_RawFree(items_);
  }

  // Room first: where there is no memory for it, the list is as it was.
  void push(PyObject* p) {
    if (size_ == capacity_) grow();
    items_[size_++] = p;
    Py_XINCREF(p);
  }
  void push_stolen(Owned p) {
    if (size_ == capacity_) grow();
    items_[size_++] = p.release();
  }
  void set(size_t i, PyObject* p) { replace(i, Owned::borrow(p)); }
  void replace(size_t i, Owned p) {
    PyObject* old = std::exchange(items_[i], p.release());
    Py_XDECREF(old);
  }
  void resize(size_t n) {
    while (size_ > n) pop();
    if (n > capacity_) reserve(std::max(n, 2 * size_));
    while (size_ < n) items_[size_++] = nullptr;
  }
  void pop() {
    PyObject* p = items_[--size_];
    Py_XDECREF(p);
  }
  // Takes the last one out.
  Owned take() { return Owned::steal(items_[--size_]); }
  // References go one by one from the end: their release may run Python code that looks at this list again.
  void clear() {
    while (size_ > 0) pop();
  }
  // Takes one out; null stays in its place.
  PyObject* release(size_t i) { return std::exchange(items_[i], nullptr); }
  size_t size() const { return size_; }
  size_t capacity() const { return capacity_; }
  bool empty() const { return size_ == 0; }
  PyObject* operator[](size_t i) const { return items_[i]; }
  PyObject* back() const { return items_[size_ - 1]; }
  PyObject** data() { return items_; }
  PyObject* const* data() const { return items_; }
  void reserve(size_t n) {
    if (n <= capacity_) return;
    auto* more = static_cast<PyObject**>(PyMem_RawMalloc(n * sizeof(PyObject*)));
    if (!more) throw std::bad_alloc();
    std::copy(items_, items_ + size_, more);
    if (items_ != few_) PyMem_RawFree(items_);
    items_ = more;
    capacity_ = n;
  }
  // Gives back the room for more elements; where there is no memory for a smaller array, the larger one stays.
  void shrink_to_fit() {
    if (items_ == few_ || size_ == capacity_ || size_ == 0) return;
    auto* less = static_cast<PyObject**>(PyMem_RawRealloc(items_, size_ * sizeof(PyObject*)));
    if (!less) return;
    items_ = less;
    capacity_ = size_;
  }

 private:
  static constexpr size_t few = 16;

  void grow() { reserve(size_ < 256 ? 4 * size_ : 2 * size_); }

  // What `other` holds, into this one, which is empty.
  void take(OwnedList& other) noexcept {
    if (items_ != few_) PyMem_RawFree(items_);
    size_ = std::exchange(other.size_, 0);
    capacity_ = std::exchange(other.capacity_, few);
    items_ = std::exchange(other.items_, other.few_);
    // A list of few elements has them in itself, where the pointer of the other list must not lead.
    if (items_ == other.few_) {
      std::copy(items_, items_ + size_, few_);
      items_ = few_;
    }
  }

  PyObject* few_[few];
  PyObject** items_ = few_;
  size_t size_ = 0, capacity_ = few;
};

// Shared ownership of one value. The interpreter's lock guards the count, so a copy costs no atomic instruction.
template <typename T>
class Shared {
 public:
  Shared() = default;
  Shared(std::nullptr_t) {}
  Shared(const Shared& other) : box_(other.box_) {
    if (box_) ++box_->count;
  }
  Shared(Shared&& other) noexcept : box_(std::exchange(other.box_, nullptr)) {}
  Shared& operator=(Shared other) noexcept {
    std::swap(box_, other.box_);
    return *this;
  }
  ~Shared() {
    if (box_ && --box_->count == 0) delete box_;
  }

  static Shared make() {
    Shared out;
    out.box_ = new Box;
    return out;
  }

  T* operator->() const { return &box_->value; }
  T& operator*() const { return box_->value; }
  explicit operator bool() const { return box_ != nullptr; }
  bool operator==(const Shared& other) const { return box_ == other.box_; }
  bool operator!=(const Shared& other) const { return box_ != other.box_; }

 private:
  struct Box {
    T value;
    size_t count = 1;
  };
  Box* box_ = nullptr;
};

// The Python error that is set becomes a C++ exception; nanobind turns it back at the boundary.
[[noreturn]] inline void raise_python() { throw nb::python_error(); }

inline PyObject* check(PyObject* p) {
  if (!p) raise_python();
  return p;
}
inline void check(int status) {
  if (status < 0) raise_python();
}
// A name for the life of the process, for a `static`: where its memory cannot be had this throws, and is tried again.
inline PyObject* interned(const char* text) { return check(PyUnicode_InternFromString(text)); }

inline nb::object text_of(const char* text) { return nb::steal(check(PyUnicode_FromString(text))); }

inline Owned own(PyObject* p) { return Owned::steal(check(p)); }

// Sets an exception object as the error, as `raise` does.
inline void set_error(PyObject* exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
}

// A new reference, or null with an error set. The name is the same object each time: the interpreter's cache of the
// attributes of types keeps every name object that it was asked for.
inline PyObject* attribute(PyObject* obj, const char* name) noexcept {
  Owned text = Owned::steal(PyUnicode_InternFromString(name));
  return text ? PyObject_GetAttr(obj, text.get()) : nullptr;
}

[[noreturn]] inline void raise_error(PyObject* type, const char* message) {
  PyErr_SetString(type, message);
  raise_python();
}
[[noreturn]] inline void raise_error(PyObject* type, const std::string& message) { raise_error(type, message.c_str()); }

inline Owned list_of(PyObject* const* values, uint32_t count) {
  Owned out = own(PyList_New(count));
  for (uint32_t i = 0; i < count; ++i) PyList_SET_ITEM(out.get(), i, Py_NewRef(values[i]));
  return out;
}

inline Owned tuple_of(PyObject* const* values, uint32_t count) {
  Owned out = own(PyTuple_New(count));
  for (uint32_t i = 0; i < count; ++i) PyTuple_SET_ITEM(out.get(), i, Py_NewRef(values[i]));
  return out;
}

// A builtin type's own method, whatever a subclass calls by its name.
inline Owned call_base(PyTypeObject* type, const char* method, PyObject* obj, PyObject* arg = nullptr) {
  return own(PyObject_CallMethod(reinterpret_cast<PyObject*>(type), method, arg ? "OO" : "O", obj, arg));
}

inline Owned list_of(const OwnedList& list) { return list_of(list.data(), static_cast<uint32_t>(list.size())); }
inline Owned tuple_of(const OwnedList& list) { return tuple_of(list.data(), static_cast<uint32_t>(list.size())); }

// The value under a key, borrowed; null where the key is not there. What its own hash or == raises is thrown.
inline PyObject* dict_get(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (!value && PyErr_Occurred()) raise_python();
  return value;
}

// The type's own ==, by identity first. What it raises is thrown.
inline bool equal(PyObject* a, PyObject* b) {
  int answer = PyObject_RichCompareBool(a, b, Py_EQ);
  check(answer);
  return answer;
}

inline Py_hash_t hash_of(PyObject* obj) {
  Py_hash_t out = PyObject_Hash(obj);
  if (out == -1) raise_python();
  return out;
}

inline nb::object or_none(PyObject* obj) { return obj ? nb::borrow(obj) : nb::none(); }
inline PyObject* or_null(nb::handle obj) { return obj.is_none() ? nullptr : obj.ptr(); }

// Do both tuples hold the same objects, by pointer?
inline bool same_items(PyObject* a, PyObject* b) {
  if (a == b) return true;
  Py_ssize_t n = PyTuple_GET_SIZE(a);
  if (PyTuple_GET_SIZE(b) != n) return false;
  for (Py_ssize_t i = 0; i < n; ++i)
    if (PyTuple_GET_ITEM(a, i) != PyTuple_GET_ITEM(b, i)) return false;
  return true;
}

// What a weak reference (or proxy) refers to, or an empty reference once that is gone.
inline Owned weak_target(PyObject* ref) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* target = nullptr;
  check(PyWeakref_GetRef(ref, &target));
  return Owned::steal(target);
#else
  PyObject* target = check(PyWeakref_GetObject(ref));
  return target == Py_None ? Owned() : Owned::borrow(target);
#endif
}

// Is it this object, which lives, that a weak reference (or proxy) refers to?
inline bool refers_to(PyObject* ref, PyObject* obj) {
  return reinterpret_cast<PyWeakReference*>(ref)->wr_object == obj && obj != Py_None;
}

inline std::string utf8(PyObject* str) {
  Py_ssize_t n = 0;
  if (const char* s = PyUnicode_AsUTF8AndSize(str, &n)) return std::string(s, static_cast<size_t>(n));
  PyErr_Clear();  // half of a surrogate pair, as os.fsdecode makes, has no UTF-8: it is shown as repr shows it
  Owned bytes =
      Owned::steal(PyUnicode_Check(str) ? PyUnicode_AsEncodedString(str, "utf-8", "backslashreplace") : nullptr);
  if (bytes) return std::string(PyBytes_AS_STRING(bytes.get()), static_cast<size_t>(PyBytes_GET_SIZE(bytes.get())));
  PyErr_Clear();
  return "<unprintable>";
}

// repr() for a message: never raises, never long.
inline std::string short_repr(PyObject* obj, size_t limit = 60) {
  Owned r = Owned::steal(PyObject_Repr(obj));
  if (!r) {
    PyErr_Clear();
    return std::string("<") + Py_TYPE(obj)->tp_name + " object>";
  }
  std::string s = utf8(r.get());
  if (s.size() > limit) s = s.substr(0, limit) + "...";
  return s;
}

// Types and objects that are looked up once, at import. They live as long as the process.
struct Runtime {
  PyObject* flatten_one_level = nullptr;  // jax.tree_util.default_registry.flatten_one_level
  PyObject* empty_tuple = nullptr;
  PyTypeObject* array_type = nullptr;  // the concrete class behind jax.Array
  PyTypeObject* deque_type = nullptr;
  PyTypeObject* defaultdict_type = nullptr;
  PyTypeObject* odict_type = nullptr;
  PyTypeObject* namespace_type = nullptr;
  PyTypeObject* local_type = nullptr;  // threading.local
  PyTypeObject* partial_type = nullptr;
  PyTypeObject* array_array_type = nullptr;
  PyTypeObject* ndarray_type = nullptr;
  PyTypeObject* method_wrapper_type = nullptr;
  PyObject* tables = nullptr;           // the attribute of a function that holds its compiled entries
  destructor python_dealloc = nullptr;  // tp_dealloc of every class made by a class statement
};
extern Runtime runtime;

// The instance dictionary of a heap object; of a threading.local the one of this thread.
inline Owned instance_dict(PyObject* obj) {
  PyTypeObject* type = Py_TYPE(obj);
  // Classes with a __getattribute__ of their own are many, and few of them are so large.
  if (type->tp_getattro != PyObject_GenericGetAttr && type->tp_basicsize >= runtime.local_type->tp_basicsize &&
      PyType_IsSubtype(type, runtime.local_type)) {
    static PyObject* const name = interned("__dict__");
    return own(runtime.local_type->tp_getattro(obj, name));
  }
  return own(PyObject_GenericGetDict(obj, nullptr));
}

// Raises one of graftax's own exceptions, by name.
[[noreturn]] void raise_graftax(const char* name, const char* message);
[[noreturn]] inline void raise_graftax(const char* name, const std::string& message) {
  raise_graftax(name, message.c_str());
}

}  // namespace graftax
