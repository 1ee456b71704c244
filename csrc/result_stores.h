// How a rank stores the results of calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "store_choice.h"
#include "wait.h"

namespace pycoll {

// Chooses for each kind of call, by the time that its stores into results take, apart from all else
// that it does. Where the same few arrays come again, the caches have their lines; where an array
// has not been touched for long, a line would be fetched from memory only to be overwritten. Every
// rank chooses for itself: both ways leave the same bytes. Not thread-safe.
class ResultStores {
 public:
  static constexpr uint64_t kLeastBytes = 16 << 10;  // less is not worth the search

  // Begins a call of the kind `key` with a result of so many bytes; returns whether that is to be
  // stored past the caches.
  bool begin(uint32_t key, uint64_t nbytes) {
    if (latest_ == nullptr || key != key_) {
      if (choices_.size() == kMost && !choices_.contains(key)) choices_.clear();
      latest_ = &choices_[key];
      key_ = key;
    }
    choice_ = latest_;
    nbytes_ = nbytes;
    ns_ = 0;
    timed_ = choice_->timed();
    return choice_->past_caches();
  }
  // Whether stores into the result of the running call are to be timed.
  bool timed() const { return timed_; }
  // Begins a call in which nothing is to be chosen.
  void begin() {
    choice_ = nullptr;
    timed_ = false;
  }
  // Ends a call that has succeeded.
  void end() {
    if (choice_ != nullptr) choice_->note(nbytes_, ns_, timed_ ? now_ns() : 0);
  }

  // While one exists, what passes counts as time of stores.
  class Clock {
   public:
    Clock(ResultStores& stores, bool runs)
        : stores_(runs ? &stores : nullptr), begin_(runs ? now_ns() : 0) {}
    ~Clock() {
      if (stores_ != nullptr) stores_->ns_ += now_ns() - begin_;
    }
    Clock(const Clock&) = delete;
    Clock& operator=(const Clock&) = delete;

   private:
    ResultStores* stores_;
    uint64_t begin_;
  };

 private:
  static constexpr size_t kMost = 1024;

  std::unordered_map<uint32_t, StoreChoice> choices_;
  StoreChoice* latest_ = nullptr;  // that of key_
  uint32_t key_ = 0;
  StoreChoice* choice_ = nullptr;  // of the running call; null: nothing is to be chosen
  bool timed_ = false;
  uint64_t nbytes_ = 0, ns_ = 0;
};

}  // namespace pycoll
