// SPDX-License-Identifier: Apache-2.0
#include "graph/static_equality.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>

#include "graph/kinds/function.h"
#include "graph/record.h"

namespace graftax {

namespace {

constexpr int max_key_depth = 200;  // keys and plain values are walked by recursion

// By their bits, so that 0.0 and -0.0 differ: a program may divide by them. All nan are one.
bool same_bits(double a, double b) {
  if (std::isnan(a) && std::isnan(b)) return true;
  return std::memcmp(&a, &b, sizeof a) == 0;
}

Py_hash_t hash_double(double x) {
  if (std::isnan(x)) return 7;
  Py_hash_t h;
  static_assert(sizeof h == sizeof x);
  std::memcpy(&h, &x, sizeof h);
  return h;
}

bool same_complex(PyObject* a, PyObject* b) {
  Py_complex x = PyComplex_AsCComplex(a), y = PyComplex_AsCComplex(b);
  return same_bits(x.real, y.real) && same_bits(x.imag, y.imag);
}

bool is_value(How how) { return how != How::identity && how != How::equal && how != How::copied; }

// Exact equality of plain values (what a reduce function returns): tuples, lists and dicts of numbers and strings.
bool plain_equal(PyObject* a, PyObject* b, int depth) {
  if (a == b) return true;
  PyTypeObject* type = Py_TYPE(a);
  if (type != Py_TYPE(b)) return false;
  if (type == &PyFloat_Type) return same_bits(PyFloat_AS_DOUBLE(a), PyFloat_AS_DOUBLE(b));
  if (type == &PyComplex_Type) return same_complex(a, b);
  if (type == &PyTuple_Type) {
    if (PyTuple_GET_SIZE(a) != PyTuple_GET_SIZE(b)) return false;
    if (depth > max_key_depth) raise_error(PyExc_RecursionError, "a static value is nested too deeply");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(a); ++i)
      if (!plain_equal(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i), depth + 1)) return false;
    return true;
  }
  if (type == &PyDict_Type) {  // in any order
    if (PyDict_GET_SIZE(a) != PyDict_GET_SIZE(b)) return false;
    if (depth > max_key_depth) raise_error(PyExc_RecursionError, "a static value is nested too deeply");
    PyObject *key, *value;
    for (Py_ssize_t pos = 0; PyDict_Next(a, &pos, &key, &value);) {
      // Held: a comparison below may run the __eq__ of a key, which may change the dict.
      Owned hold = Owned::borrow(value), other = Owned::borrow(dict_get(b, key));
      if (!other || !plain_equal(value, other.get(), depth + 1)) return false;
    }
    return true;
  }
  return equal(a, b);
}

Py_hash_t hash_by_identity(PyObject* obj) { return static_cast<Py_hash_t>(reinterpret_cast<uintptr_t>(obj) >> 4); }

Py_hash_t combined(Py_hash_t a, Py_hash_t b) {
  return static_cast<Py_hash_t>(static_cast<size_t>(a) * 31 + static_cast<size_t>(b));
}

Py_hash_t hash_complex(PyObject* obj) {
  Py_complex z = PyComplex_AsCComplex(obj);
  return combined(hash_double(z.real), hash_double(z.imag));
}

// Of values that are plain_equal it is the same: Python's own differs for two nan objects.
Py_hash_t plain_hash(PyObject* a, int depth) {
  if (PyFloat_CheckExact(a)) return hash_double(PyFloat_AS_DOUBLE(a));
  if (PyComplex_CheckExact(a)) return hash_complex(a);
  if (PyTuple_CheckExact(a)) {
    Py_hash_t h = 17;
    for (Py_ssize_t i = 0; depth < max_key_depth && i < PyTuple_GET_SIZE(a); ++i)
      h = combined(h, plain_hash(PyTuple_GET_ITEM(a, i), depth + 1));
    return h;
  }
  Py_hash_t h = PyObject_Hash(a);
  if (h == -1) PyErr_Clear();  // a list or a dict: such values are told apart by comparing them
  return h;
}

// The type's own ==, guarded: only the answer True counts.
bool own_equal(PyObject* a, PyObject* b) {
  if (a == b) return true;
  Owned answer = own(PyObject_RichCompare(a, b, Py_EQ));
  return answer.get() == Py_True;
}

bool values_equal(How how, PyObject* a, PyObject* b) {
  switch (how) {
    case How::floating: return same_bits(PyFloat_AS_DOUBLE(a), PyFloat_AS_DOUBLE(b));
    case How::complex: return same_complex(a, b);
    case How::integer:
    case How::string:
    case How::bytes: return equal(a, b);
    case How::equal:
    case How::hashed: return own_equal(a, b);
    default: return a == b;
  }
}

