// SPDX-License-Identifier: Apache-2.0
// Counts for libFuzzer which parts of the core run, where the compiler has no counters of libFuzzer's own kind.
#include <cstddef>
#include <cstdint>

extern "C" {

__attribute__((visibility("default"))) unsigned char graftax_reached[1 << 16];

// The compiler puts a call of it at the beginning of each part of a function that has no branch within.
void __sanitizer_cov_trace_pc() {
  auto place = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
  ++graftax_reached[place * 2654435769u >> 16];  // Knuth's multiplier spreads the places
}
}
