// SPDX-License-Identifier: Apache-2.0
#include "call/proven_donation.h"

#include <algorithm>
#include <numeric>

#include "call/cache.h"
#include "call/trace.h"

namespace graftax {

namespace {

BufferUsers buffer_users;

// Does each place among the children of such a node hold one reference?
bool holds_children(const Kind& kind) {
  const NodeKind& node = *kind.node;
  bool by_itself = kind.items <= Items::dict || kind.items == Items::keyed;
  return by_itself && !(node.is_registered || node.is_function || node.is_cell || node.is_weak || node.is_ignored);
}

// Child number `i` of the node at `pc`; false where it can only be reached by user code.
bool step_to(const Program& p, uint32_t pc, uint32_t i, Replaced::Step& out) {
  using Step = Replaced::Step;
  const Instr& n = p.code[pc];
  const Kind& kind = *n.node->kind;
  if (i < n.node->has_extra) return false;
  i -= n.node->has_extra;
  if (i < n.node->items && kind.items <= Items::tuple) {
    out = {Step::Kind::item, i, {}};
    return true;
  }
  uint32_t first = i < n.node->items ? n.node->keys : n.node->keys + p.item_keys(n) - n.node->items;
  PyObject* key = p.statics[p.keys[first + i]].obj;
  if (!key || !is_simple_key(key)) return false;
  if (i < n.node->items + n.node->fields) {
    out = {i < n.node->items ? Step::Kind::key : Step::Kind::field, 0, Owned::borrow(key)};
    return i < n.node->items || !(n.flags & OWN_DICT);
  }
  for (const Slot& slot : kind.slots)
    if (slot.name == key || equal(slot.name, key)) {
      out = {Step::Kind::slot, slot.offset, {}};
      return true;
    }
  return false;
}

// Borrowed from the node above. Runs no user code.
PyObject* take_step(const Replaced::Step& step, PyObject* above) {
  // The objects may have changed since the walk, so sizes are read again.
  using Kind = Replaced::Step::Kind;
  switch (step.kind) {
    case Kind::item:
      if (PyTuple_Check(above))
        return step.index < PyTuple_GET_SIZE(above) ? PyTuple_GET_ITEM(above, step.index) : nullptr;
      return step.index < PyList_GET_SIZE(above) ? PyList_GET_ITEM(above, step.index) : nullptr;
    case Kind::key: return dict_get(above, step.key.get());
    case Kind::field: return dict_get(instance_dict(above).get(), step.key.get());
    case Kind::slot: return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(above) + step.index);
  }
  return nullptr;
}

// The nodes and leaves that an Outcome puts somewhere, and the nodes that it writes.
struct OutcomeUses {
  std::vector<bool> written, nodes, leaves;  // by tracked index; by leaf

  OutcomeUses(const Program& inputs, const Outcome& outcome)
      : written(inputs.track_pc.size()), nodes(inputs.track_pc.size()), leaves(inputs.leaves) {
    for (const Write& w : outcome.writes)
      if (!w.raw && !w.unseen) written[w.track] = holds_children(*inputs.code[inputs.track_pc[w.track]].node->kind);
    for (const Instr& n : outcome.program.code) {
      if (n.op == Op::forward && n.arg < leaves.size()) leaves[n.arg] = true;
      if (n.op == Op::input && n.arg < nodes.size()) nodes[n.arg] = true;
    }
    for (const Static& s : outcome.program.statics)
      if (s.how == How::input && s.first < nodes.size()) nodes[s.first] = true;
    // A node in two places does not go with one of them.
    for (const Instr& n : inputs.code)
      if (n.op == Op::ref) nodes[n.arg] = true;
  }
};

}  // namespace

