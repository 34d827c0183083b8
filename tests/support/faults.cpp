// SPDX-License-Identifier: Apache-2.0
// What each sanitizer has to find: tests/support/sanitized.py builds this as the core is built, and calls it first.
#include <thread>
#include <vector>

extern "C" {

int shared = 0;

void data_race_of_one(int size) {
  for (int i = 0; i < size; ++i) shared += i;
}

int data_race(int size) {
  std::thread other(data_race_of_one, size);
  data_race_of_one(size);
  other.join();
  return shared;
}

std::vector<int>* volatile held = nullptr;

int leak(int size) {
  held = new std::vector<int>(size);
  held = nullptr;
  return size;
}

int use_after_free(int size) {
  auto* freed = new std::vector<int>(size);
  int* first = freed->data();
  delete freed;
  return *first;
}

int overflow(int size) { return size + 2147483647; }

int beyond_the_end(int size) {
  std::vector<int> some(size);
  return some[some.capacity()];
}
}
