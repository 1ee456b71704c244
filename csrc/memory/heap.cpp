#include "memory/heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/descriptors.h"
#include "base/error.h"
#include "memory/control.h"
#include "memory/pool.h"
#include "memory/reservation.h"

namespace pycoll {
namespace {

// Between regions: where arrays of two ranks lie a multiple of 256 MiB apart, the first-level cache
// of AMD's Zen takes a line of one for the same line of the other (it predicts its way by a hash of
// the bits 12 to 27 of the address) and a fold over both takes up to 2.5 times as long.
constexpr uint64_t kSkew = kPage;

}  // namespace

Heap::Heap(int fd, uint32_t regions, uint64_t region_bytes)
    : region_bytes_(region_bytes),
      stride_(region_bytes + kSkew),
      bytes_(regions * stride_),
      used_(regions) {
  COLL_CHECK(regions > 0 && region_bytes > 0 && region_bytes % kPage == 0, "TransportError",
             "a heap needs regions of whole pages, got ", regions, " of ", region_bytes, " bytes");
  struct stat status;
  COLL_CHECK(fstat(fd, &status) == 0, "TransportError",
             "cannot stat the heap: ", std::strerror(errno));
  if (status.st_size == 0) {  // ranks that do so at the same time set the same size
    fchmod(fd, 0600);
    COLL_CHECK(ftruncate(fd, off_t(bytes_)) == 0 && (seal_size(fd), fstat(fd, &status)) == 0,
               "TransportError", "cannot size the heap to ", bytes_,
               " bytes: ", std::strerror(errno));
  }
  COLL_CHECK(uint64_t(status.st_size) == bytes_, "TransportError", "the heap has ", status.st_size,
             " bytes where this rank expects ", regions, " regions of ", region_bytes);
  fd_ = copy_above_streams(fd);
  COLL_CHECK(fd_ >= 0, "TransportError", "cannot keep the heap open: ", std::strerror(errno));
  void* base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (base == MAP_FAILED) {
    const int error = errno;
    ::close(fd_);
    throw_error("TransportError", "cannot map the heap, ", bytes_,
                " bytes of address space: ", std::strerror(error),
                "; use a smaller heap (heap_bytes, PYCOLL_HEAP_BYTES)");
  }
  base_ = static_cast<char*>(base);
  for (uint32_t r = 0; r < regions; ++r) gaps_.push_back({{r * stride_, region_bytes}});
  owner_ = getpid();
}

Heap::~Heap() {
  munmap(base_, bytes_);
  ::close(fd_);
}

bool Heap::is_owner() const { return getpid() == owner_; }

void Heap::check_owner() const {
  COLL_CHECK(is_owner(), "ForkedError",
             "symmetric memory can only be allocated by the process that joined, not by its "
             "forked child");
}

bool Heap::map_over(char* place, uint64_t offset, uint64_t nbytes) const {
  constexpr int kFlags = MAP_SHARED | MAP_FIXED | MAP_NORESERVE;
  return mmap(place, nbytes, PROT_READ | PROT_WRITE, kFlags, fd_, off_t(offset)) != MAP_FAILED;
}

void Heap::add_alias(const void* data, uint64_t nbytes, std::weak_ptr<Registration> as) {
  const auto first = reinterpret_cast<uintptr_t>(data);
  COLL_CHECK(!finds_alias(data, nbytes), "ArgumentError",
             "the array, or a part of it, is registered already");
  std::lock_guard lock(mutex_);
  aliases_.emplace(first, Alias{first + nbytes, std::move(as)});
  alias_count_ = aliases_.size();
}

void Heap::drop_alias(const void* data) {
  std::lock_guard lock(mutex_);
  aliases_.erase(reinterpret_cast<uintptr_t>(data));
  alias_count_ = aliases_.size();
}

std::optional<uintptr_t> Heap::alias_below(uintptr_t byte) const {
  if (alias_count_.load(std::memory_order_relaxed) == 0) return std::nullopt;
  std::lock_guard lock(mutex_);
  const auto after = aliases_.upper_bound(byte);
  if (after == aliases_.begin()) return std::nullopt;
  return std::prev(after)->first;
}

bool Heap::finds_alias(const void* data, uint64_t nbytes) const {
  const auto first = reinterpret_cast<uintptr_t>(data);
  std::lock_guard lock(mutex_);
  const auto after = aliases_.lower_bound(first + nbytes);
  return after != aliases_.begin() && std::prev(after)->second.end > first;
}

std::shared_ptr<Registration> Heap::registration_of(const void* data, uint64_t nbytes) const {
  const auto first = reinterpret_cast<uintptr_t>(data);
  std::lock_guard lock(mutex_);
  const auto after = aliases_.upper_bound(first);
  if (after == aliases_.begin() || std::prev(after)->second.end < first + nbytes) return nullptr;
  return std::prev(after)->second.registration.lock();
}

Pool& Heap::pool(uint32_t region) {
  std::lock_guard lock(mutex_);
  COLL_CHECK(region < used_.size(), "TransportError", "the heap has no region ", region);
  auto& found = pools_[region];
  if (found == nullptr) found = std::make_unique<Pool>(*this, region);
  return *found;
}

uint64_t Heap::alloc(uint32_t region, uint64_t nbytes) {
  check_owner();
  COLL_CHECK(region < used_.size(), "TransportError", "the heap has no region ", region);
  COLL_CHECK(nbytes <= region_bytes_, "MemoryError", "cannot reserve ", nbytes,
             " bytes of symmetric memory: a rank has ", region_bytes_,
             "; make the heap larger (heap_bytes, PYCOLL_HEAP_BYTES)");
  const uint64_t want = std::max((nbytes + kPage - 1) / kPage * kPage, kPage);
  std::lock_guard lock(mutex_);
  auto &used = used_[region], &gaps = gaps_[region];
  const auto gap =
      std::find_if(gaps.begin(), gaps.end(), [&](const auto& g) { return g.second >= want; });
  COLL_CHECK(gap != gaps.end(), "MemoryError", "cannot reserve ", nbytes,
             " bytes of symmetric memory: the ", region_bytes_, " bytes of this rank hold ",
             used.size(), " arrays; drop some, or make the heap larger (heap_bytes)");
  const auto [at, room] = *gap;
  reserve_pages(fd_, at, want, "MemoryError", "drop arrays, or raise the container's limit");
  used.emplace(at, want);
  if (room > want) gaps.emplace(at + want, room - want);
  gaps.erase(at);
  return at;
}

// Adds a range to the gaps, which never touch each other.
void Heap::widen_gap(Ranges& gaps, uint64_t offset, uint64_t bytes) {
  const auto after = gaps.lower_bound(offset);
  const bool meets = after != gaps.end() && after->first == offset + bytes;
  const auto before = after == gaps.begin() ? gaps.end() : std::prev(after);
  if (before != gaps.end() && before->first + before->second == offset) {
    before->second += bytes + (meets ? after->second : 0);
    if (meets) gaps.erase(after);
  } else if (meets) {
    auto node = gaps.extract(after);
    node.key() = offset;
    node.mapped() += bytes;
    gaps.insert(std::move(node));
  } else {
    gaps.emplace(offset, bytes);
  }
}

void Heap::free(uint64_t offset) {
  if (!is_owner()) return;  // the pages belong to the parent of this forked child
  std::lock_guard lock(mutex_);
  const uint64_t region = offset / stride_;
  COLL_CHECK(region < used_.size() && used_[region].count(offset) == 1, "TransportError",
             "nothing is allocated at offset ", offset, " of the heap");
  auto& used = used_[region];
  const auto it = used.find(offset);
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(offset), off_t(it->second));
  widen_gap(gaps_[region], offset, it->second);
  used.erase(it);
}

}  // namespace pycoll
