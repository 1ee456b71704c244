// Device memory on the host. What other processes may open are memfds, mapped and shared; small
// pieces come from the heap. A descriptor of a memfd stands for those that CUDA exports, the place
// of a memfd in its process for handles of CUDA IPC and of a fabric.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/host/machine.h"
#include "host_machine.h"
#include "host_policy.h"

namespace pycoll::cuda::machine {
namespace {

constexpr uint64_t kUnit = uint64_t{2} << 20;

struct Piece {
  int descriptor;
  uint64_t nbytes;
};

struct Place {  // of a memfd, for other processes
  int32_t process, descriptor;
};

std::mutex g_mutex;
std::map<uintptr_t, Piece> g_pieces;                   // by address
std::atomic<int> g_allocated{0}, g_until_refused{-1};  // pieces of `allocate`
std::atomic<int> g_support{PYCOLL_CUDA_VMM};
std::atomic<bool> g_by_descriptor{true}, g_by_fabric{true};

// Maps a memfd, which now belongs to the mapping.
void* map(int descriptor, uint64_t nbytes) {
  struct stat facts{};
  const bool fits = fstat(descriptor, &facts) == 0 && facts.st_size >= int64_t(nbytes);
  void* const at = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  COLL_CHECK(fits && at != MAP_FAILED, "CudaError", "memory cannot be mapped: ", strerror(errno));
  const std::lock_guard lock(g_mutex);
  g_pieces[reinterpret_cast<uintptr_t>(at)] = {descriptor, nbytes};
  return at;
}

void* make(uint64_t nbytes) {
  const int descriptor = memfd_create("device", MFD_CLOEXEC);
  COLL_CHECK(descriptor >= 0 && ftruncate(descriptor, int64_t(nbytes)) == 0, "CudaError",
             "no memory of ", nbytes, " bytes: ", strerror(errno));
  return map(descriptor, nbytes);
}

void unmap(void* at) {
  std::unique_lock lock(g_mutex);
  const auto found = g_pieces.extract(reinterpret_cast<uintptr_t>(at));
  lock.unlock();
  COLL_CHECK(!found.empty(), "ArgumentError", "this memory is not mapped");
  munmap(at, found.mapped().nbytes);
  close(found.mapped().descriptor);
}

// The piece that memory lies in, and where it begins.
std::pair<uintptr_t, Piece> piece_of(const void* pointer) {
  const std::lock_guard lock(g_mutex);
  const auto at = reinterpret_cast<uintptr_t>(pointer);
  auto next = g_pieces.upper_bound(at);
  COLL_CHECK(next != g_pieces.begin() && (--next, at - next->first < next->second.nbytes),
             "ArgumentError", "this memory cannot be exported");
  return *next;
}

// A descriptor of one's own for what a process has at a place.
int adopt(const void* handle) {
  Place place{};
  std::memcpy(&place, handle, sizeof(place));
  const std::string path =
      "/proc/" + std::to_string(place.process) + "/fd/" + std::to_string(place.descriptor);
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

}  // namespace

void* allocate(int, size_t nbytes) {
  COLL_CHECK(g_until_refused.fetch_sub(1) != 0, "CudaError", "allocating device memory: refused");
  ++g_allocated;
  if (nbytes != 0 && nbytes % kUnit == 0) return make(nbytes);
  const size_t size = (nbytes + 256) / 256 * 256;
  void* const memory = std::aligned_alloc(256, size);
  std::memset(memory, 0, size);
  return memory;
}

void release(void* pointer) {
  --g_allocated;
  bool mapped = false;
  {
    const std::lock_guard lock(g_mutex);
    mapped = g_pieces.contains(reinterpret_cast<uintptr_t>(pointer));
  }
  if (mapped) {
    unmap(pointer);
  } else {
    std::free(pointer);
  }
}

Record* allocate_records(int device, size_t count) {
  return static_cast<Record*>(allocate(device, count * sizeof(Record)));
}
void release_records(Record* records) { release(records); }
Record* device_address(Record* records) { return records; }

void ipc_export(const void* pointer, PycollCudaIpc& ipc) {
  const auto& [base, piece] = piece_of(pointer);
  const Place place{getpid(), piece.descriptor};
  std::memcpy(ipc.handle, &place, sizeof(place));
  std::memcpy(ipc.handle + sizeof(place), &base, sizeof(base));
  ipc.offset = reinterpret_cast<uintptr_t>(pointer) - base;
  ipc.nbytes = piece.nbytes - ipc.offset;
}

void ipc_open(int, const PycollCudaIpc& ipc, void** base, void** pointer) {
  Place place{};
  std::memcpy(&place, ipc.handle, sizeof(place));
  if (place.process == getpid()) {
    std::memcpy(base, ipc.handle + sizeof(place), sizeof(*base));
  } else {
    *base = map(adopt(ipc.handle), ipc.offset + ipc.nbytes);
  }
  *pointer = static_cast<char*>(*base) + ipc.offset;
}

void ipc_close(int, void* base) { unmap(base); }

int vmm_support(int) { return g_support; }

void vmm_create(int device, size_t nbytes, PycollCudaMapping& mapping) {
  COLL_CHECK((g_support & PYCOLL_CUDA_VMM) != 0, "CudaUnavailable", "no virtual memory");
  const uint64_t size = (nbytes + kUnit - 1) / kUnit * kUnit;
  mapping = {make(size), size, device, 0};
}

void vmm_export(const PycollCudaMapping& mapping, PycollCudaShare& share, int* descriptor) {
  const Piece piece = piece_of(mapping.pointer).second;
  const Place place{getpid(), piece.descriptor};
  share.nbytes = piece.nbytes;
  share.has_fabric = (g_support & PYCOLL_CUDA_FABRIC) != 0;
  if (share.has_fabric) std::memcpy(share.fabric, &place, sizeof(place));
  *descriptor = fcntl(piece.descriptor, F_DUPFD_CLOEXEC, 0);
}

void vmm_open(int device, const PycollCudaShare& share, int descriptor,
              PycollCudaMapping& mapping) {
  const bool by_fabric = descriptor < 0;
  COLL_CHECK(!by_fabric || share.has_fabric != 0, "ArgumentError",
             "there is neither a descriptor nor a fabric handle of this memory");
  COLL_CHECK(by_fabric ? g_by_fabric : g_by_descriptor, "CudaError",
             "importing memory of a peer: refused");
  const int own = by_fabric ? adopt(share.fabric) : fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  mapping = {map(own, share.nbytes), share.nbytes, device, 0};
}

void vmm_close(const PycollCudaMapping& mapping) { unmap(mapping.pointer); }

// A multicast object is a memfd with the places of the memories that are bound to it. Its address
// cannot be read or written: kernels ask what it stands for.
namespace {

struct Team {
  std::atomic<int32_t> devices, added, bound;
  Place members[kMaxRanks];
};

struct Multicast {
  uint64_t nbytes;
  std::vector<char*> members;  // as mapped here, once somebody has asked
  Team* team;
};

std::map<uintptr_t, Multicast> g_multicasts;  // by address

Team* team_of(const PycollCudaMulticast& multicast) {
  return reinterpret_cast<Team*>(multicast.handle);
}

}  // namespace

void multicast_create(int devices, uint64_t nbytes, PycollCudaMulticast& multicast,
                      int* descriptor) {
  void* const team = make(sizeof(Team));
  static_cast<Team*>(team)->devices = devices;
  multicast = {reinterpret_cast<uint64_t>(team), nbytes, nullptr, -1, 1};
  *descriptor = fcntl(piece_of(team).second.descriptor, F_DUPFD_CLOEXEC, 0);
}

void multicast_open(int descriptor, uint64_t nbytes, PycollCudaMulticast& multicast) {
  COLL_CHECK(g_by_descriptor, "CudaError", "importing a multicast object: refused");
  void* const team = map(fcntl(descriptor, F_DUPFD_CLOEXEC, 0), sizeof(Team));
  multicast = {reinterpret_cast<uint64_t>(team), nbytes, nullptr, -1, 1};
}

void multicast_add(int device, PycollCudaMulticast& multicast) {
  ++team_of(multicast)->added;
  multicast.device = device;
}

void multicast_bind(const PycollCudaMapping& heap, PycollCudaMulticast& multicast) {
  Team* const team = team_of(multicast);
  COLL_CHECK(team->added == team->devices, "CudaError", "CUDA would wait here for the other ranks");
  team->members[team->bound++] = {getpid(), piece_of(heap.pointer).second.descriptor};
  multicast.pointer =
      mmap(nullptr, multicast.nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const std::lock_guard lock(g_mutex);
  g_multicasts[reinterpret_cast<uintptr_t>(multicast.pointer)] = {multicast.nbytes, {}, team};
}

void multicast_close(PycollCudaMulticast& multicast) {
  if (multicast.open == 0) return;
  if (multicast.pointer != nullptr) {
    std::unique_lock lock(g_mutex);
    const auto old = g_multicasts.extract(reinterpret_cast<uintptr_t>(multicast.pointer));
    lock.unlock();
    for (char* member : old.mapped().members) unmap(member);
    munmap(multicast.pointer, multicast.nbytes);
  }
  unmap(team_of(multicast));
  multicast = {};
}

}  // namespace pycoll::cuda::machine

std::vector<char*> pycoll::cuda::host::multicast_members(const void* address) {
  using namespace pycoll::cuda::machine;  // NOLINT
  static std::mutex once;
  const std::lock_guard mapping(once);
  const auto at = reinterpret_cast<uintptr_t>(address);
  std::unique_lock lock(g_mutex);
  auto& [base, multicast] = *std::prev(g_multicasts.upper_bound(at));
  lock.unlock();
  if (multicast.members.empty()) {
    for (int i = 0; i < multicast.team->devices; ++i) {
      multicast.members.push_back(
          static_cast<char*>(map(adopt(&multicast.team->members[i]), multicast.nbytes)));
    }
  }
  std::vector<char*> found;
  for (char* member : multicast.members) found.push_back(member + (at - base));
  return found;
}

void pycoll_host_vmm(int bits, int descriptors, int fabric) {
  using namespace pycoll::cuda::machine;  // NOLINT
  g_support = bits;
  g_by_descriptor = descriptors != 0;
  g_by_fabric = fabric != 0;
}

int pycoll_host_allocated(int until_refused) {
  pycoll::cuda::machine::g_until_refused = until_refused;
  return pycoll::cuda::machine::g_allocated;
}
