// What /proc tells of the processes of other ranks.
#pragma once

#include <cstdint>

namespace pycoll {

// State letter and start time of a process; {'?', 0} when /proc does not know it.
struct ProcessStat {
  char state;
  uint64_t starttime;
};
ProcessStat process_stat(int32_t pid);

// Whether no thread of the process that began then runs any more; also if /proc does not show it.
bool process_over(int32_t pid, uint64_t starttime);

}  // namespace pycoll
