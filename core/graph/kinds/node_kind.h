// SPDX-License-Identifier: Apache-2.0
// What nodes of one kind are, apart from their fields (instance dictionary and slots): how they are opened, compared,
// made, written, named and printed. There is one object per kind, in the file of its family in this folder; making it
// puts it into the list. A new kind overrides what differs from a plain object, and no walk changes.
#pragma once

#include "python/py.h"

namespace graftax {

class Commit;
class Opened;
struct Content;
struct Instr;
struct Kind;
struct Program;
struct Touched;

// How a Cursor reaches the items of a node. The first four are read in its own loop, without a call.
enum class Items : uint8_t {
  none,
  list,
  tuple,
  dict,
  listed,  // open() lists them
  keyed,   // open() lists the keys of a dict
  asked,   // item() gives them one by one
};

// Which sets of equal elements count as the same.
enum class Order : uint8_t {
  any,
  of_iteration,  // those that iterate alike, or are known to be changed in a trace and have the same table
  in_a_trace,    // those that do the same in a function that was traced with the one
};

// Which keys a node has besides the names of its fields.
enum class Keys : uint8_t {
  none,
  items,     // one for each item
  elements,  // as many as the instruction's `arg` says, without items: a set
};

// What opening a node has given.
struct Listed {
  Owned items;  // a list or a tuple: the items, or their keys
  Owned extra;  // the child before the items
  Py_ssize_t size = 0;
};

class NodeKind {
 public:
  const char* const name;
  const Items items;

  bool is_whole = false;              // immutable: made from all its items at once
  bool items_are_all = false;         // `new_items` of the builtin type itself is a node, and nothing is missing
  bool is_function = false;           // its code, names and globals count, and may not change in a trace
  bool is_registered = false;         // opened and made by functions registered with JAX: its fields are no children
  bool hides_attributes = false;      // what an instance has besides its items says how it works: no child
  bool reads_children = false;        // making one runs code that reads its items: they have to be whole by then
  bool is_cell = false;               // stands for what is in it: nothing on a path
  bool has_content = false;           // is more than its children: content_matches() is asked on every walk
  bool has_fields = false;            // instances of the builtin type itself have attributes that count
  bool is_handed = false;             // == compares instances of the builtin type itself by identity
  bool is_weak = false;               // refers to its item without holding it
  bool begins_with_its_call = false;  // its first item is called, or names what is called: None would not do
  bool is_leaf_for_jax = false;       // a leaf without arrays, whatever its content
  bool is_ignored = false;            // stands for whatever the caller has there but None
  Keys keys = Keys::none;
  const char* extra = nullptr;              // the name of one child before the items
  const char* const* item_names = nullptr;  // attributes that the items are; ends with null
  const char* brackets = nullptr;           // around the items where they are printed
  PyTypeObject* nameless = nullptr;         // a builtin type that pickle has no name for

  NodeKind(const char* name, Items items, bool in_list = true);
  NodeKind(const NodeKind&) = delete;
  NodeKind& operator=(const NodeKind&) = delete;
  virtual ~NodeKind() = default;

  // ---- which types

  // Is it the kind of classes whose nearest base that no class statement made is this one?
  virtual bool is_of(PyTypeObject* solid) const;
  // What the type is called with to make an empty instance.
  virtual Owned empty_arguments() const;
  // Does JAX look into an instance of this class?
  virtual bool is_opened_by_jax(const Kind& kind, PyTypeObject* type) const;
  // Is this object never opened, but a static by identity?
  virtual bool is_itself(PyObject* obj) const;

  // ---- children

  // With `opened`, a registered class that a walk before has asked is not asked again.
  virtual Listed open(PyObject* obj, const Kind& kind, Opened* opened) const;
  // Items::asked, Items::keyed: how many there are now. Items::asked: one of them, borrowed; null where it is gone.
  virtual Py_ssize_t size(PyObject* obj) const;
  virtual PyObject* item(PyObject* obj, Py_ssize_t i) const;
  // The attribute that item `i` is; empty where items go by number or key.
  virtual std::string item_name(Py_ssize_t i, PyObject* key) const;

  // ---- content: what a node is besides its children

  // A static that the instruction gets as its payload; NONE without one.
  virtual uint32_t add_payload(Program& program, PyObject* obj, const Kind& kind) const;
  // Keys::elements: adds their ids to `keys`, and says how many.
  virtual uint32_t add_elements(Program& program, PyObject* obj, std::vector<uint32_t>& keys) const;
  // Is `obj` apart from its children what node `n` was recorded from?
  virtual bool content_matches(const Program& program, const Instr& n, PyObject* obj) const;
  // The same where the order of iteration counts, too.
  virtual bool content_in_order(const Program& program, const Instr& n, PyObject* obj, Order) const {
    return content_matches(program, n, obj);
  }
  // Was content that is written back changed in place?
  virtual bool content_changed(const Program& program, const Instr& n, PyObject* obj) const;
  // Does it hold its content in another way, which shows after more changes? A set that got an element and lost it does.
  virtual bool holds_otherwise(const Program& program, const Instr& n, PyObject* obj) const;
  // Has a node of an unpickled state the payload and the number of items of this kind?
  virtual bool is_valid(const Program& program, const Instr& n) const;
  // What is printed before the children, and after the items.
  virtual std::string content_text(const Program& program, const Instr& n) const;
  virtual std::string closing_text(const Program& program, const Instr& n) const;

  // ---- made and written

  // Can an instance with arrays among its attributes be made anew?
  virtual bool can_hold_arrays(const Kind& kind) const;
  // The one object that is never copied, and stands for itself wherever it is rebuilt; null where there is none.
  virtual PyObject* unique_object(const Program&, const Instr&) const { return nullptr; }
  // An empty mutable node: its items are filled in later. `live` is the object that was recorded, or null.
  virtual Owned shell(const Program& program, const Instr& n, PyObject* live) const;
  // An immutable node from its items.
  virtual Owned make(const Content& content) const;
  // Gives an empty node its items.
  virtual void fill(const Content& content, PyObject* shell) const;
  // Adds what gives an existing node these items, or those that were touched, to a commit.
  virtual void write(Commit& commit, const Content& content, PyObject* node, const Touched& touched) const;
  // Sets items through functions of the interpreter, which may fail: what Commit::parts calls.
  virtual void set_parts(PyObject* node, PyObject* const* items, Py_ssize_t count) const;

  // ---- builtin containers: their items are exchanged with those of a new one, which cannot fail

  virtual Owned new_items(const Content& content) const;
  // Makes `node` ready without a visible change. Raises where its items cannot be replaced, or where memory is short.
  // False where this Python lays such objects out in a way that is not known: the two functions below have to do.
  virtual bool can_exchange(PyObject* node) const;
  virtual void exchange(PyObject* a, PyObject* b) const;
  virtual Owned copy_items(PyObject* node) const;
  virtual void replace_items(PyObject* node, PyObject* source) const;
};

// The kind of what is not a node.
extern const NodeKind leaf_node;
extern const NodeKind& dict_node;
extern const NodeKind& text_array_node;

// Null where instances with this layout cannot be opened.
const NodeKind* node_kind_of(PyTypeObject* solid);
const NodeKind* node_kind_named(const std::string& name);
// The type of this name that pickle has no name for, or null.
PyTypeObject* nameless_type(const std::string& name);

// A list of what an iterator of the base type yields: a subclass's own __iter__ is never asked.
Owned list_items(PyObject* obj, PyTypeObject* base);
// The attributes of these names.
Listed open_attributes(PyObject* obj, const char* const* names);

}  // namespace graftax
