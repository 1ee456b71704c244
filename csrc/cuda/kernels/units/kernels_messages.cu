// The kernel of messages.
#include "cuda/kernels/kernels.h"
#include "cuda/messages/messages.h"

namespace pycoll::cuda {
namespace {

__global__ void __launch_bounds__(kMaxThreads, 1)
    message(const __grid_constant__ MessageLaunch launch) {
  __shared__ Shared shared;  // not used, so it takes no room
  run_messages(DevicePolicy(shared), launch, blockIdx.x);
}

}  // namespace

const void* const kMessageKernel = reinterpret_cast<const void*>(&message);

}  // namespace pycoll::cuda
