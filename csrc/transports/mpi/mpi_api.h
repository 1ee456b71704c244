// MPI from one binary: no mpi.h, functions looked up in the library that mpi4py has loaded.
//
// Handles are whatever mpi4py gives, in an integer as wide as a pointer: MPICH's are ints, which
// every calling convention we build for passes in the low half of the same register; those of Open
// MPI and of the MPI-5 ABI are pointers. A request takes up to eight bytes; a status is never read.
#pragma once

#include <string>

#include "transports/messages/transport.h"

namespace pycoll {

using MpiHandle = uintptr_t;

// What mpi4py knows about the library in use.
struct MpiFacts {
  std::string module;    // path of mpi4py's extension module, whose libmpi is used
  MpiHandle comm = 0;    // the communicator
  MpiHandle byte = 0;    // MPI_BYTE
  int tag_ub = 32767;    // greatest tag
  bool multiple = true;  // MPI_THREAD_MULTIPLE; otherwise calls are made one at a time
  int proc_failed = -1;  // error class of a dead peer (ULFM), or -1
};

// The messages of one MPI communicator. Errors carry the library's own text.
class MpiApi : public Transport {
 public:
  // Throws TransportError if the library or one of the functions is not found.
  explicit MpiApi(const MpiFacts& facts);

  void isend(const void* data, uint64_t nbytes, int dst, int tag, Request& request) override;
  void irecv(void* data, uint64_t least, uint64_t most, int src, int tag,
             Request& request) override;
  bool test(Request& request) override;
  bool probe(int src, int tag) override;
  void cancel(Request& request) override;
  // Whether MPI has been finalized: any other MPI function would end the job then.
  bool ended() const override;
  bool try_lock() override;
  void lock() override;
  void unlock() override;

 private:
  struct Lock;
  void check(int code, const char* what) {
    if (code != 0) [[unlikely]]
      fail(code, what);
  }
  [[noreturn]] void fail(int code, const char* what);

  const MpiFacts facts_;
  int (*isend_)(const void*, int, MpiHandle, int, int, MpiHandle, void*) = nullptr;
  int (*irecv_)(void*, int, MpiHandle, int, int, MpiHandle, void*) = nullptr;
  int (*test_)(void*, int*, void*) = nullptr;
  int (*iprobe_)(int, int, MpiHandle, int*, void*) = nullptr;
  int (*cancel_)(void*) = nullptr;
  int (*finalized_)(int*) = nullptr;
  int (*error_class_)(int, int*) = nullptr;
  int (*error_string_)(int, char*, int*) = nullptr;
};

}  // namespace pycoll