Replaced::Replaced(const Program& inputs, const Outcome& outcome, uint32_t arguments) {
  struct Open {
    uint32_t pc, child;  // the next one
    bool written;
    uint32_t node;  // among `nodes`
  };
  OutcomeUses uses(inputs, outcome);
  std::vector<Open> open;
  std::vector<uint32_t> places(inputs.leaves);  // how many each leaf has
  std::vector<Leaf> first_places;
  uint32_t roots = 0;
  for (uint32_t pc = 0; pc < inputs.code.size(); ++pc) {
    const Instr& n = inputs.code[pc];
    while (!open.empty() && inputs.code[open.back().pc].node->next <= pc) open.pop_back();
    Open* above = open.empty() ? nullptr : &open.back();
    uint32_t child = above ? above->child++ : 0;
    uint32_t root = above ? NONE : roots++;
    // It can go only with a node that is written or goes itself, or as an argument.
    bool goes = above ? above->written || above->node != NONE : root < arguments;
    uint32_t holder = above && !above->written ? above->node : NONE;
    bool is_passed = !above || (holder != NONE && nodes[holder].is_passed);
    if (n.op == Op::leaf && ++places[n.arg] == 1 && goes && !uses.leaves[n.arg])
      first_places.push_back({n.arg, holder, root, is_passed});
    if (n.op != Op::node) continue;
    uint32_t track = n.node->track;
    bool is_written = track != NONE && uses.written[track];
    Step step{Step::Kind::item, 0, {}};
    goes = goes && !is_written && (track == NONE || !uses.nodes[track]) && holds_children(*n.node->kind) &&
           (!above || step_to(inputs, above->pc, child, step));
    uint32_t writes = above && above->written ? inputs.code[above->pc].node->track : NONE;
    if (goes) nodes.push_back({track, holder, writes, root, is_passed, n.node->kind->has_dict, std::move(step)});
    open.push_back({pc, 0, is_written, goes ? static_cast<uint32_t>(nodes.size() - 1) : NONE});
  }
  for (const Leaf& leaf : first_places)
    if (places[leaf.leaf] == 1) leaves.push_back(leaf);
}

Py_ssize_t CallReferences::recorded(PyObject* object) const {
  Py_ssize_t out = 0;
  for (const OwnedList* list : {recorded_leaves, recorded_objects})
    if (list) out += std::count(list->data(), list->data() + list->size(), object);
  return out;
}

Donation::Donation(Replaced replaced, const std::vector<Array>& arrays) : nodes_(std::move(replaced.nodes)) {
  auto place = replaced.leaves.begin();
  for (auto [leaf, size] : arrays) {
    place = std::find_if(place, replaced.leaves.end(), [leaf = leaf](const auto& p) { return p.leaf == leaf; });
    if (place == replaced.leaves.end()) raise_error(PyExc_IndexError, "a candidate that is not replaced");
    candidates.emplace_back(*place, size.first, size.second);
  }
  order();
}

void Donation::keep_only(const std::vector<uint32_t>& taken) {
  auto is_left_out = [&](const Candidate& c) { return !std::binary_search(taken.begin(), taken.end(), c.leaf); };
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), is_left_out), candidates.end());
  order();
}

void Donation::order() {
  by_size_.resize(candidates.size());
  std::iota(by_size_.begin(), by_size_.end(), 0);
  std::stable_sort(by_size_.begin(), by_size_.end(),
                   [&](uint32_t i, uint32_t k) { return candidates[i].bytes > candidates[k].bytes; });
  total_bytes_ = 0;
  for (const Candidate& c : candidates) total_bytes_ += c.bytes;
}

void Donation::leave_out_held_arguments() {
  auto is_held = [](const Candidate& c) { return c.is_passed && c.holder != Holder::nobody; };
  candidates.erase(std::remove_if(candidates.begin(), candidates.end(), is_held), candidates.end());
  order();
}

// Counted exactly: the one place in the graph, what the call itself holds, and nothing besides.
constexpr Py_ssize_t one_place = 1, in_roots = 1;

void Donation::count_nodes(const CallReferences& references) {
  node_objects_.assign(nodes_.size(), nullptr);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const Replaced::Node& node = nodes_[i];
    bool is_root = node.root != NONE, is_tracked = node.track != NONE;
    PyObject* above = is_root              ? nullptr
                      : node.above == NONE ? (*references.nodes)[node.writes]
                                           : node_objects_[node.above];
    PyObject* object = is_root ? (*references.roots)[node.root] : above ? take_step(node.step, above) : nullptr;
    // The walk has to have met this very object; a root, which the caller's stack holds, has to be passed once.
    if (!object || (is_tracked && object != (*references.nodes)[node.track])) continue;
    if (is_root && !references.is_passed_once(object)) continue;
    Py_ssize_t own_references = references.to_node(object, is_tracked) + (is_root ? in_roots : 0);
    if (Py_REFCNT(object) != own_references + one_place) continue;
    if (!node.has_dict || Py_REFCNT(instance_dict(object).get()) == 2) node_objects_[i] = object;  // one is ours
  }
}

void Donation::count(const OwnedList& leaves, const CallReferences& references) {
  count_nodes(references);
  donated_free_ = true;
  for (Candidate& c : candidates) {
    PyObject* leaf = leaves[c.leaf];
    bool is_root = c.root != NONE;
    Py_ssize_t own_references = references.to_leaf(leaf) + (is_root ? in_roots : 0);
    // From the cheapest question to the one that reads memory of JAX.
    c.holder = c.node != NONE && !node_objects_[c.node]        ? Holder::container
               : is_root && !references.is_passed_once(leaf)   ? Holder::reference
               : Py_REFCNT(leaf) != own_references + one_place ? Holder::reference
               : !buffer_users.is_only_user(leaf, c.devices)   ? Holder::buffer
                                                               : Holder::nobody;
    bool is_free = c.holder == Holder::nobody;
    c.free_calls = is_free ? c.free_calls + 1 : 0;
    donated_free_ = donated_free_ && (is_free || !c.is_donated);
  }
}

