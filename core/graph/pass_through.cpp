// SPDX-License-Identifier: Apache-2.0
// The end of a recording: which nodes are handed over as themselves, which functions stay themselves when they are
// rebuilt, and which objects are keys.
#include <algorithm>

#include "graph/key_path.h"
#include "graph/record.h"
#include "graph/static_equality.h"
#include "python/hooks.h"

namespace graftax {

namespace {

constexpr size_t max_below_object = 100000;  // nodes below one object of an unregistered class

}  // namespace

// By instruction: is there an array below this node? Upwards from the leaves, and through references. A context value
// counts as an array: inside the trace the caller's would be wrong. So does what is ignored.
std::vector<bool> Recorder::find_arrays_below() const {
  const Program& p = out_.program;
  auto n = static_cast<uint32_t>(p.code.size());
  std::vector<uint32_t> parent = p.parents(), work;
  std::vector<std::pair<uint32_t, uint32_t>> refs;  // (target, where the reference stands)
  for (uint32_t pc = 0; pc < n; ++pc) {
    const Instr& in = p.code[pc];
    if (in.op == Op::ref) refs.emplace_back(p.track_pc[in.arg], pc);
    if ((in.op == Op::leaf && !(in.flags & PLAIN_VALUE)) ||
        (in.op == Op::stat && p.statics[in.arg].how == How::context) ||
        (in.op == Op::node && in.node->kind->node->is_ignored))
      work.push_back(pc);
  }
  std::sort(refs.begin(), refs.end());
  auto sources = [&](uint32_t target) {
    return std::equal_range(refs.begin(), refs.end(), std::make_pair(target, 0u),
                            [](const auto& a, const auto& b) { return a.first < b.first; });
  };
  std::vector<bool> has_array(n, false);
  while (!work.empty()) {
    uint32_t pc = work.back();
    work.pop_back();
    for (uint32_t up = parent[pc]; up != NONE && !has_array[up]; up = parent[up]) {
      has_array[up] = true;
      // Whatever refers to this node has the array below it, too.
      auto [begin, end] = sources(up);
      for (auto it = begin; it != end; ++it) work.push_back(it->second);
    }
  }
  return has_array;
}

// Decides what is handed over as itself: objects of unregistered classes with no array below, and all they reach.
void Recorder::hand_over() {
  Program& p = out_.program;
  auto n = static_cast<uint32_t>(p.code.size());
  auto may_be_handed = [](const Instr& in) { return in.op == Op::node && in.node->kind->handed; };
  if (std::none_of(p.code.begin(), p.code.end(), may_be_handed)) return;
  std::vector<bool> has_array = find_arrays_below();
  std::vector<uint32_t> nodes_before(n + 1, 0);  // of each instruction, so that a difference counts a subtree
  for (uint32_t pc = 0; pc < n; ++pc) nodes_before[pc + 1] = nodes_before[pc] + (p.code[pc].op == Op::node);
  std::vector<uint32_t> work;
  // These objects, then everything reachable from them.
  for (uint32_t pc = 0; pc < n; ++pc) {
    const Instr& in = p.code[pc];
    if (!may_be_handed(in)) continue;
    if (has_array[pc]) {
      if (!in.node->kind->node->can_hold_arrays(*in.node->kind))
        raise_graftax(
            "UnsupportedValueError",
            path_text(p, pc, options_.root_names) + ": a " + in.node->type->tp_name +
                " with arrays among its attributes cannot be rebuilt. Keep the arrays in an object of their own.");
      if (in.node->kind->has_del)
        raise_graftax(
            "UnsupportedValueError",
            path_text(p, pc, options_.root_names) + ": " + in.node->type->tp_name +
                " has arrays below and defines __del__, which would run for the copy that the traced function gets. "
                "Release the resource in a method, or keep it in an object of its own without arrays.");
    } else {
      work.push_back(pc);
    }
    if (nodes_before[in.node->next] - nodes_before[pc] - 1 > max_below_object)
      raise_graftax("StructureError",
                    path_text(p, pc, options_.root_names) + ": more than " + std::to_string(max_below_object) +
                        " nodes below one " + in.node->type->tp_name +
                        ". Pass only the part that the function uses, or register the class with jax.tree_util.");
  }
  // Reached twice or in a cycle, a node has its flag already.
  while (!work.empty()) {
    uint32_t pc = work.back();
    work.pop_back();
    Instr& in = p.code[pc];
    if (in.op == Op::ref) work.push_back(p.track_pc[in.arg]);
    else if (in.op == Op::same) work.push_back(in.arg);
    else if (in.op == Op::node && !(in.flags & HANDED_OVER)) {
      in.flags |= HANDED_OVER;
      for (uint32_t c = pc + 1; c < in.node->next; c = p.after(c)) work.push_back(c);
    }
  }
}

// An object that is handed over keeps its __dict__; one that is rebuilt gets a new one, so nothing else may refer to it.
void Recorder::refuse_shared_dicts() const {
  const Program& p = out_.program;
  for (auto [first, second] : shared_dicts_) {
    if (second >= p.code.size() || ((p.code[first].flags & HANDED_OVER) && (p.code[second].flags & HANDED_OVER)))
      continue;
    const Instr& n = p.code[second];
    bool is_dict = n.node->type == &PyDict_Type;
    raise_graftax(
        "StructureError",
        path_text(p, second, options_.root_names) + ": " +
            (is_dict ? std::string("this dict is the __dict__ of an object that is")
                     : std::string("this ") + n.node->type->tp_name + " has a __dict__ that is") +
            " also reached another way. A rebuilt object has one of its own: what is written to the one would not be "
            "seen in the other. Pass the object alone, or a copy (dict(vars(obj))).");
  }
}

// A handed-over function that reaches nothing mutable but functions, cells and keyword defaults that are theirs alone
// stays itself when it is rebuilt: a copy would be another function for whoever compares with `is` or `==`, as
// structures of modules do. Where a cell is shared with something that is rebuilt, all that share it are rebuilt.
void Recorder::find_self_contained() {
  Program& p = out_.program;
  auto wanted = [](const Instr& n) {
    return n.op == Op::node && n.node->kind->node->is_function && (n.flags & HANDED_OVER) &&
           !(n.flags & SELF_CONTAINED);
  };
  if (std::none_of(p.code.begin(), p.code.end(), wanted)) return;
  enum class Part : uint8_t { none, function, inner };  // inner: a cell, or the keyword defaults of a function
  std::vector<Part> part(p.track_pc.size(), Part::none);
  std::vector<std::pair<uint32_t, uint32_t>> holds;  // (owner, tracked node); the owner of a root is NONE
  std::vector<uint32_t> open;                        // tracked nodes alone: a tuple between is nobody's owner
  for (uint32_t pc = 0; pc < p.code.size(); ++pc) {
    while (!open.empty() && p.code[open.back()].node->next <= pc) open.pop_back();
    const Instr& n = p.code[pc];
    uint32_t track = n.op == Op::ref ? n.arg : n.op == Op::node ? n.node->track : NONE;
    if (track == NONE) continue;
    holds.emplace_back(open.empty() ? NONE : p.code[open.back()].node->track, track);
    if (n.op != Op::node) continue;
    open.push_back(pc);
    if (n.node->kind->node->is_function && (n.flags & HANDED_OVER)) {
      Owned writes = hooks::writes_its_cells(out_.live[pc]);
      if (writes.get() != Py_True) part[track] = Part::function;
      uint32_t keywords = p.after(pc + 1);
      if (p.code[keywords].op == Op::node && p.code[keywords].node->track != NONE)
        part[p.code[keywords].node->track] = Part::inner;
    } else if (n.node->kind->node->is_cell) {
      part[track] = Part::inner;
    }
  }
  // Until nothing changes: a function that reaches something else is rebuilt, and so are the parts that it shares.
  for (bool changed = true; changed;) {
    changed = false;
    for (auto it = holds.rbegin(); it != holds.rend(); ++it) {  // children first: what they are decides
      auto [owner, track] = *it;
      bool owner_stays = owner != NONE && part[owner] != Part::none;
      if (owner_stays && part[track] == Part::none) part[owner] = Part::none, changed = true;
      else if (!owner_stays && part[track] == Part::inner) part[track] = Part::none, changed = true;
    }
  }
  for (size_t t = 0; t < part.size(); ++t) {
    uint32_t pc = p.track_pc[t];
    Instr& n = p.code[pc];
    if (part[t] != Part::function || (n.flags & SELF_CONTAINED)) continue;
    n.flags |= SELF_CONTAINED;
    p.statics[n.node->payload].snapshot = p.keep(Owned::borrow(out_.live[pc]));
  }
}

// Objects that are keys by identity are nodes too, recorded after the roots, unless they were met elsewhere.
void Recorder::record_keys() {
  Program& p = out_.program;
  uint32_t roots = p.roots;
  for (uint32_t i = 0; i < p.statics.size(); ++i) {
    if (!is_identity_key(p.statics[i])) continue;
    Owned key = object_of_key(p.statics[i].obj);
    if (!key || seen_->find(key.get())) continue;
    p.key_roots.push_back(i);
    visit(key.get(), {});
    run();
  }
  p.roots = roots;  // `run` has counted each key as a root, which it is not
}

// The path of the container that the key `id` is in, or is part of a key of.
std::string Recorder::place_of_key(uint32_t id) const {
  const Program& p = out_.program;
  for (uint32_t i = 0; i < p.statics.size(); ++i) {  // a tuple stands after its elements
    const Static& s = p.statics[i];
    for (uint32_t k = 0; s.how == How::tuple && k < s.count; ++k)
      if (p.elements[s.first + k] == id) return place_of_key(i);
  }
  for (uint32_t pc = 0; pc < p.code.size(); ++pc) {
    const Instr& n = p.code[pc];
    for (uint32_t k = 0; n.op == Op::node && k < p.item_keys(n); ++k)
      if (p.keys[n.node->keys + k] == id) return path_text(p, pc, options_.root_names);
  }
  return root_name();
}

// An object that is a key by identity is one wherever else it stands in the graph, too.
void Recorder::keys_count_by_identity() {
  Program& p = out_.program;
  std::vector<bool> nested(p.statics.size());
  for (uint32_t e : p.elements) nested[e] = true;
  for (size_t i = 0; i < nested.size(); ++i) {
    Static& key = p.statics[i];
    if (!is_identity_key(key)) continue;
    PyObject* obj = key.obj;
    if (options_.inputs) {  // in an Outcome
      uint32_t* input = nested[i] ? nullptr : options_.inputs->nodes->find(obj);
      if (input) {
        const Program& in = *options_.inputs->program;
        if (!(in.code[in.track_pc[*input]].flags & HANDED_OVER))
          refuse_key_with_arrays(obj, place_of_key(static_cast<uint32_t>(i)));
        key.how = How::input;
        key.first = *input;
        key.hash = static_cast<Py_hash_t>(*input);
        key.obj = nullptr;
        key.contents = nullptr;
        continue;
      }
      if (options_.inputs->keys->find(obj)) continue;
      if (PyWeakref_CheckRef(obj)) {  // to a class, as in the cache of a singledispatch function
        Owned referent = contents_root(obj);
        if (!referent || kind_of(referent.get()).is_leaf()) continue;
      }
      if (hooks::is_module_level(obj).get() == Py_True) continue;  // as a sentinel that is returned itself
      raise_graftax("UnsupportedValueError",
                    root_name() + ": a " + std::string(key.type->tp_name) +
                        " that the function makes becomes a dict key or a set element. It counts by identity, which a "
                        "compiled call cannot repeat for the next one. Use a string or a number as key.");
    }
    Owned counted = node_of_key(obj);
    uint32_t* pc = counted ? seen_->find(counted.get()) : nullptr;
    if (!pc) continue;
    Instr& n = p.code[*pc];
    if (n.op != Op::node || !(n.flags & HANDED_OVER)) {
      if (n.op == Op::node && n.node->kind->handed) refuse_key_with_arrays(obj, place_of_key(static_cast<uint32_t>(i)));
      raise_graftax(
          "UnsupportedValueError",
          path_text(p, *pc, options_.root_names) + ": this " + n.node->type->tp_name +
              " is also a dict key or a set element, but it is rebuilt for the traced function, so that the key "
              "would be another object. Use a string or a number as key.");
    }
    if (n.node->own == NONE) n.node->own = add_identity(p, counted.get());
  }
}

}  // namespace graftax
