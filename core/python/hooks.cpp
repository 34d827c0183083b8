// SPDX-License-Identifier: Apache-2.0
#include "python/hooks.h"

#include "python/jax_registry.h"

namespace graftax {

namespace {

std::vector<Hook*>& all_hooks() {
  static auto* all = new std::vector<Hook*>();
  return *all;
}

}  // namespace

void raise_graftax(const char* name, const char* message) {
  Owned type = own(attribute(hooks::errors.get(), name));
  raise_error(type.get(), message);
}

Hook::Hook(const char* name) : name_(name) { all_hooks().push_back(this); }

void bind_hooks(nb::module_& m) {
  m.def(
      "setup",
      [](nb::object hooks, nb::object jax_registry, nb::object flatten_one_level, nb::object array_type) {
        // Kept for the life of the process. A name that is missing raises here, when graftax is imported.
        for (Hook* hook : all_hooks()) hook->target_ = nb::object(hooks.attr(hook->name_)).release().ptr();
        set_jax_registry(jax_registry.is_none() ? nullptr : jax_registry.release().ptr());
        runtime.flatten_one_level = flatten_one_level.release().ptr();
        runtime.array_type = reinterpret_cast<PyTypeObject*>(array_type.release().ptr());
      },
      nb::arg("hooks"), nb::arg("jax_registry").none(), nb::arg("flatten_one_level"), nb::arg("array_type"),
      "Gives the core, once, what it asks Python for.");
}

}  // namespace graftax
