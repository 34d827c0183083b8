// SPDX-License-Identifier: Apache-2.0
// The table of contents of graftax._core: one bind_x(m) per file.
#include "call/call.h"
#include "call/caller.h"
#include "call/fast_dispatch.h"
#include "call/proven_donation.h"
#include "call/trace.h"
#include "capture/class_attributes.h"
#include "capture/frame_hook.h"
#include "capture/jax_frames.h"
#include "capture/judged_calls.h"
#include "capture/watchers.h"
#include "graph/editor.h"
#include "graph/program_rows.h"
#include "graph/rebuild.h"
#include "graph/record.h"
#include "graph/structure_cache.h"
#include "graph/swap_contents.h"
#include "python/hooks.h"
#include "python/jax_settings.h"
#include "python/user_call.h"
#include "tree/walk.h"

NB_MODULE(_core_of_main, m) {
  using namespace graftax;
  m.doc() = "The engine of graftax: walks object graphs. See core/README.md.";
  nanobind::set_leak_warnings(false);  // caches live as long as the process
  init_kinds();
  bind_hooks(m);
  bind_host_call(m);
  bind_kinds(m);
  bind_exchange(m);
  bind_rows(m);
  bind_graphdef(m);
  bind_recording(m);
  bind_kept(m);
  bind_replay(m);
  bind_rebuild(m);
  bind_inner_frames(m);
  bind_frames(m);
  bind_watch(m);
  bind_judged_calls(m);
  bind_class_attributes(m);
  bind_outcome(m);
  bind_trace(m);
  bind_surgery(m);
  bind_treedef(m);
  bind_tree(m);
  bind_signed(m);
  bind_call(m);
  bind_caller(m);
  bind_active_call(m);
  bind_settings(m);
  bind_direct(m);
  bind_donation(m);
}

// The caches are one for the process. Python 3.12 and later refuse by themselves; before, a second interpreter would
// take over nanobind's own state, and the main one would break.
extern "C" NB_EXPORT PyObject* PyInit__core() {
  if (PyInterpreterState_Get() == PyInterpreterState_Main()) return PyInit__core_of_main();
  PyErr_SetString(PyExc_ImportError, "module graftax._core does not support loading in subinterpreters");
  return nullptr;
}
