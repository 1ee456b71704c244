// An array that exists already, moved into symmetric memory where it lies.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "memory/heap.h"

namespace pycoll {

// The whole pages inside [data, data + nbytes) become pages of the heap, mapped at their old
// addresses. The bytes before and after them share their pages with strangers and stay where they
// are; the heap has a copy of them, which gather() and scatter() keep up to date. So one
// stretch of the heap is the whole array as the peers see it:
//
//   user     head | whole pages | tail
//                 :  same pages :
//   heap     head | whole pages | tail
class Registration : public std::enable_shared_from_this<Registration> {
 public:
  // Of no array yet.
  explicit Registration(std::shared_ptr<Heap> heap) : heap_(std::move(heap)) {}
  // Leaves the pages as they are if release() was not called: they may be in use.
  ~Registration() = default;
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  // Moves an array into a region; once only. Nobody may write to the array meanwhile. Throws
  // ArgumentError when the memory is not private and writable, or when there is no whole page in
  // it; MemoryError when the heap is full.
  void move_in(uint32_t region, char* data, uint64_t nbytes);

  // Whether the array has been moved in, and neither released nor forgotten since. After an
  // interrupt release() may be called again as long as this is true.
  bool is_in() const { return in_; }

  // For memory whose owner may put the array elsewhere without a word: what tells whether it still
  // lies here. For threads that exclude each other, by Python's lock.
  void watch(std::function<bool()> is_there) { is_there_ = std::move(is_there); }
  bool is_there() const { return is_there_ == nullptr || is_there_(); }

  // Where the engine finds the array.
  char* heap_address() const { return heap_address_; }
  char* heap_address_of(const char* data) const { return heap_address_ + (data - data_); }

  // Copy what a part of the array has of head and tail from the user's memory to the heap, and
  // back.
  void gather(char* data, uint64_t nbytes) const;
  void scatter(char* data, uint64_t nbytes) const;

  // Calls copy(user, heap, bytes) for what a part of the array has of head and tail.
  template <typename Copy>
  void edges(char* data, uint64_t nbytes, Copy&& copy) const {
    char *const end = data + nbytes, *const head_end = std::min(end, first_);
    if (data < head_end) copy(data, heap_address_of(data), size_t(head_end - data));
    char* const tail = std::max(data, last_);
    if (tail < end) copy(tail, heap_address_of(tail), size_t(end - tail));
  }

  // Turns the pages into private memory again, with their contents, and frees their place in
  // the heap; in a child made by fork, whose parent goes on using it, that stays.
  void release();

  // The same, unless a call of this process holds the array: then false, and all stays as it is.
  bool release_unheld();

  // For memory that its owner has given back: others may have these addresses now. The pages stay
  // as they are, and their block of the heap is not used again, because it may still be mapped.
  void forget();

  // While a call holds an array it stays where it is. Throws ArgumentError if it is not in. For
  // threads that exclude each other, by Python's lock.
  void hold();
  void let_go() { --holds_; }
  // A child made by fork has none of the threads that hold the array.
  bool is_held() const { return holds_ > 0 && heap_->is_owner(); }

 private:
  void take_pages(uint32_t region);

  std::shared_ptr<Heap> heap_;
  std::function<bool()> is_there_;
  bool in_ = false;
  int holds_ = 0;
  uint64_t offset_ = 0;      // of the pages in the heap
  uint64_t generation_ = 0;  // of the heap, when they were taken
  // The array, its whole pages, and its end.
  char *data_ = nullptr, *first_ = nullptr, *last_ = nullptr, *end_ = nullptr;
  char* heap_address_ = nullptr;
};

// Holds a registered array for as long as it exists, or until end().
class Hold {
 public:
  explicit Hold(std::shared_ptr<Registration> held) : held_(std::move(held)) { held_->hold(); }
  ~Hold() { end(); }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

  void end() {
    if (held_ != nullptr) held_->let_go();
    held_.reset();
  }

 private:
  std::shared_ptr<Registration> held_;
};

}  // namespace pycoll
