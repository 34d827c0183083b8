// SPDX-License-Identifier: Apache-2.0
// JAX's registry of pytree nodes: which types are new there.
#pragma once

#include "python/py.h"

namespace graftax {

// JAX's dict from types to functions, or null; its size when it was looked at last.
extern PyObject* jax_registry;
extern Py_ssize_t registered_types;

inline bool registry_has_grown() { return jax_registry && PyDict_GET_SIZE(jax_registry) != registered_types; }

// Looks whether JAX's registry has grown since, and forgets what was known of the types that are new there. One load
// when it has not. To be called before a walk.
void follow_registry();

// Sets JAX's registry: a dict from types to their functions; null where this JAX has none that can be read.
void set_jax_registry(PyObject* registry);

// Calls `forget` for each type that is new in the registry, and with null where all types may be: what was known of them
// is gone. For the life of the process.
void on_registry_growth(void (*forget)(PyTypeObject* type));

}  // namespace graftax
