// SPDX-License-Identifier: Apache-2.0
// Direct calls: a loaded executable runs on the leaves of a call, without jax.jit, where all that jax.jit would look at is as
// it was when jax.jit ran. What is private to JAX comes from _jax/fast_dispatch.py; see docs/internals/direct.md.
#pragma once

#include <memory>

#include "call/host_input_ring.h"
#include "call/proven_donation.h"
#include "graph/graphdef.h"
#include "python/jax_settings.h"

namespace graftax {

// What jax.jit looks at besides its arguments and settings. False where it is not as everyday calls have it: then jax.jit
// runs.
bool gate_is_open();

// What is in jax.jit's key besides its arguments: the same for all Directs of a call.
struct TraceContext {
  Owned shown;  // as JAX gives it: a tuple
  Shared<SettingsNow> settings;
};
TraceContext trace_context_now(const Shared<SettingsNow>& settings);

// How often jax.clear_caches() was called: what jax.jit has forgotten is not run any more.
uint64_t caches_cleared();

// May a call with so many leaves go this way?
bool direct_takes(size_t leaves);

// Does this error say that the executable refused its arguments, so that nothing has run?
bool nothing_has_run(PyObject* error);

// How many calls jax.jit makes before its executable is asked for: with few leaves there is little to gain by each.
int direct_waits(size_t leaves);

// A NumPy leaf: what it looked like, and where its copy goes.
struct HostLook {
  PyTypeObject* type = nullptr;
  Owned dtype, shape;             // of an array; a scalar's type says both
  Owned aval, sharding, devices;  // of the copy
};

// Is this the class of typed PRNG keys?
bool is_key_type(PyTypeObject* type);

// What a leaf looked like. Leaves that are alike have one in common, but for their shardings: each result of an
// executable has a sharding object of its own.
struct Look {
  Owned aval, committed, layout, impl;
  std::unique_ptr<HostLook> host;
  bool asks_layout = false;  // of arrays with one dimension or none there is but one
};
struct LeafLook {
  Shared<Look> look;
  Owned sharding;
};

// What these leaves look like, one after the other; empty where one of them is nothing that a direct call takes.
std::vector<LeafLook> looks_of(const OwnedList& leaves);

struct Entry;

class Direct {
 public:
  // Remembers what these leaves look like; `looks` are theirs where they are known. Null where one of them is nothing
  // that a direct call takes.
  static Shared<Direct> look(const OwnedList& leaves, TraceContext trace_context, std::vector<LeafLook>* looks);

  // Are the trace context and these leaves as they were then? Runs no user code.
  bool fits(const OwnedList& leaves, const TraceContext& trace_context);

  bool ready() const { return execute_ || (donation_ && donation_->is_ready()); }
  // Asks Python for the executable that `compiled`, a jax.jit object, has for these leaves. False where there is none to
  // run like this. The `vectors` are what the host computes for a call: arguments after the leaves.
  bool prepare(PyObject* compiled, const OwnedList& leaves, const OwnedList& vectors, bool tupled);

  // With `donate="auto"`: asks the donor of the entry what a call replaces, and for a program that donates of it what is
  // free. False where nothing is compiled that can run.
  bool prepare_donation(const Entry& entry, const OwnedList& leaves, PyObject* host, const CallReferences& references);

  // The output arrays (a list), or nothing: with the error set, or without where what is donated by the only program
  // that is compiled is not free any more. `host` has tuples of numbers for the vectors, and is null where there are
  // none; `vectors` makes arrays of them. `donated` tells whether the program that ran donates what is in `donation`.
  template <typename Vectors>
  Owned run(const OwnedList& leaves, PyObject* host, Vectors vectors, CallReferences references, bool& donated) {
    std::shared_ptr<Ring::Slot> slot = ring_ ? ring_->claim() : nullptr;
    Owned made = takes_vectors_ && !slot ? vectors() : Owned();
    return run(leaves, host, made.get(), slot.get(), references, donated);
  }

  int calls = 0;           // that fitted before it was ready
  size_t after_looks = 0;  // how many others its entry had remembered when it was made: see `Entry::remember`

  size_t outcome() const { return outcome_; }
  bool donates() const { return donates_; }
  Donation* donation() const { return donation_.get(); }

 private:
  struct Captured {
    Owned answer;  // holds the others
    PyObject *execute = nullptr, *handlers = nullptr, *ring = nullptr;
    std::vector<uint32_t> kept;
    std::vector<HostLook> computed;
    size_t number = 0;
    bool donates = false;
  };

  // Which object one leaf was, once it has fitted. `ref` is a weak reference to a leaf that was the same object twice in
  // a row: while it is alive, nothing else has to be asked.
  struct Met {
    Owned ref;
    PyObject* last = nullptr;  // compared, never read: it may be gone
    // A leaf that is a result of the call before: to ask for its layout is dear, so `ref` refers to each new result.
    uint32_t result = NONE;
    bool sure = false;     // a leaf that was this result has been looked at: all others are like it
    uint8_t searches = 0;  // for a result that it is; as many as there may be where its layout is not asked for
  };

  // Is it an object that was looked at before, and has not changed since?
  static bool is_known(const Met& met, PyObject* leaf);
  bool fits(size_t i, Met* met, PyObject* leaf);
  static bool fits(const HostLook& host, PyObject* leaf);
  void find_result(Met& met, PyObject* leaf) const;
  void expect(PyObject* outputs);
  static Owned put(const HostLook& host, PyObject* leaf);
  Captured captured(Owned answer, size_t arguments, size_t vectors);
  void take(Captured captured, Owned& execute, Owned& handlers);
  void ask_donor(const Entry& entry, const OwnedList& leaves, PyObject* host);
  Owned inputs(const OwnedList& leaves, PyObject* host, PyObject* vectors, Ring::Slot* slot);
  Owned run(const OwnedList& leaves, PyObject* host, PyObject* vectors, Ring::Slot* slot, CallReferences references,
            bool& donated);

  std::vector<LeafLook> guards_;
  std::vector<Met> met_;  // by leaf; empty until all have fitted, and never resized again
  TraceContext trace_context_;
  std::vector<uint32_t> kept_;     // the leaves that the executable takes
  std::vector<HostLook> vectors_;  // where they go
  bool takes_vectors_ = false;
  std::unique_ptr<Ring> ring_;  // where these are read in place
  Owned execute_, handlers_;
  std::vector<PyObject*> results_;  // of the last call; compared, never read
  size_t outcome_ = 0;
  size_t differed_ = 0;  // the leaf that did not fit the last time: it is asked first
  bool donates_ = false;
  bool asked_donor_ = false, has_program_ = false;
  std::unique_ptr<Donation> donation_;
};

void bind_direct(nb::module_& m);

}  // namespace graftax
