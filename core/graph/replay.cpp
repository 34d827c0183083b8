// SPDX-License-Identifier: Apache-2.0
// The walk of every later call: in lockstep with a GraphDef. Declared in graph/record.h.
#include <algorithm>

#include "graph/record.h"
#include "graph/static_equality.h"

namespace graftax {

namespace {

struct ReplayFrame {
  ReplayFrame(PyObject* obj, const Kind& kind, Opened* opened, uint32_t pc, uint32_t left, uint32_t key)
      : cursor(obj, kind, opened), pc(pc), child(pc + 1), left(left), key(key) {}

  // Every recorded child was met. Does the node have more now? Most nodes know without asking for another child.
  bool is_complete() const {
    if (left > 0 || !cursor.slots_met()) return false;
    return cursor.kind().items == Items::none ? cursor.fields_intact() : cursor.intact();
  }

  Cursor cursor;
  uint32_t pc;     // the node
  uint32_t child;  // the instruction of the next child
  uint32_t left;   // children to come
  uint32_t key;    // the next key
};

// The nodes that a walk is in. Most walks need a few, so what they take is kept; it is empty in between.
struct ReplayFrames {
  bool reset() {
    frames.clear();
    return frames.capacity() <= most_kept;
  }
  std::vector<ReplayFrame> frames;
};

class Replayer {
 public:
  Replayer(const Program& p, Walk& walk) : p_(p), walk_(walk) {}

  bool run(PyObject* const* roots, size_t n) {
    if (n != p_.roots) return false;
    walk_.leaves.reserve(p_.leaves);
    walk_.nodes.resize(p_.track_pc.size());
    if (!static_roots_match(roots, n)) return false;
    uint32_t pc = 0;
    for (size_t r = 0; r < n; ++r) {
      if (skips_settled(r, pc)) continue;
      if (p_.code[pc].op == Op::stat) {  // has matched above
        ++pc;
        continue;
      }
      if (!match_whole(roots[r], pc)) return false;
    }
    for (uint32_t key : p_.key_roots) {  // what objects that are keys are made of
      Owned hold = contents_root(p_.statics[key].obj);
      if (!hold || !match_whole(hold.get(), pc)) return false;
    }
    return keys_as_recorded();
  }

 private:
  // An object with all below it; `pc` comes to what follows.
  bool match_whole(PyObject* obj, uint32_t& pc) {
    if (!match(obj, pc)) return false;
    while (!stack_.empty())
      if (!step()) return false;
    if (p_.code.empty()) return false;  // cleared by the garbage collector meanwhile
    pc = p_.after(pc);
    return true;
  }

  // At the first root that is known to match: `r` comes to the last one, `pc` to what follows it.
  bool skips_settled(size_t& r, uint32_t& pc) const {
    if (walk_.settled == 0 || r != walk_.first_settled) return false;
    r += walk_.settled - 1;
    pc += static_cast<uint32_t>(walk_.settled);
    return true;
  }

  // What costs least to ask comes first: where a static argument is another one, nothing has to be walked.
  bool static_roots_match(PyObject* const* roots, size_t n) {
    uint32_t pc = 0;
    for (size_t r = 0; r < n; ++r) {
      if (skips_settled(r, pc)) continue;
      const Instr& in = p_.code[pc];
      if (in.op == Op::stat && !matches_at_once(p_.statics[in.arg], roots[r])) {  // a global matches: there may be many
        if (!match(roots[r], pc)) return false;
        if (p_.code.empty()) return false;  // cleared by the garbage collector meanwhile
      }
      pc = p_.after(pc);
    }
    return true;
  }

  // An object that is a key must not stand where the program has one that is none.
  bool keys_as_recorded() {
    if (p_.identity_keys < 0)  // statics are many where a config is large
      p_.identity_keys = std::any_of(p_.statics.begin(), p_.statics.end(), is_identity_key);
    if (!p_.identity_keys) return true;
    for (const Static& key : p_.statics) {
      if (!is_identity_key(key)) continue;
      Owned counted = node_of_key(key.obj);
      uint32_t* track = counted ? ids_->find(counted.get()) : nullptr;
      if (track && *track != NONE && p_.code[p_.track_pc[*track]].node->own == NONE) return false;
    }
    return true;
  }

  bool may_be_leaf(const Instr& in, PyObject* obj, const Kind& kind) const {
    if (kind.leaf == Leaf::array) return true;
    if (walk_.any_value) return kind.leaf == Leaf::numpy || is_value(obj, kind);
    if (kind.leaf == Leaf::numpy) return numpy_is_dynamic(obj, false);  // recording says why not, and where
    if (in.flags & NUMBER) return is_number(obj, kind);
    if (kind.scalar) return true;
    return kind.shape && p_.shapes;
  }

