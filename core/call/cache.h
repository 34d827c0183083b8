// SPDX-License-Identifier: Apache-2.0
// What is compiled for one function under one set of options: an entry for each structure.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "call/fast_dispatch.h"
#include "graph/record.h"

namespace graftax {

// Leaves of which the code asked whether they are one array: in groups, where those of one group are.
using AlikeLeaves = std::vector<std::vector<uint32_t>>;

// Globals that an entry was found with: what cannot change is not compared again while each name stands for what it did.
struct Settled {
  PyObject* scope = nullptr;  // the dict of the names; not owned
  uint64_t epoch = 0;         // of its `NameWatch`
  bool are_all = false;       // each is a static that matches for good
};

// One structure of one function.
struct Entry {
  Owned graphdef;                // of the structure, with weak statics: what stands in its key, and in what explains it
  Owned context;                 // what else is in the key
  Owned compiled;                // jax.jit of the flat function: leaves -> (result leaves, write-back leaves, number)
  Owned reads;                   // a Reads: bindings that it depends on, or null
  Owned outcomes;                // list of Outcome; the number that the executable returns picks one
  uint64_t used = 0;             // the table's clock at the last call
  bool waits = false;            // for the computation, whose errors a library turns into its own
  bool tupled = false;           // `compiled` takes the leaves as one tuple: JAX traces many arguments slowly
  Py_ssize_t outcomes_read = 0;  // how many of its Outcomes have been read for what their traces depended on
  std::vector<std::pair<uint32_t, PyObject*>> identities{};  // tracked nodes whose id() its code asked for; not owned
  std::vector<uint32_t> donated{};                           // leaves that each call deletes
  std::optional<std::vector<bool>> numpy_leaves{};  // where its code changes arrays in place: which were NumPy's
  std::vector<AlikeLeaves> alike{};                 // which of its leaves its code found to be one array
  uint32_t arguments = 0;                 // roots that are arguments; what the function captures comes after them
  std::vector<Shared<Direct>> directs{};  // by what the leaves look like; the one used last first
  size_t remembered = 0;                  // how many it has had
  uint64_t cleared = 0;                   // how often JAX's caches had been cleared when these were made
  bool spoiled = false;                   // was traced with sets that stand otherwise: it is for no call any more
  bool refused = false;                   // its executable cannot be run directly
  int miss_balance = 0;                   // calls that found no direct one, less those that did
  int pause = 0;                          // how many calls from now on do not look for one
  std::vector<std::pair<uint32_t, PyTypeObject*>> symbols{};  // leaves that are symbolic numbers: int or float
  Owned host;                                                 // the HostProgram of these numbers
  Owned evaluate;  // numbers -> what the host computes of them, or None where a guard fails
  Owned donor;     // with `donate="auto"`: makes the programs that donate
  mutable Settled globals{};

  const Program& program() const { return *graphdef_program; }
  const Program* graphdef_program = nullptr;  // that of `graphdef`, or an empty one once the collector has cleared this

  // Are the nodes whose id() its code asked for the same objects? `node` gives one by its tracked index.
  template <typename Node>
  bool has_identities(Node node) const {
    return std::all_of(identities.begin(), identities.end(), [&](auto& i) { return node(i.first) == i.second; });
  }
  // Is each NumPy array among these leaves one that was NumPy's when it was traced, where that counts?
  bool takes_numpy(const OwnedList& leaves) const;
  // Are those of these leaves one array which were in the trace, where its code asked for that, and no others?
  bool has_alike(const OwnedList& leaves) const;
  // What the host computes from the symbolic numbers among these leaves: a tuple; empty where there are none, or where
  // they are not as its guards say.
  Owned host_values(const OwnedList& leaves) const;
  // The leaves for an executable with symbolic numbers: nothing in place of these. What the host has computed follows.
  OwnedList without_numbers(const OwnedList& leaves) const;
  // Its inputs as two arrays, for an executable.
  OwnedList vectors(PyObject* host_values) const;
  // The first tracked node that only captured roots reach.
  uint32_t captured_from() const;
  // The direct call that fits, ready to run. Null where jax.jit has to run: `remember` takes `to_remember` after that.
  // `looks` are those of the leaves, where they are known.
  Shared<Direct> find_direct(const OwnedList& leaves, PyObject* host_values, const Shared<SettingsNow>& now,
                             Shared<Direct>& to_remember, std::vector<LeafLook>* looks);
  void remember(Shared<Direct> direct);
  // Reads the Outcomes of new traces: which sets do they change?
  void note_traces();
};

struct Table {
  // Where many structures come in turn, the one that is wanted is seldom among the last. A walk in lockstep with another
  // one fails where they differ; what stood there tells which entry was the right one the last time.
  struct Hint {
    size_t missed = 0;
    Owned entry;
  };

  std::vector<Owned> recent;  // the entries used last, first the newest
  std::vector<Hint> hints;    // by the hash of what was missed; empty until there is one
  uint64_t hits = 0;
  uint64_t restarts = 0;  // counts traces that had to begin anew
  uint64_t clock = 0;
  bool as_plain = false;    // inside of a trace the plain function is called
  uint64_t generation = 0;  // counts changes of which roots its entries have

  // Makes this entry the newest.
  void promote(PyObject* entry);
  // The entry to try after such a miss; empty where none is known.
  Owned hinted(size_t missed) const;
  void hint(size_t missed, PyObject* entry);
};

void bind_table(nb::module_& m);

}  // namespace graftax
