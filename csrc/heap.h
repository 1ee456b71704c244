// The symmetric heap of a job: one sparse memfd that every rank maps whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace pycoll {

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
  int fd_;
  int owner_ = 0;  // process that made this object
  uint64_t region_bytes_;
  uint64_t bytes_;
  char* base_ = nullptr;
  std::mutex mutex_;
  std::vector<std::map<uint64_t, uint64_t>> used_;  // per region: offset -> bytes
};

}  // namespace pycoll
