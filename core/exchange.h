// SPDX-License-Identifier: Apache-2.0
// Exchanges the contents of two builtin containers. No allocation, no user code, no signal handler: it cannot fail.
// That is what a commit of several writes needs, which has to happen as a whole or not at all.
#pragma once

#include "kind.h"

namespace graftax {

// Makes ready what an exchange needs of `node`, without a visible change. Raises where its content cannot be replaced
// (a bytearray that a memoryview shows), or where memory is short. False where this Python lays such objects out in a
// way that is not known here: its public functions have to do.
bool can_exchange(PyObject* node, Base base);

// Exchanges the content of two objects of one base type; identities, attributes and weak references stay.
void exchange(PyObject* a, PyObject* b, Base base);

void init_exchange();

}  // namespace graftax
