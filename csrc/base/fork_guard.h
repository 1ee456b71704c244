// Whether this is the process that made an object or a child made by fork, without a system call.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace pycoll {

// A page that the kernel clears in children.
class ForkGuard {
 public:
  ForkGuard() {
    void* page = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    COLL_CHECK(
        page != MAP_FAILED && madvise(page, kPage, MADV_WIPEONFORK) == 0, "TransportError",
        "no page that is wiped on fork (Linux 4.14 or newer is needed): ", std::strerror(errno));
    mark_ = static_cast<volatile uint32_t*>(page);
    *mark_ = 1;
  }
  ~ForkGuard() { munmap(const_cast<uint32_t*>(mark_), kPage); }
  ForkGuard(const ForkGuard&) = delete;
  ForkGuard& operator=(const ForkGuard&) = delete;

  // Whether this is the process that has made it.
  bool at_home() const { return *mark_ != 0; }

 private:
  static constexpr size_t kPage = 4096;
  volatile uint32_t* mark_;
};

}  // namespace pycoll
