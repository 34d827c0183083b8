// SPDX-License-Identifier: Apache-2.0
// A Program as plain tuples for pickle, and back: every index of a state is checked, so that a damaged one raises.
#include "graph/graphdef.h"

#include <algorithm>
#include <functional>
#include <iterator>

#include "graph/kinds/function.h"
#include "graph/static_equality.h"
#include "python/hooks.h"

namespace graftax {

namespace {

template <class T>
T field(const nb::tuple& t, size_t i) {
  if (i >= t.size()) malformed_state("a record is too short");
  T out{};
  if (!read_as(t[i], out)) malformed_state("a field has the wrong type");
  return out;
}

nb::tuple as_tuple(nb::handle h) {
  if (!nb::isinstance<nb::tuple>(h)) malformed_state("a tuple was expected");
  return nb::borrow<nb::tuple>(h);
}

uint32_t as_number(nb::handle h) {
  uint32_t out = 0;
  if (!read_as(h, out)) malformed_state("a number was expected");
  return out;
}

void check_static_id(const Program& p, uint32_t id) {
  if (id >= p.statics.size()) malformed_state("static id");
}

void validate_statics(const Program& p) {
  for (uint32_t id : p.keys) check_static_id(p, id);
  for (uint32_t i = 0; i < p.statics.size(); ++i) {
    const Static& s = p.statics[i];
    if (s.how == How::tuple && (s.first > p.elements.size() || s.count > p.elements.size() - s.first))
      malformed_state("tuple");
    // Elements come before their tuple, so that no tuple contains itself.
    for (uint32_t j = 0; s.how == How::tuple && j < s.count; ++j)
      if (p.elements[s.first + j] >= i) malformed_state("tuple element");
  }
}

// One node, and how many children it says to have.
uint32_t validate_node(Program& p, uint32_t pc, bool may_lack_identity) {
  const Instr& in = p.code[pc];
  auto n = static_cast<uint32_t>(p.code.size());
  if (in.node->track != NONE) {
    if (in.node->track >= p.track_pc.size() || p.track_pc[in.node->track] != NONE) malformed_state("tracked index");
    p.track_pc[in.node->track] = pc;
  }
  // In 64 bits: sums of the numbers of a state may not come round.
  uint64_t keys = uint64_t{p.item_keys(in)} + in.node->fields + in.node->slots;
  if (keys && (in.node->keys > p.keys.size() || keys > p.keys.size() - in.node->keys)) malformed_state("keys");
  for (uint64_t k = p.item_keys(in); k < keys; ++k)
    if (p.statics[p.keys[in.node->keys + k]].how != How::string) malformed_state("field name");
  if (in.node->payload != NONE) check_static_id(p, in.node->payload);
  if (in.node->own != NONE) check_static_id(p, in.node->own);
  if ((in.flags & OWN_DICT) &&
      !(in.node->kind->has_dict && in.node->kind->node->keys == Keys::items && in.node->fields == 0))
    malformed_state("fields");
  if (!in.node->kind->node->is_valid(p, in)) malformed_state("the parts of a node");
  if (is_shell_kind(*in.node->kind) && in.node->track == NONE && !may_lack_identity)
    malformed_state("a node without an identity");
  if (in.node->has_extra != (in.node->kind->node->extra != nullptr)) malformed_state("extra child");
  uint64_t children = uint64_t{in.node->has_extra} + in.node->items + in.node->fields + in.node->slots;
  if (in.node->next <= pc || in.node->next > n || children > n) malformed_state("subtree end");
  return static_cast<uint32_t>(children);
}

// Every index in range and every subtree nested, so that no walk can leave the arrays. In an Outcome there are inputs,
// and a root may be the content of a mutable node without being that node.
void validate(Program& p, bool is_outcome) {
  validate_statics(p);
  uint32_t leaf = 0, n = static_cast<uint32_t>(p.code.size());
  // Filled while the nodes are met below: what is still NONE then is a reference to a node further on.
  for (const Instr& in : p.code)
    if (in.op == Op::node && in.node->track != NONE) p.track_pc.push_back(NONE);
  struct Open {
    uint32_t end, left;
  };
  std::vector<Open> open;
  uint32_t roots = 0;
  for (uint32_t pc = 0; pc < n; ++pc) {
    // Each subtree that has all its children has to end here.
    while (!open.empty() && open.back().left == 0) {
      if (open.back().end != pc) malformed_state("subtree end");
      open.pop_back();
    }
    bool is_root = open.empty();
    if (is_root) ++roots;
    else --open.back().left;
    const Instr& in = p.code[pc];
    switch (in.op) {
      case Op::leaf:
        if (in.flags & ALIAS ? in.arg >= leaf : in.arg != leaf++) malformed_state("leaf order");
        break;
      case Op::stat: check_static_id(p, in.arg); break;
      case Op::ref:
        if (in.arg >= p.track_pc.size() || p.track_pc[in.arg] == NONE) malformed_state("reference");
        break;
      case Op::same:
        if (in.arg >= pc || p.code[in.arg].op != Op::node || !(p.code[in.arg].flags & CLOSED) ||
            p.code[in.arg].node->next > pc)
          malformed_state("shared subtree");
        p.code[in.arg].flags |= TARGET;
        break;
      case Op::node: open.push_back({in.node->next, validate_node(p, pc, is_outcome && is_root)}); break;
      case Op::input:
      case Op::forward:
        if (!is_outcome || in.arg == NONE) malformed_state("operation");
        break;
    }
  }
  while (!open.empty() && open.back().left == 0) {
    if (open.back().end != n) malformed_state("subtree end");
    open.pop_back();
  }
  if (!open.empty() || roots != p.roots || leaf != p.leaves) malformed_state("counts");
}

// By its text, the type of functions, methods, cells: pickle finds a class by its module, and these are in none.
nb::object type_state(PyTypeObject* type) {
  if (type && nameless_type(type->tp_name) == type) return text_of(type->tp_name);
  return or_none(reinterpret_cast<PyObject*>(type));
}

PyTypeObject* type_from_state(nb::handle state) {
  if (PyType_Check(state.ptr())) return reinterpret_cast<PyTypeObject*>(state.ptr());
  if (nb::isinstance<nb::str>(state))
    if (PyTypeObject* type = nameless_type(utf8(state.ptr()))) return type;
  malformed_state("type");
}

}  // namespace

// An instruction without content, by the names of its fields, in the order of a state: Python that puts a state
// together by hand knows no positions.
Owned instruction_fields() {
  Instr n;
  Node node;
  nb::dict out;
  out["op"] = static_cast<int>(n.op);
  out["flags"] = n.flags;
  out["arg"] = n.arg;
  out["next"] = node.next;
  out["track"] = node.track;
  out["items"] = node.items;
  out["fields"] = node.fields;
  out["slots"] = node.slots;
  out["has_extra"] = node.has_extra;
  out["keys"] = node.keys;
  out["payload"] = node.payload;
  out["type"] = nb::none();
  out["treedef"] = nb::none();
  out["own"] = node.own;
  return Owned::steal(out.release().ptr());
}

constexpr uint16_t stored_flags = 255;  // the others follow from what is stored

namespace {

// Python makes no table that is so much larger than what is in it. A state that says otherwise would only take memory.
bool has_plausible_size(const SetTable& t) {
  return static_cast<size_t>(t.mask) < 16 * (t.slots.size() + t.removed.size() + 1);
}

nb::list state_of_tables(const Program& p, uint32_t end) {
  nb::list out;
  for (const auto& [pc, t] : p.set_tables)
    if (pc < end && has_plausible_size(t))
      out.append(nb::make_tuple(pc, t.mask, t.finger, nb::tuple(nb::cast(t.slots)), nb::tuple(nb::cast(t.hashes)),
                                nb::tuple(nb::cast(t.removed)), nb::cast(t.is_changed)));
  return out;
}

// Are these slots of a table, each larger than the one before?
bool ascends(const std::vector<uint32_t>& slots, Py_ssize_t mask) {
  return std::is_sorted(slots.begin(), slots.end(), std::less_equal<>()) && (slots.empty() || slots.back() <= mask);
}

// May this be the table of the set that `n` records? SetTable::make writes to the slots that it names, unchecked.
bool may_be_of(const Instr& n, const SetTable& t) {
  bool is_power = t.mask >= PySet_MINSIZE - 1 && (t.mask & (t.mask + 1)) == 0;
  if (!is_power || !has_plausible_size(t) || !ascends(t.slots, t.mask) || !ascends(t.removed, t.mask)) return false;
  std::vector<uint32_t> taken;
  std::set_union(t.slots.begin(), t.slots.end(), t.removed.begin(), t.removed.end(), std::back_inserter(taken));
  return t.slots.size() == n.arg && t.hashes.size() == n.arg && taken.size() == t.slots.size() + t.removed.size() &&
         taken.size() <= static_cast<size_t>(t.mask);  // a search ends at a free slot
}

// The set that has this table; empty where it finds its elements otherwise, or they hash otherwise in this process.
Owned set_of_table(const Program& p, const Instr& n, const SetTable& table) {
  OwnedList elements;
  for (uint32_t i = 0; i < n.arg; ++i) {
    elements.push_stolen(static_object(p.statics[p.keys[n.node->keys + i]]));
    if (!elements.back()) return {};
  }
  Owned set = table.make(elements.data()), distinct = own(PySet_New(list_of(elements.data(), n.arg).get()));
  // Elements that are equal, or that are not found where the table has them, would make a set that Python never makes.
  if (!set || PySet_GET_SIZE(distinct.get()) != static_cast<Py_ssize_t>(n.arg)) return {};
  for (uint32_t i = 0; i < n.arg; ++i)
    if (!PySet_Contains(set.get(), elements[i])) return {};
  if (PyErr_Occurred()) raise_python();
  return set;
}

void read_tables(Program& p, nb::handle state) {
  for (nb::handle h : as_tuple(state)) {
    nb::tuple t = as_tuple(h);
    auto pc = field<uint32_t>(t, 0);
    SetTable table;
    table.mask = field<Py_ssize_t>(t, 1);
    table.finger = field<Py_ssize_t>(t, 2);
    table.slots = field<std::vector<uint32_t>>(t, 3);
    table.hashes = field<std::vector<Py_hash_t>>(t, 4);
    table.removed = field<std::vector<uint32_t>>(t, 5);
    table.is_changed = field<bool>(t, 6);
    if (pc >= p.code.size() || p.code[pc].op != Op::node || p.code[pc].node->kind->node->keys != Keys::elements ||
        (!p.set_tables.empty() && p.set_tables.back().first >= pc) || !may_be_of(p.code[pc], table))
      malformed_state("a set's table");
    Owned set;  // a set without a table is rebuilt by adding: right, though its order may be another
    try {
      set = set_of_table(p, p.code[pc], table);
    } catch (nb::python_error& e) {
      if (!e.matches(PyExc_Exception)) throw;
    }
    if (!set) continue;
    SetTable& read = p.set_tables.emplace_back(pc, SetTable::of(set.get())).second;
    read.is_frozen = p.code[pc].node->kind->solid == &PyFrozenSet_Type;
    read.is_changed = table.is_changed;
  }
}

}  // namespace

Owned program_state(const Program& p) {
  nb::list code, statics, keys, elements;
  uint32_t end = p.end_of_roots();  // keys by identity are not the same in another process: they stay here
  for (uint32_t pc = 0; pc < end; ++pc) {
    const Instr& n = p.code[pc];
    code.append(nb::make_tuple(static_cast<int>(n.op), n.flags & stored_flags, n.arg, p.after(pc), n.node->track,
                               n.flags & PLAIN_VALUE ? 1u : n.node->items, n.node->fields, n.node->slots,
                               n.node->has_extra, n.node->keys, n.node->payload, type_state(n.node->type),
                               or_none(n.node->treedef), n.node->own));
  }
  for (const Static& s : p.statics) {
    Owned value = s.how == How::input   ? Owned::borrow(Py_None)
                  : is_context_field(s) ? Owned::borrow(s.obj)
                                        : static_object(s);
    if (!value) raise_error(PyExc_ReferenceError, "a static of this GraphDef no longer exists");
    if (s.how == How::function) {  // pickled by name, where its name leads to it
      if (s.snapshot && !s.weak) value = Owned::borrow(s.snapshot);
      Owned named = hooks::named_function(value.get());
      if (named.get() != Py_None) value = std::move(named);
    }
    statics.append(nb::make_tuple(static_cast<int>(s.how), or_none(value.get()), s.first, s.count));
  }
  for (uint32_t k : p.keys) keys.append(k);
  for (uint32_t e : p.elements) elements.append(e);
  nb::tuple out = nb::make_tuple(1, p.roots, p.leaves, or_none(p.layout), nb::tuple(code), nb::tuple(statics),
                                 nb::tuple(keys), nb::tuple(elements));
  nb::list tables = state_of_tables(p, end);  // last, and only where there are sets: older states have none
  if (nb::len(tables) == 0) return Owned::steal(out.release().ptr());
  return own(PySequence_Concat(out.ptr(), nb::make_tuple(nb::tuple(tables)).ptr()));
}

namespace {

// Statics keep their order: those that a tuple has as elements come before it.
void add_static_of_state(Program& p, const nb::tuple& t, bool is_outcome) {
  int how = field<int>(t, 0);
  nb::object value = field<nb::object>(t, 1);
  if (how < 0 || how > static_cast<int>(How::hashed)) malformed_state("static");
  How as = static_cast<How>(how);
  if (as == How::input) {
    if (!is_outcome) malformed_state("static");
    Static s;
    s.how = How::input;
    s.type = Py_TYPE(Py_None);
    s.first = field<uint32_t>(t, 2);
    s.hash = static_cast<Py_hash_t>(s.first);
    p.statics.push_back(s);
    return;
  }
  if (as == How::function) {
    if (!PyFunction_Check(value.ptr())) malformed_state("function");
    p.statics[add_function(p, value.ptr())].snapshot = p.keep(Owned::borrow(value.ptr()));
    return;
  }
  if (as == How::tuple) {
    Static s;
    s.how = How::tuple;
    s.type = &PyTuple_Type;
    if (!PyTuple_CheckExact(value.ptr())) malformed_state("tuple key");
    s.obj = p.keep(Owned::borrow(value.ptr()));
    s.first = field<uint32_t>(t, 2);
    s.count = field<uint32_t>(t, 3);
    if (uint64_t{s.first} + s.count > p.elements.size() || s.count != PyTuple_GET_SIZE(value.ptr()))
      malformed_state("tuple key");
    for (uint32_t i = 0; i < s.count; ++i)
      if (p.elements[s.first + i] >= p.statics.size()) malformed_state("tuple key");
    s.hash = hash_of_elements(p, p.elements.data() + s.first, s.count);
    p.statics.push_back(s);
    return;
  }
  // What it is now decides, not what the state says: a class may have been registered or changed since.
  const Kind& kind = kind_of(value.ptr());
  if (as == How::copied) {
    if (!is_outcome || kind.leaf != Leaf::numpy) malformed_state("static");
    add_static(p, value.ptr(), kind, true);
  } else if (as == How::context && kind.how != How::context) {
    if (!PyCallable_Check(value.ptr())) malformed_state("static");
    add_context_field(p, value.ptr());
  } else if (kind.leaf == Leaf::statics || kind.leaf == Leaf::numpy) add_static(p, value.ptr(), kind);
  else if (as == How::hashed && kind.own_equality) add_hashed(p, value.ptr());
  else if (as == How::identity) add_identity(p, value.ptr());
  else add_key(p, value.ptr());
}

// What the numbers mean is checked by `validate`, once all instructions are there.
void add_instruction_of_state(Program& p, const nb::tuple& t) {
  Instr n;
  int op = field<int>(t, 0);
  if (op < 0 || op > static_cast<int>(Op::forward)) malformed_state("operation");
  n.op = static_cast<Op>(op);
  n.flags = static_cast<uint16_t>(field<int>(t, 1) & (HANDED_OVER | CLOSED | ALIAS | NUMBER | AUX | OWN_DICT));
  n.arg = field<uint32_t>(t, 2);
  Node node;
  node.next = field<uint32_t>(t, 3);
  node.track = field<uint32_t>(t, 4);
  node.items = field<uint32_t>(t, 5);
  node.fields = field<uint32_t>(t, 6);
  node.slots = field<uint32_t>(t, 7);
  node.has_extra = field<uint32_t>(t, 8);
  node.keys = field<uint32_t>(t, 9);
  node.payload = field<uint32_t>(t, 10);
  if (n.op == Op::leaf && node.items) n.flags |= PLAIN_VALUE;
  if (n.op == Op::node) {
    nb::object type = field<nb::object>(t, 11), treedef = field<nb::object>(t, 12);
    node.type = p.keep_type(type_from_state(type));
    node.kind = node.type == runtime.ndarray_type ? &text_array_kind() : &kind_of_type(node.type);
    p.keep_kind(*node.kind);
    if (!node.kind->is_node()) malformed_state("a type is not a node any more");
    node.own = field<uint32_t>(t, 13);
    if (!treedef.is_none()) node.treedef = p.keep(Owned::borrow(treedef.ptr()));
    n.node = p.nodes.add(node);
  }
  if (n.op == Op::same) p.has_same = true;
  p.code.push_back(n);
}

Program read_program(PyObject* state_obj, bool is_outcome) {
  nb::tuple state = as_tuple(state_obj);
  if ((state.size() != 8 && state.size() != 9) || field<int>(state, 0) != 1) malformed_state("unknown version");
  Program p;
  p.roots = field<uint32_t>(state, 1);
  p.leaves = field<uint32_t>(state, 2);
  if (!nb::object(state[3]).is_none()) {
    if (!nb::isinstance<nb::tuple>(state[3])) malformed_state("layout");
    p.layout = p.keep(Owned::borrow(nb::object(state[3]).ptr()));
  }
  for (nb::handle h : as_tuple(state[7])) p.elements.push_back(as_number(h));
  for (nb::handle h : as_tuple(state[5])) add_static_of_state(p, as_tuple(h), is_outcome);
  for (nb::handle h : as_tuple(state[6])) p.keys.push_back(as_number(h));
  for (nb::handle h : as_tuple(state[4])) add_instruction_of_state(p, as_tuple(h));
  validate(p, is_outcome);
  if (state.size() == 9) read_tables(p, state[8]);
  // What is not stored, because it follows from the rest.
  for (uint32_t pc = 0; pc < p.code.size(); ++pc) {
    const Instr& n = p.code[pc];
    if (n.op == Op::ref && p.track_pc[n.arg] < pc && pc < p.code[p.track_pc[n.arg]].node->next) p.cyclic = true;
  }
  for (Instr& n : p.code)  // a function that is code and nothing else stays itself
    if (n.op == Op::node && n.node->kind->node->is_function && n.node->items == 2 && n.node->fields == 0 &&
        is_plain_function(p.statics[n.node->payload].snapshot) &&
        !PyFunction_GET_DEFAULTS(p.statics[n.node->payload].snapshot))
      n.flags |= SELF_CONTAINED;
  p.finish();
  return p;
}

}  // namespace

Program program_from_state(PyObject* state, bool is_outcome) {
  // A state that is nested as deeply as a damaged file may say raises like any other that is malformed.
  try {
    return read_program(state, is_outcome);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_RecursionError)) throw;
  }
  malformed_state("nested too deeply");
}

}  // namespace graftax
