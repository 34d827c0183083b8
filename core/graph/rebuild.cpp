// SPDX-License-Identifier: Apache-2.0
#include "graph/rebuild.h"

#include "graph/commit.h"
#include "graph/static_equality.h"
#include "python/hooks.h"

namespace graftax {

Owned resolved_key(const Program& p, uint32_t id, PyObject* const* inputs) {
  if (p.statics[id].how == How::input && inputs) return Owned::borrow(inputs[p.statics[id].first]);
  Owned value = static_object(p.statics[id]);
  if (!value) raise_error(PyExc_ReferenceError, "a key of this GraphDef no longer exists");
  return value;
}

namespace {

void swap_slot(PyObject* obj, const Slot& slot, PyObject* value, OwnedList& replaced) {
  auto** place = reinterpret_cast<PyObject**>(reinterpret_cast<char*>(obj) + slot.offset);
  Py_XINCREF(value);
  // Released by the caller once all slots are filled: a __del__ sees none half done.
  replaced.push_stolen(Owned::steal(std::exchange(*place, value)));
}

void fill_slots(const Program& p, const Instr& n, uint32_t first_key, PyObject* obj, PyObject* const* values) {
  OwnedList old;
  uint32_t filled = 0;
  for (const Slot& slot : n.node->kind->slots) {
    PyObject* next = filled < n.node->slots ? p.statics[p.keys[first_key + filled]].obj : nullptr;
    if (next && (next == slot.name || PyUnicode_Compare(next, slot.name) == 0))
      swap_slot(obj, slot, values[filled++], old);
  }
}

}  // namespace

Owned field_value(PyObject* obj, const Kind& kind, PyObject* name) {
  for (const Slot& slot : kind.slots)
    if (slot.name == name) return Owned::borrow(slot_value(obj, slot));
  if (!kind.has_dict) return {};
  PyObject* value = dict_get(instance_dict(obj).get(), name);
  return Owned::borrow(value);
}

void fill_content(const Program& p, uint32_t pc, PyObject* obj, PyObject* const* values, PyObject* const* inputs) {
  const Instr& n = p.code[pc];
  const Kind& kind = *n.node->kind;
  kind.node->fill({p, n, values, inputs}, obj);
  if (kind.node->is_registered) return;
  PyObject* const* fields = values + n.node->has_extra + n.node->items;
  uint32_t field_key = n.node->keys + p.item_keys(n), i = 0;
  if (kind.has_dict && !(n.flags & OWN_DICT) && n.node->fields)
    for (Owned dict = instance_dict(obj); i < n.node->fields; ++i)
      check(PyDict_SetItem(dict.get(), key_object(p, p.keys[field_key + i], nullptr).get(), fields[i]));
  if (!kind.slots.empty()) fill_slots(p, n, field_key + n.node->fields, obj, fields + n.node->fields);
}

bool Builder::Lists::reset() {
  values.clear();
  closed.clear();
  nodes.clear();
  frames.clear();
  queue.clear();
  late.clear();
  waits.clear();
  open.clear();
  size_t largest = std::max({values.capacity(), closed.capacity(), nodes.capacity(), frames.capacity()});
  return largest <= most_kept && std::max(queue.capacity(), late.capacity()) <= most_kept;
}

Builder::Builder(const Program& program, Sources sources) : program_(program), sources_(sources) {
  size_t tracked = program.track_pc.size();
  nodes_.resize(tracked);
  if (program.has_same) closed_.resize(program.code.size());
  if (sources.live)
    for (size_t t = 0; t < tracked; ++t)
      if (program.code[program.track_pc[t]].flags & HANDED_OVER) nodes_.set(t, sources.live[program.track_pc[t]]);
  // What an earlier build has made stays the same objects: a trace goes on with more roots.
  size_t built = sources.built ? sources.built->size() : 0;
  for (size_t pc = 0; pc < built; ++pc) {
    const Instr& n = program.code[pc];
    PyObject* value = (*sources.built)[pc];
    if (n.op != Op::node || !value) continue;
    if (n.node->track != NONE) nodes_.set(n.node->track, value);
    if (n.flags & TARGET) closed_.set(pc, value);
  }
}

Owned Builder::construct(uint32_t pc, PyObject** values) {
  const Instr& n = program_.code[pc];
  const Kind& kind = *n.node->kind;
  Owned obj;
  if (kind.node->is_registered) {
    Owned children = tuple_of(values + 1, n.node->items);
    static PyObject* const unflatten = interned("unflatten");
    // The recorded treedef has the aux data of the first call: where that is a node, it was rebuilt for this one.
    const Instr& aux = program_.code[pc + 1];
    // A dict or a list as aux data would still be empty when unflatten reads it: the recorded one is given.
    bool other_aux = sources_.replaced && sources_.replaced[pc + 1];
    bool recorded =
        n.node->treedef && !other_aux &&
        (aux.op != Op::node || aux.node->track != NONE || (aux.node->whole && aux.node->whole == values[0]) ||
         (sources_.live && sources_.live[pc + 1] == values[0]));
    if (recorded) return own(PyObject_CallMethodOneArg(n.node->treedef, unflatten, children.get()));
    Owned treedef = hooks::one_level_treedef(reinterpret_cast<PyObject*>(n.node->type), values[0],
                                             own(PyLong_FromSize_t(n.node->items)).get());
    return own(PyObject_CallMethodOneArg(treedef.get(), unflatten, children.get()));
  }
  if (kind.node->is_whole) {
    obj = kind.node->make({program_, n, values, sources_.input_nodes});
    if (n.node->fields + n.node->slots == 0) return obj;
  } else {
    obj = make_shell(kind, n.node->type);
  }
  fill_content(program_, pc, obj.get(), values, sources_.input_nodes);
  return obj;
}

void Builder::push(uint32_t at, Owned obj) {
  if (recording_ && at != NONE) built_.set(at, obj.get());
  values_.push_stolen(std::move(obj));
}

// Is there an array below the node at `pc`, in it or behind a reference?
bool Builder::holds_array(uint32_t pc) const {
  std::vector<uint32_t> todo = {pc};
  std::vector<bool> seen(program_.code.size());
  while (!todo.empty()) {
    uint32_t from = todo.back();
    todo.pop_back();
    if (seen[from]) continue;
    for (uint32_t at = from; at < program_.after(from); ++at) {
      seen[at] = true;
      const Instr& n = program_.code[at];
      if (n.op == Op::leaf) return true;
      if (n.op == Op::ref) todo.push_back(program_.track_pc[n.arg]);
      if (n.op == Op::same) todo.push_back(n.arg);
    }
  }
  return false;
}

// With `leaves_only`: would JAX count this as a leaf, and does it hold no array?
bool Builder::is_left_out(uint32_t pc) const {
  const Instr& n = program_.code[pc];
  if (!sources_.leaves_only || n.flags & AUX) return false;
  if (n.op == Op::stat) {
    const Static& s = program_.statics[n.arg];
    const Kind* kind = known_kind(s.type);
    if ((kind && kind->immortal_value) || !s.obj) return true;
    Owned obj = static_object(s);
    return !obj || hooks::is_leaf(obj.get()).get() == Py_True;
  }
  const NodeKind& kind = *n.node->kind->node;
  if (n.node->own != NONE || kind.is_leaf_for_jax) return true;
  if (kind.is_opened_by_jax(*n.node->kind, n.node->type)) return false;
  return !kind.is_cell && !holds_array(pc);
}

void Builder::node(uint32_t pc, uint32_t at, bool keep) {
  const Instr& n = program_.code[pc];
  // First the nodes that are not made here: left out, ignored, passed through, unique, or made before.
  if (!keep && is_left_out(pc)) return push(at, Owned::borrow(Py_None));
  if (n.node->kind->node->is_ignored && sources_.replaced && sources_.replaced[pc])  // the stand-in, met again
    return push(at, Owned::borrow(sources_.replaced[pc]));
  if (sources_.live && (n.flags & HANDED_OVER)) return push(at, Owned::borrow(sources_.live[pc]));
  if (PyObject* unique = n.node->kind->node->unique_object(program_, n)) return push(at, Owned::borrow(unique));
  if (n.node->track != NONE && nodes_[n.node->track]) {
    if (readers_ && is_waiting(n.node->track)) queue_.push_back(pc);  // what is made of it reads it
    return push(at, Owned::borrow(nodes_[n.node->track]));
  }
  Owned obj = n.node->own == NONE ? Owned() : static_object(program_.statics[n.node->own]);
  bool is_itself = !sources_.anew || (obj && hooks::is_module_level(obj.get()).get() == Py_True);
  if (n.node->own != NONE && is_itself) {  // it counts by identity, so a copy would be another value
    if (!obj) raise_error(PyExc_ReferenceError, "an object of this GraphDef that counts by identity no longer exists");
    if (n.node->track != NONE) nodes_.set(n.node->track, obj.get());
    return push(at, std::move(obj));
  }
  if ((n.flags & SELF_CONTAINED) && !sources_.live)
    return push(at, Owned::borrow(program_.statics[n.node->payload].snapshot));
  if (n.node->whole && (!sources_.leaves_only || n.flags & AUX)) return push(at, Owned::borrow(n.node->whole));
  if ((n.flags & TARGET) && closed_[pc]) return push(at, Owned::borrow(closed_[pc]));
  // A mutable node: made empty now, filled later, so that a cycle through it can close.
  if (is_shell_kind(*n.node->kind)) {
    // Untracked shells (the content of a changed input) are filled by the caller of build_children.
    if (n.node->track == NONE) raise_error(PyExc_SystemError, "a mutable node without an identity");
    // Where all children are there already, it is filled at once, or even made of them, and need not wait.
    size_t base = values_.size();
    bool filled = push_children(pc),
         at_once = filled && n.node->kind->node->items_are_all && n.node->type == n.node->kind->solid;
    Owned shell = at_once ? n.node->kind->node->new_items({program_, n, values_.data() + base, sources_.input_nodes})
                          : n.node->kind->node->shell(program_, n, sources_.live ? sources_.live[pc] : nullptr);
    nodes_.set(n.node->track, shell.get());
    if (recording_) built_.set(pc, shell.get());
    if (!filled) wait(pc);
    else if (at_once) values_.resize(base);
    else finish_frame({pc, n.node->next, 0, base, NONE, true});
    return push(at, std::move(shell));
  }
  // An immutable or registered node: made of its children, when they are there. One that is open reaches itself.
  if (n.node->track != NONE) {
    if (is_open(n.node->track) && n.node->kind->node->is_registered && n.node->kind->solid == &PyBaseObject_Type) {
      // A registered class whose instance reaches itself: the shell goes into the cycle, and takes over the attributes
      // of what the class's own unflatten makes.
      Owned shell = make_shell(*n.node->kind, n.node->type);
      nodes_.set(n.node->track, shell.get());
      return push(at, std::move(shell));
    }
    if (is_open(n.node->track) && n.node->kind->node->is_weak &&
        n.node->items == 1) {  // its referent is open too: refer to its shell
      const Instr& child = program_.code[pc + 1];
      uint32_t referent = child.op == Op::ref ? program_.track_pc[child.arg] : pc + 1;
      const Instr& r = program_.code[referent];
      if (r.op == Op::node && r.node->track != NONE && r.node->kind->node->is_registered &&
          (nodes_[r.node->track] || is_open(r.node->track))) {
        value(pc + 1);
        Owned shell = Owned::borrow(values_.back());
        values_.pop();
        PyObject* items[] = {shell.get()};
        Owned ref = n.node->kind->node->make({program_, n, items, nullptr});
        nodes_.set(n.node->track, ref.get());
        return push(at, std::move(ref));
      }
    }
    if (is_open(n.node->track))
      raise_graftax("StructureError",
                    std::string("a cycle runs through immutable or registered nodes only (") + n.node->type->tp_name +
                        "): it cannot be rebuilt. Put a list, a dict or a plain object into the cycle.");
    // Until it is made there is nothing to refer to: a reference that comes back meanwhile is a cycle.
    if (open_.empty()) open_.resize(program_.track_pc.size());
    open_[n.node->track] = true;
  }
  readers_ += n.node->kind->node->reads_children;
  frames_.push_back({pc, pc + 1, program_.children(pc), values_.size(), at, false, queue_.size()});
}

void Builder::wait(uint32_t pc) {
  if (waits_.empty()) waits_.resize(program_.track_pc.size());
  waits_[program_.code[pc].node->track] = true;
  queue_.push_back(pc);
}

// Begins to fill the last node that waits above `floor`; false where there is none.
bool Builder::fill_next(size_t floor) {
  while (queue_.size() > floor) {
    uint32_t pc = queue_.back();
    queue_.pop_back();
    // It may stand in the queue twice, and has been filled by then.
    if (!waits_[program_.code[pc].node->track]) continue;
    if (needs_open(pc)) {
      late_.push_back(pc);
      continue;
    }
    waits_[program_.code[pc].node->track] = false;
    frames_.push_back({pc, pc + 1, program_.children(pc), values_.size(), NONE, true});
    return true;
  }
  return false;
}

// Is the content of this mutable node made of a node that is under construction?
bool Builder::needs_open(uint32_t pc) {
  if (!program_.cyclic || frames_.empty()) return false;
  // Stamped with the number of this search, so that nothing has to be cleared between two of them.
  visited_in_.resize(program_.code.size());
  ++search_;
  std::vector<uint32_t> todo = {pc};
  while (!todo.empty()) {
    uint32_t from = todo.back(), child = from + 1;
    todo.pop_back();
    if (std::exchange(visited_in_[from], search_) == search_) continue;
    for (uint32_t i = 0; i < program_.children(from); ++i, child = program_.after(child)) {
      const Instr& c = program_.code[child];
      uint32_t at = c.op == Op::ref ? program_.track_pc[c.arg] : c.op == Op::same ? c.arg : child;
      const Instr& n = program_.code[at];
      if (n.op != Op::node || is_shell_kind(*n.node->kind) || (n.node->track != NONE && nodes_[n.node->track]))
        continue;
      if (n.node->track != NONE && is_open(n.node->track)) return true;
      todo.push_back(at);
    }
  }
  return false;
}

// One new context value for each build, however often it stands in the graph.
Owned Builder::context(const Static& s) {
  if (is_context_field(s)) return static_object(s);
  if (context_type_ != s.type) {
    context_ = static_object(s);
    context_type_ = s.type;
  }
  return Owned::borrow(context_.get());
}

void Builder::value(uint32_t pc, bool keep) {
  if (sources_.replaced && sources_.replaced[pc]) return push(pc, Owned::borrow(sources_.replaced[pc]));
  const Instr& n = program_.code[pc];
  switch (n.op) {
    case Op::leaf: return push(pc, Owned::borrow(sources_.leaves[n.arg]));
    case Op::stat: {
      if (!keep && is_left_out(pc)) return push(pc, Owned::borrow(Py_None));
      const Static& s = program_.statics[n.arg];
      if (s.how == How::context) return push(pc, context(s));
      if (sources_.live) return push(pc, Owned::borrow(sources_.live[pc]));
      Owned obj = static_object(s);
      if (!obj) raise_error(PyExc_ReferenceError, "a static of this GraphDef no longer exists");
      if (s.how == How::copied ||
          (s.how == How::reduce && known_kind(s.type) && known_kind(s.type)->leaf == Leaf::numpy))
        obj = own(PyObject_CallMethod(obj.get(), "copy", nullptr));
      return push(pc, std::move(obj));
    }
    case Op::ref: return node(program_.track_pc[n.arg], pc, keep);
    case Op::same: return node(n.arg, pc, keep);
    case Op::node: return node(pc, pc, keep);
    case Op::input: return push(pc, Owned::borrow(sources_.input_nodes[n.arg]));
    case Op::forward: return push(pc, Owned::borrow(sources_.input_leaves[n.arg]));
  }
}

// The same where there is no more to do than to take a reference. False: see `value`.
bool Builder::push_plain(uint32_t pc) {
  const Instr& n = program_.code[pc];
  PyObject* value = nullptr;
  switch (n.op) {
    case Op::leaf: value = sources_.leaves[n.arg]; break;
    case Op::forward: value = sources_.input_leaves[n.arg]; break;
    case Op::input: value = sources_.input_nodes[n.arg]; break;
    case Op::ref: value = readers_ ? nullptr : nodes_[n.arg]; break;
    case Op::stat: {
      const Static& s = program_.statics[n.arg];
      if (s.weak || s.how >= How::copied || s.how == How::reduce) return false;
      value = sources_.live ? sources_.live[pc] : s.obj;
      break;
    }
    default: return false;
  }
  if (value) values_.push(value);
  return value;
}

void Builder::finish_frame(const Frame& frame) {
  const Instr& n = program_.code[frame.pc];
  PyObject** values = values_.data() + frame.base;
  if (frame.fill) {
    fill_content(program_, frame.pc, nodes_[n.node->track], values, sources_.input_nodes);
    values_.resize(frame.base);
    return;
  }
  readers_ -= n.node->kind->node->reads_children;
  Owned obj = construct(frame.pc, values);
  if (n.node->track != NONE && nodes_[n.node->track]) {
    // A cycle has got a shell meanwhile: it takes over the attributes of what unflatten has made.
    Owned shell = Owned::borrow(nodes_[n.node->track]);
    if (Py_TYPE(obj.get()) == n.node->type) {
      Commit commit;
      commit.move_fields(obj.get(), shell.get(), *n.node->kind);
      commit.run();
    }
    obj = std::move(shell);
  }
  if (n.node->track != NONE) {
    nodes_.set(n.node->track, obj.get());
    open_[n.node->track] = false;
  }
  if (n.flags & TARGET) closed_.set(frame.pc, obj.get());
  if (recording_) built_.set(frame.pc, obj.get());
  values_.resize(frame.base);
  push(frame.at, std::move(obj));
}

// Pushes the children of a node that holds nothing but what is there already; nothing of another one.
bool Builder::push_children(uint32_t pc) {
  uint32_t end = program_.code[pc].node->next;
  if (!takes_plain() || end != pc + 1 + program_.children(pc)) return false;
  size_t base = values_.size();
  for (uint32_t child = pc + 1; child < end; ++child) {
    if (push_plain(child)) continue;
    values_.resize(base);
    return false;
  }
  return true;
}

void Builder::run(size_t floor) {
  bool plain = takes_plain();
  while (frames_.size() > floor) {
    Frame& top = frames_.back();
    for (; plain && top.left > 0 && push_plain(top.child); --top.left) ++top.child;
    if (top.left == 0) {
      // Before such a node is made, the mutable nodes below it are filled.
      if (readers_ && !top.fill && program_.code[top.pc].node->kind->node->reads_children && fill_next(top.waiting))
        continue;
      // A copy: it is popped before it is finished, which may push others.
      Frame frame = top;
      frames_.pop_back();
      finish_frame(frame);
      continue;
    }
    --top.left;
    uint32_t child = top.child;
    top.child = program_.after(child);
    value(child, child == top.pc + 1 && program_.code[top.pc].node->kind->node->begins_with_its_call);
  }
}

Owned Builder::build(uint32_t pc) {
  size_t floor = frames_.size();
  value(pc);
  run(floor);
  Owned out = Owned::borrow(values_.back());
  values_.pop();
  return out;
}

void Builder::build_children(uint32_t pc, OwnedList& values) {
  uint32_t child = pc + 1;
  for (uint32_t i = 0; i < program_.children(pc); ++i, child = program_.after(child)) values.push_stolen(build(child));
}

Owned Builder::make(uint32_t pc) {
  OwnedList values;
  build_children(pc, values);
  if (program_.code[pc].node->kind->node->reads_children) drain();
  return construct(pc, values.data());
}

Owned Builder::made_again(uint32_t pc) {
  std::vector<PyObject*> children;
  for (uint32_t child = pc + 1, i = 0; i < program_.children(pc); ++i, child = program_.after(child))
    children.push_back(built_[child]);
  return construct(pc, children.data());
}

void Builder::drain() {
  // What needed an open node waits in `late_`: by now nothing is open. Filling a node may queue others.
  for (; !queue_.empty() || !late_.empty(); std::swap(queue_, late_))
    while (fill_next(0)) run(frames_.size() - 1);
}

namespace {

nb::tuple unflatten_roots(const GraphDef& g, nb::sequence leaves, bool leaves_only, bool anew = false) {
  OwnedList values;
  for (nb::handle h : leaves) values.push(h.ptr());
  if (values.size() != g.program.leaves)
    raise_graftax("StructureError", "this GraphDef has " + std::to_string(g.program.leaves) + " leaves, but " +
                                        std::to_string(values.size()) + " were given");
  Builder builder(g.program, {values.data(), nullptr, nullptr, nullptr, leaves_only, nullptr, anew});
  nb::list roots;
  uint32_t pc = 0;
  for (uint32_t r = 0; r < g.program.roots; ++r, pc = g.program.after(pc))
    roots.append(nb::steal(builder.build(pc).release()));
  builder.drain();
  return nb::tuple(roots);
}

}  // namespace

void bind_rebuild(nb::module_& m) {
  m.def(
      "unflatten_roots",
      [](const GraphDef& g, nb::sequence leaves, bool leaves_only) { return unflatten_roots(g, leaves, leaves_only); },
      nb::arg("graphdef"), nb::arg("leaves"), nb::arg("leaves_only") = false,
      nb::sig("def unflatten_roots(graphdef: GraphDef, leaves: Sequence[object], leaves_only: bool = False) -> "
              "tuple[Any, ...]"),
      "As unflatten: the roots, also where there is but one.");
  m.def(
      "unflatten",
      [](const GraphDef& g, nb::sequence leaves, bool leaves_only, bool anew) {
        nb::tuple roots = unflatten_roots(g, leaves, leaves_only, anew);
        return g.program.roots == 1 ? nb::object(roots[0]) : nb::object(roots);
      },
      nb::arg("graphdef"), nb::arg("leaves"), nb::arg("leaves_only") = false, nb::arg("anew") = false,
      nb::sig("def unflatten(graphdef: GraphDef, leaves: Sequence[object], leaves_only: bool = False, anew: bool = "
              "False) -> Any"),
      "Builds the graph; with leaves_only, what JAX counts as a leaf without arrays (a string, a function, a config) "
      "is None. With anew, only a sentinel that a module or a class names is itself.");
}

}  // namespace graftax
