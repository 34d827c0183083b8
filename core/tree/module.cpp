// SPDX-License-Identifier: Apache-2.0
// The functions of `graftax.tree`.
#include "python/hooks.h"
#include "tree/build.h"
#include "tree/cache.h"
#include "tree/walk.h"

namespace graftax {

namespace {

nb::tuple pair_of(nb::object first, nb::object second) {
  nb::tuple out = nb::steal<nb::tuple>(check(PyTuple_New(2)));
  PyTuple_SET_ITEM(out.ptr(), 0, first.release().ptr());
  PyTuple_SET_ITEM(out.ptr(), 1, second.release().ptr());
  return out;
}

// A list that takes the references over.
nb::list to_list(OwnedList& items) {
  auto n = static_cast<Py_ssize_t>(items.size());
  nb::list out = nb::steal<nb::list>(check(PyList_New(n)));
  for (Py_ssize_t i = 0; i < n; ++i) PyList_SET_ITEM(out.ptr(), i, items.release(static_cast<size_t>(i)));
  return out;
}

void flatten_up_to(const TreeDef& prefix, nb::handle tree, OwnedList& out, const char* name) {
  try {
    take_up_to(prefix.tree, tree.ptr(), out);
  } catch (Mismatch&) {
    // Python finds the mismatch once more, and says where: no walk that matches pays for paths.
    hooks::refuse_mismatch.object()(nb::cast(&prefix, nb::rv_policy::reference), tree, name);
    raise_error(PyExc_SystemError, "a mismatch that cannot be found again");
  }
}

nb::tuple flatten_tree(nb::handle tree, nb::handle is_leaf) {
  Walking walking;
  TreeDef def;
  OwnedList leaves;
  walk_tree(tree.ptr(), {&def.tree, &leaves, nullptr, or_null(is_leaf), false});
  return pair_of(to_list(leaves), treedef_of(std::move(def.tree)));
}

nb::list tree_leaves(nb::handle tree, nb::handle is_leaf) {
  Walking walking;
  OwnedList leaves;
  walk_tree(tree.ptr(), {nullptr, &leaves, nullptr, or_null(is_leaf), false});  // no structure is written: faster
  return to_list(leaves);
}

nb::object structure(nb::handle tree, nb::handle is_leaf) {
  Walking walking;
  TreeDef def;
  OwnedList leaves;
  walk_tree(tree.ptr(), {&def.tree, &leaves, nullptr, or_null(is_leaf), false});
  return treedef_of(std::move(def.tree));
}

nb::list with_paths(OwnedList& paths, OwnedList& leaves) {
  nb::list out = nb::steal<nb::list>(check(PyList_New(static_cast<Py_ssize_t>(leaves.size()))));
  for (size_t i = 0; i < leaves.size(); ++i) {
    PyObject* pair = check(PyTuple_New(2));
    PyTuple_SET_ITEM(pair, 0, paths.release(i));
    PyTuple_SET_ITEM(pair, 1, leaves.release(i));
    PyList_SET_ITEM(out.ptr(), static_cast<Py_ssize_t>(i), pair);
  }
  return out;
}

nb::tuple flatten_with_path(nb::handle tree, nb::handle is_leaf, bool takes_path) {
  Walking walking;
  TreeDef def;
  OwnedList leaves, paths;
  NamedNodes named;
  walk_tree(tree.ptr(), {&def.tree, &leaves, &named, or_null(is_leaf), takes_path});
  leaf_paths(def.tree, named, paths);
  return pair_of(with_paths(paths, leaves), treedef_of(std::move(def.tree)));
}

// The leaves given to unflatten, and their number checked. A tuple is as it is; the items of anything else are held here:
// user code that runs while the tree is built may change a list.
class GivenLeaves {
 public:
  GivenLeaves(const TreeDef& def, nb::handle leaves) {
    bool fast = PyList_CheckExact(leaves.ptr()) || PyTuple_CheckExact(leaves.ptr());
    items_ = fast ? Owned::borrow(leaves.ptr()) : own(PySequence_List(leaves.ptr()));
    Py_ssize_t given = PySequence_Fast_GET_SIZE(items_.get()), wanted = def.tree.leaves;
    if (given != wanted)
      raise_error(PyExc_ValueError, std::string("too ") + (given < wanted ? "few" : "many") +
                                        " leaves for this PyTreeDef: expected " + std::to_string(wanted) + ", got " +
                                        std::to_string(given));
    size_ = static_cast<size_t>(given);
    PyObject** first = PySequence_Fast_ITEMS(items_.get());
    if (!PyList_Check(items_.get())) return;
    held_.reserve(size_);
    for (size_t i = 0; i < size_; ++i) held_.push(first[i]);
  }
  PyObject* const* data() const {
    return PyList_Check(items_.get()) ? held_.data() : PySequence_Fast_ITEMS(items_.get());
  }
  size_t size() const { return size_; }

