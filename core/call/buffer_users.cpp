// SPDX-License-Identifier: Apache-2.0
#include "call/buffer_users.h"

#include <map>
#include <tuple>

#ifdef __linux__
#include <fcntl.h>
#include <unistd.h>
#endif

namespace graftax {

namespace {

constexpr size_t array_bytes = 1024, buffer_bytes = 320, count_bytes = 40;  // how far the trial looks
constexpr int32_t most_users = 64;  // larger numbers are not counts: the trial makes a few users

// Memory of this process that may not be there: reading it directly could end the process.
class OwnMemory {
 public:
#ifdef __linux__
  OwnMemory() : file_(open("/proc/self/mem", O_RDONLY | O_CLOEXEC)) {}
  OwnMemory(const OwnMemory&) = delete;
  OwnMemory& operator=(const OwnMemory&) = delete;
  ~OwnMemory() {
    if (file_ >= 0) close(file_);
  }
  // How many bytes from this address on could be read.
  size_t read(uint64_t address, char* into, size_t count) const {
    ssize_t got = file_ < 0 ? -1 : pread(file_, into, count, static_cast<off_t>(address));
    return got < 0 ? 0 : static_cast<size_t>(got);
  }

 private:
  int file_;
#else
  size_t read(uint64_t, char*, size_t) const { return 0; }
#endif
};

using Key = std::tuple<size_t, size_t, size_t>;  // the three parts of a place
using Numbers = std::map<Key, int32_t>;

// An aligned address in the half of the address space that belongs to the process.
bool may_be_pointer(uint64_t word) { return word > 4096 && word % 8 == 0 && word >> 47 == 0; }

void add_numbers(Numbers& out, const char* memory, size_t size, size_t array, size_t buffer) {
  for (size_t c = 0; c + 4 <= std::min(size, count_bytes); c += 4) {
    int32_t number;
    std::memcpy(&number, memory + c, 4);
    if (number >= 0 && number <= most_users) out.emplace(Key{array, buffer, c}, number);
  }
}

// Every small number that one or two pointers from the array lead to.
Numbers numbers_behind(const OwnMemory& memory, PyObject* array, size_t size) {
  Numbers out;
  for (size_t a = sizeof(PyObject); a + 8 <= size; a += 8) {
    uint64_t first, second;
    std::memcpy(&first, reinterpret_cast<const char*>(array) + a, 8);
    if (!may_be_pointer(first)) continue;
    char buffer[buffer_bytes], count[count_bytes];
    size_t buffer_size = memory.read(first, buffer, buffer_bytes);
    add_numbers(out, buffer, buffer_size, a, BufferUsers::Place::direct);
    for (size_t b = 0; b + 8 <= buffer_size; b += 8) {
      std::memcpy(&second, buffer + b, 8);
      if (may_be_pointer(second)) add_numbers(out, count, memory.read(second, count, count_bytes), a, b);
    }
  }
  return out;
}

// Every small number that two pointers from here lead to, in the same way.
Numbers numbers_of_buffers(const OwnMemory& memory, PyObject* array, size_t at) {
  Numbers out;
  uint64_t holder;
  std::memcpy(&holder, reinterpret_cast<const char*>(array) + at, 8);
  char buffers[buffer_bytes], pointers[buffer_bytes], count[count_bytes];
  auto each_pointer = [&](uint64_t address, char* into, auto use) {
    size_t size = may_be_pointer(address) ? memory.read(address, into, buffer_bytes) : 0;
    for (size_t i = 0; i + 8 <= size; i += 8) {
      uint64_t word;
      std::memcpy(&word, into + i, 8);
      if (may_be_pointer(word)) use(i, word);
    }
  };
  each_pointer(holder, buffers, [&](size_t list, uint64_t first) {
    each_pointer(first, pointers, [&](size_t buffer, uint64_t counted) {
      add_numbers(out, count, memory.read(counted, count, count_bytes), list, buffer);
    });
  });
  return out;
}

// Keeps the places whose number is now so much more than at first.
void keep_places(Numbers& places, const Numbers& now, int32_t more) {
  for (auto place = places.begin(); place != places.end();) {
    auto current = now.find(place->first);
    bool holds = current != now.end() && current->second == place->second + more;
    place = holds ? std::next(place) : places.erase(place);
  }
}

// The places behind one array, among those of `numbers_now`, where the number follows what this function makes of it.
template <typename NumbersNow>
Numbers places_for(PyObject* array, PyObject* another, PyObject* alias, NumbersNow numbers_now) {
  Numbers out = numbers_now();
  OwnedList aliases;
  auto make = [&](PyObject* shared) { aliases.push_stolen(own(PyObject_CallOneArg(alias, shared))); };
  make(another);  // what arrays of other buffers share with this one, such as its type, does not count
  keep_places(out, numbers_now(), 0);
  // One more for each array that shares the buffer, and as before once they are gone.
  for (int32_t more = 1; more <= 3; ++more) {
    make(array);
    keep_places(out, numbers_now(), more);
  }
  aliases.clear();
  keep_places(out, numbers_now(), 0);
  return out;
}

}  // namespace

BufferUsers BufferUsers::find(PyTypeObject* type, const nb::list& samples, const nb::list& aliases) {
  BufferUsers out;
#ifdef Py_GIL_DISABLED
  return out;  // what is counted may change before it is used
#endif
  if (samples.size() % 2) raise_error(PyExc_ValueError, "samples come in pairs");
  OwnMemory memory;
  size_t size = std::min(array_bytes, static_cast<size_t>(type->tp_basicsize));
  for (nb::handle alias : aliases) {
    Numbers places;
    for (size_t i = 0; i < samples.size(); ++i) {
      nb::object array = samples[i], another = samples[i ^ 1];  // the other one of its pair
      // Offsets are of this class alone.
      if (Py_TYPE(array.ptr()) != type) return {};
      Numbers here = places_for(array.ptr(), another.ptr(), alias.ptr(),
                                [&] { return numbers_behind(memory, array.ptr(), size); });
      if (i == 0) places = std::move(here);
      else keep_places(places, here, 0);
    }
    if (places.size() != 1) return {};
    auto [key, one_user] = *places.begin();
    out.places_.push_back({std::get<0>(key), std::get<1>(key), std::get<2>(key), one_user});
  }
  return out;
}

std::vector<BufferUsers::MeshPlaces> BufferUsers::places_on_mesh(PyTypeObject* type, nb::handle array,
                                                                 nb::handle another, const nb::list& shard_aliases,
                                                                 nb::handle list_alias) {
  OwnMemory memory;
  std::vector<MeshPlaces> out;
  size_t size = std::min(array_bytes, static_cast<size_t>(type->tp_basicsize));
  if (Py_TYPE(array.ptr()) != type || shard_aliases.size() < 2) return {};
  // First the count of the list of buffers, then, behind the same pointer, the count of each buffer in it.
  Numbers lists = places_for(array.ptr(), another.ptr(), list_alias.ptr(),
                             [&] { return numbers_behind(memory, array.ptr(), size); });
  for (auto [place, users_of_list] : lists) {
    auto [list, buffer, count_of_list] = place;
    if (buffer != Place::direct) continue;
    std::vector<Numbers> of_shards;
    for (nb::handle alias : shard_aliases)
      of_shards.push_back(places_for(array.ptr(), another.ptr(), alias.ptr(),
                                     [&, at = list] { return numbers_of_buffers(memory, array.ptr(), at); }));
    for (auto [first, users] : of_shards[0])
      for (auto [second, _] : of_shards[1]) {
        MeshPlaces p{{list, Place::direct, count_of_list, users_of_list},
                     std::get<0>(first),
                     std::get<1>(first),
                     std::get<1>(second) - std::get<1>(first),
                     std::get<2>(first),
                     users};
        bool is_spaced = std::get<1>(second) > std::get<1>(first);
        for (size_t i = 1; i < of_shards.size() && is_spaced; ++i) {
          auto place_of_shard = of_shards[i].find({p.buffers, p.first + i * p.stride, p.count});
          is_spaced = place_of_shard != of_shards[i].end() && place_of_shard->second == users;
        }
        if (is_spaced && std::find(out.begin(), out.end(), p) == out.end()) out.push_back(p);
      }
  }
  return out;
}

bool BufferUsers::find_on_meshes(PyTypeObject* type, const nb::list& groups, nb::handle list_alias) {
  std::optional<std::vector<MeshPlaces>> common;  // to all groups so far
  for (nb::handle group : groups) {
    auto [arrays, shard_aliases] = nb::cast<std::pair<std::pair<nb::object, nb::object>, nb::list>>(group);
    for (bool is_second : {false, true}) {
      auto [array, another] = is_second ? std::pair(arrays.second, arrays.first) : arrays;
      auto here = places_on_mesh(type, array, another, shard_aliases, list_alias);
      auto is_missing = [&](const MeshPlaces& p) { return std::find(here.begin(), here.end(), p) == here.end(); };
      if (common) common->erase(std::remove_if(common->begin(), common->end(), is_missing), common->end());
      else common = std::move(here);
    }
  }
  known_on_meshes_ = known() && common && common->size() == 1;
  if (known_on_meshes_) on_meshes_ = common->front();
  return known_on_meshes_;
}

}  // namespace graftax
