// SPDX-License-Identifier: Apache-2.0
#include "graph/key_path.h"

#include "graph/kinds/function.h"
#include "graph/static_equality.h"
#include "python/hooks.h"

namespace graftax {

namespace {

Step to_named_item(const Kind& kind, Py_ssize_t i) {
  return {Cursor::Stage::fields, kind.node, i, kind.item_names[static_cast<size_t>(i)], {}};
}

// Calls visit(root, pc, path steps) for every instruction, in order. One walk for all of them: `steps_to` for each
// would be quadratic.
template <class Visit>
void walk(const Program& p, Visit visit) {
  struct Open {
    uint32_t pc, child, i;
  };
  std::vector<Open> open;
  std::vector<Step> steps;
  uint32_t root = 0, pc = 0;
  for (uint32_t r = 0; r < p.roots; ++r) {
    root = pc;
    visit(r, root, steps);
    if (p.code[root].op == Op::node) open.push_back({root, root + 1, 0});
    while (!open.empty()) {
      Open& top = open.back();
      if (top.i == p.children(top.pc)) {
        open.pop_back();
        if (!steps.empty()) steps.pop_back();
        continue;
      }
      uint32_t child = top.child;
      steps.push_back(step_to(p, top.pc, top.i));
      ++top.i;
      top.child = p.after(child);
      visit(r, child, steps);
      if (p.code[child].op == Op::node) open.push_back({child, child + 1, 0});
      else steps.pop_back();
    }
    pc = p.after(root);
  }
}

// The steps that lead down to `pc`, found by skipping subtrees.
std::vector<Step> steps_to(const Program& p, uint32_t pc, uint32_t& root) {
  std::vector<Step> steps;
  uint32_t node = 0;
  for (root = 0; p.after(node) <= pc; ++root) node = p.after(node);
  while (node != pc) {
    // The child whose subtree `pc` lies in: all before it end at `pc` or earlier.
    uint32_t child = node + 1, i = 0;
    for (; p.after(child) <= pc; ++i) child = p.after(child);
    steps.push_back(step_to(p, node, i));
    node = child;
  }
  return steps;
}

}  // namespace

Step step_to(const Program& p, uint32_t pc, uint32_t i) {
  const Instr& n = p.code[pc];
  if (i < n.node->has_extra) return {Cursor::Stage::extra, n.node->kind->node, 0, nullptr, {}};
  // The children in their order: the extra one, the items, the fields, the slots.
  i -= n.node->has_extra;
  uint32_t own_keys = p.item_keys(n);
  bool keyed = n.node->kind->node->keys == Keys::items;
  if (i < n.node->items && n.node->kind->node->is_function)
    return {Cursor::Stage::items, n.node->kind->node, i, function_item_name(p.statics[n.node->payload], i), {}};
  // A named tuple, or a class that was registered with names for its children.
  if (i < n.node->items && i < n.node->kind->item_names.size()) return to_named_item(*n.node->kind, i);
  if (i < n.node->items)
    return {Cursor::Stage::items, n.node->kind->node, i, keyed ? p.statics[p.keys[n.node->keys + i]].obj : nullptr, {}};
  i -= n.node->items;
  auto stage = i < n.node->fields ? Cursor::Stage::fields : Cursor::Stage::slots;
  return {stage, n.node->kind->node, i, p.statics[p.keys[n.node->keys + own_keys + i]].obj, {}};
}

Step step_of(const Cursor& cursor) {
  const Kind& kind = cursor.kind();
  bool item = cursor.stage() == Cursor::Stage::items;
  if (item && cursor.index() < static_cast<Py_ssize_t>(kind.item_names.size()))
    return to_named_item(kind, cursor.index());
  PyObject* key = cursor.key();
  if (item && kind.node->is_function) key = code_item_name(PyFunction_GET_CODE(cursor.object()), cursor.index());
  return {cursor.stage(), kind.node, cursor.index(), key, {}};
}

Owned key_entry(const Step& s) {
  // An attribute where the child has a name; else its key, its index, or its number in a registered node.
  bool item = s.stage == Cursor::Stage::items;
  std::string name = item ? s.node->item_name(s.index, s.key) : "";
  PyObject* cls = hooks::attribute_key.get();
  nb::object arg;
  if (s.stage == Cursor::Stage::extra) arg = text_of(s.node->extra);
  else if (!name.empty()) arg = text_of(name.c_str());
  else if (s.key) cls = item ? hooks::dict_key.get() : cls, arg = nb::borrow(s.key);
  else cls = (s.node->is_registered ? hooks::flat_index_key : hooks::sequence_key).get(), arg = nb::int_(s.index);
  return own(PyObject_CallOneArg(cls, arg.ptr()));
}

std::string step_text(const Step& s, size_t longest) {
  bool item = s.stage == Cursor::Stage::items;
  if (s.stage == Cursor::Stage::extra) return std::string(".") + s.node->extra;
  if (!item) return PySet_Contains(hooks::unspoken.get(), s.key) == 1 ? "" : "." + utf8(s.key);
  if (s.node->is_cell) return "";
  std::string name = s.node->item_name(s.index, s.key);
  if (!name.empty()) return "." + name;
  if (s.key) return "[" + short_repr(s.key, longest) + "]";
  if (s.node->is_registered) return "[<flat index " + std::to_string(s.index) + ">]";
  return "[" + std::to_string(s.index) + "]";
}

Owned place_of_steps(uint32_t root, std::vector<Step>& steps) {
  nb::tuple path = nb::steal<nb::tuple>(check(PyTuple_New(static_cast<Py_ssize_t>(steps.size()))));
  for (size_t i = 0; i < steps.size(); ++i) {
    if (!steps[i].entry) steps[i].entry = key_entry(steps[i]);  // in a walk, one for all places below
    PyTuple_SET_ITEM(path.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(steps[i].entry.get()));
  }
  return Owned::steal(nb::make_tuple(root, path).release().ptr());
}

Owned place_of(const Program& p, uint32_t pc) {
  uint32_t root = 0;
  std::vector<Step> steps = steps_to(p, pc, root);
  return place_of_steps(root, steps);
}

std::string path_text(const Program& p, uint32_t pc, PyObject* root_names) {
  uint32_t root = 0;
  std::vector<Step> steps = steps_to(p, pc, root);
  std::string out = root < p.roots ? "obj" : "a dict key or set element";
  if (root_names && PyTuple_Check(root_names) && root < PyTuple_GET_SIZE(root_names))
    out = utf8(PyTuple_GET_ITEM(root_names, root));
  for (const Step& s : steps) out += step_text(s);
  return out;
}

nb::list leaf_places(const Program& p) {
  nb::list out;
  walk(p, [&](uint32_t root, uint32_t pc, std::vector<Step>& steps) {
    if (p.code[pc].op == Op::leaf && !(p.code[pc].flags & ALIAS))
      out.append(nb::steal(place_of_steps(root, steps).release()));
  });
  return out;
}

nb::list leaf_names(const Program& p, const nb::tuple& root_names) {
  if (root_names.size() < p.roots) throw nb::value_error("each root has a name");
  nb::list out;
  std::string text;          // of the place that is visited
  std::vector<size_t> ends;  // how much of it is the text of each place above, and of this one
  walk(p, [&](uint32_t root, uint32_t pc, std::vector<Step>& steps) {
    const Instr& n = p.code[pc];
    if (n.op != Op::node && (n.op != Op::leaf || n.flags & ALIAS)) return;
    // The text of the node above is there already: back to its end, and one step on.
    ends.resize(steps.size());
    text.resize(ends.empty() ? 0 : ends.back());
    text += steps.empty() ? utf8(root_names[root].ptr()) : step_text(steps.back(), SIZE_MAX);
    ends.push_back(text.size());
    if (n.op == Op::leaf)
      out.append(nb::steal(check(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())))));
  });
  return out;
}

Owned node_place(const Program& p, uint32_t track) {
  if (track >= p.track_pc.size()) throw nb::index_error("there is no such tracked node");
  return place_of(p, p.track_pc[track]);
}

}  // namespace graftax
