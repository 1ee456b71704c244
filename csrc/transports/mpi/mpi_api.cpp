#include "transports/mpi/mpi_api.h"

#include <dlfcn.h>

#include "base/error.h"
#include "base/reentrant_mutex.h"

namespace pycoll {
namespace {

constexpr size_t kStatusBytes = 64;  // of the largest known, 32
constexpr size_t kErrorText = 1024;  // of the largest known, 1023

// Of libraries that are loaded already, should the module itself not lead to one.
constexpr const char* kNames[] = {"libmpi_abi.so.1", "libmpi.so.12", "libmpi.so.40", "libmpi.so"};

void* open_library(const std::string& module) {
  void* library = dlopen(module.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library != nullptr && dlsym(library, "MPI_Isend") != nullptr) return library;
  for (const char* name : kNames) {
    library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    if (library != nullptr) return library;
  }
  throw_error("TransportError", "no MPI library is loaded: ", module, " does not lead to one");
}

template <typename F>
void find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  COLL_CHECK(function != nullptr, "TransportError", "the MPI library has no ", name);
}

}  // namespace

// Without MPI_THREAD_MULTIPLE only one thread of a process may be inside MPI at a time, in
// whichever communicator: so all objects share one mutex, as they share the library.
struct MpiApi::Lock {
  explicit Lock(const MpiApi& api) : mutex(api.any_thread ? nullptr : &inside) {
    if (mutex != nullptr) mutex->lock();
  }
  ~Lock() {
    if (mutex != nullptr) mutex->unlock();
  }
  static ReentrantMutex inside;
  ReentrantMutex* mutex;
};

ReentrantMutex MpiApi::Lock::inside;

bool MpiApi::try_lock() { return any_thread || Lock::inside.try_lock(); }

void MpiApi::lock() {
  if (!any_thread) Lock::inside.lock();
}

void MpiApi::unlock() {
  if (!any_thread) Lock::inside.unlock();
}

MpiApi::MpiApi(const MpiFacts& facts) : Transport(facts.tag_ub, facts.multiple), facts_(facts) {
  void* library = open_library(facts.module);
  find(library, "MPI_Isend", isend_);
  find(library, "MPI_Irecv", irecv_);
  find(library, "MPI_Test", test_);
  find(library, "MPI_Iprobe", iprobe_);
  find(library, "MPI_Cancel", cancel_);
  find(library, "MPI_Finalized", finalized_);
  find(library, "MPI_Error_class", error_class_);
  find(library, "MPI_Error_string", error_string_);
}

void MpiApi::fail(int code, const char* what) {
  char text[kErrorText] = "";
  int length = 0, kind = 0;
  error_string_(code, text, &length);
  error_class_(code, &kind);
  if (facts_.proc_failed > 0 && kind == facts_.proc_failed) {
    throw_error("PeerLost", what, ": MPI says that a process of the job died: ", text);
  }
  throw_error("TransportError", what, " failed: ", text);
}

bool MpiApi::ended() const {
  int flag = 0;
  return finalized_(&flag) == 0 && flag != 0;
}

void MpiApi::isend(const void* data, uint64_t nbytes, int dst, int tag, Request& request) {
  const Lock lock(*this);
  const int count = static_cast<int>(nbytes);
  check(isend_(data, count, facts_.byte, dst, tag, facts_.comm, &request), "MPI_Isend");
}

void MpiApi::irecv(void* data, uint64_t, uint64_t most, int src, int tag, Request& request) {
  const Lock lock(*this);
  const int count = static_cast<int>(most);
  check(irecv_(data, count, facts_.byte, src, tag, facts_.comm, &request), "MPI_Irecv");
}

bool MpiApi::test(Request& request) {
  const Lock lock(*this);
  alignas(16) char status[kStatusBytes];
  int flag = 0;
  check(test_(&request, &flag, status), "MPI_Test");
  return flag != 0;
}

bool MpiApi::probe(int src, int tag) {
  const Lock lock(*this);
  alignas(16) char status[kStatusBytes];
  int flag = 0;
  check(iprobe_(src, tag, facts_.comm, &flag, status), "MPI_Iprobe");
  return flag != 0;
}

void MpiApi::cancel(Request& request) {
  const Lock lock(*this);
  check(cancel_(&request), "MPI_Cancel");
}

}  // namespace pycoll
