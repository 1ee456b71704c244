// How long a process takes to read the memory of another through the kernel, by how far behind the
// source the destination lies in its page: as the kernel does it, and as the engine lets it. On
// pages of 4 KiB; medians. It links what `make build` has compiled:
//   engine=$(find csrc -name '*.cpp' ! -path '*/cuda/*' ! -path '*/bindings/*' | sed 's/cpp$/o/')
//   (cd build/objects-* && g++ -O2 -std=c++20 -pthread -I../../csrc \
//     ../../benchmarks/native/read_bench.cpp $engine -o ../reads) && build/reads
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "engine/peer_memory.h"
#include "timing.h"

namespace {

constexpr size_t kPage = 4096, kMost = 4 << 20;
constexpr int kRounds = 61, kCalls = 4;

bool read_at_once(pid_t pid, void* to, const void* from, size_t nbytes) {
  const iovec here{to, nbytes}, there{const_cast<void*>(from), nbytes};
  return process_vm_readv(pid, &here, 1, &there, 1, 0) == static_cast<ssize_t>(nbytes);
}

template <typename Read>
double microseconds(Read read) {
  auto checked = [&] {
    if (!read()) std::abort();
  };
  return seconds_of(checked, kCalls) * 1e6;
}

void measure(pid_t pid, char* to, const char* from, size_t nbytes, size_t behind) {
  std::vector<double> once, ours;
  for (int i = 0; i < kRounds; ++i) {
    once.push_back(microseconds([&] { return read_at_once(pid, to + behind, from, nbytes); }));
    ours.push_back(
        microseconds([&] { return pycoll::read_process(pid, to + behind, from, nbytes); }));
  }
  std::printf("%8zu B, %2zu behind: kernel %8.2f us, engine %8.2f us\n", nbytes, behind,
              median(once), median(ours));
}

}  // namespace

int main() {
  const char* theirs = memory(kMost + kPage, true);
  const pid_t parent = getpid(), child = fork();
  if (child == 0) {
    char* own = memory(kMost + kPage, true);
    for (size_t nbytes = kPage; nbytes <= kMost; nbytes *= 4) {
      for (size_t behind : {0, 1, 16, 31, 32, 48, 64}) {
        measure(parent, own, theirs, nbytes, behind);
      }
    }
    return 0;
  }
  int status = 1;
  waitpid(child, &status, 0);
  return status;
}