 private:
  Owned items_;
  OwnedList held_;
  size_t size_ = 0;
};

nb::object unflatten(const TreeDef& def, nb::handle leaves) {
  GivenLeaves given(def, leaves);
  return nb::steal(build(def.tree, given.data(), build_tree_node).release());
}

nb::object tree_unflatten(nb::handle treedef, nb::handle leaves) {
  if (nb::isinstance<TreeDef>(treedef)) return unflatten(nb::cast<const TreeDef&>(treedef), leaves);
  nb::object ours = as_treedef(treedef);
  return unflatten(nb::cast<const TreeDef&>(ours), leaves);
}

nb::object walk_treedef(const TreeDef& def, nb::handle f_node, nb::handle f_leaf, nb::handle leaves) {
  GivenLeaves given(def, leaves);
  OwnedList values;
  for (size_t i = 0; i < given.size(); ++i) {
    if (f_leaf.is_none()) values.push(given.data()[i]);
    else values.push_stolen(own(PyObject_CallOneArg(f_leaf.ptr(), given.data()[i])));
  }
  // `f_node` takes the place of the constructors.
  auto make = [&](const TreeNode& n, PyObject* const* children) {
    Owned items = tuple_of(children, n.arity);
    nb::object pair = node_data(n);
    // JAX keeps the class of a named tuple where others have their data.
    PyObject* data = PyTuple_GET_ITEM(pair.ptr(), n.role == Role::namedtuple ? 0 : 1);
    return own(PyObject_CallFunctionObjArgs(f_node.ptr(), items.get(), data, nullptr));
  };
  return nb::steal(build(def.tree, values.data(), make).release());
}

// f(leaf, *leaves of the rest) for each leaf, and the tree around the results.
Owned mapped(nb::handle f, const TreeDef& def, std::vector<OwnedList>& columns) {
  OwnedList& results = columns[0];  // each takes the place of its leaf, which the tree holds or nobody needs any more
  size_t n = results.size(), width = columns.size();
  std::vector<PyObject*> args(width + 1);  // the first place is the callee's to use, as the flag below says
  for (size_t i = 0; i < n; ++i) {
    for (size_t k = 0; k < width; ++k) args[k + 1] = columns[k][i];
    Owned result = own(PyObject_Vectorcall(f.ptr(), args.data() + 1, width | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
    results.replace(i, std::move(result));
  }
  return build(def.tree, results.data(), build_tree_node);
}

// Both maps: with `named`, the paths of the leaves are the first column.
nb::object map_columns(nb::handle f, nb::handle tree, const nb::args& rest, nb::handle is_leaf, NamedNodes* named,
                       bool takes_path, const char* name) {
  Walking walking;
  TreeDef walked;
  size_t leaves = named ? 1 : 0, first = leaves + 1;
  std::vector<OwnedList> columns(first + rest.size());
  walk_tree(tree.ptr(), {&walked.tree, &columns[leaves], named, or_null(is_leaf), takes_path});
  // The walk is over by here, so that the structure is whole.
  if (named) leaf_paths(walked.tree, *named, columns[0]);
  nb::object hold = treedef_of(std::move(walked.tree));  // not before: the collector shows it to anybody
  auto& def = nb::cast<TreeDef&>(hold);
  for (size_t k = first; k < columns.size(); ++k) flatten_up_to(def, rest[k - first], columns[k], name);
  return nb::steal(mapped(f, def, columns).release());
}

nb::object map(nb::handle f, nb::handle tree, nb::args rest, nb::handle is_leaf) {
  return map_columns(f, tree, rest, is_leaf, nullptr, false, "tree.map");
}

nb::object map_with_path(nb::handle f, nb::handle tree, nb::args rest, nb::handle is_leaf, bool takes_path) {
  NamedNodes named;
  return map_columns(f, tree, rest, is_leaf, &named, takes_path, "tree.map_with_path");
}

nb::object one_level(nb::handle obj, bool keys) {
  Walking walking;
  const TreeKind& kind = tree_kind_of(Py_TYPE(obj.ptr()));
  if (!kind.is_node()) return nb::none();
  OwnedList children, entries;
  // A registered class names its children itself, and may open otherwise for that.
  if (keys && kind.role == Role::registered) {
    Owned data = open_with_keys(obj.ptr(), kind, entries, children);
    if (data) return nb::make_tuple(with_paths(entries, children), nb::borrow(data.get()));
  }
  TreeNode n;
  Owned data = open_tree_node(obj.ptr(), kind, children);
  n.kind = &kind;
  n.role = kind.role;
  n.arity = static_cast<uint32_t>(children.size());
  n.data = data.get();
  nb::object shown = data ? nb::borrow(data.get()) : nb::none();
  if (!keys) return nb::make_tuple(to_list(children), shown);
  child_entries(n, entries);
  return nb::make_tuple(with_paths(entries, children), shown);
}

bool all_leaves(nb::handle iterable) {
  Walking walking;
  Owned items = own(PySequence_List(iterable.ptr()));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.get()); ++i)
    if (tree_kind_of(Py_TYPE(PyList_GET_ITEM(items.get(), i))).is_node()) return false;
  return true;
}

}  // namespace

void bind_tree(nb::module_& m) {
  on_registry_growth(
      [](PyTypeObject* type) { type ? TypeTable<TreeKind>::forget(type) : TypeTable<TreeKind>::forget_all(); });
  auto cls = nb::borrow<nb::object>(m.attr("PyTreeDef"));
  nb::cpp_function_def(&unflatten, nb::scope(cls), nb::name("unflatten"), nb::is_method(), nb::arg("leaves"),
                       nb::sig("def unflatten(self, leaves: Iterable[Any], /) -> Any"),
                       "Builds the tree around these leaves.");
  nb::cpp_function_def(
      [](const TreeDef& def, nb::handle tree) {
        Walking walking;
        OwnedList out;
        flatten_up_to(def, tree, out, "flatten_up_to");
        return to_list(out);
      },
      nb::scope(cls), nb::name("flatten_up_to"), nb::is_method(), nb::arg("tree").none(),
      nb::sig("def flatten_up_to(self, tree: Any) -> list[Any]"),
      "The subtrees that stand where this structure has leaves.");
  nb::cpp_function_def(&walk_treedef, nb::scope(cls), nb::name("walk"), nb::is_method(), nb::arg("f_node"),
                       nb::arg("f_leaf").none(), nb::arg("leaves"),
                       nb::sig("def walk(self, f_node: Callable[[tuple[Any, ...], Any], Any], "
                               "f_leaf: Callable[[Any], Any] | None, leaves: Iterable[Any], /) -> Any"),
                       "Calls f_node(children, node data) at nodes and f_leaf at leaves, from below.");
  m.def("tree_flatten", &flatten_tree, nb::arg("tree").none(), nb::arg("is_leaf").none() = nb::none(),
        nb::sig(
            "def tree_flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], PyTreeDef]"),
        R"doc(The leaves of a tree, and its structure.

Args:
    tree: any value: what is no node is a leaf. The keys of dicts are taken in sorted order, and None has no leaves.
    is_leaf: called with each value before it is opened; where it says True, the value is a leaf.

Returns:
    (leaves, treedef).

Raises:
    ValueError: where the keys of a dict cannot be sorted, or a registered flatten function returns no pair.
    RecursionError: where a node contains itself.

Example:
    >>> graftax.tree.flatten({"b": 1, "a": [2, 3]})
    ([2, 3, 1], PyTreeDef({'a': [*, *], 'b': *}))
)doc");
  m.def("tree_unflatten", &tree_unflatten, nb::arg("treedef").none(), nb::arg("leaves"),
        nb::sig("def tree_unflatten(treedef: Any, leaves: Iterable[Any]) -> Any"),
        R"doc(Builds a tree from its structure and leaves.

Args:
    treedef: of `graftax.tree`, or of `jax.tree`.
    leaves: as many as the structure has; any values.

Raises:
    ValueError: where there are more or fewer leaves.
    TypeError: where `treedef` is none.
)doc");
  m.def("tree_leaves", &tree_leaves, nb::arg("tree").none(), nb::arg("is_leaf").none() = nb::none(),
        nb::sig("def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]"),
        "The leaves of a tree. See `flatten` for the arguments.");
  m.def("tree_structure", &structure, nb::arg("tree").none(), nb::arg("is_leaf").none() = nb::none(),
        nb::sig("def tree_structure(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> PyTreeDef"),
        "The structure of a tree. See `flatten` for the arguments.");
  m.def("tree_flatten_with_path", &flatten_with_path, nb::arg("tree").none(), nb::arg("is_leaf").none() = nb::none(),
        nb::arg("is_leaf_takes_path") = false,
        nb::sig("def tree_flatten_with_path(tree: Any, is_leaf: Callable[..., bool] | None = None, "
                "is_leaf_takes_path: bool = False) -> tuple[list[tuple[tuple[Any, ...], Any]], PyTreeDef]"),
        R"doc(The leaves of a tree with their key paths, and its structure.

Args:
    tree: as in `flatten`.
    is_leaf: as in `flatten`.
    is_leaf_takes_path: `is_leaf` is called with (key path, value).

Returns:
    (pairs (key path, leaf), treedef). A key path is a tuple of JAX's own key entries.
)doc");
  m.def("tree_map", &map, nb::arg("f"), nb::arg("tree").none(), nb::arg("rest"), nb::kw_only(),
        nb::arg("is_leaf").none() = nb::none(),
        nb::sig("def tree_map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = "
                "None) -> Any"),
        R"doc(A tree of the results of `f`, called with each leaf of `tree` and what stands in its place in the `rest`.

Args:
    f: takes one leaf of each tree.
    tree: gives the structure.
    rest: trees that have the structure of `tree`, or further nodes where it has leaves.
    is_leaf: as in `flatten`, for `tree`.

Raises:
    ValueError: where one of the `rest` does not have the structure; names the paths.

Example:
    >>> graftax.tree.map(lambda x, y: x + y, [1, (2,)], [10, (20,)])
    [11, (22,)]
)doc");
  m.def("tree_map_with_path", &map_with_path, nb::arg("f"), nb::arg("tree").none(), nb::arg("rest"), nb::kw_only(),
        nb::arg("is_leaf").none() = nb::none(), nb::arg("is_leaf_takes_path") = false,
        nb::sig("def tree_map_with_path(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[..., bool] | "
                "None = None, "
                "is_leaf_takes_path: bool = False) -> Any"),
        "`map` whose `f` is given the key path first. See `flatten_with_path` for `is_leaf_takes_path`.");
  m.def("tree_one_level", &one_level, nb::arg("tree").none(), nb::arg("with_keys") = false,
        nb::sig("def tree_one_level(tree: Any, with_keys: bool = False) -> tuple[list[Any], Any] | None"),
        "(children, node data) of a node, None for a leaf; with keys the children are pairs (key path entry, child).");
  m.def("tree_all_leaves", &all_leaves, nb::arg("iterable"),
        nb::sig("def tree_all_leaves(iterable: Iterable[Any]) -> bool"));
}

}  // namespace graftax
