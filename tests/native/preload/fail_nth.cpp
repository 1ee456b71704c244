// A library for LD_PRELOAD that makes the n-th call of a kind fail in this process, as a system
// does that has no more memory, descriptors or threads. See
// tests/communicator/failures/fail_nth.py.
//
// Memory is asked for everywhere, by Python too: of allocations, and of mmap and futex, only those
// count that the code between two addresses makes, that of pycoll or of the C++ library.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <new>

extern "C" void* __libc_malloc(size_t);
extern "C" void* __libc_calloc(size_t, size_t);
extern "C" void* __libc_realloc(void*, size_t);
extern "C" void* __libc_memalign(size_t, size_t);

namespace {

enum Kind { kMemory, kMap, kResize, kReserve, kMemfd, kFutex, kSocket, kThread, kKinds };

struct Range {
  uintptr_t low, high;
};
constexpr int kRanges = 4;
Range g_ranges[kRanges];
std::atomic<int> g_kind{-1};    // whose calls are counted
std::atomic<long> g_seen{0};    // so many have been
std::atomic<long> g_first{-1};  // number of the first that fails, from 0 on
std::atomic<long> g_last{-1};   // and of the last

bool ours(const void* caller) {
  const auto at = reinterpret_cast<uintptr_t>(caller);
  for (const Range& range : g_ranges) {
    if (range.low <= at && at < range.high) return true;
  }
  return false;
}

// Counts a call; true if it shall fail.
bool fails(Kind kind, const void* caller = nullptr) {
  if (g_kind.load(std::memory_order_relaxed) != kind) return false;
  if (caller != nullptr && !ours(caller)) return false;
  const long number = g_seen++;
  return g_first <= number && number <= g_last;
}

template <typename F>
F next(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define CALLER __builtin_return_address(0)
#define NEXT(function) static const auto real = next<decltype(&::function)>(#function)

extern "C" {

// Of the code that counts: up to four ranges of addresses.
void fail_among(int index, uintptr_t low, uintptr_t high) { g_ranges[index] = {low, high}; }

// Counts the calls of a kind from now on, and makes those from `first` to `last` fail.
void fail_from(int kind, long first, long last) {
  g_kind = -1;
  g_seen = 0;
  g_first = first;
  g_last = last;
  g_kind = kind;
}

long fail_seen() { return g_seen; }

void* malloc(size_t nbytes) {
  if (!fails(kMemory, CALLER)) return __libc_malloc(nbytes);
  errno = ENOMEM;
  return nullptr;
}

void* calloc(size_t count, size_t nbytes) {
  if (!fails(kMemory, CALLER)) return __libc_calloc(count, nbytes);
  errno = ENOMEM;
  return nullptr;
}

void* realloc(void* data, size_t nbytes) {
  if (!fails(kMemory, CALLER)) return __libc_realloc(data, nbytes);
  errno = ENOMEM;
  return nullptr;
}

int posix_memalign(void** data, size_t alignment, size_t nbytes) {
  if (fails(kMemory, CALLER)) return ENOMEM;
  *data = __libc_memalign(alignment, nbytes);
  return *data == nullptr ? ENOMEM : 0;
}

void* aligned_alloc(size_t alignment, size_t nbytes) {
  if (!fails(kMemory, CALLER)) return __libc_memalign(alignment, nbytes);
  errno = ENOMEM;
  return nullptr;
}

void* mmap(void* at, size_t nbytes, int protection, int flags, int fd, off_t offset) {
  NEXT(mmap);
  if (!fails(kMap, CALLER)) return real(at, nbytes, protection, flags, fd, offset);
  errno = ENOMEM;
  return MAP_FAILED;
}

int ftruncate(int fd, off_t nbytes) {
  NEXT(ftruncate);
  if (!fails(kResize)) return real(fd, nbytes);
  errno = ENOSPC;
  return -1;
}
int ftruncate64(int fd, off_t nbytes) { return ftruncate(fd, nbytes); }

int fallocate(int fd, int mode, off_t offset, off_t nbytes) {
  NEXT(fallocate);
  if ((mode & FALLOC_FL_PUNCH_HOLE) != 0 || !fails(kReserve)) return real(fd, mode, offset, nbytes);
  errno = ENOSPC;
  return -1;
}
int fallocate64(int fd, int mode, off_t offset, off_t nbytes) {
  return fallocate(fd, mode, offset, nbytes);
}

int memfd_create(const char* name, unsigned flags) noexcept {
  NEXT(memfd_create);
  if (!fails(kMemfd)) return real(name, flags);
  errno = EMFILE;
  return -1;
}

int socket(int domain, int type, int protocol) noexcept {
  NEXT(socket);
  if (!fails(kSocket)) return real(domain, type, protocol);
  errno = EMFILE;
  return -1;
}

int accept4(int fd, sockaddr* from, socklen_t* size, int flags) {
  NEXT(accept4);
  if (!fails(kSocket)) return real(fd, from, size, flags);
  errno = EMFILE;
  return -1;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*),
                   void* argument) noexcept {
  NEXT(pthread_create);
  if (fails(kThread)) return EAGAIN;
  return real(thread, attributes, run, argument);
}

long syscall(long number, ...) noexcept {
  static const auto real = next<long (*)(long, ...)>("syscall");
  va_list list;
  va_start(list, number);
  long a[6];
  for (long& value : a) value = va_arg(list, long);
  va_end(list);
  if (number == SYS_futex && fails(kFutex, CALLER)) {
    errno = ENOMEM;
    return -1;
  }
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

}  // extern "C"

void* operator new(size_t nbytes) {
  void* data = fails(kMemory, CALLER) ? nullptr : __libc_malloc(nbytes + (nbytes == 0));
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
void* operator new[](size_t nbytes) {
  void* data = fails(kMemory, CALLER) ? nullptr : __libc_malloc(nbytes + (nbytes == 0));
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
void* operator new(size_t nbytes, const std::nothrow_t&) noexcept {
  return fails(kMemory, CALLER) ? nullptr : __libc_malloc(nbytes + (nbytes == 0));
}
void* operator new(size_t nbytes, std::align_val_t alignment) {
  void* data =
      fails(kMemory, CALLER) ? nullptr : __libc_memalign(static_cast<size_t>(alignment), nbytes);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
void operator delete(void* data) noexcept { free(data); }
void operator delete[](void* data) noexcept { free(data); }
void operator delete(void* data, size_t) noexcept { free(data); }
void operator delete[](void* data, size_t) noexcept { free(data); }
void operator delete(void* data, std::align_val_t) noexcept { free(data); }
void operator delete(void* data, size_t, std::align_val_t) noexcept { free(data); }
