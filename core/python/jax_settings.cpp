// SPDX-License-Identifier: Apache-2.0
#include "python/jax_settings.h"

namespace graftax {

namespace {

// How to read each setting, as `_jax/settings.py` has found. Lives as long as the process.
struct SettingQuestions {
  Question disable_jit, prng_impl;
  std::vector<Question> key_flags;  // with `prng_impl` what decides how random keys are made: each is a bool
  std::vector<Question> off;        // each has its one answer where an executable may be run by itself
  std::vector<Question> in_jits_key;
} questions;

// The settings of one thread, the last that asked. The interpreter's lock guards them.
struct ThreadSettings {
  uint64_t thread = 0;
  uint64_t version = 0;  // `times_changed` when they were read
  Shared<SettingsNow> settings;
};

bool jax_reports_changes = false;
uint64_t times_changed = 1;  // one more with each change

ThreadSettings& last_settings() {
  static auto* const out = new ThreadSettings;  // never destroyed: at the end of the process there is no interpreter
  return *out;
}

// The usual case, in which all flags are off, builds nothing.
Owned context() {
  Owned prng_impl = questions.prng_impl.now();
  long long flags = 0;
  for (size_t i = 0; i < questions.key_flags.size(); ++i)
    if (questions.key_flags[i].now().get() == Py_True) flags |= 1LL << i;
  if (flags == 0) return prng_impl;
  return own(Py_BuildValue("(OL)", prng_impl.get(), flags));
}

Shared<SettingsNow> read_settings() {
  auto out = Shared<SettingsNow>::make();
  out->context = context();
  out->as_plain = questions.disable_jit.now().get() == Py_True;
  out->direct = answered(questions.off);
  for (const Question& q : questions.in_jits_key) out->in_jits_key.push_stolen(q.now());
  return out;
}

std::vector<Question> questions_of(const nb::list& parts) {
  std::vector<Question> out;
  for (nb::handle h : parts) out.push_back(Question::of_parts(h));
  return out;
}

}  // namespace

Question Question::of_parts(nb::handle tuple) {
  auto parts = nb::cast<nb::tuple>(tuple);
  auto keep = [](nb::handle h) { return nb::borrow(h).release().ptr(); };
  Question out;
  out.ask = keep(parts[0]);
  out.subject = parts[1].is_none() ? nullptr : keep(parts[1]);
  out.answer = parts.size() > 2 ? keep(parts[2]) : nullptr;
  return out;
}

bool answered(const std::vector<Question>& questions) {
  for (const Question& q : questions)
    if (q.now().get() != q.answer) return false;
  return true;
}

Shared<SettingsNow> settings_now() {
  if (!jax_reports_changes) return read_settings();
  ThreadSettings& last = last_settings();
  uint64_t thread = PyThreadState_GetID(PyThreadState_Get());  // never used again, as an address may be
  if (last.thread == thread && last.version == times_changed) return last.settings;
  // The count is read before the settings: a change while they are read is noticed by the next call.
  uint64_t version = times_changed;
  Shared<SettingsNow> settings = read_settings();
  // Released on return, after the assignment: releasing may run any code.
  Shared<SettingsNow> released = std::exchange(last.settings, settings);
  last.thread = thread;
  last.version = version;
  return settings;
}

void bind_settings(nb::module_& m) {
  m.def(
      "use_settings",
      [](nb::tuple disable_jit, nb::tuple prng_impl, nb::list others) {
        questions.disable_jit = Question::of_parts(disable_jit);
        questions.prng_impl = Question::of_parts(prng_impl);
        questions.key_flags = questions_of(others);
        ++times_changed;
      },
      nb::arg("disable_jit"), nb::arg("prng_impl"), nb::arg("others"),
      nb::sig("def use_settings(disable_jit: tuple[Any, Any], prng_impl: tuple[Any, Any], others: list[tuple[Any, "
              "Any]]) -> None"),
      "How to ask for JAX's settings: a function and its one argument. The others are booleans.");
  m.def(
      "use_direct_settings",
      [](nb::list off, nb::list in_jits_key) {
        questions.off = questions_of(off);
        questions.in_jits_key = questions_of(in_jits_key);
        ++times_changed;
      },
      nb::arg("off"), nb::arg("in_jits_key"),
      nb::sig("def use_direct_settings(off: list[tuple[Any, Any, Any]], in_jits_key: list[tuple[Any, Any]]) -> None"),
      "The settings that direct calls depend on: those with one answer that lets them through, those of jax.jit's "
      "key.");
  m.def(
      "settings_changed", [](nb::args) { return ++times_changed; },
      nb::sig("def settings_changed(*args: object) -> int"),
      "One of the settings may have changed: all are asked again.");
  m.def(
      "use_told_settings", [](bool told) { jax_reports_changes = told; }, nb::arg("told"),
      nb::sig("def use_told_settings(told: bool) -> None"),
      "Whether each change of a setting is followed by `settings_changed`.");
  m.def(
      "settings_now",
      [] {
        Shared<SettingsNow> now = settings_now();
        return nb::make_tuple(nb::borrow(now->context.get()), now->direct,
                              nb::steal(tuple_of(now->in_jits_key).release()));
      },
      nb::sig("def settings_now() -> tuple[Any, bool, tuple[Any, ...]]"),
      "What JAX's settings are in this thread: what a trace depends on and JAX's own key does not show, whether an "
      "executable may be run by itself, and what jax.jit has in its key.");
}

}  // namespace graftax
