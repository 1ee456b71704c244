// Kernels over multicast addresses, for sm_90 and later alone: see build_cuda.py. They have run on
// no device yet.
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/multicast.h"
#include "cuda/kernels/multicast_policy.h"

namespace pycoll::cuda {
namespace {

template <typename T>
struct WithElement : With<Folder<MulticastPolicy, T, ReduceOp::kSum>, sizeof(T)> {
  using Element = T;
};

template <typename W>
__global__ void __launch_bounds__(kMaxThreads, 1) multicast(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  const MulticastPolicy p(shared);
  run_rank_multicast<W>(p, launch, launch.first_rank, blockIdx.x);
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    multicast_copies(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  const MulticastPolicy p(shared);
  run_rank_multicast_copies(p, launch, launch.first_rank, blockIdx.x);
}

template <typename T>
const void* kernel() {
  return reinterpret_cast<const void*>(&multicast<WithElement<T>>);
}

}  // namespace

const void* const kMulticastKernels[kMulticastTypes] = {kernel<Half>(), kernel<BFloat>(),
                                                        kernel<float>()};
const void* const kMulticastCopies = reinterpret_cast<const void*>(&multicast_copies);

}  // namespace pycoll::cuda