  // Another structure. Notes where it differs and what is there, so that the next call finds the right entry by a hint.
  // The lowest bit is set: 0 says that nothing is known.
  bool miss(uint32_t pc, size_t difference) {
    walk_.missed = (difference ^ (static_cast<size_t>(pc) << 40)) * 0x9e3779b97f4a7c15ULL | 1;
    return false;
  }

  // By its value where that is plain, else by its address.
  bool miss_value(uint32_t pc, PyObject* obj) {
    bool plain =
        PyUnicode_CheckExact(obj) || PyLong_CheckExact(obj) || PyFloat_CheckExact(obj) || PyBytes_CheckExact(obj);
    return miss(pc, plain ? static_cast<size_t>(PyObject_Hash(obj)) : reinterpret_cast<size_t>(obj));
  }

  bool match(PyObject* obj, uint32_t pc) {
    const Instr& in = p_.code[pc];
    switch (in.op) {
      case Op::leaf: {
        bool one_leaf = p_.aliases;
        if (Py_TYPE(obj) != runtime.array_type) {
          const Kind* kind = known_kind(Py_TYPE(obj));
          if (!kind || !may_be_leaf(in, obj, *kind)) return false;
          walk_.has_numpy = walk_.has_numpy || kind->leaf == Leaf::numpy;
          one_leaf = kind->leaf == Leaf::array && (one_leaf || kind->tracked);
        }
        // One array in two places is one leaf: the pattern of aliases has to be the recorded one, no more and no less.
        if (in.flags & ALIAS) return walk_.leaves[in.arg] == obj;
        if (one_leaf && !ids_->insert(obj, NONE)) return false;
        walk_.leaves.push(obj);
        return true;
      }
      case Op::stat: return static_matches(p_, in.arg, obj) || miss_value(pc, obj);
      case Op::ref: return walk_.nodes[in.arg] == obj;
      case Op::same: return match_node(obj, in.arg);
      case Op::node: return match_node(obj, pc);
      default: return false;
    }
  }

  bool match_ignored(PyObject* obj, const Instr& in) {
    if (obj == Py_None) return false;
    if (in.flags & REFUSED) {  // its payload is the type, which code may ask for
      if (!static_matches(p_, in.node->payload, reinterpret_cast<PyObject*>(Py_TYPE(obj)))) return false;
      if (!ids_->insert(obj, in.node->track)) return false;
    }
    walk_.nodes.set(in.node->track, obj);
    return true;
  }

  bool match_node(PyObject* obj, uint32_t pc) {
    const Instr& in = p_.code[pc];
    if (Py_TYPE(obj) != in.node->type || in.node->kind->stale)
      return in.node->kind->node->is_ignored ? match_ignored(obj, in)
                                             : miss(pc, reinterpret_cast<size_t>(Py_TYPE(obj)));
    if (in.node->whole == obj) return true;
    const Kind& kind = *in.node->kind;
    // A value that is met in several places matches at once where it is the object that has matched before.
    if (in.flags & TARGET) {
      if (same_.empty()) same_.resize(p_.code.size());
      if (same_[pc] == obj) return true;
      same_.set(pc, obj);
    }
    if (is_sized(kind) && raw_size(obj, kind) != static_cast<Py_ssize_t>(in.node->items))
      return miss(pc, static_cast<size_t>(raw_size(obj, kind)));
    // An object that was met as another node is shared here, and was not in the recording.
    if (in.node->track != NONE) {
      if (!ids_->insert(obj, in.node->track)) return false;
      walk_.nodes.set(in.node->track, obj);
    }
    if (kind.node->has_content && !(walk_.order == Order::any ? kind.node->content_matches(p_, in, obj)
                                                              : kind.node->content_in_order(p_, in, obj, walk_.order)))
      return false;
    if (in.node->own != NONE && !static_matches(p_, in.node->own, obj) &&
        !(walk_.any_sentinel && kind.sentinel && is_bare(obj, kind)))
      return false;
    // Without attributes an instance of such a class is a sentinel: another structure than one with some.
    if (kind.sentinel && in.node->own == NONE && is_bare(obj, kind)) return false;
    uint32_t children = p_.children(pc);
    // An empty list has nothing to walk; fields must be looked at even where none were recorded.
    if (children == 0 && !kind.has_fields() && is_sized(kind)) return true;
    stack_.emplace_back(obj, kind, walk_.opened, pc, children, p_.child_keys(in));
    const Cursor& cursor = stack_.back().cursor;
    if (cursor.own_dict() != static_cast<bool>(in.flags & OWN_DICT)) return false;
    // Met a second time, by itself or below another object, this dict is shared: another structure. What is handed over
    // keeps its dict, so there it does not matter.
    if (PyObject* dict = in.flags & HANDED_OVER ? nullptr : cursor.shared_dict())
      if (!ids_->insert(dict, NONE)) return false;
    return cursor.fields() == static_cast<Py_ssize_t>(in.node->fields) &&
           (cursor.items() == static_cast<Py_ssize_t>(in.node->items));
  }

