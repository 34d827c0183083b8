// SPDX-License-Identifier: Apache-2.0
// Donation that is proven, for `donate="auto"`: which arrays a call replaces and nobody else can reach, counted right
// before the launch, and the program that donates them. See docs/internals/decisions/0011-donation-that-is-proven.md.
#pragma once

#include <algorithm>

#include "call/buffer_users.h"
#include "graph/graphdef.h"

namespace graftax {

struct Outcome;

// What an Outcome takes out of the caller's graph: leaves with one place each, which it overwrites or which is in a node
// that it takes out as well, and that it puts nowhere. So go arguments, where the caller has passed on what nobody has.
struct Replaced {
  // How a node is reached from the one above.
  struct Step {
    enum class Kind : uint8_t { item, key, field, slot };
    Kind kind;
    Py_ssize_t index = 0;  // of an item; of a slot the offset
    Owned key;
  };
  // A node that goes with its leaves, where nobody else has it. The nodes above come first.
  struct Node {
    uint32_t track;   // NONE: it is reached by its step
    uint32_t above;   // the one above, among these nodes; NONE: it is in a node that is written
    uint32_t writes;  // the tracked index of that one
    uint32_t root;    // it is this argument itself; else NONE
    bool is_passed;   // it is an argument, or in one that is not written
    bool has_dict;    // an instance dictionary, which somebody may have without the node
    Step step;
  };
  struct Leaf {
    uint32_t leaf;
    uint32_t node;   // the one that it goes with; NONE: its place is overwritten
    uint32_t root;   // it is this argument itself; else NONE
    bool is_passed;  // it goes with the arguments of a call, which only the caller may have
  };
  std::vector<Node> nodes;
  std::vector<Leaf> leaves;

  Replaced(const Program& inputs, const Outcome& outcome, uint32_t arguments);
};

// The references that a call itself has to what it was given.
struct CallReferences {
  Py_ssize_t each_leaf = 0;
  const OwnedList* roots = nullptr;      // each holds one
  PyObject* const* arguments = nullptr;  // those to which the caller's stack has a reference; null: not known
  Py_ssize_t argument_count = 0;
  const OwnedList* nodes = nullptr;            // by tracked index; each holds one
  const OwnedList* recorded_leaves = nullptr;  // of a call that was recorded: what holds some of them besides
  const OwnedList* recorded_objects = nullptr;

  Py_ssize_t to_leaf(PyObject* leaf) const { return each_leaf + recorded(leaf); }
  Py_ssize_t to_node(PyObject* node, bool is_tracked) const { return is_tracked + recorded(node); }
  // Is it an argument that has one place, on the caller's stack?
  bool is_passed_once(PyObject* object) const {
    return arguments && std::count(arguments, arguments + argument_count, object) == 1;
  }

 private:
  Py_ssize_t recorded(PyObject* object) const;
};

class Donation {
 public:
  enum class Holder : uint8_t { nobody, reference, buffer, container };

  struct Candidate {
    uint32_t leaf;
    uint32_t node;  // among those of Replaced
    uint32_t root;  // it is this argument itself; else NONE
    bool is_passed;
    size_t bytes;
    uint32_t devices;                // that it lies on
    bool is_donated = false;         // by the program
    Holder holder = Holder::nobody;  // in the last call
    uint32_t free_calls = 0;         // in turn, up to the last one
    Owned held;                      // a weak reference to the array to which somebody referred in the last call

    Candidate(Replaced::Leaf place, size_t size, uint32_t on)
        : leaf(place.leaf), node(place.node), root(place.root), is_passed(place.is_passed), bytes(size), devices(on) {}
  };
  using Array = std::pair<uint32_t, std::pair<size_t, uint32_t>>;  // a leaf: its bytes, and how many devices it lies on

  Donation(Replaced replaced, const std::vector<Array>& arrays);

  // The leaves that the program takes, in order: the others are no candidates. XLA frees nothing of what it is not given.
  void keep_only(const std::vector<uint32_t>& taken);
  // Leaves those arguments alone that somebody has: who passes variables once is likely to do so again.
  void leave_out_held_arguments();
  // Who else has the candidates now? Runs no Python code, so that the answer holds until the interpreter is let go.
  void count(const OwnedList& leaves, const CallReferences& references);
  // Is there a program all of whose donated arrays are free?
  bool is_ready() const { return execute && donated_free_; }
  // After `count`: the leaves of a program that is worth a compilation; none where there is no such. What was free for
  // several calls in turn is likely to be so again.
  std::vector<uint32_t> worth_donating(bool is_first_call);
  // The program donates these leaves from now on.
  void use(const std::vector<uint32_t>& leaves, Owned program, Owned result_handlers);
  // No program can be had.
  void refuse() { programs_ = most_programs; }
  // Notes for the user what became of the candidates.
  void note_call(const OwnedList& leaves, bool donated);
  // Once: has a call kept so much that the user should hear of it?
  bool should_warn() { return kept_bytes_ >= many_bytes && !std::exchange(has_warned_, true); }

  Owned execute, handlers;
  std::vector<Candidate> candidates;
  uint64_t calls_donated = 0, calls_kept = 0;
  bool has_donated = false;  // the last call

 private:
  void count_nodes(const CallReferences& references);
  void order();

  static constexpr int most_programs = 3;  // compiled for one Direct, besides the one that donates nothing
  static constexpr uint32_t patience = 2;  // calls

  static constexpr size_t many_bytes = 100'000'000;
  static constexpr size_t most_noted = 32;  // arrays of a call: a weak reference takes longer to make than all counts

  std::vector<Replaced::Node> nodes_;
  std::vector<PyObject*> node_objects_;  // in the running count; null where somebody else has the node
  std::vector<uint32_t> by_size_;        // the candidates, the largest first
  size_t total_bytes_ = 0, donated_bytes_ = 0;
  size_t kept_bytes_ = 0;  // by the last call
  bool has_warned_ = false;
  bool donated_free_ = false;
  int programs_ = 0;
  uint32_t streak_ = 0;  // calls in turn after which another program was the better one
};

void bind_donation(nb::module_& m);

}  // namespace graftax
