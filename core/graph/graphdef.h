// SPDX-License-Identifier: Apache-2.0
// The recorded structure of an object graph: a flat program in pre-order, its pool of statics, and one array that
// owns every Python reference of both, so that the garbage collector visits each exactly once.
#pragma once

#include "graph/kind.h"
#include "graph/set_table.h"
#include "python/collected.h"

namespace graftax {

constexpr uint32_t NONE = UINT32_MAX;

enum class Op : uint8_t {
  leaf,     // arg: index of the dynamic leaf
  stat,     // arg: index in the static pool
  ref,      // arg: tracked index of a node met before
  same,     // arg: the instruction of an equal immutable, array-free subtree met before
  node,     // a kind and its children
  input,    // Outcome: arg is the tracked index of an input node
  forward,  // Outcome: arg is the index of an input leaf
};

enum Flag : uint16_t {
  HANDED_OVER = 1,      // handed over as itself, never rebuilt
  CLOSED = 2,           // immutable all the way down and without arrays: no identity, no leaves
  TARGET = 4,           // some `same` points here
  ALIAS = 8,            // leaf: the array of an earlier leaf, met again
  NUMBER = 16,          // leaf: a Python number that is traced
  OWN_DICT = 64,        // a dict that is its own instance dictionary: its items are its attributes
  AUX = 128,            // part of a node's type for JAX (aux data, a static field), not a leaf of its tree
  SELF_CONTAINED = 32,  // a function that reaches nothing mutable but what is its alone: not copied when it is rebuilt
  PLAIN_VALUE = 256,    // leaf: no array (surgery)
  REFUSED = 512,        // an ignored node: for what it is, not for an option of the function
};

// What an instruction is that stands for a node.
struct Node {
  uint32_t next = 0;        // first instruction after this subtree
  uint32_t track = NONE;    // its tracked index
  uint32_t items = 0;       // children from the base
  uint32_t fields = 0;      // children from the instance dictionary
  uint32_t slots = 0;       // children from slots that are filled
  uint32_t has_extra = 0;   // one child before the items (aux data, default factory)
  uint32_t keys = NONE;     // first of its keys: dict keys or set elements, field names, slot names
  uint32_t payload = NONE;  // static of what it is besides its children: a deque's maxlen, a buffer's content, a
                            // function's code, the value of a subclass of str or int
  uint32_t own = NONE;      // static that holds the object itself, where it counts by identity
  const Kind* kind = nullptr;
  PyTypeObject* type = nullptr;  // owned by the program
  PyObject* whole = nullptr;     // an object with just this content, when it can never change; owned
  PyObject* treedef = nullptr;   // registered node: JAX's treedef of this one level, to rebuild with; owned
};

inline constexpr Node no_node{};

// Most instructions are leaves: what only nodes have is elsewhere.
struct Instr {
  Op op = Op::leaf;
  uint16_t flags = 0;
  uint32_t arg = 0;
  Node* node = const_cast<Node*>(&no_node);  // of a node: one of the program's own; of others only to be read
};
static_assert(sizeof(Instr) == 16 && sizeof(Node) == 72);

// The nodes of a program. They stay where they are.
class Nodes {
 public:
  Node* add(const Node& node) {
    if (chunks_.empty() || left_ == 0) reserve(std::min<size_t>(2 * chunk_, 512));
    Node* place = chunks_.back().get() + (chunk_ - left_--);
    *place = node;
    return place;
  }
  // Makes room for so many more.
  void reserve(size_t count) {
    chunk_ = std::max<size_t>(count, 1);
    chunks_.push_back(std::make_unique<Node[]>(chunk_));
    left_ = chunk_;
  }

 private:
  std::vector<std::unique_ptr<Node[]>> chunks_;
  size_t chunk_ = 2, left_ = 0;  // of the last one
};

struct Static {
  How how = How::identity;
  bool weak = false;             // obj is a weak reference to the value
  PyTypeObject* type = nullptr;  // owned by the program
  PyObject* obj = nullptr;       // owned by the program; How::context: what makes a new one
  // How::reduce: the plain value. How::function: the function, where it is SELF_CONTAINED; its globals and names where
  // the static is weak.
  PyObject* snapshot = nullptr;
  uint32_t first = 0, count = 0;  // How::input: a tracked index; How::tuple: its elements in Program::elements
  std::shared_ptr<struct Program> contents;  // How::contents: what the object is made of, when it was recorded
  Py_hash_t hash = 0;
};

struct Program {
  std::vector<Instr> code;
  Nodes nodes;
  std::vector<Static> statics;
  std::vector<uint32_t> keys;                             // static ids
  std::vector<uint32_t> elements;                         // static ids
  std::vector<uint32_t> track_pc;                         // tracked index -> instruction
  std::vector<std::pair<uint32_t, SetTable>> set_tables;  // by instruction: those of sets and frozensets
  std::vector<uint32_t> key_roots;    // keys (statics) that count by identity: what they are made of follows the roots
  mutable int8_t identity_keys = -1;  // are there keys that count by identity? A replay asks once; -1: not yet
  OwnedList owned;
  std::vector<std::shared_ptr<const Kind>> kinds;  // those that the instructions name
  PyObject* layout = nullptr;                      // how the roots were passed: a tuple of strings and numbers; owned
  uint32_t roots = 0;
  uint32_t leaves = 0;
  bool has_same = false;
  bool cyclic = false;   // a node is reached from itself
  bool aliases = false;  // one array in two places is one leaf: for donation
  bool shapes = false;   // a ShapeDtypeStruct stands for an array
  bool weak = false;     // some of its statics are held weakly
  Py_hash_t hash = 0;