// One object as a key: weak references are one where their referent is.
bool same_key(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (!PyWeakref_CheckRef(a) || !PyWeakref_CheckRef(b)) return false;
  // A `WeakMethod` is more than its referent, and says itself what is equal to it.
  if (Py_TYPE(a)->tp_richcompare != _PyWeakref_RefType.tp_richcompare)
    return Py_TYPE(a) == Py_TYPE(b) && own_equal(a, b);
  Owned x = contents_root(a), y = contents_root(b);
  return x && x.get() == y.get();
}

// What a key object is made of. It is compared, never traced, so it must hold no array.
// Keys inside a key's own contents count by pointer.
std::shared_ptr<Program> contents_of(PyObject* key) {
  // The walk over a key meets keys itself: without this, one that holds itself would never end.
  static thread_local bool inside = false;
  if (inside) return nullptr;
  struct Guard {
    Guard() { inside = true; }
    ~Guard() { inside = false; }
  } guard;
  Owned root = contents_root(key);
  if (!root) return nullptr;
  Recorder recorder({});
  recorder.root(root.get());
  if (recorder.leaf_count() > 0) refuse_key_with_arrays(key);
  return std::make_shared<Program>(std::move(recorder.finish(nullptr).program));
}

Owned reduced(const Kind& kind, PyObject* obj) { return own(PyObject_CallOneArg(kind.reduce, obj)); }

}  // namespace

bool defines_eq(PyTypeObject* type) {
  // Weak references compare their referents; as keys they count by identity.
  return type->tp_richcompare != PyBaseObject_Type.tp_richcompare && !PyType_IsSubtype(type, &_PyWeakref_RefType);
}

// As a key a weak reference is its referent. Its callback often leads back to the container, and does not count.
Owned contents_root(PyObject* key) { return PyWeakref_CheckRef(key) ? weak_target(key) : Owned::borrow(key); }

Owned object_of_key(PyObject* key) {
  Owned object = contents_root(key);
  if (!object || !kind_of(object.get()).handed || defines_eq(Py_TYPE(object.get()))) return {};
  return object;
}

Owned node_of_key(PyObject* key) { return PyWeakref_CheckRef(key) ? object_of_key(key) : Owned::borrow(key); }

bool is_identity_key(const Static& s) { return s.how == How::contents && !defines_eq(s.type); }

void refuse_key_with_arrays(PyObject* key, const std::string& path) {
  raise_graftax("UnsupportedValueError",
                path + (path.empty() ? "" : ": ") + "a " + Py_TYPE(key)->tp_name +
                    " that is a dict key or a set element has arrays below. Keep the arrays in the values.");
}

// Can the hash of this key change?
static bool can_be_lost(PyObject* key) {
  if (PyTuple_CheckExact(key) || PyFrozenSet_CheckExact(key)) return true;
  return Py_TYPE(key)->tp_flags & Py_TPFLAGS_HEAPTYPE && Py_TYPE(key)->tp_hash != PyBaseObject_Type.tp_hash &&
         !PyWeakref_CheckRef(key);
}

void refuse_lost_keys(PyObject* container, PyObject* const* keys, Py_ssize_t count) {
  if (std::none_of(keys, keys + count, can_be_lost)) return;
  Owned held = own(PySet_New(container));  // takes over the hashes that are kept there
  auto* set = reinterpret_cast<PySetObject*>(held.get());
  for (Py_ssize_t i = 0; i <= set->mask; ++i) {
    PyObject* key = set->table[i].key;
    if (!key || !can_be_lost(key)) continue;
    Py_hash_t now = hash_of(key);
    if (now != set->table[i].hash)
      raise_graftax("UnsupportedValueError",
                    std::string("a ") + Py_TYPE(key)->tp_name + " that is a key of a " + Py_TYPE(container)->tp_name +
                        " has another hash than when it was put there, so that Python does not find it. Change objects "
                        "before they become keys, or take them out, change them and put them in again.");
  }
}

Owned static_object(const Static& s) {
  if (s.how == How::context) return own(PyObject_CallNoArgs(Owned::borrow(s.obj).get()));
  return s.weak ? weak_target(s.obj) : Owned::borrow(s.obj);
}

uint32_t add_static(Program& program, PyObject* obj, const Kind& kind, bool copy) {
  Static s;
  s.how = copy ? How::copied : kind.how;
  s.type = program.keep_type(Py_TYPE(obj));
  s.obj = program.keep(Owned::borrow(s.how == How::context ? kind.reduce : obj));
  switch (s.how) {
    case How::context: break;
    case How::identity:
    case How::copied: s.hash = hash_by_identity(obj); break;
    case How::floating: s.hash = hash_double(PyFloat_AS_DOUBLE(obj)); break;
    case How::complex: s.hash = hash_complex(obj); break;
    case How::reduce:
      s.snapshot = program.keep(reduced(kind, obj));
      s.hash = plain_hash(s.snapshot, 0);
      break;
    default: s.hash = hash_of(obj);
  }
  return program.add(s);
}

