// What groups and calls need of the machine that runs kernels. machine.cu is CUDA; the tests have
// one that runs the same templates on the host, so that everything above is tested without a GPU.
//
// cuda/ is a library of its own with a C interface, pycoll_cuda.h, which is to be read first. It
// uses base/, engine/plan.h and bind.h, and the formulas of kernels/optim/; kernels/ has what runs
// on the device, optim/ the passes of optimizers, messages/ what two ranks send each other,
// host/ everything else.
//
// Functions throw Error of kind "CudaUnavailable", "ArgumentError", "TooLarge" or "CudaError".
#pragma once

#include "base/error.h"
#include "cuda/host/pycoll_cuda.h"
#include "cuda/kernels/layout.h"

namespace pycoll::cuda::machine {

int device_count();
void versions(int* driver, int* runtime);  // never throws
void properties(int device, PycollCudaDevice& properties);
// Loads every kernel of the library on a device.
void preload(int device);
void enable_peer_access(int device, int peer);

// Device memory, zeroed.
void* allocate(int device, size_t nbytes);
// The size to allocate memory with that other processes will map. CUDA cuts smaller allocations out
// of blocks of 2 MiB and shares blocks as a whole, with whatever else lies in them.
constexpr size_t exportable(size_t nbytes) {
  constexpr size_t kBlock = size_t{2} << 20;
  const size_t whole = (nbytes + kBlock - 1) / kBlock * kBlock;
  return whole < nbytes ? nbytes : whole;  // more than there can be: to be refused as it is
}
void release(void* pointer);
// Between any two memories, ordered on the stream.
void copy(void* dst, const void* src, size_t nbytes, void* stream);
void synchronize(void* stream);
// The same at once; also while a stream of this thread is being captured.
void copy_now(int device, void* dst, const void* src, size_t nbytes);
// Waits until a device is idle.
void wait_idle(int device);

// Host memory that kernels on the device can read and write, zeroed; and its address there.
Record* allocate_records(int device, size_t count);
void release_records(Record* records);
Record* device_address(Record* records);

void ipc_export(const void* pointer, PycollCudaIpc& ipc);
void ipc_open(int device, const PycollCudaIpc& ipc, void** base, void** pointer);
void ipc_close(int device, void* base);

// Virtual memory; the contracts are those of the functions with these names in pycoll_cuda.h.
int vmm_support(int device);
void vmm_create(int device, size_t nbytes, PycollCudaMapping& mapping);
void vmm_export(const PycollCudaMapping& mapping, PycollCudaShare& share, int* descriptor);
void vmm_open(int device, const PycollCudaShare& share, int descriptor, PycollCudaMapping& mapping);
void vmm_close(const PycollCudaMapping& mapping);

// Multicast over that memory, likewise.
void multicast_create(int devices, uint64_t nbytes, PycollCudaMulticast& multicast,
                      int* descriptor);
void multicast_open(int descriptor, uint64_t nbytes, PycollCudaMulticast& multicast);
void multicast_add(int device, PycollCudaMulticast& multicast);
void multicast_bind(const PycollCudaMapping& heap, PycollCudaMulticast& multicast);
void multicast_close(PycollCudaMulticast& multicast);

struct KernelInfo {
  int registers, local_bytes, shared_bytes;
  int resident;  // blocks of so many threads that fit on the device at once
};
KernelInfo kernel_info(int device, const void* kernel, int threads);

// Launches a kernel with one parameter of `nbytes`, which is copied. Cooperative: all blocks at
// once, or TooLarge. device < 0: the current one.
void launch(int device, const void* kernel, int blocks, int threads, const void* parameter,
            size_t nbytes, bool cooperative, void* stream);

}  // namespace pycoll::cuda::machine
