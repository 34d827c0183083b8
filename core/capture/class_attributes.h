// SPDX-License-Identifier: Apache-2.0
// Attributes of classes, whatever running traces show in their place. A class is there for all threads: while the trace
// of one shows a rebuilt value in it, or has assigned the attribute, the others have what the class itself holds.
#pragma once

#include "python/py.h"

namespace graftax {

// What a class itself holds under a name, or null. In the thread of a trace that has assigned it: what it has assigned.
Owned class_attribute(PyObject* cls, PyObject* name);

// Gives the class another value, whatever its metaclass says; null deletes. It takes effect where a trace that shows
// something there has ended.
void set_class_attribute(PyObject* cls, PyObject* name, PyObject* value);

// What is found under a name in a class and its bases, or null.
Owned inherited_attribute(PyTypeObject* cls, PyObject* name);

// A new list of the names that a class itself holds.
Owned class_names(PyObject* cls);

void bind_class_attributes(nb::module_& m);

}  // namespace graftax
