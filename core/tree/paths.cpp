// SPDX-License-Identifier: Apache-2.0
#include "tree/paths.h"

#include "python/hooks.h"
#include "tree/build.h"
#include "tree/cache.h"

namespace graftax {

namespace {

// SequenceKey(i) and FlattenedIndexKey(i): small ones are kept.
Owned index_entry(PyObject* cls, std::vector<PyObject*>& kept, uint32_t i) {
  constexpr uint32_t most_kept = 1 << 17;
  while (kept.size() <= i && i < most_kept) {
    size_t next = kept.size();
    Owned number = own(PyLong_FromSize_t(next));
    Owned entry = own(PyObject_CallOneArg(cls, number.get()));
    if (kept.size() == next) kept.push_back(entry.release());  // else the collector ran, and code that made it too
  }
  if (i < kept.size()) return Owned::borrow(kept[i]);
  Owned number = own(PyLong_FromUnsignedLong(i));
  return own(PyObject_CallOneArg(cls, number.get()));
}

// DictKey(key) and GetAttrKey(name): those of text are kept, up to a number.
Owned named_entry(PyObject* cls, PyObject* kept, PyObject* key) {
  constexpr Py_ssize_t most_kept = 8192;
  if (!PyUnicode_CheckExact(key)) return own(PyObject_CallOneArg(cls, key));
  if (PyObject* entry = dict_get(kept, key)) return Owned::borrow(entry);
  Owned entry = own(PyObject_CallOneArg(cls, key));
  if (PyDict_GET_SIZE(kept) >= most_kept) PyDict_Clear(kept);
  check(PyDict_SetItem(kept, key, entry.get()));
  return entry;
}

Owned attribute_entry(PyObject* name) {
  static PyObject* cls = hooks::attribute_key.get();
  static PyObject* kept = check(PyDict_New());
  return named_entry(cls, kept, name);
}

}  // namespace

void child_entries(const TreeNode& n, OwnedList& entries) {
  static PyObject *sequence = hooks::sequence_key.get(), *dict_key = hooks::dict_key.get(),
                  *flat = hooks::flat_index_key.get();
  static PyObject* kept_keys = check(PyDict_New());
  static std::vector<PyObject*> kept_sequence, kept_flat;
  entries.reserve(n.arity);
  switch (n.role) {
    case Role::list:
    case Role::tuple:
      for (uint32_t i = 0; i < n.arity; ++i) entries.push_stolen(index_entry(sequence, kept_sequence, i));
      return;
    case Role::dict:
    case Role::odict:
    case Role::defaultdict:
      for (uint32_t i = 0; i < n.arity; ++i)
        entries.push_stolen(named_entry(dict_key, kept_keys, PyTuple_GET_ITEM(keys_of(n), i)));
      return;
    case Role::namedtuple:
    case Role::fields: {
      // Made once for the class, one by one: another walk may run while an entry is made.
      std::vector<PyObject*>& kept = n.kind->entries;
      while (kept.size() < n.kind->children.size()) {
        size_t next = kept.size();
        Owned entry = attribute_entry(n.kind->children[next]);
        if (kept.size() == next) kept.push_back(entry.release());
      }
      if (kept.size() != n.arity)
        raise_error(PyExc_ValueError,
                    std::string("the fields of ") + n.kind->type->tp_name + " do not name its children");
      for (PyObject* entry : kept) entries.push(entry);
      return;
    }
    case Role::registered:
      for (uint32_t i = 0; i < n.arity; ++i) entries.push_stolen(index_entry(flat, kept_flat, i));
      return;
    default: return;
  }
}

namespace {

void make_paths(const Structure& t, const NamedNodes& named, OwnedList& out) {
  struct Open {
    uint32_t end, taken;
    OwnedList entries;  // of the children
  };
  std::vector<Open> open;
  OwnedList path;
  auto next_named = named.begin();
  out.reserve(t.leaves);
  for (uint32_t i = 0; i < t.nodes.size(); ++i) {
    // Nodes that end before this record take their entry off the path. The root has none.
    for (; !open.empty() && open.back().end == i; open.pop_back())
      if (!path.empty()) path.resize(path.size() - 1);
    const TreeNode& n = t.nodes[i];
    uint32_t times = n.role == Role::leaf ? n.arity : 1;
    for (uint32_t k = 0; k < times; ++k) {
      if (!open.empty()) path.push(open.back().entries[open.back().taken++]);
      if (n.role != Role::leaf) break;
      out.push_stolen(tuple_of(path.data(), static_cast<uint32_t>(path.size())));
      if (!open.empty()) path.resize(path.size() - 1);
    }
    if (n.role == Role::leaf) continue;
    open.push_back({n.next, 0, {}});
    if (next_named == named.end() || next_named->node != i) {
      child_entries(n, open.back().entries);
      continue;
    }
    for (size_t k = 0; k < next_named->entries.size(); ++k) open.back().entries.push(next_named->entries[k]);
    ++next_named;
  }
}

}  // namespace

void leaf_paths(const Structure& t, const NamedNodes& named, OwnedList& out) {
  if (!named.empty()) return make_paths(t, named, out);
  size_t hash = cache_hash(t);
  if (KeptPaths::slot(hash).take(t, out)) return;
  make_paths(t, named, out);
  KeptPaths::slot(hash).see(t, hash, out);
}

}  // namespace graftax
