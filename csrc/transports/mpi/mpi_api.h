// MPI from one binary: no mpi.h, functions looked up in the library that mpi4py has loaded.
//
// Handles are whatever mpi4py gives, in an integer as wide as a pointer: MPICH's are ints, which
// every calling convention we build for passes in the low half of the same register; those of Open
// MPI and of the MPI-5 ABI are pointers. A request takes up to eight bytes; a status is never read.
#pragma once

#include <cstdint>
#include <string>

namespace pycoll {

using MpiHandle = uintptr_t;
using MpiRequest = uint64_t;  // storage for one handle, written by the library

// What mpi4py knows about the library in use.
struct MpiFacts {
  std::string module;    // path of mpi4py's extension module, whose libmpi is used
  MpiHandle byte = 0;    // MPI_BYTE
  int tag_ub = 32767;    // greatest tag
  bool multiple = true;  // MPI_THREAD_MULTIPLE; otherwise calls are made one at a time
  int proc_failed = -1;  // error class of a dead peer (ULFM), or -1
};

// The point-to-point calls that the transport needs. Thread-safe. Every function throws
// TransportError with the library's own text when MPI returns an error, PeerLost if the error is
// that a process failed.
class MpiApi {
 public:
  // Throws TransportError if the library or one of the functions is not found.
  explicit MpiApi(const MpiFacts& facts);
  virtual ~MpiApi() = default;
  MpiApi(const MpiApi&) = delete;
  MpiApi& operator=(const MpiApi&) = delete;

  const MpiFacts& facts() const { return facts_; }

  // Whether MPI has been finalized: whatever else is called of it ends the job then.
  bool ended() const;

  // At most kMostBytes in one message.
  virtual void isend(const void* data, uint64_t nbytes, int dst, int tag, MpiHandle comm,
                     MpiRequest& req);
  virtual void irecv(void* data, uint64_t nbytes, int src, int tag, MpiHandle comm,
                     MpiRequest& req);
  // True once the request is done; it is then null. Makes progress on all others too.
  virtual bool test(MpiRequest& req);
  // Whether a message with this tag has come from a rank, or begun to.
  virtual bool probe(int src, int tag, MpiHandle comm);
  // Takes back a receive that has not been matched; the request must still be tested.
  virtual void cancel(MpiRequest& req);

  static constexpr uint64_t kMostBytes = uint64_t{1} << 30;

 protected:
  struct NoLibrary {};
  // For what does the same without MPI: see socket_api.h.
  MpiApi(const MpiFacts& facts, NoLibrary) : facts_(facts) {}

 private:
  struct Lock;
  void check(int code, const char* what);
  template <typename F>
  void find(void* library, const char* name, F& function);

  MpiFacts facts_;
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
