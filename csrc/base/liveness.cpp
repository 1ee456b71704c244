#include "base/liveness.h"

#include <dirent.h>
#include <linux/futex.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "base/error.h"

namespace pycoll {
namespace {

#if defined(__GLIBC__)
unsigned word_of(pthread_mutex_t* lock) {
  return static_cast<unsigned>(__atomic_load_n(&lock->__data.__lock, __ATOMIC_ACQUIRE));
}
#else
// The error of an attempt to take the lock, which is undone.
int try_once(pthread_mutex_t* lock) {
  const int rc = pthread_mutex_trylock(lock);
  if (rc == 0 || rc == EOWNERDEAD) pthread_mutex_unlock(lock);  // dead: not recoverable from now on
  return rc;
}
#endif

}  // namespace

void init_liveness(pthread_mutex_t* lock) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int rc = pthread_mutex_init(lock, &attributes);
  pthread_mutexattr_destroy(&attributes);
  COLL_CHECK(rc == 0, "TransportError", "no robust mutex: ", std::strerror(rc));
}

#if defined(__GLIBC__)
// The kernel sets this bit in the lock word as the first act of the owner's death.
bool owner_died(pthread_mutex_t* lock) { return (word_of(lock) & FUTEX_OWNER_DIED) != 0; }
bool is_unowned(pthread_mutex_t* lock) { return word_of(lock) == 0; }
#else
bool owner_died(pthread_mutex_t* lock) {
  const int rc = try_once(lock);
  return rc == EOWNERDEAD || rc == ENOTRECOVERABLE;
}
bool is_unowned(pthread_mutex_t* lock) { return try_once(lock) == 0; }
#endif

ProcessStat process_stat(int32_t pid) {
  ProcessStat stat{'?', 0};
  char path[32], text[1024];
  std::snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  FILE* file = std::fopen(path, "re");
  if (file == nullptr) return stat;
  const size_t n = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  text[n] = '\0';
  const char* at = std::strrchr(text, ')');  // the name before it may hold anything
  if (at == nullptr || at[1] != ' ') return stat;
  at += 2;
  stat.state = *at;
  for (int field = 3; field < 22 && at != nullptr; ++field) {
    at = std::strchr(at, ' ');
    if (at != nullptr) ++at;
  }
  if (at != nullptr) std::sscanf(at, "%lu", &stat.starttime);
  return stat;
}

// Of a process whose main thread is dead, /proc shows the threads that still run beside it.
bool process_over(int32_t pid, uint64_t starttime) {
  const auto unknown = [] { return errno == ENOENT || errno == ESRCH; };  // not: no descriptors
  errno = 0;
  const ProcessStat stat = process_stat(pid);
  if (stat.starttime != starttime) return stat.starttime != 0 || unknown();
  if (stat.state != 'Z' && stat.state != 'X') return false;
  char path[32];
  std::snprintf(path, sizeof(path), "/proc/%d/task", pid);
  DIR* tasks = opendir(path);
  if (tasks == nullptr) return unknown();
  size_t entries = 0;
  while (readdir(tasks) != nullptr) ++entries;
  closedir(tasks);
  return entries <= 3;  // ".", ".." and the main thread
}

}  // namespace pycoll
