// Kernels of all_reduce + residual + RMSNorm on the host: the same templates with the host's
// policy.
#include "cuda/kernels/rms_norm.h"
#include "host_policy.h"

namespace pycoll::cuda {
namespace {

using host::HostPolicy;

template <typename T>
void norm(const HostPolicy& p, uint32_t block, const void* parameter) {
  const NormLaunch& launch = *static_cast<const NormLaunch*>(parameter);
  const uint32_t nblocks = launch.call.nblocks;
  run_rank_norm<T>(p, launch, p.sums(), launch.call.first_rank + block / nblocks, block % nblocks);
}

}  // namespace

const void* const kNormKernels[kNormTypes] = {reinterpret_cast<const void*>(&norm<float>),
                                              reinterpret_cast<const void*>(&norm<Half>),
                                              reinterpret_cast<const void*>(&norm<BFloat>)};

}  // namespace pycoll::cuda
