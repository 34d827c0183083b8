// SPDX-License-Identifier: Apache-2.0
// Modules and classes given to `graftax.register`: opened and rebuilt by attribute, with the same node data
// as the functions given to JAX make (`_graph/types/register.py`). Instances that fit no schema go through those functions.
#pragma once

#include <array>

#include "tree/treekind.h"

namespace graftax {

// What is done with all instances that have the same attributes in the same order.
struct Schema {
  std::vector<PyObject*> attributes;  // names as the instance dictionary has them; interned, kept for ever
  std::vector<uint32_t> children;     // which of these are children
  std::vector<uint32_t> others;
  std::vector<uint32_t> assigned;  // names in the order of assignment, as numbers: children first, then others
  std::vector<PyObject*> names;    // of children and others
  Owned data;                      // node data where there are no others
  Owned entries;                   // key path entries of the children
  struct Kept {
    Owned others, data;
  };
  std::vector<Kept> kept;  // node data of values that cannot change, made before
  size_t replaced = 0;
};

struct Schemas {
  Owned by_names;  // asked for the schema of some names: `_Fields.by_names`
  Owned aux;       // the class of node data with others; null before the first
  std::vector<std::unique_ptr<Schema>> schemas;
  size_t recent = 0;  // the one that fitted last
};

constexpr size_t most_attributes = 64;
using AttributeValues = std::array<PyObject*, most_attributes>;  // borrowed, beside `attributes`

// The schema for this instance, and its values; null where the functions have to be asked. May call Python; the caller is
// `Walking`.
Schema* schema_of(PyObject* obj, const TreeKind& kind, AttributeValues& values);

// The node data. The values must not have been let go since `schema_of`.
Owned data_by_schema(const TreeKind& kind, Schema& schema, const AttributeValues& values);

// An instance of these children; empty where unflatten has to make it.
Owned build_by_schema(const TreeKind& kind, PyObject* data, PyObject* const* items, uint32_t arity);

}  // namespace graftax
