// SPDX-License-Identifier: Apache-2.0
// From the arguments of a call to its roots: arguments in the order of the signature, then what the function captures.
#pragma once

#include "capture/watchers.h"
#include "python/py.h"

namespace graftax {

// How a signature's arguments become roots. Read from the function once.
struct Binding {
  nb::object names;     // tuple: positional parameters, then keyword-only ones
  nb::object defaults;  // tuple beside `names`; `missing` where there is none
  nb::object missing;
  nb::object positional_defaults;  // the function's __defaults__ when this was read
  nb::object code;                 // and its code, or None
  nb::object cells;                // tuple of closure cells, or empty
  nb::object globals;              // dict, or None
  nb::object global_names;
  // Tuple of triples: a dict or a class, a name, and whether the code assigns it; or a function, None and False. The root
  // of an assigned name is a cell, made for the call, with the value in it.
  nb::object origins;
  Py_ssize_t positional = 0, positional_only = 0;
  bool var_positional = false, var_keyword = false;
  uint64_t generation = 0;  // the table's when this was read: entries of another one have other roots
  // The values of the globals in this epoch of `watch`. Borrowed: none has changed while the epoch is the same.
  mutable std::vector<PyObject*> global_values = {};
  mutable uint64_t global_epoch = 0;
  NameWatch watch = {};  // ends before what it has borrowed goes
};

struct Roots {
  OwnedList values;
  OwnedList assigned;                    // what the assigned names held, in order; None for a name that is not there
  Owned layout;                          // (number of extra positional arguments, names of extra keyword arguments...)
  size_t first_global = 0, globals = 0;  // which of the values stand under a global's name
  uint64_t globals_epoch = 0;            // of the function's `NameWatch`, when they were read
};

// Arguments that come before the caller's (`prefix`: self of a bound method, a partial's) and the caller's own, as
// roots. False when the function would raise TypeError for these arguments: the caller then lets it.
bool bind(PyObject* prefix, const Binding& b, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames, Roots& out);

// Has the function the code and the defaults that it had? Those of keyword-only arguments change in a dict.
bool was_read_from(const Binding& b, PyObject* function);

// Gives the assigned names what a call has put into their cells, where that is something else than they held.
void give_back(const Binding& b, const Roots& roots);

void bind_binding(nb::module_& m);

}  // namespace graftax
