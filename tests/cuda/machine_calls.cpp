// machine.cu over a CUDA runtime that only notes what is asked of it: which devices are chosen,
// and whether a context is current where the driver wants one; which kernels are loaded. Prints a
// line for each function.
#include <cstdio>
#include <string>
#include <thread>

#include "cuda/host/machine.cu"  // NOLINT: its own functions are called below

using namespace pycoll::cuda;  // NOLINT

namespace {

const void* kernel(uintptr_t number) { return reinterpret_cast<const void*>(number); }

}  // namespace

namespace pycoll::cuda {
KernelRow kSumKernels{{kernel(1), kernel(2), kernel(3), kernel(4), 1}};
KernelRow kProdKernels{}, kMinKernels{}, kMaxKernels{};
KernelRow kAndKernels{}, kOrKernels{}, kXorKernels{};
const KernelSet kMoveKernels{kernel(5), nullptr, kernel(6), kernel(7), 1};
const void* const kGateKernel = kernel(8);
const void* const kMessageKernel = kernel(9);
const void* const kEmptyKernel = kernel(10);
const void* const kNormKernels[kNormTypes] = {kernel(11), kernel(12), kernel(13)};
const OptimKernels kOptimKernels{{{kernel(14)}}, {kernel(15)}, {kernel(16)}, {kernel(17)}};
const void* const kMulticastKernels[kMulticastTypes] = {kernel(18), kernel(19), kernel(20)};
const void* const kMulticastCopies = kernel(21);

int machine::vmm_support(int device) { return device == 0 ? 0 : PYCOLL_CUDA_MULTICAST; }
}  // namespace pycoll::cuda

namespace {

thread_local int t_device = 0;
thread_local bool t_context = false;  // nothing but choosing a device makes one current here
thread_local std::string t_calls;

CUresult range(CUdeviceptr* base, size_t* size, CUdeviceptr at) {
  if (!t_context) return CUDA_ERROR_INVALID_CONTEXT;
  *base = at - 24;
  *size = 100;
  return CUDA_SUCCESS;
}

// Runs something on a thread that has not used CUDA yet.
template <typename Body>
void trace(const char* name, Body body) {
  std::thread([&] {
    try {
      body();
    } catch (const pycoll::Error& error) {
      t_calls += std::string(" ") + error.kind();
    }
    std::printf("%s:%s\n", name, t_calls.c_str());
  }).join();
}

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = t_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  t_calls += " set " + std::to_string(device);
  if (device > 1) return cudaErrorInvalidDevice;
  t_device = device;
  t_context = true;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  t_calls += " idle " + std::to_string(t_device);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  attributes->type = cudaMemoryTypeDevice;
  attributes->device = static_cast<int>(reinterpret_cast<uintptr_t>(pointer) >> 20);
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,  // NOLINT: the runtime's own
                                             cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&range);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) {
  t_calls += " export " + std::to_string(t_device);
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* kernel) {
  if (kernel == nullptr) return cudaSuccess;  // of types that this program leaves out
  t_calls += " " + std::to_string(reinterpret_cast<uintptr_t>(kernel));
  return cudaSuccess;
}
cudaError_t cudaFree(void*) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return ""; }
const char* cudaGetErrorString(cudaError_t) { return ""; }

}  // extern "C"

int main() {
  const auto pointer = [](uintptr_t device) { return reinterpret_cast<void*>(device << 20 | 64); };
  trace("idle here", [] { machine::wait_idle(0); });
  trace("idle there", [] { machine::wait_idle(1); });
  trace("idle nowhere", [] { machine::wait_idle(2); });
  trace("preload", [] { machine::preload(0); });
  trace("preload with multicast", [] { machine::preload(1); });
  for (uintptr_t device : {0, 1}) {
    trace("export", [&] {
      PycollCudaIpc ipc{};
      machine::ipc_export(pointer(device), ipc);
      t_calls += ", offset " + std::to_string(ipc.offset) + " of " + std::to_string(ipc.nbytes);
    });
  }
}
