// SPDX-License-Identifier: Apache-2.0
// Record: objects -> GraphDef and leaves, once per structure. Replay: the same walk in lockstep with a GraphDef.
#pragma once

#include <unordered_map>
#include <unordered_set>

#include "graph/graphdef.h"
#include "graph/key_path.h"
#include "python/id_table.h"

namespace graftax {

// What an Outcome's recording knows beforehand: which objects are the call's inputs.
struct Inputs {
  IdTable* nodes = nullptr;          // rebuilt node -> tracked index
  IdTable* leaves = nullptr;         // tracer -> leaf index
  IdTable* keys = nullptr;           // objects that are keys in the inputs
  const Program* program = nullptr;  // what the inputs were recorded as
  bool arrays = false;               // NumPy arrays are leaves, not constants
  bool numbers = false;              // what stands for a Python number is a leaf
  bool functions = true;             // with `arrays`: those that functions capture, too
};

enum RootFlag : uint8_t {  // Python's RootFlag
  STATIC_ROOT = 1,         // its arrays are constants of the program
  GLOBAL_ROOT = 2,         // a function in it counts by identity
  DYNAMIC_ROOT = 4,        // Python numbers in it are traced
  CAPTURED_ROOT = 8,       // no argument: a ShapeDtypeStruct in it is itself, and stands for no array
  TARGET_ROOT = 16,        // what is called: functions anywhere in it count by identity
  CONSTANT_ROOT = 32,      // its NumPy arrays are constants of the program: its code asks for their values
};

struct RecordOptions {
  PyObject* root_names = nullptr;                    // for messages
  const std::vector<uint8_t>* root_flags = nullptr;  // RootFlag, by root
  const Inputs* inputs = nullptr;                    // set for an Outcome
  bool aliases = false;                              // one array in two places is one leaf
  bool shapes = false;                               // a ShapeDtypeStruct is a leaf
  PyObject* dynamic = nullptr;                       // key path -> is the Python number there traced?
  PyObject* symbolic = nullptr;                      // key paths of Python numbers that are traced besides
  PyObject* ignored = nullptr;                       // key path, value -> does no call look at it?
  bool stand_ins = false;                            // a trace has a stand-in for what is refused
  bool everything = false;                           // every value that is not a node is a leaf, refused ones too
  Opened* opened = nullptr;                          // what walks before have asked registered classes
};

// What a Recorder has written. `live[pc]` is the object that instruction pc stands for.
struct RecordedGraph {
  Program program;
  OwnedList live;
  OwnedList leaves;
};

class Recorder {
 public:
  explicit Recorder(RecordOptions options) : options_(options) {}

  // Records one more root.
  void root(PyObject* obj);
  // Records the content of a node as a new node, although the node itself may be an input.
  void content(PyObject* obj);
  RecordedGraph finish(PyObject* layout);

  uint32_t leaf_count() const { return out_.program.leaves; }
  uint32_t position() const { return static_cast<uint32_t>(out_.program.code.size()); }
  bool has_seen(PyObject* node) { return seen_->find(node) != nullptr; }
  PyObject* keep(Owned obj) { return out_.program.keep(std::move(obj)); }

 private:
  struct Below {               // what holds for everything below a node
    bool in_static = false;    // arrays are static, by identity
    bool in_dynamic = false;   // Python numbers are traced
    bool in_function = false;  // a captured function's own numbers are static, but for those in a Dynamic
    bool in_state = false;     // but those of its variables and attributes
    bool repeated = false;     // it is below an immutable node that was expanded before
    bool aux = false;          // part of a node's type for JAX: what is here is no leaf of its tree
    bool arrays_only = false;  // the same, but for arrays
  };

  struct Frame {
    Cursor cursor;
    uint32_t pc;
    Below below;
    bool closed;  // nothing tracked and no leaf so far
    uint32_t slots = 0;
  };

