// SPDX-License-Identifier: Apache-2.0
#include "direct.h"

namespace graftax {

namespace {

// One zero-argument question: a callable, and the one object it is asked of (or none).
struct Question {
  PyObject* ask = nullptr;
  PyObject* of = nullptr;
  PyObject* answer = nullptr;  // the only one that lets a call through; null where it has to be the same as before

  Owned now() const { return own(of ? PyObject_CallOneArg(ask, of) : PyObject_CallNoArgs(ask)); }
};

// What _direct.py hands over when the self-test has passed. Lives as long as the process.
struct Known {
  bool on = false;
  size_t least = 0;           // leaves: below, jax.jit's own call is as fast
  PyTypeObject* key = nullptr;  // typed PRNG keys
  PyObject *aval = nullptr, *sharding = nullptr, *committed = nullptr, *layout = nullptr;  // getters of an array
  PyObject *impl = nullptr, *base = nullptr;                                            // attributes of a key
  PyObject* capture = nullptr;
  PyObject* consume = nullptr;  // the name of the method that makes arrays of results
  std::vector<Question> required, surroundings;
} known;

bool same(const Owned& a, const Owned& b) {
  if (a.get() == b.get()) return true;
  int equal = PyObject_RichCompareBool(a.get(), b.get(), Py_EQ);
  check(equal);
  return equal;
}

Owned read(PyObject* getter, PyObject* array) { return own(PyObject_CallOneArg(getter, array)); }

PyObject* referent(PyObject* ref) { return reinterpret_cast<PyWeakReference*>(ref)->wr_object; }

Py_ssize_t rank(PyObject* aval) {
  static PyObject* name = PyUnicode_InternFromString("shape");
  return PyTuple_GET_SIZE(own(PyObject_GetAttr(aval, name)).get());
}

}  // namespace

bool gate_is_open() {
  for (const Question& q : known.required)
    if (q.now().get() != q.answer) return false;
  return true;
}

bool direct_takes(size_t leaves) { return known.on && leaves >= known.least; }

bool Direct::look_at(Guard& guard, PyObject* leaf) {
  Owned array = Owned::borrow(leaf);
  if (Py_TYPE(leaf) == known.key) {
    guard.impl = own(PyObject_GetAttr(leaf, known.impl));
    array = own(PyObject_GetAttr(leaf, known.base));
  }
  if (Py_TYPE(array.get()) != runtime.array_type) return false;
  guard.aval = read(known.aval, array.get());
  guard.sharding = read(known.sharding, array.get());
  guard.committed = read(known.committed, array.get());
  guard.asks_layout = rank(guard.aval.get()) > 1;
  if (guard.asks_layout) guard.layout = read(known.layout, array.get());
  guard.last = leaf;
  return true;
}

std::shared_ptr<Direct> Direct::look(const OwnedList& leaves) {
  auto out = std::make_shared<Direct>();
  out->guards_.resize(leaves.size());
  for (size_t i = 0; i < leaves.size(); ++i)
    if (!look_at(out->guards_[i], leaves[i])) return nullptr;
  for (const Question& q : known.surroundings) out->surroundings_.push_back(q.now());
  return out;
}

bool Direct::fits(Guard& guard, PyObject* leaf) {
  if (guard.ref && referent(guard.ref.get()) == leaf) return true;
  Owned array = Owned::borrow(leaf);
  if (guard.impl) {
    if (Py_TYPE(leaf) != known.key || own(PyObject_GetAttr(leaf, known.impl)).get() != guard.impl.get()) return false;
    array = own(PyObject_GetAttr(leaf, known.base));
  }
  if (Py_TYPE(array.get()) != runtime.array_type) return false;
  auto as_before = [&](PyObject* getter, Owned& before) {
    Owned now = read(getter, array.get());
    if (now.get() == before.get()) return true;
    if (!same(now, before)) return false;
    before = std::move(now);  // the next one is likely to have the same
    return true;
  };
  if (!as_before(known.aval, guard.aval) || !as_before(known.sharding, guard.sharding)) return false;
  if (read(known.committed, array.get()).get() != guard.committed.get()) return false;
  if (guard.asks_layout && !as_before(known.layout, guard.layout)) return false;
  if (guard.last == leaf) guard.ref = own(PyWeakref_NewRef(leaf, nullptr));
  else guard.last = leaf;
  return true;
}

bool Direct::fits(const OwnedList& leaves) {
  if (leaves.size() != guards_.size()) return false;
  for (size_t i = 0; i < surroundings_.size(); ++i)
    if (!same(known.surroundings[i].now(), surroundings_[i])) return false;
  for (size_t i = 0; i < leaves.size(); ++i)
    if (!fits(guards_[i], leaves[i])) return false;
  return true;
}

bool Direct::prepare(PyObject* compiled, const OwnedList& leaves, bool packed) {
  Owned all = own(PyTuple_New(static_cast<Py_ssize_t>(leaves.size())));
  for (size_t i = 0; i < leaves.size(); ++i) PyTuple_SET_ITEM(all.get(), static_cast<Py_ssize_t>(i), Py_NewRef(leaves[i]));
  Owned answer = own(PyObject_CallFunctionObjArgs(known.capture, compiled, all.get(), packed ? Py_True : Py_False, nullptr));
  if (answer.get() == Py_None) return false;
  PyObject *execute, *handlers, *kept;
  Py_ssize_t number;
  int donates;
  if (!PyArg_ParseTuple(answer.get(), "OO!O!np", &execute, &PyList_Type, &handlers, &PyTuple_Type, &kept, &number, &donates))
    raise_python();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kept); ++i) {
    size_t k = PyLong_AsSize_t(PyTuple_GET_ITEM(kept, i));
    if (k >= leaves.size()) raise_error(PyExc_IndexError, "a kept leaf that is not there");
    kept_.push_back(static_cast<uint32_t>(k));
  }
  outcome_ = static_cast<size_t>(number);
  donates_ = donates;
  handlers_ = Owned::borrow(handlers);
  execute_ = Owned::borrow(execute);
  return true;
}

