// One thread at a time.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

#include "base/error.h"

namespace pycoll {

// The thread that is inside, or 0.
using User = std::atomic<uintptr_t>;

// Marks the calling thread as the one inside for as long as it lives; throws ConcurrentUseError if
// another one is.
class Use {
 public:
  Use(User& user, uint32_t rank) : user_(user) {
    uintptr_t nobody = 0;
    const auto me = static_cast<uintptr_t>(pthread_self());
    if (!user_.compare_exchange_strong(nobody, me, std::memory_order_acquire)) {
      refuse(nobody, rank);
    }
  }
  // Throws what a Use would throw now.
  static void check_unused(const User& user, uint32_t rank) {
    const uintptr_t other = user.load(std::memory_order_acquire);
    if (other != 0) refuse(other, rank);
  }
  ~Use() { user_.store(0, std::memory_order_release); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  [[noreturn]] static void refuse(uintptr_t other, uint32_t rank) {
    throw_error("ConcurrentUseError", "thread ", static_cast<uintptr_t>(pthread_self()),
                " used rank ", rank, "'s communicator while thread ", other,
                " was inside a call; use one communicator per thread (dup), or a lock");
  }

  User& user_;
};

}  // namespace pycoll
