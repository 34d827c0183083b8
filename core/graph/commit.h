// SPDX-License-Identifier: Apache-2.0
// Several objects get new contents as a whole or not at all. Everything new is built while writes are added; a commit
// only puts it in place: no user code, no signal handler, and no allocation after the point from which it cannot go back.
#pragma once

#include <algorithm>
#include <functional>

#include "graph/graphdef.h"

namespace graftax {

// Which parts of a node were changed: writes touch no other, so that what others did to the rest meanwhile stays.
struct Touched {
  bool items = true;               // its items as a whole
  bool fields = true;              // its attributes as a whole
  std::vector<uint32_t> children;  // otherwise these, by number
  PyObject* dropped = nullptr;     // keys of items that went: a tuple; owned by the program
  PyObject* deleted = nullptr;     // names of attributes that went: a tuple; owned by the program

  bool has(uint32_t child) const { return std::binary_search(children.begin(), children.end(), child); }
};

class Commit {
 public:
  // Gives `node` the content that the node at `pc` describes. `values` are its children, built.
  void content(const Program& program, uint32_t pc, PyObject* node, PyObject* const* values,
               PyObject* const* inputs = nullptr, const Touched* touched = nullptr);
  // Sets or (with a null value) deletes one attribute below any user __setattr__.
  void field(PyObject* obj, const Kind& kind, PyObject* name, PyObject* value);
  // Gives `to` the attributes of `from`, an instance of the same class.
  void move_fields(PyObject* from, PyObject* to, const Kind& kind);

  // Writes all of it. Where it raises, nothing was written. What was replaced is released with the Commit.
  void run();
  // After `run`: what was replaced takes its place again.
  void take_back();

  // ---- what a kind of node asks for, in NodeKind::write

  // `node` gets the items of `fresh`, a builtin container.
  void exchange(const NodeKind& kind, PyObject* node, Owned fresh);
  // Sets or (with a null value) deletes a key.
  void assign(PyObject* dict, PyObject* key, PyObject* value, bool ordered = false);
  void list_item(PyObject* list, Py_ssize_t index, PyObject* value);
  void slot(PyObject* obj, Py_ssize_t offset, PyObject* value);
  // May fail, and can be taken back: done before the others.
  void step(std::function<void()> go, std::function<void()> back);
  // Items that are set through functions of the interpreter that check their arguments.
  void parts(const Instr& n, PyObject* node, PyObject* const* items);

 private:
  struct Step {
    std::function<void()> go, back;
  };
  struct Exchange {
    const NodeKind* kind;
    Owned node, fresh;
    bool by_api = false;  // this Python's layout is not known
  };
  struct Assignment {
    Owned dict, key, value;  // no value: the key goes
    bool ordered;            // an OrderedDict
    Owned old;               // null where the key was not there
    bool is_new = false;     // the key was not there, and is by now
  };
  // Both exchange their value with what is there.
  struct Item {
    Owned list;
    Py_ssize_t index;
    Owned value;
    void exchange();
  };
  struct SlotWrite {
    Owned obj;
    Py_ssize_t offset;
    Owned value;
    void exchange();
  };

  void fields(const Program& p, const Instr& n, PyObject* dict, PyObject* const* values, const Touched& touched);
  void all_fields(const Program& p, const Instr& n, PyObject* dict, PyObject* const* values);
  void slots(const Program& p, const Instr& n, PyObject* node, PyObject* const* values, const Touched& touched);
  void insert_keys();

  std::vector<Step> steps_;
  std::vector<Exchange> exchanges_;
  std::vector<Assignment> assignments_;
  std::vector<Item> items_;
  std::vector<SlotWrite> slots_;
};

// The text or number that hashes and compares without user code.
bool is_simple_key(PyObject* key);

}  // namespace graftax
