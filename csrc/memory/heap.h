// The symmetric heap of a job: one sparse memfd that every rank maps whole.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/types.h"

namespace pycoll {

class Pool;
class Registration;

// A region belongs to one rank of the job, and only that rank allocates in it; so the book-keeping
// is private, and only the bytes are shared. Offsets count from the start of the file and mean the
// same on every rank. Thread-safe.
class Heap {
 public:
  // Maps `fd`, sizing and sealing it if nobody has. Takes no memory. region_bytes is a multiple of
  // the page size. Throws TransportError when the file has another size or cannot be mapped.
  Heap(int fd, uint32_t regions, uint64_t region_bytes);
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  // Reserves zeroed pages (first fit) and returns the offset of the first; at least one page.
  // Throws MemoryError when the region is full or the machine has no memory left, ForkedError in a
  // child made by fork.
  uint64_t alloc(uint32_t region, uint64_t nbytes);

  // Gives the pages of an alloc back to the system. Does nothing in a child made by fork, whose
  // parent still uses them.
  void free(uint64_t offset);

  // Blocks taken before now are not used again: a stopped peer may still write into them.
  void retire_blocks() { generation_.fetch_add(1, std::memory_order_relaxed); }
  // Changes with every call of that.
  uint64_t generation() const { return generation_.load(std::memory_order_relaxed); }

  // Maps pages of the heap a second time, over `place`. False, with errno, if that fails.
  bool map_over(char* place, uint64_t offset, uint64_t nbytes) const;

  // Remembers that private memory [data, data + nbytes) lies in the heap, too; see Registration.
  void add_alias(const void* data, uint64_t nbytes, std::weak_ptr<Registration> as);
  void drop_alias(const void* data);
  // The first byte of the last of these stretches that does not begin behind a byte.
  std::optional<uintptr_t> alias_below(uintptr_t byte) const;
  // Whether some of [data, data + nbytes) is registered.
  bool is_aliased(const void* data, uint64_t nbytes) const {
    return alias_count_.load(std::memory_order_relaxed) != 0 && finds_alias(data, nbytes);
  }
  // The one whose array has all of [data, data + nbytes); null if there is none.
  std::shared_ptr<Registration> registration_of(const void* data, uint64_t nbytes) const;

  // The blocks of a region; arrays come from here.
  Pool& pool(uint32_t region);

  // Whether this is the process that made this object, not a child of it made by fork.
  bool is_owner() const;
  void check_owner() const;

  char* at(uint64_t offset) const { return base_ + offset; }
  uint64_t bytes() const { return bytes_; }

  // The offset of a pointer if all of [ptr, ptr + nbytes) lies in the heap.
  std::optional<uint64_t> offset_of(const void* ptr, uint64_t nbytes) const {
    const uint64_t offset = reinterpret_cast<uintptr_t>(ptr) - reinterpret_cast<uintptr_t>(base_);
    if (offset > bytes_ || nbytes > bytes_ - offset) return std::nullopt;
    return offset;
  }
  bool contains(const void* ptr, uint64_t nbytes) const {
    return offset_of(ptr, nbytes).has_value();
  }

 private:
  using Ranges = std::map<uint64_t, uint64_t>;  // offset -> bytes

  bool finds_alias(const void* data, uint64_t nbytes) const;
  static void widen_gap(Ranges& gaps, uint64_t offset, uint64_t bytes);

  int fd_;
  int owner_ = 0;                   // process that made this object
  uint64_t region_bytes_, stride_;  // of which a region uses so much, and from one to the next
  uint64_t bytes_;
  char* base_ = nullptr;
  mutable std::mutex mutex_;
  std::vector<Ranges> used_, gaps_;  // per region
  std::map<uint32_t, std::unique_ptr<Pool>> pools_;
  struct Alias {
    uintptr_t end;  // past the last byte
    std::weak_ptr<Registration> registration;
  };
  std::map<uintptr_t, Alias> aliases_;  // by first byte
  std::atomic<size_t> alias_count_{0};
  std::atomic<uint64_t> generation_{0};
};

}  // namespace pycoll
