// SPDX-License-Identifier: Apache-2.0
// Leaves + GraphDef -> objects. Mutable nodes are boundaries: each gets an empty shell when it is met and its content
// later, so that immutable spines close bottom-up and every cycle that holds a mutable node closes. Below a registered
// node it gets its content before the class's own unflatten reads it, but for what waits for a node of the cycle.
#pragma once

#include "graph/graphdef.h"
#include "python/pool.h"

namespace graftax {

// A key as an object; `inputs` are the caller's nodes. Most keys are texts, for which `key_object` calls nothing.
Owned resolved_key(const Program& p, uint32_t id, PyObject* const* inputs);
inline Owned key_object(const Program& p, uint32_t id, PyObject* const* inputs) {
  const Static& key = p.statics[id];
  return !key.weak && key.how == How::string ? Owned::borrow(key.obj) : resolved_key(p, id, inputs);
}

// What a node is made of, or gets: its children, built.
struct Content {
  const Program& program;
  const Instr& n;
  PyObject* const* values;
  PyObject* const* inputs;  // the caller's nodes

  PyObject* const* items() const { return values + n.node->has_extra; }
  Owned key(uint32_t i) const { return key_object(program, program.keys[n.node->keys + i], inputs); }
};

// Where the values of a program come from.
struct Sources {
  PyObject* const* leaves = nullptr;        // Op::leaf
  PyObject* const* input_nodes = nullptr;   // Op::input
  PyObject* const* input_leaves = nullptr;  // Op::forward
  PyObject* const* live = nullptr;          // by instruction: statics and handed-over nodes as the caller's own
  bool leaves_only = false;                 // None in place of every leaf of JAX's tree that holds no Op::leaf
  PyObject* const* replaced = nullptr;      // by instruction: another value in its place; nullptr for none
  bool anew = false;                        // an instance that counts by identity but has no name is made anew
  const OwnedList* built = nullptr;         // by instruction: what is there already of the first ones; with `live`
};

class Builder {
 public:
  Builder(const Program& program, Sources sources);

  // Builds the root at `pc` (its content included, once drain() has run).
  Owned build(uint32_t pc);
  // Builds the children of the node at `pc`, without making the node.
  void build_children(uint32_t pc, OwnedList& values);
  // Makes the node at `pc`, although it is handed over where it is referred to.
  Owned make(uint32_t pc);
  // Fills every shell that waits for its content.
  void drain();
  // By instruction: what was built. Filled when `record_built` was called before.
  void record_built() {
    recording_ = true;
    built_.resize(program_.code.size());
  }
  OwnedList& built() { return built_; }
  // The registered node at `pc` once more, of what was built for its children. Needs `record_built`.
  Owned made_again(uint32_t pc);

 private:
  struct Frame {
    uint32_t pc;     // the node, or the node whose content is built
    uint32_t child;  // next child
    uint32_t left;
    size_t base;         // where its children's values start
    uint32_t at;         // the instruction that asked for this value
    bool fill;           // pc's shell exists: fill it; else construct
    size_t waiting = 0;  // of the queue: what stands there before its children
  };

  void run(size_t floor);
  // Pushes the value of instruction pc, or a frame that will. With `keep`, `leaves_only` does not make it None.
  void value(uint32_t pc, bool keep = false);
  bool takes_plain() const { return !recording_ && !sources_.leaves_only && !sources_.replaced; }
  bool push_plain(uint32_t pc);
  bool push_children(uint32_t pc);
  bool is_open(uint32_t track) const { return !open_.empty() && open_[track]; }
  bool is_waiting(uint32_t track) const { return !waits_.empty() && waits_[track]; }
  void node(uint32_t pc, uint32_t at, bool keep);
  void wait(uint32_t pc);
  bool fill_next(size_t floor);
  bool needs_open(uint32_t pc);
  void push(uint32_t at, Owned obj);
  void finish_frame(const Frame& frame);
  Owned construct(uint32_t pc, PyObject** values);
  Owned context(const Static& s);
  bool is_left_out(uint32_t pc) const;
  bool holds_array(uint32_t pc) const;

  // What grows with the graph, on loan: memory for it is not taken anew on each call.
  struct Lists {
    OwnedList nodes;   // by tracked index
    OwnedList closed;  // by instruction: values that `same` refers to
    OwnedList values;
    std::vector<Frame> frames;
    std::vector<uint32_t> queue;  // mutable nodes whose content waits; one may stand there twice
    std::vector<uint32_t> late;   // those that wait for a node under construction
    std::vector<bool> waits;      // by tracked index: a mutable node whose content waits; empty until there is one
    std::vector<bool> open;       // by tracked index: an immutable node under construction; empty until there is one

    bool reset();
  };

  const Program& program_;
  Sources sources_;
  Lease<Lists> lists_;
  OwnedList& nodes_ = lists_->nodes;
  OwnedList& closed_ = lists_->closed;
  OwnedList& values_ = lists_->values;
  std::vector<Frame>& frames_ = lists_->frames;
  std::vector<uint32_t>& queue_ = lists_->queue;
  std::vector<uint32_t>& late_ = lists_->late;
  std::vector<bool>& waits_ = lists_->waits;
  std::vector<bool>& open_ = lists_->open;
  OwnedList built_;
  Owned context_;  // the context value made last
  PyTypeObject* context_type_ = nullptr;
  bool recording_ = false;
  uint32_t readers_ = 0;              // nodes under construction that read their children
  std::vector<uint32_t> visited_in_;  // by instruction: the number of the last search of `needs_open` that was there
  uint32_t search_ = 0;
};

// Fills an empty node with the content that the node at `pc` describes. `inputs` are the caller's nodes.
void fill_content(const Program& program, uint32_t pc, PyObject* shell, PyObject* const* values,
                  PyObject* const* inputs);

// One attribute below any user __getattribute__; empty where it is not there.
Owned field_value(PyObject* obj, const Kind& kind, PyObject* name);

void bind_rebuild(nb::module_& m);

}  // namespace graftax
