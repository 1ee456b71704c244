#include "engine/peer_memory.h"

#include <algorithm>
#include <cerrno>

#include "base/types.h"
#include "kernels/fold/fold.h"
#include "memory/control.h"

#ifdef __linux__
#include <sys/uio.h>
#endif

namespace pycoll {
namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;  // of Fibonacci hashing
constexpr uint64_t kRoom = 64 << 10;              // stays in the L2 cache

bool read_at_once(int32_t pid, void* to, const void* from, uint64_t nbytes) {
#ifdef __linux__
  char* target = static_cast<char*>(to);
  const char* source = static_cast<const char*>(from);
  while (nbytes > 0) {
    const iovec here{target, nbytes}, there{const_cast<char*>(source), nbytes};
    const ssize_t copied = process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (copied <= 0) {
      if (copied < 0 && errno == EINTR) continue;
      return false;
    }
    target += copied;
    source += copied;
    nbytes -= static_cast<uint64_t>(copied);
  }
  return true;
#else
  return (void)pid, (void)to, (void)from, nbytes == 0;
#endif
}

// By way of a room that begins where `from` does in its page: 256 KiB in 39 us where the kernel
// alone takes 112.
bool read_in_pieces(int32_t pid, char* to, const char* from, uint64_t nbytes) {
  alignas(kPage) char rooms[kRoom + kPage];
  char* const room = rooms + reinterpret_cast<uintptr_t>(from) % kPage;
  for (uint64_t at = 0; at < nbytes; at += kRoom) {
    const uint64_t n = std::min(kRoom, nbytes - at);
    if (!read_at_once(pid, room, from + at, n)) return false;
    copy(to + at, room, n);
  }
  return true;
}

}  // namespace

bool read_process(int32_t pid, void* to, const void* from, uint64_t nbytes) {
  if (nbytes < kPage || !slow_for_strings(to, from)) return read_at_once(pid, to, from, nbytes);
  return read_in_pieces(pid, static_cast<char*>(to), static_cast<const char*>(from), nbytes);
}

PeerMemory::PeerMemory(std::shared_ptr<ControlSegment> control, uint32_t rank)
    : control_(std::move(control)), rank_(rank), word_(control_->cookie() ^ ~uint64_t{rank}) {
  control_->block(rank_).word_at.store(reinterpret_cast<uintptr_t>(&word_),
                                       std::memory_order_release);
}

void PeerMemory::probe() {
  if (probed_) return;
  probed_ = true;
  for (uint32_t peer = 0; peer < control_->geometry().world_size; ++peer) {
    able_ = able_ && (peer == rank_ || reaches(*control_, peer));
  }
}

bool PeerMemory::reaches(ControlSegment& control, uint32_t peer) {
  const uintptr_t at = control.block(peer).word_at.load(std::memory_order_acquire);
  const int32_t pid = control.block(peer).pid.load(std::memory_order_relaxed);
  uint64_t word = 0;
  const bool found = read_process(pid, &word, reinterpret_cast<const void*>(at), sizeof(word));
  return found && word == (control.cookie() ^ ~uint64_t{peer});
}

bool PeerMemory::read(uint32_t peer, void* to, const void* from, uint64_t nbytes) const {
  return read_process(control_->block(peer).pid.load(std::memory_order_relaxed), to, from, nbytes);
}

const void* PeerMemory::readable_address(const void* array, uint64_t nbytes) {
  if (array == nullptr || nbytes == 0) return array;  // null: only the root has an input
  const Stretch stretch{array, nbytes};
  Stretch& known = readable_[reinterpret_cast<uintptr_t>(array) * kGolden >> 56];
  if (known == stretch) return array;
  const char *first = static_cast<const char*>(array), *last = first + nbytes - 1;
  char end;
  copy_ = {};
  if (read(rank_, &end, first, 1) && read(rank_, &end, last, 1)) {
    known = stretch;
    return array;
  }
  copy_.assign(first, first + nbytes);
  return copy_.data();
}

}  // namespace pycoll
