// SPDX-License-Identifier: Apache-2.0
#include "call/fast_dispatch.h"

#include <algorithm>
#include <array>

#include "call/array_fields.h"
#include "call/cache.h"
#include "call/trace.h"
#include "graph/kind.h"

namespace graftax {

namespace {

// What `_jax/fast_dispatch.py` found of JAX. Lives as long as the process.
struct JaxInternals {
  bool on = false;
  size_t least = 0;             // leaves: calls with fewer stay with jax.jit
  int wait = 0;                 // calls before an executable with few leaves is asked for
  PyTypeObject* key = nullptr;  // typed PRNG keys
  PyObject *aval = nullptr, *sharding = nullptr, *committed = nullptr, *layout = nullptr;  // getters of an array
  PyObject *impl = nullptr, *base = nullptr;                                               // attributes of a key
  PyObject* capture = nullptr;
  PyObject* consume = nullptr;     // the name of the method that makes arrays of results
  PyObject* put = nullptr;         // NumPy array, aval and devices -> a jax.Array with its content
  PyObject* refused = nullptr;     // error -> had the executable refused its arguments?
  PyObject* semantics = nullptr;   // says to it that the memory is the caller's again when the call returns
  PyTypeObject* scalar = nullptr;  // numpy.generic
  std::vector<Question> required, at_first;
  Question trace_context;
} jax;

ArrayParts array_parts;
uint64_t times_cleared = 0;

constexpr size_t few_leaves = 4;
constexpr uint8_t max_searches = 3;  // of a leaf among the results of the call before

bool same(PyObject* a, PyObject* b) {
  // JAX makes its trace context anew for each question, of the same objects.
  if (a == b || (PyTuple_CheckExact(a) && PyTuple_CheckExact(b) && same_items(a, b))) return true;
  return equal(a, b);
}

PyObject* name_of_shape() {
  static PyObject* const name = interned("shape");
  return name;
}

PyObject* name_of_dtype() {
  static PyObject* const name = interned("dtype");
  return name;
}

bool same_settings(const SettingsNow& a, const SettingsNow& b) {
  size_t count = a.in_jits_key.size();
  if (count != b.in_jits_key.size()) return false;
  for (size_t i = 0; i < count; ++i)
    if (!same(a.in_jits_key[i], b.in_jits_key[i])) return false;
  return true;
}

Owned read(PyObject* getter, PyObject* array) { return own(PyObject_CallOneArg(getter, array)); }

// What a weak reference refers to, without a new reference: only compared.
PyObject* referent(PyObject* ref) { return reinterpret_cast<PyWeakReference*>(ref)->wr_object; }

Py_ssize_t rank(PyObject* aval) { return PyTuple_GET_SIZE(own(PyObject_GetAttr(aval, name_of_shape())).get()); }

}  // namespace

bool gate_is_open() { return answered(jax.required); }

TraceContext trace_context_now(const Shared<SettingsNow>& settings) { return {jax.trace_context.now(), settings}; }

uint64_t caches_cleared() { return times_cleared; }

bool is_key_type(PyTypeObject* type) { return type == jax.key; }

bool direct_takes(size_t leaves) { return jax.on && leaves >= jax.least; }

bool nothing_has_run(PyObject* error) { return own(PyObject_CallOneArg(jax.refused, error)).get() == Py_True; }

int direct_waits(size_t leaves) { return leaves < few_leaves ? jax.wait : 0; }

namespace {

// What the leaves before were like: most are like one of these.
class Looker {
 public:
  // False where this is nothing that a direct call takes.
  bool look_at(PyObject* leaf, LeafLook& out) {
    if (kind_of(leaf).leaf == Leaf::numpy) return look_at_host(leaf, out);
    // A typed PRNG key is an array in a box, with the implementation of its algorithm.
    Owned array = Owned::borrow(leaf), impl, layout;
    if (Py_TYPE(leaf) == jax.key) {
      impl = own(PyObject_GetAttr(leaf, jax.impl));
      array = own(PyObject_GetAttr(leaf, jax.base));
    }
    if (Py_TYPE(array.get()) != runtime.array_type) return false;
    Owned aval = read(jax.aval, array.get());
    Owned committed = read(jax.committed, array.get());
    out.sharding = read(jax.sharding, array.get());
    auto is_like = [&](const Look& other) {
      if (other.aval.get() != aval.get() || other.committed.get() != committed.get()) return false;
      if (other.impl.get() != impl.get()) return false;
      if (!other.asks_layout) return true;
      if (!layout) layout = read(jax.layout, array.get());  // last, since it is the one that is expensive
      return same(other.layout.get(), layout.get());
    };
    for (size_t i = 0; i < recent_.size(); ++i) {
      Shared<Look> look = recent_[i];
      if (!look || !is_like(*look)) continue;
      out.look = std::move(look);
      return true;
    }
    out.look = Shared<Look>::make();
    out.look->asks_layout = rank(aval.get()) > 1;
    if (out.look->asks_layout && !layout) layout = read(jax.layout, array.get());
    if (out.look->asks_layout) out.look->layout = std::move(layout);
    out.look->aval = std::move(aval);
    out.look->committed = std::move(committed);
    out.look->impl = std::move(impl);
    recent_[next_++ % recent_.size()] = out.look;
    return true;
  }

