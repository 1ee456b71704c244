// Descriptors that are not taken for standard streams.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace pycoll {

// Returns a copy of a descriptor that is no standard stream, even if those are closed: what is
// written or opened there later would meet it. -1 with errno if there is none.
inline int copy_above_streams(int fd) { return fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1); }

// Moves the descriptor `fd` there, if it has just been opened in the place of such a stream.
inline void move_above_streams(int& fd) {
  if (fd < 0 || fd > STDERR_FILENO) return;
  const int moved = copy_above_streams(fd);
  COLL_CHECK(moved >= 0, "TransportError", "cannot keep a descriptor: ", std::strerror(errno));
  close(fd);
  fd = moved;
}

}  // namespace pycoll
