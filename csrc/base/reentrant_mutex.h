// A mutex that a thread which has it can lock again, at the cost of a few instructions.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <mutex>

namespace pycoll {

class ReentrantMutex {
 public:
  void lock() {
    if (!locked_again()) {
      mutex_.lock();
      own();
    }
  }
  bool try_lock() {
    if (locked_again()) return true;
    if (!mutex_.try_lock()) return false;
    own();
    return true;
  }
  void unlock() {
    if (--depth_ > 0) return;
    owner_.store(0, std::memory_order_relaxed);
    mutex_.unlock();
  }

 private:
  static uintptr_t self() { return static_cast<uintptr_t>(pthread_self()); }
  bool locked_again() {
    if (owner_.load(std::memory_order_relaxed) != self()) return false;
    ++depth_;
    return true;
  }
  void own() {
    owner_.store(self(), std::memory_order_relaxed);
    depth_ = 1;
  }

  std::mutex mutex_;
  std::atomic<uintptr_t> owner_{0};
  uint32_t depth_ = 0;  // for the owner only
};

}  // namespace pycoll
