// Whether the processes of other ranks live: by a lock that their owner's death marks, and by
// /proc.
#pragma once

#include <pthread.h>

#include <cstdint>

namespace pycoll {

// Makes an unlocked robust process-shared mutex of it: a liveness lock.
void init_liveness(pthread_mutex_t* lock);

// Whether the process that held the lock died. No system call; also true of a process in another
// PID namespace, and long before its memory is torn down.
bool owner_died(pthread_mutex_t* lock);

// Whether no thread holds the lock: none has taken it so far, or its owner has released it.
bool is_unowned(pthread_mutex_t* lock);

// State letter and start time of a process; {'?', 0} when /proc does not know it.
struct ProcessStat {
  char state;
  uint64_t starttime;
};
ProcessStat process_stat(int32_t pid);

// Whether no thread of the process that began then runs any more; also if /proc does not show it.
bool process_over(int32_t pid, uint64_t starttime);

}  // namespace pycoll