uint32_t add_context_field(Program& program, PyObject* make) {
  Static s;
  s.how = How::context;
  s.type = program.keep_type(&PyBaseObject_Type);
  s.obj = program.keep(Owned::borrow(make));
  return program.add(s);
}

uint32_t add_hashed(Program& program, PyObject* obj) {
  Static s;
  s.how = How::hashed;
  s.type = program.keep_type(Py_TYPE(obj));
  s.obj = program.keep(Owned::borrow(obj));
  s.hash = hash_of(obj);
  return program.add(s);
}

static Owned value_of_symbol(PyObject* symbol) { return own(PyObject_CallMethod(symbol, "pinned", nullptr)); }

// A key without symbols: it leaves the trace with its dict or its set.
static Owned plain_key(PyObject* key, int depth) {
  if (!PyTuple_CheckExact(key)) return kind_of(key).symbolic ? value_of_symbol(key) : Owned::borrow(key);
  if (depth > max_key_depth) raise_error(PyExc_RecursionError, "a dict key is nested too deeply");
  Owned out = Owned::borrow(key);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(key); ++i) {
    Owned element = plain_key(PyTuple_GET_ITEM(key, i), depth + 1);
    if (element.get() == PyTuple_GET_ITEM(key, i)) continue;
    if (out.get() == key) out = own(PySequence_Tuple(own(PySequence_List(key)).get()));
    PyTuple_SetItem(out.get(), i, element.release());
  }
  return out;
}

Py_hash_t hash_of_elements(const Program& program, const uint32_t* ids, size_t count) {
  Py_hash_t hash = 17;
  for (size_t i = 0; i < count; ++i) hash = combined(hash, program.statics[ids[i]].hash);
  return hash;
}

uint32_t add_key(Program& program, PyObject* original, int depth) {
  // The elements of a tuple were made plain with it.
  Owned plain = depth || PyUnicode_CheckExact(original) ? Owned::borrow(original) : plain_key(original, 0);
  PyObject* key = plain.get();
  if (PyTuple_CheckExact(key)) {
    if (depth > max_key_depth) raise_error(PyExc_RecursionError, "a dict key is nested too deeply");
    std::vector<uint32_t> ids;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(key); ++i)
      ids.push_back(add_key(program, PyTuple_GET_ITEM(key, i), depth + 1));
    Static s;
    s.how = How::tuple;
    s.type = &PyTuple_Type;
    s.obj = program.keep(Owned::borrow(key));
    s.first = static_cast<uint32_t>(program.elements.size());
    s.count = static_cast<uint32_t>(ids.size());
    s.hash = hash_of_elements(program, ids.data(), ids.size());
    program.elements.insert(program.elements.end(), ids.begin(), ids.end());
    return program.add(s);
  }
  const Kind& kind = kind_of(key);
  if (kind.leaf == Leaf::statics || kind.how == How::reduce) return add_static(program, key, kind);
  if (kind.leaf == Leaf::array)
    raise_graftax("StructureError", "a jax.Array or tracer cannot be a dict key or a set element");
  if (!kind.is_node())
    raise_graftax("UnsupportedValueError", std::string(Py_TYPE(key)->tp_name) + " as a dict key: " + kind.reason);
  Static s;
  s.how = How::contents;
  s.type = program.keep_type(Py_TYPE(key));
  s.obj = program.keep(Owned::borrow(key));
  Owned object = object_of_key(key);
  s.contents = object ? nullptr : contents_of(key);  // by identity: recorded as a node
  if (s.contents)
    for (const Static& below : s.contents->statics)
      if (below.how == How::identity && !below.weak && kind_of(below.obj).symbolic)
        raise_graftax("UnsupportedValueError", "a number that may change, in an object that is a key");
  s.hash = s.contents ? s.contents->hash : hash_by_identity(object ? object.get() : key);
  return program.add(s);
}

uint32_t add_identity(Program& program, PyObject* obj) {
  Static s;
  s.type = program.keep_type(Py_TYPE(obj));
  s.obj = program.keep(Owned::borrow(obj));
  s.hash = hash_by_identity(obj);
  return program.add(s);
}

