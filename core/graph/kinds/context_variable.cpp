// SPDX-License-Identifier: Apache-2.0
// A ContextVar shows the value that it has in the context of the call. A trace runs in a copy of that context, so it
// sets the variable itself.
#include "graph/commit.h"
#include "graph/rebuild.h"

namespace graftax {

namespace {

struct ContextVariableKind final : NodeKind {
  ContextVariableKind() : NodeKind("context variable", Items::listed) { item_names = names; }

  bool is_of(PyTypeObject* solid) const override { return solid == &PyContextVar_Type; }
  Listed open(PyObject* variable, const Kind&, Opened*) const override {
    PyObject* value = nullptr;
    check(PyContextVar_Get(variable, nullptr, &value));
    if (!value) return {Owned::borrow(runtime.empty_tuple), {}, 0};
    return {own(PyTuple_Pack(1, Owned::steal(value).get())), {}, 1};
  }
  bool is_valid(const Program&, const Instr& n) const override { return n.node->items <= 1; }

  Owned shell(const Program&, const Instr&, PyObject* live) const override {
    if (!live)
      raise_graftax("UnsupportedValueError",
                    "a ContextVar cannot be made anew: Python finds the value of each by its identity. "
                    "Pass the value that is set now.");
    return Owned::borrow(live);
  }
  void fill(const Content& c, PyObject* variable) const override {
    if (c.n.node->items) own(PyContextVar_Set(variable, c.items()[0]));
  }
  void write(Commit& commit, const Content& c, PyObject* variable, const Touched&) const override {
    if (!c.n.node->items)
      raise_graftax("UnsupportedValueError",
                    "a ContextVar has no value after the call and had one before. Only the token that its set() "
                    "returned takes a value away: call reset() outside.");
    auto token = std::make_shared<Owned>();
    commit.step([token, variable = Owned::borrow(variable),
                 value = Owned::borrow(c.items()[0])] { *token = own(PyContextVar_Set(variable.get(), value.get())); },
                [token, variable = Owned::borrow(variable)] {
                  if (*token) check(PyContextVar_Reset(variable.get(), token->get()));
                });
  }

 private:
  static constexpr const char* names[] = {"value", nullptr};
};

const ContextVariableKind context_variable_kind;

}  // namespace

}  // namespace graftax
