// SPDX-License-Identifier: Apache-2.0
// Loaded before the interpreter: the n-th allocation of C++ that graftax's core asks for fails, once.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <new>

extern "C" {
long failing_new_at = 0;
}

static void* allocate(std::size_t size, void* caller) {
  Dl_info of;
  if (failing_new_at > 0 && dladdr(caller, &of) && std::strstr(of.dli_fname, "/_core.") && --failing_new_at == 0)
    throw std::bad_alloc();
  if (void* p = std::malloc(size ? size : 1)) return p;
  throw std::bad_alloc();
}

void* operator new(std::size_t size) { return allocate(size, __builtin_return_address(0)); }
void* operator new[](std::size_t size) { return allocate(size, __builtin_return_address(0)); }
