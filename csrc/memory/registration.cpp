#include "memory/registration.h"

#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/error.h"
#include "memory/pool.h"

namespace pycoll {
namespace {

char* page_below(char* p) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(p) / kPage * kPage);
}

bool is_stack(const char* name) { return std::strncmp(name, "[stack", 6) == 0; }

// The kernel's answer about one mapping, since Linux 6.11: `struct procmap_query` and PROCMAP_QUERY
// of <linux/fs.h>, which older headers lack.
struct MapQuery {
  uint64_t size, flags, address;
  uint64_t first, end, mode, page_bytes, offset, inode;
  uint32_t device[2], name_bytes, build_id_bytes;
  uint64_t name, build_id;
};
constexpr unsigned long kMapQuery = _IOWR('f', 17, MapQuery);
constexpr uint64_t kReadable = 1, kWritable = 2, kExecutable = 4, kShared = 8, kThisOrNext = 16;

// Whether the kernel says of all mappings in [first, last) that they are this process's own. False
// if it does not, or cannot be asked so; then reading all mappings shows why.
bool known_private(int maps, const char* first, const char* last) {
  const auto end = reinterpret_cast<uintptr_t>(last);
  for (auto at = reinterpret_cast<uintptr_t>(first); at < end;) {
    char name[64] = "";
    MapQuery query = {};
    query.size = sizeof(query);
    query.flags = kThisOrNext;
    query.address = at;
    query.name = reinterpret_cast<uintptr_t>(name);
    query.name_bytes = sizeof(name);
    if (ioctl(maps, kMapQuery, &query) != 0) return false;
    const uint64_t mode = query.mode & (kReadable | kWritable | kExecutable | kShared);
    const bool own = mode == (kReadable | kWritable) && query.inode == 0 && !is_stack(name);
    if (query.first < end && !own) return false;
    at = query.end;
  }
  return true;
}

// Refuses memory that is not this process's own: a file's, shared, read-only, or a stack.
void check_private(const char* first, const char* last) {
  FILE* maps = std::fopen("/proc/self/maps", "re");
  COLL_CHECK(maps != nullptr, "TransportError", "cannot read /proc/self/maps");
  const std::unique_ptr<FILE, int (*)(FILE*)> closer(maps, std::fclose);
  if (known_private(fileno(maps), first, last)) return;
  char line[512];
  while (std::fgets(line, sizeof(line), maps) != nullptr) {
    unsigned long from = 0, to = 0, inode = 0;
    char mode[5] = "";
    int name = 0;
    if (std::sscanf(line, "%lx-%lx %4s %*x %*s %lu %n", &from, &to, mode, &inode, &name) < 4) {
      continue;
    }
    if (to <= reinterpret_cast<uintptr_t>(first) || from >= reinterpret_cast<uintptr_t>(last)) {
      continue;
    }
    const bool own = std::strncmp(mode, "rw-p", 4) == 0 && inode == 0;
    COLL_CHECK(own && !is_stack(line + name), "ArgumentError",
               "the array's memory cannot be moved into symmetric memory: it belongs to a file, is "
               "shared already, read-only, or on a stack");
  }
}

}  // namespace

void Registration::move_in(uint32_t region, char* data, uint64_t nbytes) {
  data_ = data;
  first_ = page_below(data + kPage - 1);
  last_ = page_below(data + nbytes);
  end_ = data + nbytes;
  COLL_CHECK(sysconf(_SC_PAGESIZE) == long{kPage}, "ArgumentError", "only pages of ", kPage,
             " bytes can be moved, and this system has larger ones; copy the array to one from "
             "Communicator.empty");
  COLL_CHECK(first_ < last_, "ArgumentError", "an array of ", nbytes,
             " bytes has no whole page of memory; copy it to an array from Communicator.empty");
  heap_->check_owner();
  heap_->add_alias(data, nbytes, weak_from_this());
  try {
    check_private(first_, last_);
    take_pages(region);
  } catch (...) {
    heap_->drop_alias(data);
    throw;
  }
  in_ = true;
}

void Registration::take_pages(uint32_t region) {
  const uint64_t head = data_ == first_ ? 0 : kPage, tail = end_ == last_ ? 0 : kPage;
  const auto inner = static_cast<uint64_t>(last_ - first_);
  char* pages = heap_->pool(region).pages(head + inner + tail);
  offset_ = heap_->offset_of(pages, 1).value();
  generation_ = heap_->generation();
  heap_address_ = pages + head - (first_ - data_);
  std::memcpy(heap_address_, data_, static_cast<size_t>(end_ - data_));
  if (!heap_->map_over(first_, offset_ + head, inner)) {
    const int error = errno;
    heap_->free(offset_);
    throw_error("TransportError",
                "cannot map symmetric memory over the array: ", std::strerror(error));
  }
}

void Registration::gather(char* data, uint64_t nbytes) const {
  edges(data, nbytes, [](char* user, char* heap, size_t n) { std::memcpy(heap, user, n); });
}

void Registration::scatter(char* data, uint64_t nbytes) const {
  edges(data, nbytes, [](char* user, char* heap, size_t n) { std::memcpy(user, heap, n); });
}

void Registration::forget() {
  if (!in_) return;
  in_ = false;
  heap_->drop_alias(data_);
}

void Registration::release() {
  if (!in_) return;
  const auto inner = static_cast<size_t>(last_ - first_);
  void* own = mmap(nullptr, inner, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  COLL_CHECK(own != MAP_FAILED, "MemoryError", "cannot get ", inner,
             " bytes of private memory to move an array back: ", std::strerror(errno));
  std::memcpy(own, first_, inner);
  COLL_CHECK(mremap(own, inner, inner, MREMAP_MAYMOVE | MREMAP_FIXED, first_) != MAP_FAILED,
             "TransportError", "cannot move an array back: ", std::strerror(errno));
  in_ = false;
  if (!heap_->is_owner()) return;  // a child made by fork: the block is its parent's
  heap_->drop_alias(data_);
  if (heap_->generation() == generation_) heap_->free(offset_);
}

void Registration::hold() {
  COLL_CHECK(in_, "ArgumentError", "another thread has unregistered an array of this call");
  ++holds_;
}

bool Registration::release_unheld() {
  if (in_ && is_held()) return false;
  release();
  return true;
}

}  // namespace pycoll