 private:
  static bool look_at_host(PyObject* leaf, LeafLook& out) {
    bool is_array = Py_TYPE(leaf) == runtime.ndarray_type;
    if (!is_array && !PyType_IsSubtype(Py_TYPE(leaf), jax.scalar)) return false;
    out.look = Shared<Look>::make();
    out.look->host = std::make_unique<HostLook>();
    HostLook& host = *out.look->host;
    host.type = Py_TYPE(leaf);
    if (!is_array) return true;
    host.dtype = own(PyObject_GetAttr(leaf, name_of_dtype()));
    host.shape = own(PyObject_GetAttr(leaf, name_of_shape()));
    return true;
  }

  std::array<Shared<Look>, 4> recent_;  // a ring
  size_t next_ = 0;
};

}  // namespace

std::vector<LeafLook> looks_of(const OwnedList& leaves) {
  std::vector<LeafLook> out(leaves.size());
  Looker looker;
  for (size_t i = 0; i < leaves.size(); ++i)
    if (!looker.look_at(leaves[i], out[i])) return {};
  return out;
}

Shared<Direct> Direct::look(const OwnedList& leaves, TraceContext trace_context, std::vector<LeafLook>* looks) {
  if (!answered(jax.at_first)) return nullptr;
  auto out = Shared<Direct>::make();
  out->guards_ = looks && looks->size() == leaves.size() ? std::move(*looks) : looks_of(leaves);
  if (out->guards_.size() != leaves.size()) return nullptr;
  out->trace_context_ = std::move(trace_context);
  return out;
}

bool Direct::fits(const HostLook& host, PyObject* leaf) {
  if (Py_TYPE(leaf) != host.type) return false;
  if (!host.dtype) return true;
  return same(own(PyObject_GetAttr(leaf, name_of_dtype())).get(), host.dtype.get()) &&
         same(own(PyObject_GetAttr(leaf, name_of_shape())).get(), host.shape.get());
}

bool Direct::is_known(const Met& met, PyObject* leaf) {
  // A result of the call before is a new array: it is known once one like it was looked at.
  return met.ref && referent(met.ref.get()) == leaf && (met.result == NONE || met.sure);
}

// What is compared is held: comparing may let another thread in, which is at the same guards.
bool Direct::fits(size_t i, Met* met, PyObject* leaf) {
  bool referred = met && met->ref && referent(met->ref.get()) == leaf;
  uint32_t result = referred ? met->result : NONE;
  LeafLook& guard = guards_[i];
  Shared<Look> look = guard.look;
  if (look->host) return fits(*look->host, leaf);
  Owned array = Owned::borrow(leaf);
  if (look->impl) {
    if (Py_TYPE(leaf) != jax.key || own(PyObject_GetAttr(leaf, jax.impl)).get() != look->impl.get()) return false;
    array = own(PyObject_GetAttr(leaf, jax.base));
  }
  if (Py_TYPE(array.get()) != runtime.array_type) return false;
  // The fields of the array say at once that it has these very objects; otherwise its getters are asked, and objects
  // that are equal will do.
  bool has_same_fields =
      array_parts.are(array.get(), look->aval.get(), guard.sharding.get(), look->committed.get() == Py_True);
  if (has_same_fields && !look->asks_layout && !look->impl) return true;
  Owned aval = has_same_fields ? look->aval : read(jax.aval, array.get());
  Owned sharding = has_same_fields ? guard.sharding : read(jax.sharding, array.get()), layout;
  bool same_aval = aval.get() == look->aval.get();
  if (!same_aval && !same(aval.get(), look->aval.get())) return false;
  if (sharding.get() != guard.sharding.get()) {
    Owned before = guard.sharding;
    if (!same(sharding.get(), before.get())) return false;
    guard.sharding = std::move(sharding);  // the next one is likely to have the same
  }
  if (!has_same_fields && read(jax.committed, array.get()).get() != look->committed.get()) return false;
  if (look->asks_layout) {
    layout = read(jax.layout, array.get());
    if (!same(layout.get(), look->layout.get())) return false;
  }
  // So with the aval, but in a copy: leaves that are alike have one Look, and the others still have the old aval.
  if (!same_aval) {
    auto own_look = Shared<Look>::make();
    own_look->committed = look->committed;
    own_look->impl = look->impl;
    own_look->asks_layout = look->asks_layout;
    own_look->aval = std::move(aval);
    own_look->layout = std::move(layout);
    guard.look = std::move(own_look);
  }
  if (!met) return true;
  // By here the leaf fits. Which object it was is noted, so that the same one is not looked at again.
  if (result != NONE) {
    met->sure = met->result == result;
    if (look->asks_layout) met->searches = 0;
    return true;
  }
  met->result = NONE;
  if (met->last == leaf) met->ref = own(PyWeakref_NewRef(leaf, nullptr));
  else met->last = leaf;
  if (met->searches < max_searches && !look->impl) find_result(*met, leaf);
  return true;
}

// An address may be that of another array by now, so what is found here is only tried.
void Direct::find_result(Met& met, PyObject* leaf) const {
  ++met.searches;
  auto result = std::find(results_.begin(), results_.end(), leaf);
  if (result == results_.end()) return;
  met.result = static_cast<uint32_t>(result - results_.begin());
  met.sure = false;
}

// Leaves that were results of the call before are likely to be so again: their references follow to the new results.
void Direct::expect(PyObject* outputs) {
  PyObject* const* items = PySequence_Fast_ITEMS(outputs);
  auto count = static_cast<size_t>(PyList_GET_SIZE(outputs));
  bool searching = false;
  for (Met& met : met_) {
    if (met.result < count) met.ref = own(PyWeakref_NewRef(items[met.result], nullptr));
    searching = searching || met.searches < max_searches;
  }
  if (searching) results_.assign(items, items + count);
  else results_.clear();
}

bool Direct::fits(const OwnedList& leaves, const TraceContext& trace_context) {
  if (leaves.size() != guards_.size() || !same(trace_context.shown.get(), trace_context_.shown.get())) return false;
  if (trace_context.settings != trace_context_.settings) {
    if (!same_settings(*trace_context.settings, *trace_context_.settings)) return false;
    trace_context_.settings = trace_context.settings;
  }
  // Which object each leaf was is noted once all of them have fitted.
  Met* met = met_.empty() ? nullptr : met_.data();
  auto is_as_before = [&](size_t i) {
    if (!met) return fits(i, nullptr, leaves[i]);
    return is_known(met[i], leaves[i]) || fits(i, met + i, leaves[i]);
  };
  // Of shapes that come in turn the same leaf differs most times.
  if (differed_ > 0 && !is_as_before(differed_)) return false;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (i > 0 && i == differed_) continue;
    if (is_as_before(i)) continue;
    differed_ = i;
    return false;
  }
  if (met_.empty()) {
    met_.resize(leaves.size());
    for (size_t i = 0; i < leaves.size(); ++i) {
      met_[i].last = leaves[i];
      if (!guards_[i].look->asks_layout) met_[i].searches = max_searches;
    }
  }
  return true;
}