Owned Direct::run(const OwnedList& leaves) const {
  Owned inputs = own(PyList_New(static_cast<Py_ssize_t>(kept_.size())));
  for (size_t i = 0; i < kept_.size(); ++i) {
    PyObject* leaf = leaves[kept_[i]];
    Owned array = guards_[kept_[i]].impl ? own(PyObject_GetAttr(leaf, known.base)) : Owned::borrow(leaf);
    PyList_SET_ITEM(inputs.get(), static_cast<Py_ssize_t>(i), array.release());
  }
  Owned results = Owned::steal(PyObject_CallOneArg(execute_.get(), inputs.get()));
  if (!results) return {};
  Owned outputs = Owned::steal(PyObject_CallMethodOneArg(results.get(), known.consume, handlers_.get()));
  if (outputs && !PyList_CheckExact(outputs.get())) raise_error(PyExc_SystemError, "the results of an executable are no list");
  return outputs;
}

void bind_direct(nb::module_& m) {
  m.def("use_direct", [](nb::object capture, nb::object key, nb::tuple array_getters, nb::tuple key_attributes, nb::str consume,
                         nb::list required, nb::list surroundings) {
    auto keep = [](nb::handle h) { return nb::borrow(h).release().ptr(); };
    auto question = [&](nb::handle h, bool has_answer) {
      auto parts = nb::cast<nb::tuple>(h);
      Question q;
      q.ask = keep(parts[0]);
      q.of = parts[1].is_none() ? nullptr : keep(parts[1]);
      if (has_answer) q.answer = keep(parts[2]);
      return q;
    };
    if (array_getters.size() != 4 || key_attributes.size() != 2) raise_error(PyExc_ValueError, "expected 4 getters and 2 names");
    known.capture = keep(capture);
    known.key = reinterpret_cast<PyTypeObject*>(keep(key));
    known.aval = keep(array_getters[0]);
    known.sharding = keep(array_getters[1]);
    known.committed = keep(array_getters[2]);
    known.layout = keep(array_getters[3]);
    known.impl = keep(key_attributes[0]);
    known.base = keep(key_attributes[1]);
    known.consume = keep(consume);
    known.required.clear();
    known.surroundings.clear();
    for (nb::handle h : required) known.required.push_back(question(h, true));
    for (nb::handle h : surroundings) known.surroundings.push_back(question(h, false));
  }, nb::arg("capture"), nb::arg("key"), nb::arg("array_getters"), nb::arg("key_attributes"), nb::arg("consume"),
     nb::arg("required"), nb::arg("surroundings"),
     nb::sig("def use_direct(capture: Callable[..., Any], key: type, array_getters: tuple[Any, ...], key_attributes: tuple[str, str], "
             "consume: str, required: list[tuple[Any, Any, Any]], surroundings: list[tuple[Any, Any]]) -> None"),
     "Hands over, once, what direct calls read of JAX.");
  m.def("direct_from", [](size_t leaves) { known.on = leaves != 0, known.least = leaves; }, nb::arg("leaves"),
        nb::sig("def direct_from(leaves: int) -> None"),
        "Calls with so many leaves or more may run their executable directly; 0: none does.");
}

}  // namespace graftax
