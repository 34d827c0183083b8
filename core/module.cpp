// SPDX-License-Identifier: Apache-2.0
// The table of contents of graftax._core: one bind_x(m) per file.
#include "call.h"
#include "direct.h"
#include "exchange.h"
#include "rebuild.h"
#include "record.h"
#include "rows.h"
#include "surgery.h"
#include "tree/walk.h"
#include "writeback.h"

namespace graftax {

namespace {

// (leaves, GraphDef) of the roots of one call. Static references inside are strong until an entry weakens them.
nb::tuple record(nb::tuple roots, nb::object names, const std::vector<uint8_t>& root_flags, nb::object layout,
                 bool aliases, bool shapes, nb::object dynamic) {
  Recorder recorder({names.is_none() ? nullptr : names.ptr(), &root_flags, nullptr, aliases, shapes,
                     dynamic.is_none() ? nullptr : dynamic.ptr()});
  for (nb::handle r : roots) recorder.root(r.ptr());
  Recording rec = recorder.finish(layout.is_none() ? nullptr : layout.ptr());
  nb::list leaves;
  for (size_t i = 0; i < rec.leaves.size(); ++i) leaves.append(nb::borrow(rec.leaves[i]));
  return nb::make_tuple(leaves, GraphDef{std::move(rec.program)});
}

void bind_flatten(nb::module_& m) {
  m.def("record", &record, nb::arg("roots"), nb::arg("names").none(), nb::arg("root_flags"), nb::arg("layout").none(),
        nb::arg("aliases") = false, nb::arg("shapes") = false, nb::arg("dynamic") = nb::none(),
        nb::sig("def record(roots: tuple[object, ...], names: tuple[str, ...] | None, root_flags: Sequence[int], "
                "layout: tuple[Any, ...] | None, aliases: bool = False, shapes: bool = False, "
                "dynamic: Callable[[tuple[int, tuple[Any, ...]]], bool] | None = None) -> tuple[list[Any], GraphDef]"),
        "Walks the roots together and returns (leaves, GraphDef).");
  m.def(
      "weaken", [](const GraphDef& g) { return GraphDef{weakened(g.program)}; }, nb::arg("graphdef"),
      "An equal GraphDef that holds its identity statics weakly, where their type allows it.");
  m.def(
      "flatten",
      [](nb::handle obj) {
        Recorder recorder({});
        recorder.root(obj.ptr());
        Recording rec = recorder.finish(nullptr);
        nb::list leaves;
        for (size_t i = 0; i < rec.leaves.size(); ++i) leaves.append(nb::borrow(rec.leaves[i]));
        return nb::make_tuple(leaves, GraphDef{std::move(rec.program)});
      },
      nb::arg("obj").none(), nb::sig("def flatten(obj: object) -> tuple[list[Any], GraphDef]"));
  m.def(
      "children",
      [](nb::handle obj) {
        KindHold kinds;
        const Kind& kind = kind_of(obj.ptr());
        nb::list out;
        if (!kind.is_node()) return out;
        Cursor cursor(obj.ptr(), kind);
        PyObject *child = nullptr, *key = nullptr;
        while (cursor.next(child, key))
          if (cursor.stage() != Cursor::Stage::extra) out.append(nb::borrow(child));
        return out;
      },
      nb::arg("obj").none(), nb::sig("def children(obj: object) -> list[Any]"),
      "The children of a node, one level down.");
  m.def(
      "replay",
      [](const GraphDef& g, nb::handle obj) -> nb::object {
        Walk walk;
        PyObject* root = obj.ptr();
        if (!replay(g.program, &root, 1, walk)) return nb::none();
        nb::list out = nb::steal<nb::list>(check(PyList_New(static_cast<Py_ssize_t>(walk.leaves.size()))));
        for (size_t i = 0; i < walk.leaves.size(); ++i)
          PyList_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(i), walk.leaves.release(i));
        return out;
      },
      nb::arg("graphdef"), nb::arg("obj").none(),
      nb::sig("def replay(graphdef: GraphDef, obj: object) -> list[Any] | None"),
      "The leaves of `obj` when its structure is `graphdef`, else None.");
}

void bind_unflatten(nb::module_& m) {
  m.def(
      "unflatten",
      [](const GraphDef& g, nb::sequence leaves, bool leaves_only) {
        OwnedList values;
        for (nb::handle h : leaves) values.push(h.ptr());
        if (values.size() != g.program.leaves)
          raise_graftax("StructureError", "this GraphDef has " + std::to_string(g.program.leaves) + " leaves, but " +
                                              std::to_string(values.size()) + " were given");
        Builder builder(g.program, {values.data(), nullptr, nullptr, nullptr, leaves_only});
        nb::list roots;
        uint32_t pc = 0;
        for (uint32_t r = 0; r < g.program.roots; ++r, pc = g.program.after(pc))
          roots.append(nb::steal(builder.build(pc).release()));
        builder.drain();
        return g.program.roots == 1 ? nb::object(roots[0]) : nb::object(nb::tuple(roots));
      },
      nb::arg("graphdef"), nb::arg("leaves"), nb::arg("leaves_only") = false,
      nb::sig("def unflatten(graphdef: GraphDef, leaves: Sequence[object], leaves_only: bool = False) -> Any"),
      "Builds the graph; with leaves_only, what JAX counts as a leaf without arrays (a string, a function, a config) "
      "is None.");
}

void bind_kinds(nb::module_& m) {
  m.def(
      "setup",
      [](nb::object registry, nb::object errors, nb::object trees, nb::object flatten_one_level,
         nb::object array_type) {
        runtime.statics = nb::object(registry.attr("statics")).release().ptr();
        runtime.registry = registry.release().ptr();
        runtime.errors = errors.release().ptr();
        nb::object jax_registry = trees.attr("jax_registry")();
        set_jax_registry(jax_registry.is_none() ? nullptr : jax_registry.release().ptr());
        runtime.trees = trees.release().ptr();
        runtime.flatten_one_level = flatten_one_level.release().ptr();
        runtime.array_type = reinterpret_cast<PyTypeObject*>(array_type.release().ptr());
      },
      nb::arg("registry"), nb::arg("errors"), nb::arg("trees"), nb::arg("flatten_one_level"), nb::arg("array_type"),
      "Hands over, once, what the core asks Python for.");
  m.def(
      "forget_kind",
      [](nb::handle type) {
        if (PyType_Check(type.ptr())) forget_kind(reinterpret_cast<PyTypeObject*>(type.ptr()));
      },
      nb::arg("type"), nb::sig("def forget_kind(type: type) -> None"), "Looks at the next instance of a class anew.");
  m.def(
      "kind_info",
      [](nb::handle type) {
        static const char* leaves[] = {"", "array", "numpy", "static", "refused"};
        auto* cls = reinterpret_cast<PyTypeObject*>(type.ptr());
        const Kind& kind = cls == runtime.ndarray_type ? text_array_kind() : kind_of_type(cls);
        nb::list slots;
        for (const Slot& s : kind.slots) slots.append(nb::borrow(s.name));
        return nb::make_tuple(kind.is_node() ? kind.node->name : leaves[static_cast<int>(kind.leaf)], kind.tracked,
                              slots);
      },
      nb::arg("type"), nb::sig("def kind_info(type: type) -> tuple[str, bool, list[str]]"),
      "(base, has an identity, slot names) of a class.");
}

}  // namespace

}  // namespace graftax

NB_MODULE(_core_of_main, m) {
  using namespace graftax;
  m.doc() = "The engine of graftax: walks object graphs. See core/README.md.";
  nanobind::set_leak_warnings(false);  // caches live as long as the process
  init_kinds();
  init_exchange();
  bind_kinds(m);
  bind_rows(m);
  bind_graphdef(m);
  bind_flatten(m);
  bind_unflatten(m);
  bind_recorded(m);
  bind_outcome(m);
  bind_trace(m);
  bind_surgery(m);
  bind_treedef(m);
  bind_tree(m);
  bind_signed(m);
  bind_call(m);
  bind_direct(m);
}

// The caches are one for the process. Python 3.12 and later refuse by themselves; before, a second interpreter would
// take over nanobind's own state, and the main one would break.
extern "C" NB_EXPORT PyObject* PyInit__core() {
  if (PyInterpreterState_Get() == PyInterpreterState_Main()) return PyInit__core_of_main();
  PyErr_SetString(PyExc_ImportError, "module graftax._core does not support loading in subinterpreters");
  return nullptr;
}