std::vector<uint32_t> Donation::worth_donating(bool is_first_call) {
  std::vector<uint32_t> leaves;
  size_t bytes = 0;
  for (const Candidate& c : candidates) {
    if (c.free_calls <= (is_first_call ? 0 : patience)) continue;
    leaves.push_back(c.leaf);
    bytes += c.bytes;
  }
  // Another program costs a compilation: it has to donate a quarter more, and the first one half of all.
  bool is_better = is_ready() ? bytes > donated_bytes_ + donated_bytes_ / 4 : bytes > 0 && 2 * bytes >= total_bytes_;
  streak_ = is_better ? streak_ + 1 : 0;
  bool is_worth_it = is_better && programs_ < most_programs && (is_first_call || streak_ > patience);
  return is_worth_it ? leaves : std::vector<uint32_t>();
}

void Donation::use(const std::vector<uint32_t>& leaves, Owned program, Owned result_handlers) {
  ++programs_;
  streak_ = 0;
  donated_bytes_ = 0;
  donated_free_ = true;
  for (Candidate& c : candidates) {
    c.is_donated = std::binary_search(leaves.begin(), leaves.end(), c.leaf);
    if (!c.is_donated) continue;
    donated_bytes_ += c.bytes;
    donated_free_ = donated_free_ && c.holder == Holder::nobody;
  }
  // What was there is released on return, when this object is whole again.
  std::swap(handlers, result_handlers);
  std::swap(execute, program);
}

void Donation::note_call(const OwnedList& leaves, bool donated) {
  ++(donated ? calls_donated : calls_kept);
  has_donated = donated;
  kept_bytes_ = 0;
  size_t noted = 0;
  for (uint32_t i : by_size_) {  // the largest first: those that the user should hear of
    Candidate& c = candidates[i];
    if (c.holder != Holder::nobody) kept_bytes_ += c.bytes;
    bool is_noted = c.holder == Holder::reference && noted++ < most_noted;
    if (!is_noted && !c.held) continue;
    Owned held = is_noted ? own(PyWeakref_NewRef(leaves[c.leaf], nullptr)) : Owned();
    std::swap(c.held, held);
  }
}

void bind_donation(nb::module_& m) {
  m.def(
      "replaced_leaves",
      [](nb::handle_t<Entry> entry, nb::handle_t<Outcome> outcome) {
        std::vector<std::pair<uint32_t, bool>> out;
        const Entry& e = *nb::inst_ptr<Entry>(entry);
        for (auto place : Replaced(e.program(), *nb::inst_ptr<Outcome>(outcome), e.arguments).leaves)
          out.emplace_back(place.leaf, place.is_passed);
        return out;
      },
      nb::arg("entry"), nb::arg("outcome"),
      nb::sig("def replaced_leaves(entry: Entry, outcome: Outcome) -> list[tuple[int, bool]]"),
      "The leaves that this Outcome of the entry takes out of the caller's graph, or that go with its arguments "
      "(True).");
  m.def(
      "find_buffer_users",
      [](const nb::list& samples, const nb::list& aliases) {
        buffer_users = BufferUsers::find(runtime.array_type, samples, aliases);
        return buffer_users.known();
      },
      nb::arg("samples"), nb::arg("aliases"),
      nb::sig("def find_buffer_users(samples: list[Any], aliases: list[Callable[[Any], Any]]) -> bool"),
      "Finds where JAX counts the users of a buffer; `aliases` make another array of the buffer of one. Where that is "
      "not known, nothing is donated unasked.");
  m.def(
      "find_buffer_users_on_meshes",
      [](const nb::list& groups, nb::handle list_alias) {
        return buffer_users.find_on_meshes(runtime.array_type, groups, list_alias);
      },
      nb::arg("groups"), nb::arg("list_alias"),
      nb::sig("def find_buffer_users_on_meshes(groups: list[tuple[tuple[Any, Any], list[Callable[[Any], Any]]]], "
              "list_alias: Callable[[Any], Any]) -> bool"),
      "The same for arrays on several devices, after `find_buffer_users`. A group is two arrays on as many devices, "
      "and "
      "for each device a function that makes another array of the buffer there; `list_alias` makes one of all "
      "buffers.");
}

}  // namespace graftax