namespace {

Owned arguments_of(const OwnedList& leaves, const OwnedList& vectors) {
  OwnedList arguments;
  for (size_t i = 0; i < leaves.size(); ++i) arguments.push(leaves[i]);
  for (size_t i = 0; i < vectors.size(); ++i) arguments.push(vectors[i]);
  return tuple_of(arguments);
}

}  // namespace

// What Python says of an executable. Where the copies of NumPy leaves go is noted in the guards.
Direct::Captured Direct::captured(Owned answer, size_t arguments, size_t vectors) {
  Captured out;
  out.answer = std::move(answer);
  PyObject *kept, *hosts;
  Py_ssize_t number;
  int donates;
  if (!PyArg_ParseTuple(out.answer.get(), "OO!O!npO!O", &out.execute, &PyList_Type, &out.handlers, &PyTuple_Type, &kept,
                        &number, &donates, &PyList_Type, &hosts, &out.ring))
    raise_python();
  out.number = static_cast<size_t>(number);
  out.donates = donates;
  out.computed.resize(vectors);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(hosts); ++i) {
    Py_ssize_t k;
    PyObject *aval, *sharding, *devices;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(hosts, i), "nOOO", &k, &aval, &sharding, &devices)) raise_python();
    auto at = static_cast<size_t>(k);
    if (k < 0 || at >= arguments || (at < guards_.size() && !guards_[at].look->host))
      raise_error(PyExc_IndexError, "a NumPy leaf that is not there");
    HostLook& host = at < guards_.size() ? *guards_[at].look->host : out.computed[at - guards_.size()];
    // A program that was prepared before has placed it.
    if (host.aval) continue;
    host.aval = Owned::borrow(aval);
    host.sharding = Owned::borrow(sharding);
    host.devices = Owned::borrow(devices);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kept); ++i) {
    size_t k = PyLong_AsSize_t(PyTuple_GET_ITEM(kept, i));
    if (k >= arguments) raise_error(PyExc_IndexError, "a kept leaf that is not there");
    out.kept.push_back(static_cast<uint32_t>(k));
  }
  return out;
}

