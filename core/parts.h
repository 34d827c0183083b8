// SPDX-License-Identifier: Apache-2.0
// What some nodes are besides their children (their payload): a function's code and globals, a buffer's content, the
// value of a subclass of str. How it is recorded, compared, and how such a node is made.
#pragma once

#include "graphdef.h"

namespace graftax {

// Adds the payload of `obj` to the program's pool; NONE for nodes that are their children and nothing else.
uint32_t add_payload(Program& program, PyObject* obj, const Kind& kind);

// The static of a function apart from its children. `obj` is never kept: a bare twin without closure and defaults is.
uint32_t add_function(Program& program, PyObject* obj);

// Is a function code and nothing else: no closure, no attributes, defaults that cannot change?
bool is_plain_function(PyObject* function);

// Was it made by a call of another function, so that the next call makes another one?
bool made_in_a_call(PyObject* function);

// Is `obj` apart from its children what node `n` was recorded from?
bool payload_matches(const Program& program, const Instr& n, PyObject* obj);

bool function_matches(const Static& s, PyObject* function);
bool functions_equal(const Static& a, const Static& b);
// Lets a function's static hold its code and its module weakly. False where its code cannot be held that way.
void weaken_function(Program& program, Static& s);

// The name of item `i` of a function: "__defaults__", "__kwdefaults__", then the names of its free variables; borrowed,
// null when the code is gone.
PyObject* function_item_name(const Program& program, const Instr& n, uint32_t i);
PyObject* code_item_name(PyObject* code, Py_ssize_t i);

// An empty mutable node: its content is written later. `live` is the object that was recorded, or null.
Owned make_node_shell(const Program& program, const Instr& n, PyObject* live);

// An immutable node of one of the bases method, builtin, weakref, proxy, set (frozenset) from its items.
Owned construct_part(const Program& program, const Instr& n, PyObject* const* items, PyObject* const* inputs);

// Gives a function the code and the names back that it was recorded with.
void restore_code(const Static& s, PyObject* function);
void write_function(PyObject* function, const Instr& n, PyObject* const* items, OwnedList& graveyard);
// Is a value of this kind rebuilt by its class's own constructor (dates, fractions, paths)?
bool is_remade(const Kind& kind);

void write_exception(PyObject* exception, PyObject* const* items, OwnedList& graveyard);
void write_partial(PyObject* partial, PyObject* const* items, OwnedList& graveyard);
// Gives an empty bytearray, array.array or NumPy array of text the content that a payload holds.
void fill_buffer(PyObject* content, PyObject* shell);
// A bytearray or an array.array with this content.
Owned new_buffer(PyObject* content);

Py_ssize_t default_factory_offset();
void set_default_factory(PyObject* shell, PyObject* factory);

}  // namespace graftax
