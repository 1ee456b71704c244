// What the files that call CUDA have in common: errors, the current device, functions of the
// driver. The runtime is linked statically, and the driver's functions are looked up at run time,
// so that the library loads where there is no driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/host/machine.h"

namespace pycoll::cuda::machine {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // not sticky: the next call starts clean
  const bool absent = status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice ||
                      status == cudaErrorStubLibrary || status == cudaErrorSystemNotReady ||
                      status == cudaErrorSystemDriverMismatch ||
                      status == cudaErrorCompatNotSupportedOnDevice;
  const char* kind = absent                                         ? "CudaUnavailable"
                     : status == cudaErrorCooperativeLaunchTooLarge ? "TooLarge"
                     : status == cudaErrorNoKernelImageForDevice    ? "CudaUnavailable"
                     : status == cudaErrorInvalidDevice             ? "ArgumentError"
                                                                    : "CudaError";
  throw_error(kind, what, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status));
}

// Makes a device current for a while. Where it is already, nothing is changed: to choose a device
// makes its primary context current, in the place of any other that the caller may have.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "finding the current device");
    if (device < 0 || device == before_) return;
    check(cudaSetDevice(device), "choosing a device");
    changed_ = true;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// The same for functions of the driver, which ask for a current context: a thread that has used
// none yet lacks one even where the device is the current one.
class InContext : OnDevice {
 public:
  explicit InContext(int device) : OnDevice(device) {
    check(cudaSetDevice(device), "choosing a device");
  }
};

// Allows calls on this thread that a capture under way would otherwise forbid.
class DuringCapture {
 public:
  DuringCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~DuringCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// A function of the driver, as it was in a version of CUDA.
template <typename Function>
Function driver_function(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found),
        "looking up a function of the driver");
  COLL_CHECK(found == cudaDriverEntryPointSuccess && function != nullptr, "CudaUnavailable",
             "the driver has no ", name);
  return reinterpret_cast<Function>(function);
}

// Sets device memory to zero, on a stream of its own: the legacy stream would wait for others.
cudaError_t clear(void* pointer, size_t nbytes);

}  // namespace pycoll::cuda::machine
