// Blocks of symmetric memory of one rank, of any size, reused when they are freed.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "memory/heap.h"

namespace pycoll {

// Sizes are rounded up to classes, four to each power of two. Blocks below a page come from slabs;
// larger ones are pages of their own. A freed block is kept for the next request of its class; the
// pages of large ones go back to the system, oldest first, when the kept bytes exceed a limit, or
// when the heap is full. The limit is kKeptBytes at first. When a class needs pages again after
// some went back, the limit grows by that size, up to twice the most that was ever in use: a
// program that goes through several sizes in turn needs the blocks of all of them. Where a whole
// class does not fit any more a block has just the pages asked for. A block that the heap has
// retired stays taken when it is freed. Thread-safe.
class Pool {
 public:
  static constexpr uint64_t kKeptBytes = 64 << 20;
  static constexpr uint64_t kAlignment = 64;

  Pool(Heap& heap, uint32_t region) : heap_(heap), region_(region) {}

  // Returns at least one byte; `zeroed` tells whether the bytes are known to be 0. Throws what
  // Heap::alloc throws.
  void* alloc(uint64_t nbytes, bool* zeroed = nullptr);
  // Does nothing in a child made by fork. Throws TransportError if the block is not in use.
  void free(void* block);
  // Pages for something else than a block, to be given to Heap::free; blocks that wait for reuse
  // make room for them. Throws what Heap::alloc throws.
  char* pages(uint64_t nbytes);
  // Bytes of a block in use, at least those that were asked for.
  uint64_t size_of(const void* block);

  // Bytes of blocks in use, and of freed ones that wait.
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t kept_bytes() const { return kept_bytes_; }

 private:
  char* carve(uint64_t nbytes);
  // Where so many do not fit, takes `least` bytes and sets `nbytes` to them.
  char* take_pages(uint64_t& nbytes, uint64_t least);
  void keep(uint64_t size, char* block);
  void forget(uint64_t size, char* block);
  bool give_back_oldest();
  void give_back(uint64_t size, char* block);
  void regret(uint64_t size);

  Heap& heap_;
  const uint32_t region_;
  std::mutex mutex_;
  struct Used {
    uint64_t size;        // of its class
    uint64_t generation;  // see Heap
  };
  std::unordered_map<const void*, Used> used_;             // by block
  std::unordered_map<uint64_t, std::vector<char*>> free_;  // size of the class -> blocks
  std::deque<std::pair<uint64_t, char*>> oldest_;          // large free blocks, in order
  char* slab_ = nullptr;
  uint64_t slab_left_ = 0;
  uint64_t used_bytes_ = 0, kept_bytes_ = 0, most_used_bytes_ = 0, limit_ = kKeptBytes;
  std::unordered_map<uint64_t, uint64_t> given_back_;  // size of the class -> blocks
};

}  // namespace pycoll