  uint32_t add(const Static& s) {
    statics.push_back(s);
    return static_cast<uint32_t>(statics.size() - 1);
  }
  PyObject* keep(Owned obj) {
    owned.push_stolen(std::move(obj));
    return owned.back();
  }
  PyTypeObject* keep_type(PyTypeObject* type) {
    if (type->tp_flags & Py_TPFLAGS_HEAPTYPE) owned.push(reinterpret_cast<PyObject*>(type));
    return type;
  }
  void keep_kind(const Kind& kind) {
    for (const auto& k : kinds)
      if (k.get() == &kind) return;
    kinds.push_back(kind.shared_from_this());
  }
  uint32_t after(uint32_t pc) const { return code[pc].op == Op::node ? code[pc].node->next : pc + 1; }
  uint32_t children(uint32_t pc) const {
    const Instr& n = code[pc];
    return n.node->has_extra + n.node->items + n.node->fields + n.node->slots;
  }
  // Where the roots end: what objects that are keys are made of follows them.
  uint32_t end_of_roots() const {
    uint32_t end = 0;
    for (uint32_t r = 0; r < roots; ++r) end = after(end);
    return end;
  }
  // The node around each instruction; NONE for a root.
  std::vector<uint32_t> parents() const;
  // The number of keys that a node has before the names of its fields: those of a dict's items, a set's elements.
  uint32_t item_keys(const Instr& n) const {
    Keys keys = n.node->kind->node->keys;
    return keys == Keys::none ? 0 : keys == Keys::items ? n.node->items : n.arg;
  }
  // The first key that is met with a child: a set has none for its elements.
  uint32_t child_keys(const Instr& n) const {
    return n.node->kind->node->keys == Keys::elements ? n.node->keys + n.arg : n.node->keys;
  }

  // Of a set or a frozenset; null where it is not known, as in a program of another process.
  const SetTable* set_table(const Instr& n) const {
    auto pc = static_cast<uint32_t>(&n - code.data());
    auto place = std::lower_bound(set_tables.begin(), set_tables.end(), pc,
                                  [](const auto& entry, uint32_t at) { return entry.first < at; });
    return place != set_tables.end() && place->first == pc ? &place->second : nullptr;
  }

  void finish();  // computes the hash: the program is immutable from here on
  void clear();
  void show_held(Visitor& visit) const;
};

bool operator==(const Program& a, const Program& b);

// Is `longer` the same program with more roots behind those of `p`, which stand where they stood?
bool begins_with(const Program& longer, const Program& p);

// The same structure, whatever the leaves are?
bool same_but_for_leaves(const Program& a, const Program& b);

// The instruction of the one static in which two programs differ; NONE when they differ in anything else, or not at all.
uint32_t only_static_that_differs(const Program& a, const Program& b);

// The instructions of the Python numbers that can change by themselves: `int` and `float`, no keys.
std::vector<uint32_t> numbers_in(const Program& program);

// The same structure, whatever these numbers are.
Program without_numbers(const Program& program);

// A copy whose identity statics are held weakly where their type allows it, without the parts that only speed up.
Program weakened(const Program& program);

// Would such a copy be no other?
bool is_weak_already(const Program& program);

// The same for those leaves alone that stand among the identity statics of `inputs` too.
Program weakened_inputs(const Program& program, const Program& inputs);

// True when a static that was held weakly is gone: the program can never match again.
bool is_dead(const Program& program);

Owned static_object(const Static& s);  // the value (How::context: a new one), or an empty reference when it died

std::string program_repr(const Program& program);
std::string static_text(const Program& program, uint32_t id);

Owned program_state(const Program& program);  // for pickle

// A pickled state that none of ours wrote.
[[noreturn]] inline void malformed_state(const char* what) {
  raise_error(PyExc_ValueError, std::string("malformed state: ") + what);
}

Owned instruction_fields();
Program program_from_state(PyObject* state, bool is_outcome);

// Is there a number among its statics that may be the id() of an object?
bool holds_ids(const Program& program);
// Is there the id() of one of these objects among its statics?
bool holds_ids_of(const Program& program, std::vector<PyObject*> objects);
// Of two equal programs: do the sets in them iterate in the same order, also after what a function that was traced with
// the first one does to them?
bool same_order(const Program& a, const Program& b);

struct GraphDef {
  Program program;
};

void bind_graphdef(nb::module_& m);

}  // namespace graftax
