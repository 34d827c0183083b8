// SPDX-License-Identifier: Apache-2.0
// One trace: rebuild the graph around tracers, compare it with what the function left, and put the difference into an
// Outcome, which later calls apply to the caller's own objects.
#pragma once

#include <functional>
#include <unordered_map>

#include "call/recording.h"
#include "capture/named_scopes.h"
#include "graph/commit.h"
#include "graph/rebuild.h"

namespace graftax {

// One input node that the function changed.
struct Write {
  uint32_t track;        // the input node
  uint32_t pc;           // root of its new content in the Outcome's program
  bool raw;              // a registered node: the root is a dict of the attributes that changed
  Touched touched;       // raw: only `deleted` is used
  bool context = false;  // its content has context values: the caller's node keeps the ones that it has
  bool unseen = false;   // its content is the same, held in another way: a set that got an element and lost it
};

struct Outcome {
  Program program;            // root 0 is the result
  std::vector<Write> writes;  // those that are not `unseen` first
  // New registered nodes that hold a caller's own: their unflatten may read what is written. Outer ones come first.
  std::vector<uint32_t> readers;
  uint32_t result_leaves = 0;
  // Output leaves that are Python numbers, in order: the leaf, and which of the entry's host outputs it is.
  std::vector<std::pair<uint32_t, uint32_t>> numbers;
  // Output leaves that are the content of a new jax.Ref, in order: the leaf, and the first one of the same Ref.
  std::vector<std::pair<uint32_t, uint32_t>> refs;
  // Output leaves that are one array, in order: the leaf, and the first one, which stands in the place of both.
  std::vector<std::pair<uint32_t, uint32_t>> ties;
  // Output leaves that are one array where the input leaves that they were made of are: groups of (output, inputs).
  std::vector<std::vector<std::pair<uint32_t, std::vector<uint32_t>>>> alike;
  // The sets that the function changed, by instruction of the inputs, with the tables that it was traced with.
  std::vector<std::pair<uint32_t, SetTable>> changed_sets;
};

// Is the value at `pc` one that says where the program is running?
bool is_context(const Program& p, uint32_t pc);

// Finds the readers of an Outcome whose program and writes are there.
void find_readers(Outcome& outcome);

// What the host computes for a call, a tuple: two tuples of inputs (integers, floats), the number of Outcomes that it
// knows, and its outputs.
inline constexpr Py_ssize_t host_inputs = 2, host_outputs = 3;

// The output leaves with the numbers that the host has computed in their places.
std::vector<PyObject*> with_numbers(const Outcome& outcome, PyObject* const* outputs, size_t count, PyObject* host);

// Builds the result and applies the writes: every value exists before the first write.
// Tracked nodes from `seen_only` on get no `unseen` writes.
Owned apply(const Outcome& outcome, PyObject* const* out_leaves, PyObject* const* in_leaves, PyObject* const* in_nodes,
            uint32_t seen_only = NONE);

// What became of an input node. Of a registered one: the attributes that changed, and the names of those that are gone.
struct Change {
  uint32_t track;
  Owned delta, deleted;
  bool unseen = false;
};

class Trace {
 public:
  explicit Trace(nb::object recording);  // a Recording

