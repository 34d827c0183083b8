// SPDX-License-Identifier: Apache-2.0
// What the interpreter runs by itself between two steps of a program: finalizers and callbacks of the garbage collector,
// handlers of signals. None of it is part of the function that happens to be traced.
#pragma once

#include "capture/frame_layout.h"

namespace graftax {

// Has `tell` told of when a collection begins (true) and ends, from now on; a second time does nothing.
void hear_collections(void (*tell)(bool begins));
void hear_collections_no_more();

// Is this frame that of a handler which the interpreter calls for a signal?
bool is_signal_handler(const Frame& frame);

}  // namespace graftax
