// The machine of machine.h on CUDA, but for virtual memory; see virtual_memory.cu.
#include <algorithm>
#include <cstring>

#include "cuda/host/cuda_calls.h"
#include "cuda/kernels/kernels.h"
#include "cuda/messages/messages.h"
#include "cuda/optim/optim_launch.h"

namespace pycoll::cuda::machine {
namespace {

template <typename Visit>
void for_each_kernel(Visit visit) {
  const KernelSet* const rows[] = {kSumKernels, kProdKernels, kMinKernels, kMaxKernels,
                                   kAndKernels, kOrKernels,   kXorKernels};
  for (const KernelSet* row : rows) {
    for (int type = 0; type < kDTypeCount; ++type) {
      for (const void* kernel :
           {row[type].interpret, row[type].direct, row[type].packets, row[type].fold}) {
        if (kernel != nullptr) visit(kernel);
      }
    }
  }
  for (const void* kernel : {kMoveKernels.interpret, kMoveKernels.packets, kMoveKernels.fold,
                             kGateKernel, kMessageKernel, kEmptyKernel}) {
    visit(kernel);
  }
  std::for_each_n(kNormKernels, kNormTypes, visit);
  for (const auto& row : kOptimKernels.steps) std::for_each_n(row, kOptimPairs, visit);
  for (const auto& row : {kOptimKernels.unscale, kOptimKernels.nonfinite, kOptimKernels.squares}) {
    std::for_each_n(row, kOptimFloats, visit);
  }
}

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

int device_count() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "counting CUDA devices");
  return count;
}

void versions(int* driver, int* runtime) {
  if (cudaDriverGetVersion(driver) != cudaSuccess) *driver = 0;
  if (cudaRuntimeGetVersion(runtime) != cudaSuccess) *runtime = 0;
  (void)cudaGetLastError();
}

void properties(int device, PycollCudaDevice& out) {
  cudaDeviceProp prop{};
  check(cudaGetDeviceProperties(&prop, device), "asking for properties of a device");
  static_assert(sizeof(out.name) == sizeof(prop.name));
  std::memcpy(out.name, prop.name, sizeof(out.name));
  std::memcpy(out.uuid, &prop.uuid, sizeof(out.uuid));
  out.major = prop.major;
  out.minor = prop.minor;
  out.multiprocessors = prop.multiProcessorCount;
  out.cooperative = prop.cooperativeLaunch;
  out.max_threads_per_block = prop.maxThreadsPerBlock;
  out.pci_domain = prop.pciDomainID;
  out.pci_bus = prop.pciBusID;
  out.pci_device = prop.pciDeviceID;
  out.memory_bytes = prop.totalGlobalMem;
  out.l2_bytes = static_cast<uint64_t>(prop.l2CacheSize);
  const OnDevice on(device);
  cudaFuncAttributes attributes{};
  out.runnable = cudaFuncGetAttributes(&attributes, kEmptyKernel) == cudaSuccess;
  (void)cudaGetLastError();
}

void preload(int device) {
  const OnDevice on(device);
  const DuringCapture relaxed;
  check(cudaFree(nullptr), "starting CUDA on a device");
  const auto load = [](const void* kernel) {
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel");
  };
  for_each_kernel(load);
  if ((vmm_support(device) & PYCOLL_CUDA_MULTICAST) == 0) return;
  std::for_each_n(kMulticastKernels, kMulticastTypes, load);
  load(kMulticastCopies);
}

void enable_peer_access(int device, int peer) {
  if (device == peer) return;
  const OnDevice on(device);
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
    return;
  }
  check(status, "enabling access between devices");
}

cudaError_t clear(void* pointer, size_t nbytes) {
  cudaStream_t stream = nullptr;
  cudaError_t status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (status == cudaSuccess) status = cudaMemsetAsync(pointer, 0, nbytes, stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  if (stream != nullptr) cudaStreamDestroy(stream);
  return status;
}

void* allocate(int device, size_t nbytes) {
  const OnDevice on(device);
  const DuringCapture relaxed;
  void* pointer = nullptr;
  check(cudaMalloc(&pointer, nbytes == 0 ? 1 : nbytes), "allocating device memory");
  const cudaError_t status = clear(pointer, nbytes);
  if (status != cudaSuccess) cudaFree(pointer);
  check(status, "clearing device memory");
  return pointer;
}

void release(void* pointer) {
  const DuringCapture relaxed;
  check(cudaFree(pointer), "freeing device memory");
}

void copy(void* dst, const void* src, size_t nbytes, void* stream) {
  check(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, stream_of(stream)), "copying");
}

