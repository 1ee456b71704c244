#include "base/process.h"

#include <dirent.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>

namespace pycoll {

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