// What all programs of these leaves have in common stays once it is there: another thread may be using it.
void Direct::take(Captured captured, Owned& execute, Owned& handlers) {
  handlers = Owned::borrow(captured.handlers);
  execute = Owned::borrow(captured.execute);
  if (std::exchange(has_program_, true)) return;
  auto in_place = Ring::of(captured.ring);
  takes_vectors_ = !captured.kept.empty() && captured.kept.back() >= guards_.size();
  kept_ = std::move(captured.kept);
  outcome_ = captured.number;
  vectors_ = std::move(captured.computed);
  ring_ = std::move(in_place);
}

bool Direct::prepare(PyObject* compiled, const OwnedList& leaves, const OwnedList& vectors, bool tupled) {
  Owned all = arguments_of(leaves, vectors);
  Owned answer = own(PyObject_CallFunction(jax.capture, "OOOn", compiled, all.get(), tupled ? Py_True : Py_False,
                                           static_cast<Py_ssize_t>(vectors.size())));
  if (answer.get() == Py_None) return false;
  if (answer.get() == Py_False) {  // still being compiled
    calls = 0;
    return true;
  }
  Captured program = captured(std::move(answer), leaves.size() + vectors.size(), vectors.size());
  if (execute_) return true;  // another thread has asked meanwhile, and may be running it
  // The program that donates takes the same leaves: what is noted of them is for both.
  if (has_program_ && program.kept != kept_) return false;
  donates_ = program.donates;
  take(std::move(program), execute_, handlers_);
  return true;
}

void Direct::ask_donor(const Entry& entry, const OwnedList& leaves, PyObject* host) {
  static PyObject* const name = interned("candidates");
  Owned donor = entry.donor, all = arguments_of(leaves, entry.vectors(host));
  Owned answer = own(PyObject_CallMethodObjArgs(donor.get(), name, nb::find(entry).ptr(), all.get(), nullptr));
  std::pair<nb::object, std::vector<Donation::Array>> outcome_and_arrays;  // the arrays that it replaces
  auto& [outcome, arrays] = outcome_and_arrays;
  if (answer.get() != Py_None && (!read_as(answer.get(), outcome_and_arrays) || !nb::isinstance<Outcome>(outcome)))
    raise_error(PyExc_TypeError, "expected an Outcome and candidates");
  // Another thread may have asked while Python answered: the first answer stays.
  if (std::exchange(asked_donor_, true) || arrays.empty()) return;
  Replaced replaced(entry.program(), *nb::inst_ptr<Outcome>(outcome), entry.arguments);
  donation_ = std::make_unique<Donation>(std::move(replaced), arrays);
  if (has_program_) donation_->keep_only(kept_);
}