void synchronize(void* stream) {
  check(cudaStreamSynchronize(stream_of(stream)), "waiting for a stream");
}

void copy_now(int device, void* dst, const void* src, size_t nbytes) {
  const OnDevice on(device);
  const DuringCapture relaxed;
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream");
  cudaError_t status = cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  check(status, "copying");
}

void wait_idle(int device) {
  const OnDevice on(device);
  check(cudaDeviceSynchronize(), "waiting for a device");
}

Record* allocate_records(int device, size_t count) {
  const OnDevice on(device);
  const DuringCapture relaxed;
  void* records = nullptr;
  check(
      cudaHostAlloc(&records, count * sizeof(Record), cudaHostAllocMapped | cudaHostAllocPortable),
      "allocating host memory that a device can reach");
  std::memset(records, 0, count * sizeof(Record));
  return static_cast<Record*>(records);
}

void release_records(Record* records) { check(cudaFreeHost(records), "freeing host memory"); }

Record* device_address(Record* records) {
  void* address = nullptr;
  check(cudaHostGetDevicePointer(&address, records, 0), "mapping host memory");
  return static_cast<Record*>(address);
}

void ipc_export(const void* pointer, PycollCudaIpc& ipc) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, pointer), "asking where memory lies");
  COLL_CHECK(attributes.type == cudaMemoryTypeDevice, "ArgumentError",
             "only device memory can be exported to other processes");
  const InContext on(attributes.device);
  CUdeviceptr base = 0;
  size_t size = 0;
  const auto at = reinterpret_cast<CUdeviceptr>(pointer);
  const auto address_range =
      driver_function<decltype(&cuMemGetAddressRange)>("cuMemGetAddressRange", 12000);
  COLL_CHECK(address_range(&base, &size, at) == CUDA_SUCCESS, "ArgumentError",
             "the allocation that the memory lies in is not known to the driver");
  cudaIpcMemHandle_t handle{};
  const cudaError_t status = cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(base));
  if (status != cudaSuccess) (void)cudaGetLastError();
  COLL_CHECK(status != cudaErrorInvalidValue && status != cudaErrorNotSupported, "ArgumentError",
             "this memory cannot be exported (only memory made by cudaMalloc can): ",
             cudaGetErrorString(status));
  check(status, "exporting device memory");
  static_assert(sizeof(handle) == sizeof(ipc.handle));
  std::memcpy(ipc.handle, &handle, sizeof(handle));
  ipc.offset = at - base;
  ipc.nbytes = size - ipc.offset;
  ipc.device = attributes.device;
}

void ipc_open(int device, const PycollCudaIpc& ipc, void** base, void** pointer) {
  const OnDevice on(device);
  cudaIpcMemHandle_t handle;
  std::memcpy(&handle, ipc.handle, sizeof(handle));
  void* mapped = nullptr;
  check(cudaIpcOpenMemHandle(&mapped, handle, cudaIpcMemLazyEnablePeerAccess),
        "opening memory of another process");
  *base = mapped;
  *pointer = static_cast<char*>(mapped) + ipc.offset;
}

void ipc_close(int device, void* base) {
  const OnDevice on(device);
  check(cudaIpcCloseMemHandle(base), "closing memory of another process");
}

KernelInfo kernel_info(int device, const void* kernel, int threads) {
  const OnDevice on(device);
  cudaFuncAttributes attributes{};
  check(cudaFuncGetAttributes(&attributes, kernel), "asking for attributes of a kernel");
  int per_multiprocessor = 0, multiprocessors = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, 0),
        "asking how many blocks fit");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
        "asking for multiprocessors");
  return {attributes.numRegs, static_cast<int>(attributes.localSizeBytes),
          static_cast<int>(attributes.sharedSizeBytes), per_multiprocessor * multiprocessors};
}

void launch(int device, const void* kernel, int blocks, int threads, const void* parameter,
            size_t /*nbytes*/, bool cooperative, void* stream) {
  const OnDevice on(device);
  void* parameters[] = {const_cast<void*>(parameter)};
  const dim3 grid(static_cast<unsigned>(blocks)), block(static_cast<unsigned>(threads));
  void** const all = parameter == nullptr ? nullptr : parameters;
  if (cooperative) {
    check(cudaLaunchCooperativeKernel(kernel, grid, block, all, 0, stream_of(stream)),
          "launching ranks");
  } else {
    check(cudaLaunchKernel(kernel, grid, block, all, 0, stream_of(stream)), "launching a kernel");
  }
}

}  // namespace pycoll::cuda::machine
