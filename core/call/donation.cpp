// SPDX-License-Identifier: Apache-2.0
#include "call/donation.h"

#include <algorithm>

#include "call/cache.h"
#include "call/trace.h"

namespace graftax {

namespace {

BufferUsers buffer_users;

// Does each place among the children of such a node hold one reference?
bool holds_children(const Kind& kind) {
  const NodeKind& node = *kind.node;
  bool by_itself =
      kind.items == Items::none || kind.items == Items::list || kind.items == Items::dict || kind.items == Items::keyed;
  return by_itself && !(node.is_registered || node.is_function || node.is_cell || node.is_weak || node.is_ignored);
}

}  // namespace

std::vector<uint32_t> replaced_leaves(const Program& inputs, const Outcome& outcome) {
  std::vector<bool> written(inputs.code.size()), stays(inputs.leaves);
  for (const Write& w : outcome.writes)
    if (!w.raw && !w.unseen && holds_children(*inputs.code[inputs.track_pc[w.track]].node->kind))
      written[inputs.track_pc[w.track]] = true;
  for (const Instr& n : outcome.program.code)
    if (n.op == Op::forward && n.arg < stays.size()) stays[n.arg] = true;
  std::vector<uint32_t> open, places(inputs.leaves), out;
  for (uint32_t pc = 0; pc < inputs.code.size(); ++pc) {
    const Instr& n = inputs.code[pc];
    while (!open.empty() && inputs.code[open.back()].node->next <= pc) open.pop_back();
    if (n.op == Op::leaf) {
      ++places[n.arg];
      stays[n.arg] = stays[n.arg] || open.empty() || !written[open.back()];
    }
    if (n.op == Op::node) open.push_back(pc);
  }
  for (uint32_t leaf = 0; leaf < inputs.leaves; ++leaf)
    if (!stays[leaf] && places[leaf] == 1) out.push_back(leaf);
  return out;
}

Py_ssize_t CallReferences::to(PyObject* leaf) const {
  Py_ssize_t out = each;
  for (const OwnedList* recorded : {recorded_leaves, recorded_objects})
    if (recorded) out += std::count(recorded->data(), recorded->data() + recorded->size(), leaf);
  return out;
}

Donation::Donation(std::vector<Candidate> all) : candidates(std::move(all)) {
  for (const Candidate& c : candidates) total_bytes_ += c.bytes;
}

void Donation::count(const OwnedList& leaves, const CallReferences& references) {
  constexpr Py_ssize_t place = 1;
  donated_free_ = true;
  for (Candidate& c : candidates) {
    PyObject* leaf = leaves[c.leaf];
    c.holder = Py_REFCNT(leaf) != references.to(leaf) + place ? Holder::reference
               : !buffer_users.is_only_user(leaf)             ? Holder::buffer
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
  std::swap(handlers, result_handlers);
  std::swap(execute, program);
}

void Donation::note_call(const OwnedList& leaves, bool donated) {
  ++(donated ? calls_donated : calls_kept);
  has_donated = donated;
  kept_bytes_ = 0;
  for (Candidate& c : candidates) {
    if (c.holder != Holder::nobody) kept_bytes_ += c.bytes;
    Owned held = c.holder == Holder::nobody ? Owned() : own(PyWeakref_NewRef(leaves[c.leaf], nullptr));
    std::swap(c.held, held);
  }
}

void bind_donation(nb::module_& m) {
  m.def(
      "replaced_leaves",
      [](nb::handle_t<Entry> entry, nb::handle_t<Outcome> outcome) {
        return nb::cast(replaced_leaves(nb::inst_ptr<Entry>(entry)->program(), *nb::inst_ptr<Outcome>(outcome)));
      },
      nb::arg("entry"), nb::arg("outcome"), nb::sig("def replaced_leaves(entry: Entry, outcome: Outcome) -> list[int]"),
      "The leaves that are only in places which this Outcome of the entry overwrites.");
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
}

}  // namespace graftax