bool Direct::prepare_donation(const Entry& entry, const OwnedList& leaves, PyObject* host,
                              const CallReferences& references) {
  static PyObject* const name = interned("program");
  bool is_first_call = !has_program_;
  if (!asked_donor_) {
    ask_donor(entry, leaves, host);
    if (donation_) {
      donation_->count(leaves, references);
      donation_->leave_out_held_arguments();
      if (donation_->candidates.empty()) donation_ = nullptr;
    }
  }
  std::vector<uint32_t> chosen = donation_ ? donation_->worth_donating(is_first_call) : std::vector<uint32_t>();
  if (chosen.empty()) return ready();
  Owned donor = entry.donor, all = arguments_of(leaves, entry.vectors(host));
  Owned numbers = own(nb::cast(chosen).release().ptr());
  Owned count = own(PyLong_FromSize_t(PyTuple_GET_SIZE(all.get()) - leaves.size()));
  Owned answer = own(PyObject_CallMethodObjArgs(donor.get(), name, all.get(), numbers.get(), count.get(), nullptr));
  auto arguments = static_cast<size_t>(PyTuple_GET_SIZE(all.get()));
  bool usable = answer.get() != Py_None;
  if (usable) {
    Captured program = captured(std::move(answer), arguments, arguments - leaves.size());
    usable = !has_program_ || program.kept == kept_;
    Owned execute, handlers;
    if (usable) take(std::move(program), execute, handlers);
    if (usable) donation_->keep_only(kept_);
    if (usable) donation_->use(chosen, std::move(execute), std::move(handlers));
  }
  if (!usable) donation_->refuse();
  return ready();
}

// The content of a NumPy leaf on its device. The caller may write to the leaf as soon as the call has returned.
Owned Direct::put(const HostLook& host, PyObject* leaf) {
  if (!host.aval) raise_error(PyExc_SystemError, "a NumPy leaf has no place");
  Owned content = own(PyList_New(1));
  PyList_SET_ITEM(content.get(), 0, Py_NewRef(leaf));
  // As `batched_device_put` takes them: the content is a list with one array for each device.
  PyObject* arguments[] = {host.aval.get(), host.sharding.get(), content.get(), host.devices.get(), Py_False,
                           Py_False,        jax.semantics};
  return Owned::steal(PyObject_Vectorcall(jax.put, arguments, 7, nullptr));
}

Owned Direct::inputs(const OwnedList& leaves, PyObject* host, PyObject* vectors, Ring::Slot* slot) {
  Owned out = own(PyList_New(static_cast<Py_ssize_t>(kept_.size())));
  size_t in_slot = 0;
  auto array_of = [&](uint32_t k) {
    if (k >= guards_.size()) {
      // Behind the leaves come the numbers of the host: written into a slot of the ring, or copied.
      auto vector = static_cast<Py_ssize_t>(k - guards_.size());
      if (!slot) return put(vectors_[k - guards_.size()], PyTuple_GET_ITEM(vectors, vector));
      ring_->write(*slot, in_slot, PyTuple_GET_ITEM(host, vector));
      return slot->arrays[in_slot++];
    }
    const Look& look = *guards_[k].look;
    if (look.host) return put(*look.host, leaves[k]);
    return look.impl ? own(PyObject_GetAttr(leaves[k], jax.base)) : Owned::borrow(leaves[k]);
  };
  for (size_t i = 0; i < kept_.size(); ++i) {
    Owned array = array_of(kept_[i]);
    if (!array) return {};
    PyList_SET_ITEM(out.get(), static_cast<Py_ssize_t>(i), array.release());
  }
  return out;
}

