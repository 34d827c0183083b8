// SPDX-License-Identifier: Apache-2.0
// What graftax.record keeps of the last calls: references to what a call was given and gave. Python makes a snapshot of
// them only where a call went wrong. See docs/internals/recording.md.
#pragma once

#include <deque>
#include <utility>
#include <vector>

#include "call/cache.h"
#include "call/recording.h"

namespace graftax {

struct KeptCall {
  Owned target, plan;  // of the callable: what was called, with which options
  Owned entry, graphdef, layout;
  Owned host;        // what the host has computed
  OwnedList leaves;  // as they were before the call: copies of those that it may change
  OwnedList roots;   // held where `graphdef` refers to some of what they have weakly
  Owned before;      // a KeptCall, some of whose outputs were donated to this one
  std::vector<std::pair<uint32_t, uint32_t>> reused_outputs;  // these: (the leaf, which output of `before` it is)
  Py_ssize_t since_copy = 0;                                  // calls that would have to be made again to have them
  Owned outputs;                                              // a list or a tuple; null until the call has ended
  Owned are_finite;                                           // the scalar of a program that checks, until it is read
  Owned draws, raised;                                        // what Python notes: random states, an error's text
  std::vector<uint32_t> ref_leaves;
  Owned refs;  // a list beside `ref_leaves`: the Refs, and copies of them once the call has ended
  size_t outcome = 0;
  int statement = -1;  // offset in the code of the script, where there is one
  bool is_strong = false;

  void clear();
};

// What a call has when it is about to run.
struct Beginning {
  PyObject* caller;
  const Owned& entry;
  const Owned& recording;  // of a miss
  const OwnedList& roots;
  PyObject* layout;
  const Walk& walk;
  bool is_direct;
};

class CallRing {
 public:
  CallRing(Py_ssize_t last, Py_ssize_t copy_every, nb::object observer)
      : last(static_cast<size_t>(last)), copy_every(copy_every), observer(Owned::borrow(observer.ptr())) {}

  // Before a call: reads what is known by now of the calls before, and waits for that of one to be forgotten.
  void read_known();
  // A KeptCall, in the place of the oldest; null inside of a trace, and while recorders are paused.
  Owned begin(const Beginning& call);
  void end(PyObject* kept, PyObject* outputs, size_t outcome, const Owned& host, PyObject* are_finite, bool traced);
  // The call has raised; without an error it is made again.
  void fail(PyObject* kept, PyObject* error);
  // Reads whether the results are finite, where that is known by now or `waits`. False where it is not known.
  bool read(PyObject* kept, bool waits);

  size_t last;
  Py_ssize_t copy_every;
  Owned observer;               // History
  bool draws_in_calls = false;  // do calls draw random numbers? Then each notes the state before it
  std::deque<Owned> calls;

 private:
  void make_room();
  Owned take_spare();
  void fill(KeptCall& kept, const Beginning& call);
  void copy_what_may_change(KeptCall& kept, const Entry& entry);
  Owned ask(const char* method, PyObject* argument, PyObject* other = nullptr) const;

  Owned spare_;
  bool is_copied_ = false;  // do the scalars come from a device whose memory has to be copied?
};

CallRing* ring_of(PyObject* ring);  // borrowed; null for None

void bind_kept_calls(nb::module_& m);

}  // namespace graftax