  // Arrays, nodes met before, and statics that are the very objects recorded: for these no Python code runs, and
  // nothing has to be held.
  void skim(ReplayFrame& top) {
    if (p_.aliases) return;  // then arrays have an identity, which `match` compares
    const Static* statics = p_.statics.data();
    const uint32_t* name = p_.keys.data() + top.key;
    const Instr *const first = p_.code.data() + top.child, *const end = first + top.left;
    const Instr* in = first;
    top.cursor.skim([&](PyObject* child, PyObject* key) {
      if (in == end) return false;
      if (key) {
        const Static& expected = statics[*name];
        if (expected.obj != key || expected.how >= How::tuple) return false;
      }
      if (in->op == Op::leaf) {
        if (Py_TYPE(child) != runtime.array_type) return false;
        walk_.leaves.push(child);
      } else if (in->op == Op::ref) {
        if (walk_.nodes[in->arg] != child) return false;
      } else if (in->op != Op::stat || !matches_at_once(statics[in->arg], child)) {
        return false;
      }
      if (key) ++name;
      ++in;
      return true;
    });
    top.key = static_cast<uint32_t>(name - p_.keys.data());
    top.child += static_cast<uint32_t>(in - first);
    top.left -= static_cast<uint32_t>(in - first);
  }

  bool step() {
    ReplayFrame& top = stack_.back();
    PyObject *child = nullptr, *key = nullptr;
    skim(top);  // most children end here
    if (top.is_complete()) {
      stack_.pop_back();
      return true;
    }
    if (top.cursor.kind().by_name) {  // as many fields as recorded: each one recorded must be there
      if (top.left > 0 && !(child = top.cursor.named(p_.statics[p_.keys[top.key++]].obj))) return false;
    } else if (!top.cursor.next(child, key)) {
      child = nullptr;
    }
    if (!child) {
      bool complete = top.left == 0;
      stack_.pop_back();
      return complete;
    }
    if (top.left == 0) return false;
    --top.left;
    if (key) {
      const Static& expected = p_.statics[p_.keys[top.key]];
      if (expected.obj != key || expected.how >= How::tuple) {
        // Comparing keys may run user code, which may drop both from the dict.
        Owned hold = Owned::borrow(child), hold_key = Owned::borrow(key);
        if (!static_matches(p_, p_.keys[top.key], key)) return miss_value(top.child, key);
      }
      ++top.key;
    }
    uint32_t pc = top.child;
    top.child = p_.after(pc);
    Owned hold = Owned::borrow(child);
    return match(child, pc);
  }

  const Program& p_;
  Walk& walk_;
  IdLease ids_;
  Lease<ReplayFrames> lent_;
  std::vector<ReplayFrame>& stack_ = lent_->frames;
  OwnedList same_;  // by instruction: held, because a user's flatten makes aux data that nobody else holds
};

}  // namespace

bool replay(const Program& program, PyObject* const* roots, size_t n, Walk& walk) {
  Replayer replayer(program, walk);
  if (replayer.run(roots, n)) return true;
  walk.clear();
  return false;
}

bool match_for_good(const Program& program, size_t first, size_t count) {
  uint32_t pc = 0;
  for (size_t r = 0; r < first; ++r) pc = program.after(pc);
  return std::all_of(program.code.data() + pc, program.code.data() + pc + count,
                     [&](const Instr& in) { return in.op == Op::stat && matches_for_good(program.statics[in.arg]); });
}

nb::object handed_over(OwnedList& items) {
  auto n = static_cast<Py_ssize_t>(items.size());
  Owned out = own(PyList_New(n));
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* item = items.release(static_cast<size_t>(i));
    PyList_SET_ITEM(out.get(), i, item ? item : Py_NewRef(Py_None));
  }
  return nb::steal(out.release());
}

void bind_replay(nb::module_& m) {
  m.def(
      "walk",
      [](const GraphDef& graphdef, nb::tuple roots, bool any_sentinel, bool in_order) -> nb::object {
        Walk walk;
        walk.order = in_order ? Order::of_iteration : Order::any;
        walk.any_sentinel = any_sentinel;
        if (!replay(graphdef.program, PySequence_Fast_ITEMS(roots.ptr()), roots.size(), walk)) return nb::none();
        return nb::make_tuple(handed_over(walk.leaves), handed_over(walk.nodes));
      },
      nb::arg("graphdef"), nb::arg("roots"), nb::arg("any_sentinel") = false, nb::arg("in_order") = false,
      nb::sig("def walk(graphdef: GraphDef, roots: tuple[object, ...], any_sentinel: bool = False, in_order: bool = "
              "False) -> tuple[list[Any], list[Any]] | None"),
      "The leaves and tracked nodes of roots that match, else None. `any_sentinel`: an instance without fields that "
      "counts by identity fits any other of its class. `in_order`: equal sets have to iterate alike, and those that a "
      "trace is known to change to do the same in it.");
}

}  // namespace graftax
