// How a rank stores the results of calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <unordered_map>

#include "base/wait.h"
#include "kernels/fold/store_choice.h"

namespace pycoll {

// Chooses for each kind of call, by the time that its stores into results take: folds and copies,
// not waits, nor what the kernel copies. Where the same few arrays come again, the caches have
// their lines; where an array has not been touched for long, a line would be fetched from memory
// only to be overwritten. Every rank chooses for itself: both ways leave the same bytes. Not
// thread-safe.
class ResultStores {
 public:
  using Now = uint64_t (*)();
  static constexpr uint64_t kLeastBytes = 16 << 10;  // less is not worth the search

  explicit ResultStores(Now now = now_ns) : now_(now) {}

  // Begins a call of the kind `key`; returns whether it stores its result past the caches. `kept`:
  // caches have room for the arrays of this kind.
  bool begin(uint32_t key, bool kept = true) {
    choice_ = find(key, kept);
    timed_ = choice_ != nullptr && choice_->timed();
    nbytes_ = ns_ = 0;
    return choice_ != nullptr && choice_->past_caches();
  }
  // Begins a call in which nothing is to be chosen.
  void begin() {
    choice_ = nullptr;
    timed_ = false;
  }
  // Whether stores into the result of the running call are to be timed.
  bool timed() const { return timed_; }
  // Ends a call that has succeeded. One that stores nothing does not count.
  void end() {
    if (choice_ != nullptr && (!timed_ || nbytes_ > 0)) choice_->note(nbytes_, ns_);
  }

  // While one exists, what passes is the time of storing so many bytes; none: nothing is.
  class Clock {
   public:
    Clock(ResultStores& stores, uint64_t nbytes)
        : stores_(stores), nbytes_(nbytes), begin_(nbytes > 0 ? stores.now_() : 0) {}
    ~Clock() {
      if (nbytes_ == 0) return;
      stores_.nbytes_ += nbytes_;
      stores_.ns_ += stores_.now_() - begin_;
    }
    Clock(const Clock&) = delete;
    Clock& operator=(const Clock&) = delete;

   private:
    ResultStores& stores_;
    uint64_t nbytes_, begin_;
  };

 private:
  static constexpr size_t kMost = 1024;  // kinds

  // The choice for a kind; null without memory for it.
  StoreChoice* find(uint32_t key, bool kept) {
    if (latest_ != nullptr && key == key_) return latest_;
    latest_ = nullptr;
    try {
      if (choices_.size() == kMost && !choices_.contains(key)) choices_.clear();
      latest_ = &choices_.try_emplace(key, kept).first->second;
    } catch (const std::bad_alloc&) {
    }
    key_ = key;
    return latest_;
  }

  Now now_;
  std::unordered_map<uint32_t, StoreChoice> choices_;
  StoreChoice* latest_ = nullptr;  // that of key_
  uint32_t key_ = 0;
  StoreChoice* choice_ = nullptr;  // of the running call; null: nothing is to be chosen
  bool timed_ = false;
  uint64_t nbytes_ = 0, ns_ = 0;
};

}  // namespace pycoll
