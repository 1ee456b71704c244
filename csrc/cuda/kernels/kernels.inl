// The kernels: the templates of interpreter.h, direct.h, low_latency.h and fold.h with the device's
// policy.
#include "cuda/kernels/direct.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/visit.h"
#include "cuda/packets/low_latency.h"

namespace pycoll::cuda {
namespace {

using Policy = DevicePolicy;

template <typename T, ReduceOp kOp>
inline constexpr bool kHasInterpreter = true;

template <typename W>
__global__ void __launch_bounds__(kMaxThreads, 1) interpret(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  const DevicePolicy p(shared);
  run_rank<W>(p, launch, launch.first_rank + blockIdx.x / launch.nblocks,
              blockIdx.x % launch.nblocks);
}

template <typename W>
__global__ void __launch_bounds__(kMaxThreads, 1) direct(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  const DevicePolicy p(shared);
  run_rank_direct<W>(p, launch, launch.first_rank + blockIdx.x / launch.nblocks,
                     blockIdx.x % launch.nblocks);
}

template <typename W>
__global__ void __launch_bounds__(kMaxThreads, 1)
    low_latency(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  const DevicePolicy p(shared);
  run_rank_low_latency<W>(p, launch, launch.first_rank + blockIdx.x / launch.nblocks,
                          blockIdx.x % launch.nblocks);
}

template <typename W>
__global__ void __launch_bounds__(kMaxThreads, 1) fold(const __grid_constant__ FoldLaunch launch) {
  __shared__ Shared shared;
  const DevicePolicy p(shared);
  const FoldView view{launch.src,  launch.dst,       launch.nsrc,
                      launch.ndst, launch.tree != 0, {launch.scale_n, launch.is_signed != 0}};
  const uint64_t begin = blockIdx.x * launch.slice;
  const uint64_t stop = begin + launch.slice;
  fold_range<typename W::Fold, W::kSize>(
      p, view, begin, stop < launch.nbytes ? stop : launch.nbytes,
      [&](uint64_t from, uint64_t to) { W::Fold::template range<16>(p, view, from, to); });
}

}  // namespace
}  // namespace pycoll::cuda

#include "cuda/kernels/kernel_rows.inl"
