// SPDX-License-Identifier: Apache-2.0
// What happens to a daemon thread that is in the core when the interpreter ends.
//
// Before Python 3.14 such a thread ends by pthread_exit where it next wants the interpreter's lock. With glibc that
// unwinds the stack as an exception does: the frames of the core would release references without the lock, and the
// process would crash at its end. Python 3.14 lets the thread wait instead, for ever. So do these frames: the linker
// takes this function for the one that the compiler names in each frame (--wrap, see CMakeLists.txt).
#if defined(__linux__)

#include <unistd.h>
#include <unwind.h>

#include "python/py.h"

extern "C" {

_Unwind_Reason_Code __real___gxx_personality_v0(int, _Unwind_Action, _Unwind_Exception_Class, _Unwind_Exception*,
                                                _Unwind_Context*);

_Unwind_Reason_Code __wrap___gxx_personality_v0(int version, _Unwind_Action actions, _Unwind_Exception_Class kind,
                                                _Unwind_Exception* exception, _Unwind_Context* context) {
#if PY_VERSION_HEX >= 0x030D0000
  bool ends = Py_IsFinalizing();
#else
  bool ends = _Py_IsFinalizing();
#endif
  while (ends && (actions & _UA_FORCE_UNWIND)) pause();
  return __real___gxx_personality_v0(version, actions, kind, exception, context);
}
}

#endif
