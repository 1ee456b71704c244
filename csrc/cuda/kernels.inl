// The kernels: the templates of interpreter.h, direct.h and fold.h with the device's policy.
#include <utility>

#include "cuda/direct.h"
#include "cuda/kernels.h"
#include "cuda/visit.h"

namespace pycoll::cuda {
namespace {

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
__global__ void __launch_bounds__(kMaxThreads, 1) fold(const __grid_constant__ FoldLaunch launch) {
  __shared__ Shared shared;
  const DevicePolicy p(shared);
  const FoldView view{launch.src,  launch.dst,         launch.nsrc,
                      launch.ndst, launch.tree != 0, {launch.scale_n, launch.is_signed != 0}};
  const uint64_t begin = blockIdx.x * launch.slice;
  const uint64_t stop = begin + launch.slice;
  fold_range<typename W::Fold, W::kSize>(
      p, view, begin, stop < launch.nbytes ? stop : launch.nbytes,
      [&](uint64_t from, uint64_t to) { W::Fold::template range<16>(p, view, from, to); });
}

template <typename T, ReduceOp kOp>
KernelSet kernel_set() {
  if constexpr (std::is_void_v<T>) {
    return {};
  } else {
    using W = With<Folder<DevicePolicy, T, kOp>, sizeof(T)>;
    KernelSet set{};
    set.interpret = reinterpret_cast<const void*>(&interpret<W>);
    set.fold = reinterpret_cast<const void*>(&fold<W>);
    if constexpr (kHasDirect<T, kOp>) set.direct = reinterpret_cast<const void*>(&direct<W>);
    set.elem_bytes = sizeof(T);
    return set;
  }
}

template <ReduceOp kOp, size_t kType>
KernelSet set_of() {
  return kernel_set<typename Canonical<static_cast<DType>(kType), kOp>::type, kOp>();
}

}  // namespace

// Defines a row of kernels.h.
#define PYCOLL_KERNEL_ROW(name, op)                                                            \
  KernelRow name = {set_of<op, 0>(), set_of<op, 1>(), set_of<op, 2>(), set_of<op, 3>(),        \
                    set_of<op, 4>(), set_of<op, 5>(), set_of<op, 6>(), set_of<op, 7>(),        \
                    set_of<op, 8>(), set_of<op, 9>(), set_of<op, 10>(), set_of<op, 11>()}

}  // namespace pycoll::cuda