  nb::list leaf_names() const;
  // The roots, rebuilt around these leaves. Handed-over nodes and statics are the caller's own.
  nb::list rebuild(nb::sequence leaves);
  // f(), while handed-over nodes are as the trace found them; None where what f changed in them cannot be set aside.
  nb::object as_begun(nb::handle f);
  // Has the function changed anything so far?
  bool has_changed();
  // Is this the recording of the same roots, of which nothing has changed, and of more behind them?
  bool begins(nb::handle recording) const;
  // The trace goes on with that recording and all of its leaves: the new roots, rebuilt. What they share with the others
  // is what the trace has in its place.
  nb::list extend(nb::object recording, nb::sequence leaves);
  // Of each node with an identity: id of the rebuilt one -> (tracked index, id of the caller's).
  nb::dict identities() const;
  // Does the Outcome hold the id() of a rebuilt node, which is another object than the caller's?
  bool leaves_ids_of_copies(const Outcome& outcome) const;
  // The caller's object that a rebuilt one stands for; none of anything else.
  nb::object original(nb::handle rebuilt) const;
  // The functions among the rebuilt nodes.
  nb::list functions() const;
  // Compares, records the Outcome, restores handed-over nodes. Returns (outcome, output leaves, changed paths,
  // whether a change cannot be seen in the result).
  // Without `forward`, an untouched input leaf in the result is an output like any other.
  // With `arrays`, a NumPy array that the function made is an output too, not a constant.
  // With `numbers`, so is what stands for a Python number.
  // With `forward` or `share`, an array that the function leaves in two places is one output.
  // Without `numpy`, an untouched NumPy leaf is an output, also with `forward`, and what functions capture is none.
  nb::tuple finish(nb::handle result, bool by_value, bool forward, const std::vector<bool>& donated, bool arrays,
                   bool numbers, bool share, bool numpy);
  // What the function changed in registered nodes and their classes' flatten leaves out: (path, class, name of the
  // attribute, was it changed in place, and not replaced?).
  nb::list left_out();
  // Puts handed-over nodes back to what they were.
  void restore();
  // Do the caller's own objects still look as they did when the trace began?
  bool verify(nb::tuple roots);
  void close();

 private:
  nb::list build_roots(uint32_t first_root);
  PyObject* expected(uint32_t pc) const;
  bool changed(uint32_t pc) const;
  bool holds_otherwise(uint32_t pc) const;
  bool find_change(Change& change);
  bool changed_by_function(uint32_t track);
  bool is_as_built(PyObject* value, uint32_t pc) const;
  bool is_key(PyObject* key, uint32_t at) const;
  Touched touched_parts(uint32_t pc, Recorder& recorder) const;
  bool holds_donated(uint32_t pc) const;
  bool raw_changed(uint32_t track, PyObject* obj, PyObject* delta, PyObject* deleted);
  Owned attributes_of(PyObject* obj, const Kind& kind) const;
  bool is_part(uint32_t pc, PyObject* value) const;  // one of the children, or the aux data, of the node at `pc`?
  Owned attribute_contents(uint32_t pc, PyObject* attributes, OwnedList* backups = nullptr) const;
  PyObject* attribute_with_changed_contents(uint32_t track) const;
  bool flattens_otherwise(uint32_t pc, const Cursor& now) const;
  Cursor opened_with(uint32_t pc, PyObject* names) const;
  nb::dict left_out_of(uint32_t track);
  void refuse_changed_frozen();
  Owned unflattened(uint32_t pc) const;
  void refuse_changed_registered(uint32_t pc, PyObject* before);
  bool is_made_otherwise(uint32_t pc);
  void refuse_new_attributes(uint32_t pc, PyObject* dict, const std::function<bool(PyObject*)>& is_known) const;
  // Calls f(pc) for each handed-over node that has changed.
  void each_changed_in_place(const std::function<void(uint32_t)>& f);
  bool has_another_type_or_code(uint32_t pc) const;
  void restore_node(uint32_t pc, Commit& commit);
  Owned backup_of(PyObject* obj, const Kind& kind) const;
  void restore_attributes(PyObject* obj, PyObject* before, Commit& commit) const;
  void restore_backup(PyObject* backup, Commit& commit) const;
  void restore_raw(uint32_t pc, Commit& commit);
  std::vector<bool> leads_to_rebuilt() const;
  std::vector<bool> reaches_changed(const std::vector<uint32_t>& changed_nodes) const;

  KindHold kinds_;
  PyObject* root_names() const { return recording_->names.ptr(); }

  nb::object recording_object_;
  const Recording* recording_;  // in `recording_object_`, or an empty one
  OwnedList tracers_;
  OwnedList built_;
  OwnedList raw_;                 // by tracked index: attributes of registered nodes, as rebuilt
  OwnedList attribute_contents_;  // by tracked index, of these: what their attributes lead to, by name
  std::unordered_map<uint32_t, OwnedList> backups_;  // the same of those that are handed over, to be put back
  OwnedList unflattened_;           // by instruction: attributes of immutable registered nodes, as rebuilt
  Opened opened_;                   // rebuilt registered nodes, as the function left them
  std::vector<PyObject*> donated_;  // tracers of donated leaves, sorted
  Named named_;                     // what methods are called on
};

void bind_outcome(nb::module_& m);
void bind_trace(nb::module_& m);

}  // namespace graftax
