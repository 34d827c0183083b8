// SPDX-License-Identifier: Apache-2.0
#include "call/recording.h"

#include <algorithm>
#include <utility>

#include "graph/structure_cache.h"

namespace graftax {

namespace {

void show_recording(const Recording& r, Visitor& visit) { visit(r.graphdef, r.names, r.live, r.leaves); }

void clear_recording(Recording& r) {
  r.graphdef.reset();
  r.live.clear();
  r.leaves.clear();
  auto gone = std::exchange(r.looks, {});  // releasing a sharding may run code that sees this recording
}

void show_opened(const Opened& opened, Visitor& visit) { opened.show_held(visit); }

void clear_opened(Opened& opened) { opened.clear(); }

RecordedGraph record_roots(nb::tuple roots, const RecordOptions& options, nb::handle layout) {
  Recorder recorder(options);
  for (nb::handle r : roots) recorder.root(r.ptr());
  return recorder.finish(or_null(layout));
}

void init_recording(Recording* self, nb::tuple roots, nb::tuple names, const std::vector<uint8_t>& root_flags,
                    nb::object layout, bool aliases, bool shapes, nb::object dynamic, Opened* opened,
                    nb::object ignored, nb::object symbolic, bool stand_ins) {
  RecordOptions options{names.ptr(), &root_flags, nullptr, aliases, shapes, or_null(dynamic)};
  options.opened = opened;
  options.ignored = or_null(ignored);
  options.symbolic = or_null(symbolic);
  options.stand_ins = stand_ins;
  if (opened) opened->walk_again();  // another walk of the call may have filled it: what was opened then is found
  RecordedGraph rec = record_roots(roots, options, layout);
  new (self)
      Recording{nb::cast(GraphDef{std::move(rec.program)}), names, std::move(rec.live), std::move(rec.leaves), {}, {}};
}

// The same roots, with other numbers in place of symbolic ones.
Recording with_numbers(const Recording& recording, const std::vector<std::pair<uint32_t, nb::object>>& numbers) {
  Recording out{recording.graphdef, recording.names, {}, {}, {}, {}};
  for (size_t i = 0; i < recording.live.size(); ++i) out.live.push(recording.live[i]);
  for (size_t i = 0; i < recording.leaves.size(); ++i) {
    auto other = std::find_if(numbers.begin(), numbers.end(), [&](const auto& number) { return number.first == i; });
    if (other != numbers.end()) out.assumed.push_back(static_cast<uint32_t>(i));
    out.leaves.push(other != numbers.end() ? other->second.ptr() : recording.leaves[i]);
  }
  return out;
}

// (leaves, GraphDef) of the roots of one call. Static references inside are strong until an entry weakens them.
nb::tuple record(nb::tuple roots, nb::object names, const std::vector<uint8_t>& root_flags, nb::object layout,
                 bool aliases, bool shapes, nb::object dynamic, nb::object ignored, bool stand_ins) {
  RecordOptions options{or_null(names), &root_flags, nullptr, aliases, shapes, or_null(dynamic)};
  options.ignored = or_null(ignored);
  options.stand_ins = stand_ins;
  RecordedGraph rec = record_roots(roots, options, layout);
  return nb::make_tuple(handed_over(rec.leaves), GraphDef{std::move(rec.program)});
}

}  // namespace

const Program& Recording::program() const {
  // Once the collector has cleared this, an empty program: whoever still holds it walks over nothing.
  static const Program empty{};
  return graphdef.is_valid() ? nb::inst_ptr<GraphDef>(graphdef)->program : empty;
}

void Recording::walk(Walk& out) const {
  const Program& p = program();
  out.leaves.reserve(leaves.size());
  for (size_t i = 0; i < leaves.size(); ++i) {
    out.leaves.push(leaves[i]);
    const Kind* kind = known_kind(Py_TYPE(leaves[i]));
    out.has_numpy = out.has_numpy || (kind && kind->leaf == Leaf::numpy);
  }
  out.nodes.resize(p.track_pc.size());
  for (size_t t = 0; t < p.track_pc.size(); ++t) out.nodes.set(t, live[p.track_pc[t]]);
}

const Recording& Recording::nothing() {
  static const Recording nothing{};
  return nothing;
}

void bind_recording(nb::module_& m) {
  nb::class_<Opened>(m, "Opened", nb::type_slots(Collected<Opened, show_opened, clear_opened>::slots),
                     "What registered classes gave when they were opened: each is asked once in a call.")
      .def(nb::init<>());
  nb::class_<Recording>(m, "Recording", nb::type_slots(Collected<Recording, show_recording, clear_recording>::slots),
                        "The roots of one call, walked once: their structure, leaves and live objects.")
      .def(
          "__init__", &init_recording, nb::arg("roots"), nb::arg("names"), nb::arg("root_flags"),
          nb::arg("layout").none() = nb::none(), nb::arg("aliases") = false, nb::arg("shapes") = false,
          nb::arg("dynamic").none() = nb::none(), nb::arg("opened").none() = nb::none(),
          nb::arg("ignored").none() = nb::none(), nb::arg("symbolic").none() = nb::none(), nb::arg("stand_ins") = false,
          nb::sig("def __init__(self, roots: tuple[Any, ...], names: tuple[str, ...], root_flags: Sequence[int], "
                  "layout: tuple[Any, ...] | None = None, aliases: bool = False, shapes: bool = False, dynamic: "
                  "Callable[[tuple[int, tuple[Any, ...]]], bool] | None = None, opened: Opened | None = None, ignored: "
                  "Callable[[tuple[int, tuple[Any, ...]], Any], bool] | None = None, symbolic: Any = None, "
                  "stand_ins: bool = False) -> None"))
      .def_prop_ro(
          "graphdef", [](const Recording& r) { return r.graphdef; }, nb::sig("def graphdef(self) -> GraphDef"))
      .def_prop_ro(
          "names", [](const Recording& r) { return r.names; }, nb::sig("def names(self) -> tuple[str, ...]"))
      .def_prop_ro(
          "leaves", [](const Recording& r) { return nb::steal(list_of(r.leaves).release()); },
          nb::sig("def leaves(self) -> list[Any]"))
      .def("with_numbers", &with_numbers, nb::arg("numbers"),
           nb::sig("def with_numbers(self, numbers: list[tuple[int, int | float]]) -> Recording"),
           "The same roots, as if other numbers were in the place of these leaves.")
      .def(
          "kinds_of_shardings",
          [](Recording& r) -> nb::object {
            if (!direct_takes(r.leaves.size())) return nb::none();
            try {
              // Kept, as a direct call takes them over.
              if (r.looks.empty()) r.looks = looks_of(r.leaves);
            } catch (nb::python_error& e) {  // a leaf that cannot be looked at: such calls go through Python
              if (!e.matches(PyExc_Exception)) throw;
            }
            if (r.looks.size() != r.leaves.size()) return nb::none();
            nb::set out;
            PyTypeObject* last = nullptr;  // most have one type
            for (const LeafLook& leaf : r.looks) {
              if (!leaf.sharding || Py_TYPE(leaf.sharding.get()) == last) continue;
              last = Py_TYPE(leaf.sharding.get());
              out.add(nb::borrow(reinterpret_cast<PyObject*>(last)));
            }
            return out;
          },
          nb::sig("def kinds_of_shardings(self) -> set[type] | None"),
          "The classes of the shardings of leaves; None where direct calls do not look at such leaves.")
      .def_prop_ro(
          "holds_ids", [](const Recording& r) { return holds_ids(r.program()); },
          "Is there a number among its statics that may be the id() of an object?")
      .def_prop_ro(
          "holds_own_ids",
          [](const Recording& r) {
            if (!holds_ids(r.program())) return false;
            std::vector<PyObject*> objects;
            for (uint32_t pc : r.program().track_pc) objects.push_back(r.live[pc]);
            return holds_ids_of(r.program(), std::move(objects));
          },
          "Is there the id() of one of its objects among its statics?")
      .def_prop_ro(
          "named",
          [](const Recording& r) {
            nb::set out;
            for (const Instr& n : r.program().code)
              if (n.op == Op::node) out.add(nb::borrow(reinterpret_cast<PyObject*>(n.node->type)));
            for (const Static& s : r.program().statics)
              if (s.obj && (PyType_Check(s.obj) || PyModule_Check(s.obj))) out.add(nb::borrow(s.obj));
            return out;
          },
          nb::sig("def named(self) -> set[Any]"), "The classes of its nodes, and the classes and modules in it.")
      .def(
          "instances",
          [](const Recording& r, nb::tuple types) {
            nb::list out;
            for (const Static& s : r.program().statics)
              if (s.obj && PyTuple_Check(types.ptr()))
                for (nb::handle type : types)
                  if (PyType_Check(type.ptr()) &&
                      PyType_IsSubtype(Py_TYPE(s.obj), reinterpret_cast<PyTypeObject*>(type.ptr()))) {
                    out.append(nb::borrow(s.obj));
                    break;
                  }
            return out;
          },
          nb::arg("types"), nb::sig("def instances(self, types: tuple[type, ...]) -> list[Any]"),
          "The statics in it that are of these classes.")
      .def_prop_ro(
          "opaque",
          [](const Recording& r) {
            nb::list out;
            for (const Static& s : r.program().statics) {
              const Kind* kind = s.obj && s.how == How::identity && !s.weak ? known_kind(s.type) : nullptr;
              if (kind && kind->opaque) out.append(nb::borrow(s.obj));
            }
            return out;
          },
          nb::sig("def opaque(self) -> list[Any]"), "The objects in it whose state C code keeps.")
      .def_prop_ro(
          "nodes",
          [](const Recording& r) {
            nb::list out;
            for (uint32_t pc : r.program().track_pc) out.append(nb::borrow(r.live[pc]));
            return out;
          },
          nb::sig("def nodes(self) -> list[Any]"), "The tracked nodes, by their index.")
      .def(
          "objects_of",
          [](const Recording& r, nb::handle type) {
            nb::list out;
            for (uint32_t pc = 0; pc < r.program().code.size(); ++pc) {
              const Instr& n = r.program().code[pc];
              if (n.op == Op::node && reinterpret_cast<PyObject*>(n.node->type) == type.ptr())
                out.append(nb::borrow(r.live[pc]));
            }
            return out;
          },
          nb::arg("type"), nb::sig("def objects_of(self, type: type[Any]) -> list[Any]"),
          "The nodes of this very class.")
      .def_prop_ro(
          "functions",
          [](const Recording& r) {
            nb::list out;
            for (uint32_t pc = 0; pc < r.program().code.size(); ++pc)
              if (r.program().code[pc].op == Op::node && PyFunction_Check(r.live[pc]))
                out.append(nb::borrow(r.live[pc]));
            return out;
          },
          nb::sig("def functions(self) -> list[Any]"), "The functions among its nodes.");
  m.def(
      "is_opaque", [](nb::handle obj) { return kind_of(obj.ptr()).leaf == Leaf::statics; }, nb::arg("obj").none(),
      nb::sig("def is_opaque(obj: object) -> bool"), "Is this value one static leaf?");
  m.def(
      "holds_only",
      [](nb::handle items, nb::handle types) {
        if (!PyTuple_Check(items.ptr())) raise_error(PyExc_TypeError, "expected a tuple");
        PyTypeObject* last = nullptr;  // most have one type
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.ptr()); ++i) {
          PyTypeObject* type = Py_TYPE(PyTuple_GET_ITEM(items.ptr(), i));
          if (type == last) continue;
          int held = PySet_Contains(types.ptr(), reinterpret_cast<PyObject*>(type));
          check(held);
          if (held == 0) return false;
          last = type;
        }
        return true;
      },
      nb::arg("items"), nb::arg("types"),
      nb::sig("def holds_only(items: tuple[Any, ...], types: frozenset[type]) -> bool"),
      "Is each item of a tuple of one of these types?");
  m.def(
      "types_of",
      [](nb::iterable values) {
        Owned items = own(PySequence_Fast(values.ptr(), "expected an iterable"));
        nb::set out;
        PyTypeObject* last = nullptr;  // most have one type
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); ++i) {
          PyTypeObject* type = Py_TYPE(PySequence_Fast_GET_ITEM(items.get(), i));
          if (type != std::exchange(last, type)) out.add(nb::borrow(reinterpret_cast<PyObject*>(type)));
        }
        return out;
      },
      nb::arg("values"), nb::sig("def types_of(values: Iterable[object]) -> set[type]"));
  nb::enum_<RootFlag>(m, "RootFlag", nb::is_arithmetic(), "What a root is besides an argument; several are added.")
      .value("static", STATIC_ROOT, "Its arrays are constants of the program.")
      .value("global_", GLOBAL_ROOT, "A function in it counts by identity.")
      .value("dynamic", DYNAMIC_ROOT, "Python numbers in it are traced.")
      .value("captured", CAPTURED_ROOT, "No argument: a ShapeDtypeStruct in it is itself, and stands for no array.")
      .value("target", TARGET_ROOT, "What is called: functions anywhere in it count by identity.")
      .value("constant", CONSTANT_ROOT,
             "Its NumPy arrays are constants of the program: its code asks for their values.");
  m.def("record", &record, nb::arg("roots"), nb::arg("names").none() = nb::none(),
        nb::arg("root_flags") = std::vector<uint8_t>(), nb::arg("layout").none() = nb::none(),
        nb::arg("aliases") = false, nb::arg("shapes") = false, nb::arg("dynamic") = nb::none(),
        nb::arg("ignored") = nb::none(), nb::arg("stand_ins") = false,
        nb::sig("def record(roots: tuple[object, ...], names: tuple[str, ...] | None = None, root_flags: "
                "Sequence[int] = (), layout: tuple[Any, ...] | None = None, aliases: bool = False, shapes: bool = "
                "False, "
                "dynamic: Callable[[tuple[int, tuple[Any, ...]]], bool] | None = None, ignored: "
                "Callable[[tuple[int, tuple[Any, ...]], Any], bool] | None = None, stand_ins: bool = False) -> "
                "tuple[list[Any], GraphDef]"),
        "Walks the roots together and returns (leaves, GraphDef). Roots without a flag are arguments.");
  m.def("flatten", &flatten, nb::arg("obj").none(), nb::sig("def flatten(obj: object) -> tuple[list[Any], GraphDef]"));
}

}  // namespace graftax