bool static_matches(const Program& program, uint32_t id, PyObject* obj) {
  const Static& s = program.statics[id];
  // From the cheapest answer to those that call Python.
  if (matches_at_once(s, obj)) return true;
  if (s.how == How::function) return PyFunction_Check(obj) && function_matches(s, obj);
  if (s.weak) return static_object(s).get() == obj;
  if (s.how == How::reduce && s.obj == obj && kind_of(obj).immortal_value) return true;
  if (s.how == How::identity || Py_TYPE(obj) != s.type) return false;
  if (s.how == How::tuple) {
    if (PyTuple_GET_SIZE(obj) != static_cast<Py_ssize_t>(s.count)) return false;
    // Held: an element may have an `==` of the user that drops the tuple.
    Owned tuple = Owned::borrow(obj);
    for (uint32_t i = 0, n = s.count, first = s.first; i < n; ++i)
      if (!static_matches(program, program.elements[first + i], PyTuple_GET_ITEM(obj, i))) return false;
    return true;
  }
  if (s.how == How::contents) {
    if (!same_key(s.obj, obj) && !defines_eq(s.type)) return false;
    if (!s.contents) return same_key(s.obj, obj);
    Owned key = Owned::borrow(obj);
    // Held: the replay may run user code that drops the program of this static.
    std::shared_ptr<Program> contents = s.contents;
    Walk walk;
    walk.order = Order::in_a_trace;  // a frozenset is a key, or is in one
    Owned root = contents_root(obj);
    PyObject* object = root.get();
    return object && replay(*contents, &object, 1, walk);
  }
  if (s.how == How::reduce) {
    // Held: a reduce function is Python code.
    Owned snapshot = Owned::borrow(s.snapshot);
    Owned hold = Owned::borrow(obj);
    return plain_equal(snapshot.get(), reduced(kind_of(obj), obj).get(), 0);
  }
  Owned value = Owned::borrow(s.obj);
  if (s.how == How::hashed) {  // one object, too, after a change that its hash shows
    Py_hash_t recorded = s.hash, hash = hash_of(obj);
    return hash == recorded && own_equal(value.get(), obj);
  }
  return values_equal(s.how, value.get(), obj);
}

bool statics_equal(const Program& a, uint32_t ia, const Program& b, uint32_t ib) {
  const Static& x = a.statics[ia];
  const Static& y = b.statics[ib];
  // Equal statics hash alike, so most of those that differ end here, without a call.
  if (x.how != y.how || x.type != y.type || x.hash != y.hash) return false;
  if (x.how == How::identity || x.how == How::copied) {
    Owned ox = static_object(x), oy = static_object(y);
    return ox && ox.get() == oy.get();
  }
  if (x.how == How::function) return functions_equal(x, y);
  if (x.how == How::input) return x.first == y.first;
  if (x.how == How::tuple) {
    if (x.count != y.count) return false;
    for (uint32_t i = 0; i < x.count; ++i)
      if (!statics_equal(a, a.elements[x.first + i], b, b.elements[y.first + i])) return false;
    return true;
  }
  if (x.how == How::reduce) return plain_equal(x.snapshot, y.snapshot, 0);
  if (x.how == How::contents) {
    if (!same_key(x.obj, y.obj) && !defines_eq(x.type)) return false;
    return x.contents && y.contents ? *x.contents == *y.contents : same_key(x.obj, y.obj);
  }
  if (x.obj == y.obj && is_value(x.how)) return true;
  return values_equal(x.how, x.obj, y.obj);
}

bool hash_apart(const Program& program, uint32_t first, PyObject* const* others, uint32_t count) {
  std::vector<Py_hash_t> hashes, theirs;
  for (uint32_t i = 0; i < count; ++i) {
    Owned element = static_object(program.statics[program.keys[first + i]]);
    if (!element) return false;
    hashes.push_back(hash_of(element.get()));
    theirs.push_back(hash_of(others[i]));
  }
  std::sort(hashes.begin(), hashes.end());
  std::sort(theirs.begin(), theirs.end());
  return hashes != theirs;
}

bool set_matches(const Program& program, uint32_t first, uint32_t count, PyObject* set) {
  if (PySet_GET_SIZE(set) != static_cast<Py_ssize_t>(count)) return false;
  if (count == 0) return true;
  std::unordered_multimap<Py_hash_t, uint32_t> by_hash;
  for (uint32_t i = 0; i < count; ++i) {
    Owned element = static_object(program.statics[program.keys[first + i]]);
    if (!element) return false;
    by_hash.emplace(hash_of(element.get()), program.keys[first + i]);
  }
  // A list of them: comparing may run code that changes the set.
  Owned elements = own(PySequence_List(own(PySet_Type.tp_iter(set)).get()));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(elements.get()); ++i) {
    PyObject* element = PyList_GET_ITEM(elements.get(), i);
    auto [it, end] = by_hash.equal_range(hash_of(element));
    while (it != end && !static_matches(program, it->second, element)) ++it;
    if (it == end) {  // equal keys may hash apart: two nan objects do
      for (it = by_hash.begin(); it != by_hash.end() && !static_matches(program, it->second, element);) ++it;
      if (it == by_hash.end()) return false;
    }
    by_hash.erase(it);
  }
  return true;
}

}  // namespace graftax
