// SPDX-License-Identifier: Apache-2.0
#include "python/jax_registry.h"

#include <vector>

namespace graftax {

PyObject* jax_registry = nullptr;
Py_ssize_t registered_types = 0;

namespace {

std::vector<void (*)(PyTypeObject*)>& listeners() {
  static auto* all = new std::vector<void (*)(PyTypeObject*)>();
  return *all;
}

}  // namespace

void on_registry_growth(void (*forget)(PyTypeObject* type)) { listeners().push_back(forget); }

void set_jax_registry(PyObject* registry) {
  jax_registry = registry;
  registered_types = registry ? PyDict_GET_SIZE(registry) : 0;
}

void follow_registry() {
  if (!jax_registry) {  // no way to tell
    for (auto* forget : listeners()) forget(nullptr);
    return;
  }
  if (!registry_has_grown()) return;
  PyObject *type, *functions;
  // A dict keeps the order of insertion, so the new types come last. They are held in a list, because what runs when a
  // kind is released may register more.
  Py_ssize_t pos = 0, count = 0;
  OwnedList fresh;
  while (PyDict_Next(jax_registry, &pos, &type, &functions))
    if (count++ >= registered_types && PyType_Check(type)) fresh.push(type);
  // Set before the listeners run: a listener may release objects whose code looks at the registry again.
  registered_types = count;
  for (size_t i = 0; i < fresh.size(); ++i)
    for (auto* forget : listeners()) forget(reinterpret_cast<PyTypeObject*>(fresh[i]));
}

}  // namespace graftax
