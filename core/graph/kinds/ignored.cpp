// SPDX-License-Identifier: Apache-2.0
// What `ignore=` means: how it is recorded, and the kind of the node that it is.
#include "graph/key_path.h"
#include "graph/record.h"
#include "graph/static_equality.h"
#include "python/hooks.h"

namespace graftax {

namespace {

// Where the caller has what no call looks at, a trace has a stand-in without children.
struct IgnoredKind final : NodeKind {
  IgnoredKind() : NodeKind("ignored", Items::none) { is_whole = is_leaf_for_jax = is_ignored = true; }

  bool is_opened_by_jax(const Kind&, PyTypeObject*) const override { return false; }
  Owned make(const Content&) const override { return hooks::ignored(Py_None, Py_None); }
};

const IgnoredKind ignored_kind;

}  // namespace

// None is looked at: `is None` is the one question that a stand-in would answer wrongly. A cell is what is in it.
bool Recorder::is_ignored(PyObject* obj) {
  if (!options_.ignored || obj == Py_None || PyCell_Check(obj)) return false;
  if (root_ >= PyTuple_GET_SIZE(options_.root_names)) return false;  // of a key
  // Python decides by the place, since patterns of `ignore=` name paths.
  std::vector<Step> steps = open_steps();
  Owned place = place_of_steps(root_, steps);
  Owned answer = own(PyObject_CallFunctionObjArgs(options_.ignored, place.get(), obj, nullptr));
  return answer.get() == Py_True;
}

// A tracked node that replay takes whatever it finds for, so that an Outcome can name it; where it is refused, whatever
// is of the same type.
void Recorder::add_ignored(PyObject* obj, uint16_t flags) {
  Program& p = out_.program;
  auto* type = reinterpret_cast<PyTypeObject*>(hooks::ignored.get());
  const Kind& kind = kind_of_type(type);
  Instr n;
  n.op = Op::node;
  n.flags = flags;
  n.node = p.nodes.add({});
  n.node->kind = &kind;
  n.node->type = p.keep_type(type);
  n.node->track = static_cast<uint32_t>(p.track_pc.size());
  n.node->next = position() + 1;
  p.keep_kind(kind);
  p.track_pc.push_back(position());
  p.code.push_back(n);
  out_.live.push(obj);
  rule_out_value();
}

// What cannot be a part of a program may still be there: the trace has a stand-in that says so when it is used.
void Recorder::add_refused(PyObject* obj, const Kind& kind, const Below& below) {
  // JAX compares what a registered class keeps beside its children by its own ==, which for this is its identity.
  if (kind.opaque && below.aux && (!options_.inputs || is_identity_input(obj))) {
    hooks::check_opaque(obj, Py_False);
    return emit(Op::stat, add_identity(out_.program, obj), obj);
  }
  // What holds it cannot be rebuilt around a stand-in, as it could not around an array: it stays the caller's own.
  for (const Frame& above : stack_)
    if (!above.cursor.kind().node->can_hold_arrays(above.cursor.kind()))
      return emit(Op::stat, add_identity(out_.program, obj), obj);
  bool is_key = !options_.root_names || root_ >= PyTuple_GET_SIZE(options_.root_names);
  if (!options_.stand_ins || options_.inputs || below.in_static || is_key)
    raise_graftax("UnsupportedValueError", std::string(Py_TYPE(obj)->tp_name) + ": " + kind.reason);
  if (uint32_t* before = seen_->find(obj)) {
    emit(Op::ref, out_.program.code[*before].node->track, obj);
    rule_out_value();
    return;
  }
  seen_->insert(obj, position());
  add_ignored(obj, REFUSED);
  // Code may ask whether it is None, True or another object that it knows: a value of another type is another program.
  out_.program.code.back().node->payload = add_identity(out_.program, reinterpret_cast<PyObject*>(Py_TYPE(obj)));
}

}  // namespace graftax
