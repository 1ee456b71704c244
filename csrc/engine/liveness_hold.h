// What shows the peers of a rank that its process lives: a lock that the process holds.
#pragma once

#include <pthread.h>

#include "base/fork_guard.h"

namespace pycoll {

class LivenessThread;

// Holds the liveness lock of a rank for as long as it lives. One thread holds those of all ranks
// that the process is, as the lock belongs to a thread that must outlive the caller's; it ends with
// the last of them.
class LivenessHold {
 public:
  // Returns once the lock is held. Throws TransportError if there can be no thread.
  explicit LivenessHold(pthread_mutex_t* lock);
  // Releases the lock; not in a child made by fork, which does not hold it.
  ~LivenessHold();
  LivenessHold(const LivenessHold&) = delete;
  LivenessHold& operator=(const LivenessHold&) = delete;

 private:
  pthread_mutex_t* const lock_;
  LivenessThread* thread_ = nullptr;
  const ForkGuard guard_;
};

}  // namespace pycoll