  bool is_identity_input(PyObject* obj);
  void check_opaque(PyObject* obj);
  void visit(PyObject* obj, Below below);
  bool is_ignored(PyObject* obj);
  void add_ignored(PyObject* obj, uint16_t flags = 0);
  void add_refused(PyObject* obj, const Kind& kind, const Below& below);
  void open(PyObject* obj, const Kind& kind, Below below, bool with_identity);
  bool refer_to_known(PyObject* obj, bool& repeated);
  void note_shared_dict(PyObject* obj, const Cursor& cursor);
  void step();
  void close();
  void close_value(uint32_t pc);
  bool is_constant(uint32_t pc) const;
  size_t hash_of_value(uint32_t pc);
  bool is_same_value(uint32_t pc, uint32_t other) const;
  void refer_to_value(uint32_t pc, uint32_t other);
  void run();
  void emit(Op op, uint32_t arg, PyObject* obj);
  void add_leaf(PyObject* obj, const Kind& kind, bool in_static, uint16_t flags = 0);
  void add_value(PyObject* obj);
  bool is_dynamic_number(PyObject* obj, const Kind& kind, const Below& below);
  bool is_left_alone(const Below& below) const;
  bool is_traced_symbol(const Kind& kind) const;
  std::vector<Step> open_steps() const;
  std::string open_path() const;
  void add_static_leaf(PyObject* obj, const Kind& kind);
  void hand_over();
  std::vector<bool> find_arrays_below() const;
  void refuse_shared_dicts() const;
  void find_self_contained();
  void record_keys();
  std::string place_of_key(uint32_t id) const;
  void keys_count_by_identity();
  bool root_has(RootFlag flag) const;
  bool root_is_static() const { return root_has(STATIC_ROOT); }
  std::string root_name() const;  // of the root that is walked: where each path begins
  // The innermost open node holds a leaf, a context value or something with an identity: it will not close as a value.
  void rule_out_value() {
    if (!stack_.empty()) stack_.back().closed = false;
  }

  KindHold kinds_;
  RecordOptions options_;
  RecordedGraph out_;
  std::vector<Frame> stack_;
  IdLease seen_;                                             // node -> pc
  IdLease dicts_;                                            // instance dictionary that others hold too -> pc
  std::vector<std::pair<uint32_t, uint32_t>> shared_dicts_;  // two nodes over one instance dictionary
  std::vector<uint32_t> field_keys_;                         // keys of open nodes, as a stack
  std::vector<size_t> field_base_;                           // where the keys of each open node begin there
  std::unordered_multimap<size_t, uint32_t> values_;         // content hash -> pc of a closed immutable subtree
  std::unordered_map<uint32_t, size_t> value_hash_;          // the same, the other way round
  std::unordered_set<PyObject*>
      identity_inputs_;  // statics of the inputs that count by identity; empty: not listed yet
  OwnedList held_;       // objects whose instructions were taken back: `seen_` still has their addresses
  size_t expanded_ = 0;  // nodes that were recorded once more, as immutable ones with arrays have no identity
  uint32_t root_ = 0;    // the number of the root that is walked
};

// What a replay collected.
struct Walk {
  OwnedList leaves;
  OwnedList nodes;  // tracked nodes, by tracked index
  bool has_numpy = false;
  Order order = Order::any;
  bool any_sentinel = false;  // an instance without fields that counts by identity fits any other of its class
  bool any_value = false;     // where a program has a leaf, any array or value fits: one recorded with `everything`
  Opened* opened = nullptr;   // what walks before have asked registered classes
  size_t missed = 0;          // of a walk that failed: a hash of where, and of what stands there; 0: not known
  // Roots that are known to match, all of them statics: these are not looked at.
  size_t first_settled = 0, settled = 0;

  void clear() {
    leaves.clear();
    nodes.clear();
    has_numpy = false;
  }
  // To its beginnings, for the next call.
  bool reset() {
    clear();
    any_sentinel = any_value = false;
    order = Order::any;
    opened = nullptr;
    missed = first_settled = settled = 0;
    return std::max(leaves.capacity(), nodes.capacity()) <= most_kept;
  }
};

// Walks the roots in lockstep with `program`. False (and an empty walk) when they do not match.
bool replay(const Program& program, PyObject* const* roots, size_t n, Walk& walk);

// Are these roots statics, of which an object that has matched matches for as long as it lives?
bool match_for_good(const Program& program, size_t first, size_t count);

// With `everything`: is this one value, which is not looked into?
bool is_value(PyObject* obj, const Kind& kind);

// A list that takes the references over; None for null.
nb::object handed_over(OwnedList& items);

// Is this NumPy array or scalar traced (numeric), rather than static by value? What is refused raises, or is false.
bool numpy_is_dynamic(PyObject* obj, bool refuse);

void bind_replay(nb::module_& m);

}  // namespace graftax
