// C interface of libpycoll_cuda.so, the part about device memory and how other processes open it.
// pycoll_cuda.h, which includes this, says what all functions have in common.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PYCOLL_CUDA_API __attribute__((visibility("default")))

// Device memory by cudaMalloc (256-byte aligned), zeroed; takes a multiple of 2 MiB, so that
// nothing else is exported with it. The caller frees it when no kernel uses it any more; freeing
// waits for the device.
PYCOLL_CUDA_API int pycoll_cuda_malloc(int device, size_t nbytes, void** pointer);
PYCOLL_CUDA_API int pycoll_cuda_free(void* pointer);
// Copies between any two memories (host, device, peers), ordered on the stream.
PYCOLL_CUDA_API int pycoll_cuda_copy(void* dst, const void* src, size_t nbytes, void* stream);
PYCOLL_CUDA_API int pycoll_cuda_synchronize(void* stream);

// A piece of device memory that other processes can open: handle of the allocation it lies in, and
// its place therein. 88 bytes, to be sent as they are.
typedef struct {
  uint8_t handle[64];  // cudaIpcMemHandle_t of the base of the allocation
  uint64_t offset;     // bytes from that base to the exported pointer
  uint64_t nbytes;     // bytes from the exported pointer to the end of the allocation
  int32_t device;      // in the exporting process
  int32_t reserved;
} PycollCudaIpc;

// Exports `pointer`, which lies anywhere inside memory made by cudaMalloc (pools of CuPy too).
// ARGUMENT for memory that cannot be exported (cudaMallocAsync, host memory).
PYCOLL_CUDA_API int pycoll_cuda_ipc_export(const void* pointer, PycollCudaIpc* ipc);
// Maps exported memory of another process on `device`. *pointer is the exported address, in this
// process; *base is what pycoll_cuda_ipc_close takes. One close for each open. A process cannot
// open what it exported itself.
PYCOLL_CUDA_API int pycoll_cuda_ipc_open(int device, const PycollCudaIpc* ipc, void** base,
                                         void** pointer);
PYCOLL_CUDA_API int pycoll_cuda_ipc_close(int device, void* base);

// Device memory by the virtual memory functions of the driver, beside that of pycoll_cuda_malloc.
// Other processes open it by a file descriptor, or by a fabric handle. Wherever it is mapped it
// stays valid, even when its owner has closed it. It cannot be exported by
// pycoll_cuda_ipc_export.

// What a device and its driver say that they support.
typedef enum {
  PYCOLL_CUDA_VMM = 1,        // virtual memory that is shared by file descriptors
  PYCOLL_CUDA_FABRIC = 2,     // by fabric handles
  PYCOLL_CUDA_MULTICAST = 4,  // multicast objects over such memory
} PycollCudaSupport;

// *bits: PycollCudaSupport, combined; 0 where the driver has no such functions.
PYCOLL_CUDA_API int pycoll_cuda_vmm_support(int device, int* bits);

// Memory mapped in this process.
typedef struct {
  void* pointer;
  uint64_t nbytes;  // a multiple of what the device maps at once
  int32_t device;   // which can reach it at this address; no other one can
  int32_t reserved;
} PycollCudaMapping;

// What another process needs, beside the descriptor; to be sent as it is.
typedef struct {
  uint8_t fabric[64];  // CUmemFabricHandle
  uint64_t nbytes;
  int32_t has_fabric;  // 0: `fabric` means nothing
  int32_t reserved;
} PycollCudaShare;

// Makes at least `nbytes` of memory on `device`, zeroed. With a fabric handle where the device says
// that it has them and the driver makes one.
PYCOLL_CUDA_API int pycoll_cuda_vmm_create(int device, uint64_t nbytes, PycollCudaMapping* mapping);
// Exports memory that pycoll_cuda_vmm_create made. *descriptor belongs to the caller, who closes it
// once peers have got it.
PYCOLL_CUDA_API int pycoll_cuda_vmm_export(const PycollCudaMapping* mapping, PycollCudaShare* share,
                                           int* descriptor);
// Maps exported memory so that `device` reaches it; in the exporting process, too. By `descriptor`,
// which stays the caller's, or by the fabric handle if that is negative.
PYCOLL_CUDA_API int pycoll_cuda_vmm_open(int device, const PycollCudaShare* share, int descriptor,
                                         PycollCudaMapping* mapping);
// Unmaps memory, made or opened, which no kernel here may use any more. The memory itself is given
// back when nobody has it mapped.
PYCOLL_CUDA_API int pycoll_cuda_vmm_close(const PycollCudaMapping* mapping);

// A multicast object: an address at which loads sum, and stores reach, the same place of memory on
// several devices, one of each rank. It has run on no device yet. The ranks make it together, and
// wait for each other between two steps, as a step waits in the driver for those that are late:
// one creates it, the others open it by the descriptor; all add their devices; all bind.
typedef struct {
  uint64_t handle;
  uint64_t nbytes;  // of the memory of each rank
  void* pointer;    // the address, once it is bound
  int32_t device;   // that has been added here, or -1
  int32_t open;     // 1: there is something to close
} PycollCudaMulticast;

PYCOLL_CUDA_API int pycoll_cuda_multicast_create(int devices, uint64_t nbytes,
                                                 PycollCudaMulticast* multicast, int* descriptor);
PYCOLL_CUDA_API int pycoll_cuda_multicast_open(int descriptor, uint64_t nbytes,
                                               PycollCudaMulticast* multicast);
PYCOLL_CUDA_API int pycoll_cuda_multicast_add(int device, PycollCudaMulticast* multicast);
// Binds memory of pycoll_cuda_vmm_create, `nbytes` long, and maps the object.
PYCOLL_CUDA_API int pycoll_cuda_multicast_bind(const PycollCudaMapping* memory,
                                               PycollCudaMulticast* multicast);
// Undoes whatever has been done; harmless if repeated.
PYCOLL_CUDA_API int pycoll_cuda_multicast_close(PycollCudaMulticast* multicast);

#ifdef __cplusplus
}
#endif
