// Kernels of sums over ranks + residual + RMSNorm.
#include "cuda/kernels/rms_norm.h"

namespace pycoll::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 1) norm(const __grid_constant__ NormLaunch launch) {
  __shared__ Shared shared;
  __shared__ NormSums sums;
  const DevicePolicy p(shared);
  const Launch& call = launch.call;
  run_rank_norm<T>(p, launch, sums, call.first_rank + blockIdx.x / call.nblocks,
                   blockIdx.x % call.nblocks);
}

}  // namespace

const void* const kNormKernels[kNormTypes] = {reinterpret_cast<const void*>(&norm<float>),
                                              reinterpret_cast<const void*>(&norm<Half>),
                                              reinterpret_cast<const void*>(&norm<BFloat>)};

}  // namespace pycoll::cuda
