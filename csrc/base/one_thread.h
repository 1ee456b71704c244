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
    const auto me = static_cast<uintptr_t>(pthread_self());
    uintptr_t nobody = 0;
    COLL_CHECK(user_.compare_exchange_strong(nobody, me, std::memory_order_acquire),
               "ConcurrentUseError", "thread ", me, " used rank ", rank,
               "'s communicator while thread ", nobody,
               " was inside a call; use one communicator per thread (dup), or a lock");
  }
  ~Use() { user_.store(0, std::memory_order_release); }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  User& user_;
};

}  // namespace pycoll