Owned Direct::run(const OwnedList& leaves, PyObject* host, PyObject* vectors, Ring::Slot* slot,
                  CallReferences references, bool& donated) {
  Owned arrays = inputs(leaves, host, vectors, slot);
  if (!arrays) return {};
  if (donation_) {
    references.each_leaf += 1;  // in `arrays`
    donation_->count(leaves, references);
    // From here to the launch nothing may let another thread in: the count has to hold until then.
    donated = donation_->is_ready();
    if (!donated && !execute_) {
      donation_->note_call(leaves, false);
      return {};
    }
  }
  // Both held: while it runs, another thread may ask for another program.
  Owned execute = donated ? donation_->execute : execute_, handlers = donated ? donation_->handlers : handlers_;
  Owned results = Owned::steal(PyObject_CallOneArg(execute.get(), arrays.get()));
  if (!results) return {};
  Owned outputs = Owned::steal(PyObject_CallMethodOneArg(results.get(), jax.consume, handlers.get()));
  if (outputs && !PyList_CheckExact(outputs.get()))
    raise_error(PyExc_SystemError, "the results of an executable are not a list");
  if (outputs) expect(outputs.get());
  if (outputs && slot) ring_->give_back(*slot, outputs.get());
  if (donation_) donation_->note_call(leaves, donated);
  return outputs;
}

void bind_direct(nb::module_& m) {
  m.def(
      "use_direct",
      [](nb::object capture, nb::object key, nb::tuple array_getters, nb::tuple key_attributes, nb::str consume,
         nb::list required, nb::list at_first, nb::tuple trace_context, nb::tuple put, nb::object refused) {
        auto keep = [](nb::handle h) { return nb::borrow(h).release().ptr(); };
        jax.capture = keep(capture);
        jax.key = reinterpret_cast<PyTypeObject*>(keep(key));
        jax.aval = keep(array_getters[0]);
        jax.sharding = keep(array_getters[1]);
        jax.committed = keep(array_getters[2]);
        jax.layout = keep(array_getters[3]);
        jax.impl = keep(key_attributes[0]);
        jax.base = keep(key_attributes[1]);
        jax.consume = keep(consume);
        jax.put = keep(put[0]);
        jax.refused = keep(refused);
        jax.semantics = keep(put[1]);
        jax.scalar = reinterpret_cast<PyTypeObject*>(keep(put[2]));
        for (nb::handle h : required) jax.required.push_back(Question::of_parts(h));
        for (nb::handle h : at_first) jax.at_first.push_back(Question::of_parts(h));
        jax.trace_context = Question::of_parts(trace_context);
      },
      nb::arg("capture"), nb::arg("key"), nb::arg("array_getters"), nb::arg("key_attributes"), nb::arg("consume"),
      nb::arg("required"), nb::arg("at_first"), nb::arg("trace_context"), nb::arg("put"), nb::arg("refused"),
      nb::sig(
          "def use_direct(capture: Callable[..., Any], key: type, array_getters: tuple[Any, ...], key_attributes: "
          "tuple[str, str], "
          "consume: str, required: list[tuple[Any, Any, Any]], at_first: list[tuple[Any, Any, Any]], trace_context: "
          "tuple[Any, Any], "
          "put: tuple[Any, Any, type], refused: Callable[[BaseException], bool]) -> None"),
      "Tells the core, once, what direct calls read of JAX.");
  m.def(
      "find_array_parts",
      [](const nb::list& samples) {
        array_parts = ArrayParts::find(runtime.array_type, samples);
        return array_parts.known();
      },
      nb::arg("samples"), nb::sig("def find_array_parts(samples: list[tuple[Any, Any, Any, bool]]) -> bool"),
      "Finds where an array holds its aval, its sharding, and whether it is committed; each sample is an array and "
      "these "
      "three. Where that is not known, direct calls ask the array.");
  m.def(
      "caches_cleared", [] { ++times_cleared; }, nb::sig("def caches_cleared() -> None"),
      "JAX has forgotten what it had compiled: so do direct calls.");
  m.def(
      "direct_from", [](size_t leaves, int wait) { jax.on = leaves != 0, jax.least = leaves, jax.wait = wait; },
      nb::arg("leaves"), nb::arg("wait"), nb::sig("def direct_from(leaves: int, wait: int) -> None"),
      "Calls with so many leaves or more may run their executable directly, those with few leaves only after `wait` "
      "calls; 0: none does.");
}

}  // namespace graftax
