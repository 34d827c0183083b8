// SPDX-License-Identifier: Apache-2.0
// Every name that the core asks Python for, typed once: those of `graftax._hooks`, where setup raises for one that is
// missing, and the methods of `Jitted` that a Caller calls on itself.
#pragma once

#include "python/py.h"

namespace graftax {

class Hook {
 public:
  explicit Hook(const char* name);

  PyObject* get() const { return target_; }
  nb::object object() const { return nb::borrow(target_); }

  // May run any Python code.
  template <class... Args>
  Owned operator()(Args... args) const {
    return own(PyObject_CallFunctionObjArgs(target_, static_cast<PyObject*>(args)..., nullptr));
  }

 private:
  friend void bind_hooks(nb::module_& m);

  const char* name_;
  PyObject* target_ = nullptr;  // for the life of the process
};

namespace jitted {

inline constexpr const char* plain = "_plain";  // what runs under jax.disable_jit
inline constexpr const char* entry = "_entry";  // (roots, layout, context, Opened) -> (Entry, Recording)
inline constexpr const char* explain =
    "_explain";  // (exception, roots, layout, entry that was traced) -> exception to raise
inline constexpr const char* rebind = "_rebind";                  // reads the signature anew
inline constexpr const char* reads = "_reads";                    // Entry -> Reads, or None
inline constexpr const char* trace_branches = "_trace_branches";  // (arguments, keyword arguments) of a traced call
inline constexpr const char* warn_of_kept = "_warn_of_kept";      // after a call that could not donate much

}  // namespace jitted

namespace hooks {

// ---- types and values

inline Hook describe("describe");                  // object, nearest base that no class statement made -> Description
inline Hook numpy_role("numpy_role");              // dtype -> is it traced? or why it is refused
inline Hook check_opaque("check_opaque");          // object, is it an output? Raises
inline Hook is_module_level("is_module_level");    // object -> does a module or a class name it?
inline Hook named_function("named_function");      // function -> what its name leads to, or None
inline Hook writes_its_cells("writes_its_cells");  // function -> does its code assign variables of its closure?
inline Hook unspoken("UNSPOKEN");                  // a set of the names of fields that paths leave out
inline Hook ignored("Ignored");                    // path, or None; why it is refused, or None -> stand-in
inline Hook is_tracer("is_tracer");
inline Hook is_leaf("is_leaf");                            // to JAX
inline Hook one_level_treedef("one_level_treedef");        // class, aux data, number of children
inline Hook open_jaxpr("open_jaxpr");                      // -> (constants, the Jaxpr without them)
inline Hook new_ref("new_ref");                            // content -> jax.Ref
inline Hook record_alias_sources("record_alias_sources");  // [(input leaves, the output leaf made of them)]
inline Hook equal_leaves("equal_leaves");                  // leaf, what flatten made in its place -> is it the same?
inline Hook copied_value("copied_value");                  // an equal one without its attributes
inline Hook text_array("text_array");                      // (dtype, shape, bytes) -> array
inline Hook write_text_array("write_text_array");          // array, (dtype, shape, bytes)
inline Hook errors("errors");                              // the module of exceptions
inline Hook at_path("at_path");                            // exception, path -> exception
inline Hook named_scope("named_scope");                    // name -> context manager
inline Hook registered_classes("registered_classes");      // abstract class -> what was registered with it, to compare

inline Hook block_until_ready("block_until_ready");
inline Hook outside_of_traces("outside_of_traces");  // -> is no trace running in this thread?
inline Hook with_room("with_room");  // function -> what it returns, with all its frames in one piece of memory

// ---- methods of a GraphDef and of an Outcome

inline Hook reduce_graphdef("reduce_graphdef");
inline Hook reduce_outcome("reduce_outcome");
inline Hook fingerprint("fingerprint");
inline Hook graphdef_children("graphdef_children");

// ---- key paths

inline Hook sequence_key("SequenceKey");
inline Hook attribute_key("GetAttrKey");
inline Hook flat_index_key("FlattenedIndexKey");
inline Hook dict_key("dict_key");

// ---- trees

inline Hook describe_tree("describe_tree");    // class -> TreeDescription
inline Hook open_with_keys("open_with_keys");  // None, or object -> ((key, child) pairs, aux data)
inline Hook open_first("open_first");          // flatten, object -> (the same, who names the children)
inline Hook absent_mark("Mark");               // stands for an absent field in a pickle
inline Hook replaced("replaced");              // aux data, old, new
inline Hook from_jax("from_jax");              // treedef of JAX -> PyTreeDef
inline Hook to_jax("to_jax");                  // the same, the other way round
inline Hook from_iterable_tree("from_iterable_tree");
inline Hook treedef_from_state("treedef_from_state");
inline Hook deserialize_using_proto("deserialize_using_proto");
inline Hook refuse_mismatch("refuse_mismatch");  // treedef, tree, name. Raises

}  // namespace hooks

// Binds `setup`.
void bind_hooks(nb::module_& m);

}  // namespace graftax
