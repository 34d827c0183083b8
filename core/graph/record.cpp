// SPDX-License-Identifier: Apache-2.0
#include "graph/record.h"

#include <algorithm>

#include "graph/key_path.h"
#include "graph/kinds/function.h"
#include "graph/static_equality.h"
#include "python/hooks.h"
#include "python/jax_registry.h"

namespace graftax {

namespace {

constexpr size_t max_expanded = 100000;  // nodes below immutable nodes that are met again

std::string type_name(PyObject* obj) { return Py_TYPE(obj)->tp_name; }

// Puts the path into an error on its way out: ours get it in their message, a user's exception gets a note.
[[noreturn]] void raise_at_path(nb::python_error& e, const std::string& path) {
  nb::object exc = nb::borrow(e.value());
  // Given back to the interpreter and cleared: no Python code may run while an error is set.
  e.restore();
  PyErr_Clear();
  Owned raised = hooks::at_path(exc.ptr(), own(PyUnicode_FromString(path.c_str())).get());
  set_error(raised.get());
  raise_python();
}

}  // namespace

bool numpy_is_dynamic(PyObject* obj, bool refuse) {
  // The dtype objects of native numeric types are singletons: seen once, a pointer comparison after.
  static std::vector<PyObject*> numeric;
  static PyObject* const name = interned("dtype");
  Owned dtype = own(PyObject_GetAttr(obj, name));
  for (PyObject* known : numeric)
    if (known == dtype.get()) return true;
  Owned answer = hooks::numpy_role(dtype.get());
  if (refuse && PyUnicode_Check(answer.get())) raise_graftax("UnsupportedValueError", utf8(answer.get()));
  if (answer.get() != Py_True) return false;
  // Bounded, as dtypes can be made without an end; each is kept for ever, so that its address stays its own.
  if (numeric.size() < 64) numeric.push_back(Py_NewRef(dtype.get()));
  return true;
}

// Text, bytes and dates: what no transform maps. (JAX maps its zeros of no dtype, which are no numbers either.)
static bool is_text_array(PyObject* obj) {
  if (numpy_is_dynamic(obj, false)) return false;
  Owned kind = own(attribute(own(attribute(obj, "dtype")).get(), "kind"));
  return PyUnicode_CompareWithASCIIString(kind.get(), "V") != 0;
}

// ---- record

std::string Recorder::root_name() const {
  std::string out = "obj";
  if (options_.root_names && root_ < PyTuple_GET_SIZE(options_.root_names))
    out = utf8(PyTuple_GET_ITEM(options_.root_names, root_));
  else if (options_.inputs) out = root_ == 0 ? "the result" : "a changed argument";
  return out;
}

void Recorder::emit(Op op, uint32_t arg, PyObject* obj) {
  Instr n;
  n.op = op;
  n.arg = arg;
  out_.program.code.push_back(n);
  out_.live.push(obj);
}

void Recorder::add_static_leaf(PyObject* obj, const Kind& kind) {
  uint32_t id = add_static(out_.program, obj, kind);
  emit(Op::stat, id, obj);
  if (kind.how == How::context && !stack_.empty()) stack_.back().closed = false;
}

void Recorder::add_leaf(PyObject* obj, const Kind& kind, bool in_static, uint16_t flags) {
  if (options_.inputs) {
    if (uint32_t* index = options_.inputs->leaves->find(obj)) {
      emit(Op::forward, *index, obj);
      rule_out_value();
      return;
    }
    bool as_array = options_.inputs->arrays && !in_static && kind.leaf == Leaf::numpy && !is_text_array(obj);
    if (kind.leaf == Leaf::numpy && !as_array) {  // a constant that the function made: a fresh copy for each call
      emit(Op::stat, add_static(out_.program, obj, kind, true), obj);
      rule_out_value();
      return;
    }
  }
  if (in_static) {
    // A constant of the program: it has no value to be compared before the transform around it ends.
    if (root_is_static() && Py_TYPE(obj) != runtime.array_type && hooks::is_tracer(obj).get() == Py_True)
      raise_graftax(
          "StructureError",
          "this argument is declared static, but holds an array that is traced (" + type_name(obj) +
              "). Leave it out of static_argnums/static_argnames: arrays are traced, the rest is static anyway.");
    add_static_leaf(obj, kind);
    return;
  }
  rule_out_value();
  bool one_leaf = kind.leaf == Leaf::array && (kind.tracked || options_.aliases);
  if (one_leaf) {
    if (uint32_t* before = seen_->find(obj)) {
      emit(Op::leaf, out_.program.code[*before].arg, obj);
      out_.program.code.back().flags |= ALIAS;
      return;
    }
    seen_->insert(obj, position());
  }
  emit(Op::leaf, out_.program.leaves++, obj);
  out_.program.code.back().flags |= flags;
  out_.leaves.push(obj);
}

bool is_value(PyObject* obj, const Kind& kind) {
  switch (kind.leaf) {
    case Leaf::none: break;
    case Leaf::array: return false;
    case Leaf::numpy: return !numpy_is_dynamic(obj, false);
    default: return true;
  }
  if (!kind.node->is_function) return kind.node->is_itself(obj);
  return is_plain_function(obj) || hooks::named_function(obj).get() == obj;
}

void Recorder::add_value(PyObject* obj) {
  emit(Op::leaf, out_.program.leaves++, obj);
  out_.program.code.back().flags |= PLAIN_VALUE;
  out_.leaves.push(obj);
  rule_out_value();
}

// The steps that lead to the value being visited, from every open node.
std::vector<Step> Recorder::open_steps() const {
  std::vector<Step> steps;
  for (const Frame& f : stack_)
    if (f.cursor.started()) steps.push_back(step_of(f.cursor));
  return steps;
}

std::string Recorder::open_path() const {
  std::string path = root_name();
  for (const Step& s : open_steps()) path += step_text(s);
  return path;
}

// By value, a function in the result is left alone, with the NumPy arrays that it captures.
bool Recorder::is_left_alone(const Below& below) const {
  return below.in_function && options_.inputs && !options_.inputs->functions;
}

bool Recorder::is_traced_symbol(const Kind& kind) const {
  if (!options_.inputs) return kind.symbolic && kind.scalar;
  return kind.symbolic && (options_.inputs->numbers || (kind.scalar && options_.inputs->arrays));
}

bool Recorder::is_dynamic_number(PyObject* obj, const Kind& kind, const Below& below) {
  if (!is_number(obj, kind) || below.in_static || options_.inputs) return false;
  // Below a Dynamic; at a place whose number has been found to change; or where the option says so. Numbers of a
  // captured function are its constants, but for those in its variables and attributes.
  if (below.in_dynamic) return true;
  if (options_.root_names && root_ >= PyTuple_GET_SIZE(options_.root_names)) return false;  // of a key: static
  bool may_be_symbolic = options_.symbolic && (!below.in_function || below.in_state || !root_has(CAPTURED_ROOT));
  if (!may_be_symbolic && (!options_.dynamic || below.in_function)) return false;
  std::vector<Step> steps = open_steps();
  Owned place = place_of_steps(root_, steps);
  if (may_be_symbolic) {
    int contains = PySequence_Contains(options_.symbolic, place.get());
    check(contains);
    if (contains) return true;
  }
  if (!options_.dynamic || below.in_function) return false;
  Owned answer = own(PyObject_CallOneArg(options_.dynamic, place.get()));
  return answer.get() == Py_True;
}

// Is it an object that the function got as itself, as a static of its inputs that counts by identity?
bool Recorder::is_identity_input(PyObject* obj) {
  if (identity_inputs_.empty()) {
    identity_inputs_.insert(nullptr);  // listed, even if there are none
    for (const Static& s : options_.inputs->program->statics)
      if (s.how == How::identity || s.how == How::hashed) identity_inputs_.insert(s.obj);
  }
  return identity_inputs_.count(obj) > 0;
}

// An opaque value may hide arrays; one that the function made would be one object for all calls.
void Recorder::check_opaque(PyObject* obj) {
  bool made = options_.inputs != nullptr && !is_identity_input(obj);
  hooks::check_opaque(obj, made ? Py_True : Py_False);
}

void Recorder::visit(PyObject* obj, Below below) {
  // First, whatever its kind: what `ignore=` selects may be of a refused type.
  if (is_ignored(obj)) return add_ignored(obj);
  if (Py_TYPE(obj) == reinterpret_cast<PyTypeObject*>(hooks::ignored.get()) &&
      !(options_.inputs && options_.inputs->nodes->find(obj)))
    return emit(Op::stat, add_identity(out_.program, obj), obj);  // of the trace around this one
  const Kind& kind = kind_of(obj);
  if (options_.everything) {
    below.in_static = false;
    if (is_value(obj, kind)) return add_value(obj);
  }
  switch (kind.leaf) {
    case Leaf::array: return add_leaf(obj, kind, below.in_static);
    case Leaf::numpy:
      if (root_has(CONSTANT_ROOT)) below.in_static = true;
      if (numpy_is_dynamic(obj, true)) {
        if (!below.in_static || options_.inputs) return add_leaf(obj, kind, below.in_static || is_left_alone(below));
        return add_static_leaf(obj, kind);
      }
      if (Py_TYPE(obj) == runtime.ndarray_type && !below.in_static) return open(obj, text_array_kind(), below, true);
      if (options_.inputs) return add_leaf(obj, kind, false);
      return add_static_leaf(obj, kind);
    case Leaf::statics:
      if (is_dynamic_number(obj, kind, below)) return add_leaf(obj, kind, false, NUMBER);
      if (is_traced_symbol(kind) && !below.in_static) return add_leaf(obj, kind, false);
      if (kind.symbolic && options_.inputs && options_.inputs->numbers)
        raise_graftax("UnsupportedValueError", "a number that may change, in aux data or a static field");
      if (kind.shape && options_.shapes && !below.in_static && !root_has(CAPTURED_ROOT))
        return add_leaf(obj, kind, false);
      if ((kind.how == How::identity || options_.inputs) && !kind.immortal_value && kind.how != How::context &&
          !kind.symbolic)
        check_opaque(obj);
      return add_static_leaf(obj, kind);
    case Leaf::refused: return add_refused(obj, kind, below);
    case Leaf::none: break;
  }
  if (kind.own_equality) {
    if (options_.inputs ? is_identity_input(obj) : root_is_static() && !below.in_function)
      return emit(Op::stat, options_.inputs ? add_identity(out_.program, obj) : add_hashed(out_.program, obj), obj);
  }
  auto is_new = [&] { return options_.inputs && !options_.inputs->nodes->find(obj); };
  if (kind.node->is_function && is_new() && !seen_->find(obj) && hooks::named_function(obj).get() == obj)
    return add_static_leaf(obj, kind);  // a module's or a class's own function
  if (root_has(TARGET_ROOT) && PyFunction_Check(obj)) return emit(Op::stat, add_identity(out_.program, obj), obj);
  if (kind.node->is_itself(obj)) {
    check_opaque(obj);
    return emit(Op::stat, add_identity(out_.program, obj), obj);
  }
  if (kind.sentinel && is_new() && is_bare(obj, kind)) {
    if (hooks::is_module_level(obj).get() == Py_True) return add_static_leaf(obj, kind);  // returned as itself
  }
  open(obj, kind, below, true);
}

// Was it met before? Then an input, a reference or an equal value is written, and nothing is opened. An immutable node
// with arrays has no identity, and is recorded once more (`repeated`).
bool Recorder::refer_to_known(PyObject* obj, bool& repeated) {
  Program& p = out_.program;
  if (options_.inputs) {
    if (uint32_t* input = options_.inputs->nodes->find(obj)) {
      emit(Op::input, *input, obj);
      rule_out_value();
      return true;
    }
  }
  uint32_t* before = seen_->find(obj);
  if (!before) {
    seen_->insert(obj, position());
    return false;
  }
  Instr& first = p.code[*before];
  // `next` is written when a node closes.
  bool is_open = first.op == Op::node && first.node->next == 0;
  if (first.node->track == NONE && is_open) {  // an immutable node that contains itself
    first.node->track = static_cast<uint32_t>(p.track_pc.size());
    p.track_pc.push_back(*before);
  }
  if (first.node->track != NONE) {
    p.cyclic = p.cyclic || is_open;
    emit(Op::ref, first.node->track, obj);
    rule_out_value();
    return true;
  }
  if (!(first.flags & CLOSED)) {
    repeated = true;
    return false;
  }
  uint32_t target = *before;
  if (p.code[target].op == Op::same) target = p.code[target].arg;
  p.code[target].flags |= TARGET;
  emit(Op::same, target, obj);
  p.has_same = true;
  return true;
}

// Two objects with one __dict__, or an object and vars() of it: see `refuse_shared_dicts`. The next instruction is the
// node's.
void Recorder::note_shared_dict(PyObject* obj, const Cursor& cursor) {
  if (PyObject* dict = cursor.shared_dict()) {
    if (uint32_t* other = seen_->find(dict)) shared_dicts_.emplace_back(*other, position());
    if (!dicts_->insert(dict, position())) shared_dicts_.emplace_back(*dicts_->find(dict), position());
  }
  if (Py_TYPE(obj) == &PyDict_Type)
    if (uint32_t* owner = dicts_->find(obj)) shared_dicts_.emplace_back(*owner, position());
}

void Recorder::open(PyObject* obj, const Kind& kind, Below below, bool with_identity) {
  Program& p = out_.program;
  auto pc = static_cast<uint32_t>(p.code.size());
  if (with_identity && refer_to_known(obj, below.repeated)) return;
  uint32_t track = NONE;
  if (with_identity && kind.tracked) {
    track = static_cast<uint32_t>(p.track_pc.size());
    p.track_pc.push_back(pc);
  }
  // Opened here: a registered class runs its flatten. Shared nodes without an identity may unfold to any number.
  Cursor cursor(obj, kind, options_.opened);
  bool grows = !options_.everything || cursor.items() + cursor.fields() > 0;  // not by `()` in many places
  if (below.repeated && grows && ++expanded_ > max_expanded)
    raise_graftax("StructureError", "immutable nodes with arrays are reached again and again: more than " +
                                        std::to_string(max_expanded) +
                                        " nodes once expanded. Put one mutable object (a list) "
                                        "around what is shared.");
  if (!options_.inputs) note_shared_dict(obj, cursor);
  // The instruction; what is known only when the node closes is written by `close`.
  Instr n;
  n.op = Op::node;
  n.node = p.nodes.add({});
  n.node->track = track;
  n.node->kind = &kind;
  n.node->type = p.keep_type(Py_TYPE(obj));
  p.keep_kind(kind);
  n.node->items = static_cast<uint32_t>(cursor.items());
  n.node->fields = static_cast<uint32_t>(cursor.fields());
  n.node->has_extra = kind.node->extra != nullptr;
  if (kind.node->is_registered)
    n.node->treedef = p.keep(hooks::one_level_treedef(reinterpret_cast<PyObject*>(Py_TYPE(obj)), cursor.extra(),
                                                      own(PyLong_FromSsize_t(cursor.items())).get()));
  // User code may run here and below (a reduce function, a hash): so the node is pushed after it.
  n.node->payload = kind.node->add_payload(p, obj, kind);
  if (kind.node->is_function && is_plain_function(obj) && !(options_.inputs && made_in_a_call(obj))) {
    n.flags |= SELF_CONTAINED;
    p.statics[n.node->payload].snapshot = p.keep(Owned::borrow(obj));
  }
  if (cursor.own_dict()) n.flags |= OWN_DICT;
  if (kind.sentinel && !options_.inputs && is_bare(obj, kind)) n.node->own = add_identity(p, obj);
  if (PyDict_CheckExact(obj)) {
    Owned keys = list_items(obj, &PyDict_Type);
    refuse_lost_keys(obj, PySequence_Fast_ITEMS(keys.get()), PyList_GET_SIZE(keys.get()));
  }
  // Keys are collected on one stack, above those of the nodes around: `close` moves this node's to the program.
  field_base_.push_back(field_keys_.size());
  n.arg = kind.node->add_elements(p, obj, field_keys_);
  // With `everything` each place is one of its own, whatever is equal to it.
  bool closed = !kind.tracked && with_identity && kind.node->keys != Keys::elements && !options_.everything;
  // Aux data and static fields make arrays static, but not those of a function there; an argument that is declared
  // static does.
  if (kind.node->is_function && !root_is_static()) below.in_static = false;
  if (kind.node->is_function) below.in_function = true, below.in_dynamic = below.in_state = false;
  below.in_state = below.in_state || kind.node->is_cell;
  below.in_dynamic = below.in_dynamic || kind.dynamic;
  p.code.push_back(n);
  out_.live.push(obj);
  stack_.push_back({std::move(cursor), pc, below, closed});
}

// Takes the next child of the innermost open node, or closes it.
void Recorder::step() {
  Frame& top = stack_.back();
  PyObject *child = nullptr, *key = nullptr;
  if (!top.cursor.next(child, key)) return close();
  // Borrowed from a node that user code below may change.
  Owned hold = Owned::borrow(child), hold_key = Owned::borrow(key);
  const Kind& kind = top.cursor.kind();
  Below below = top.below;
  auto stage = top.cursor.stage();
  if (stage == Cursor::Stage::extra) {  // aux data, the factory of a defaultdict
    below.in_static = below.aux = true;
  } else if (stage != Cursor::Stage::items) {
    if (stage == Cursor::Stage::slots) ++top.slots;
    if (!PyUnicode_CheckExact(key)) raise_graftax("StructureError", "an attribute name is no string");
    field_keys_.push_back(add_key(out_.program, key));
    if (kind.static_fields) {
      int is_static = PySequence_Contains(kind.static_fields, key);
      check(is_static);
      below.in_static = below.in_static || is_static;
      below.aux = below.aux || is_static;
    }
    if (kind.node->is_function) below.in_state = true;
    if (kind.dynamic_fields && PySequence_Contains(kind.dynamic_fields, key) == 1) below.in_dynamic = true;
    below.arrays_only = below.arrays_only || kind.arrays_only;
    PyObject* make = kind.context_fields ? PyDict_GetItemWithError(kind.context_fields, key) : nullptr;
    if (!make && PyErr_Occurred()) raise_python();
    if (make && !options_.everything) {
      emit(Op::stat, add_context_field(out_.program, make), child);
      out_.program.code.back().flags |= AUX;
      top.closed = false;
      return;
    }
  } else if (key) {  // of an item of a dict
    field_keys_.push_back(add_key(out_.program, key));
  } else if (options_.everything && kind.node->is_weak && top.cursor.index() > 0) {
    below.arrays_only = true;  // the callback is part of what the weak reference is
  }
  size_t pc = out_.program.code.size();
  visit(child, below);
  if (out_.program.code.size() <= pc) return;
  Instr& n = out_.program.code[pc];
  bool array = n.op == Op::leaf && !(n.flags & PLAIN_VALUE);
  if (below.aux || (below.arrays_only && !array)) n.flags |= AUX;
}

void Recorder::close() {
  Frame frame = std::move(stack_.back());
  stack_.pop_back();
  Program& p = out_.program;
  Instr& n = p.code[frame.pc];
  size_t base = field_base_.back();
  field_base_.pop_back();
  n.node->slots = frame.slots;
  n.node->next = static_cast<uint32_t>(p.code.size());
  uint32_t count = n.node->has_extra + n.node->items + n.node->fields + n.node->slots, child = frame.pc + 1,
           recorded = 0;
  for (; child < n.node->next; child = p.after(child)) ++recorded;
  // Counted again: user code has run since the node was opened.
  if (!frame.cursor.intact() || recorded != count)
    raise_graftax("ConcurrentChangeError", "a " + type_name(frame.cursor.object()) + " changed during flattening");
  if (field_keys_.size() > base) {
    n.node->keys = static_cast<uint32_t>(p.keys.size());
    p.keys.insert(p.keys.end(), field_keys_.begin() + static_cast<ptrdiff_t>(base), field_keys_.end());
    field_keys_.resize(base);
  }
  if (n.node->track != NONE) frame.closed = false;
  if (frame.closed) close_value(frame.pc);
  if (!stack_.empty() && !frame.closed) stack_.back().closed = false;
}

// Is this closed node a tuple of values that can never change? It is kept as a whole: the same one costs a comparison
// of pointers.
bool Recorder::is_constant(uint32_t pc) const {
  const Program& p = out_.program;
  if (!PyTuple_CheckExact(out_.live[pc])) return false;
  for (uint32_t i = pc + 1; i < p.code[pc].node->next; i = p.after(i)) {
    const Instr& c = p.code[i];
    if (c.op != Op::stat) {
      if (!p.code[c.op == Op::same ? c.arg : i].node->whole) return false;
      continue;
    }
    const Kind* kind = known_kind(p.statics[c.arg].type);
    if (!kind || !kind->immortal_value || p.statics[c.arg].how == How::copied) return false;
  }
  return true;
}

// Of equal values it is the same: made of the hashes of their children.
size_t Recorder::hash_of_value(uint32_t pc) {
  const Program& p = out_.program;
  const Instr& n = p.code[pc];
  size_t h = reinterpret_cast<size_t>(n.node->type) ^ (n.node->items * 1000003u) ^ n.node->fields;
  for (uint32_t i = pc + 1; i < n.node->next; i = p.after(i)) {
    const Instr& c = p.code[i];
    size_t x =
        c.op == Op::stat ? static_cast<size_t>(p.statics[c.arg].hash) : value_hash_[c.op == Op::same ? c.arg : i];
    h = (h ^ x) * 0x9e3779b97f4a7c15ULL + static_cast<size_t>(c.op == Op::stat);
  }
  return h;
}

// Instruction by instruction, as far as closed nodes have any: nodes, statics and equal values met before.
bool Recorder::is_same_value(uint32_t pc, uint32_t other) const {
  const Program& p = out_.program;
  const Instr &n = p.code[pc], &m = p.code[other];
  uint32_t length = n.node->next - pc;
  if (m.op != Op::node || m.node->next > pc || m.node->next - other != length || ((m.flags ^ n.flags) & AUX))
    return false;
  for (uint32_t i = 0; i < length; ++i) {
    const Instr &a = p.code[other + i], &b = p.code[pc + i];
    if (a.op != b.op || a.node->type != b.node->type || a.node->items != b.node->items ||
        a.node->fields != b.node->fields || a.node->slots != b.node->slots)
      return false;
    if (a.op == Op::stat && !statics_equal(p, a.arg, p, b.arg)) return false;
    if (a.op == Op::same && a.arg != b.arg) return false;
    for (uint32_t k = 0; a.op == Op::node && k < a.node->fields + a.node->slots; ++k)
      if (!statics_equal(p, p.keys[a.node->keys + k], p, p.keys[b.node->keys + k])) return false;
  }
  return true;
}

// The instructions and live objects of the node at `pc`, the last one, go: those of an equal value met first stand for
// both. Its statics stay in the pool, unused.
void Recorder::refer_to_value(uint32_t pc, uint32_t other) {
  Program& p = out_.program;
  Owned obj = Owned::borrow(out_.live[pc]);
  uint32_t length = p.code[pc].node->next - pc;
  for (uint32_t i = 1; i < length; ++i)
    if (uint32_t* place = seen_->find(out_.live[pc + i]); place && *place == pc + i) *place = other + i;
  for (uint32_t i = 0; i < length; ++i) {
    held_.push(out_.live[pc + i]);
    auto hash = value_hash_.find(pc + i);
    if (hash == value_hash_.end()) continue;
    auto [first, last] = values_.equal_range(hash->second);
    for (auto v = first; v != last; ++v)
      if (v->second == pc + i) {
        values_.erase(v);
        break;
      }
    value_hash_.erase(hash);
  }
  p.code.resize(pc);
  out_.live.resize(pc);
  p.code[other].flags |= TARGET;
  emit(Op::same, other, obj.get());
  p.code[pc].flags |= CLOSED | (p.code[other].flags & AUX);
  p.has_same = true;
}

// An immutable node without arrays has closed: it is a value. An equal one met before takes its place.
void Recorder::close_value(uint32_t pc) {
  constexpr int most_tries = 8;  // values with this hash that turn out to be others: many would take quadratic time
  Program& p = out_.program;
  Node& node = *p.code[pc].node;
  p.code[pc].flags |= CLOSED;
  if (is_constant(pc)) node.whole = p.keep(Owned::borrow(out_.live[pc]));
  size_t hash = value_hash_[pc] = hash_of_value(pc);
  if (node.next == pc + 1) return;  // an empty one is as short as a reference to it
  auto [it, end] = values_.equal_range(hash);
  for (int tries = 0; it != end && tries < most_tries; ++it, ++tries)
    if (is_same_value(pc, it->second)) return refer_to_value(pc, it->second);
  values_.emplace(hash, pc);
}

void Recorder::run() {
  size_t steps = 0;
  try {
    while (!stack_.empty()) {
      // So that Control-C ends the walk of a huge graph.
      if ((++steps & 0xFFFF) == 0) check(PyErr_CheckSignals());
      step();
    }
  } catch (nb::python_error& e) {
    std::string path = open_path();
    stack_.clear();
    field_keys_.clear();
    field_base_.clear();
    raise_at_path(e, path);
  }
  ++root_;
  ++out_.program.roots;
}

bool Recorder::root_has(RootFlag flag) const {
  return options_.root_flags && root_ < options_.root_flags->size() && ((*options_.root_flags)[root_] & flag);
}

void Recorder::root(PyObject* obj) {
  if (registry_has_grown()) follow_registry();
  try {
    if (root_has(GLOBAL_ROOT) && PyFunction_Check(obj)) emit(Op::stat, add_identity(out_.program, obj), obj);
    else visit(obj, {root_is_static(), root_has(DYNAMIC_ROOT)});
  } catch (nb::python_error& e) {
    raise_at_path(e, root_name());
  }
  run();
}

void Recorder::content(PyObject* obj) {
  open(obj, Py_TYPE(obj) == runtime.ndarray_type ? text_array_kind() : kind_of(obj), {}, false);
  run();
}

RecordedGraph Recorder::finish(PyObject* layout) {
  Program& p = out_.program;
  p.aliases = options_.aliases;
  p.shapes = options_.shapes;
  if (layout) p.layout = p.keep(Owned::borrow(layout));
  // Keys first, as they may be handed over; what is shared or self-contained is asked of nodes with that flag.
  if (!options_.inputs) record_keys(), hand_over(), refuse_shared_dicts(), find_self_contained();
  keys_count_by_identity();
  p.finish();
  return std::move(out_);
}

}  // namespace graftax
