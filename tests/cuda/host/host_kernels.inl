// The kernels on the host: the same templates with the host's policy.
#include "cuda/kernels/direct.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/visit.h"
#include "cuda/packets/low_latency.h"
#include "host_policy.h"

namespace pycoll::cuda {
namespace {

using Policy = host::HostPolicy;

// Every fold is there; of interpreters, which take long to compile, one for each kind of element,
// and the largest float, which a loss over a divided vocabulary needs.
template <typename T, ReduceOp kOp>
inline constexpr bool kHasInterpreter =
    kOp == ReduceOp::kSum || (kOp == ReduceOp::kMax && std::is_same_v<T, int32_t>) ||
    (kOp == ReduceOp::kMax && std::is_same_v<T, float>) ||
    (kOp == ReduceOp::kProd && std::is_same_v<T, BFloat>);

template <typename W>
void interpret(const Policy& p, uint32_t block, const void* parameter) {
  const Launch& launch = *static_cast<const Launch*>(parameter);
  run_rank<W>(p, launch, launch.first_rank + block / launch.nblocks, block % launch.nblocks);
}

template <typename W>
void direct(const Policy& p, uint32_t block, const void* parameter) {
  const Launch& launch = *static_cast<const Launch*>(parameter);
  run_rank_direct<W>(p, launch, launch.first_rank + block / launch.nblocks, block % launch.nblocks);
}

template <typename W>
void low_latency(const Policy& p, uint32_t block, const void* parameter) {
  const Launch& launch = *static_cast<const Launch*>(parameter);
  run_rank_low_latency<W>(p, launch, launch.first_rank + block / launch.nblocks,
                          block % launch.nblocks);
}

template <typename W>
void fold(const Policy& p, uint32_t block, const void* parameter) {
  const FoldLaunch& launch = *static_cast<const FoldLaunch*>(parameter);
  const FoldView view{launch.src,  launch.dst,       launch.nsrc,
                      launch.ndst, launch.tree != 0, {launch.scale_n, launch.is_signed != 0}};
  const uint64_t begin = block * launch.slice, stop = begin + launch.slice;
  fold_range<typename W::Fold, W::kSize>(
      p, view, begin, stop < launch.nbytes ? stop : launch.nbytes,
      [&](uint64_t from, uint64_t to) { W::Fold::template range<16>(p, view, from, to); });
}

}  // namespace
}  // namespace pycoll::cuda

#include "cuda/kernels/kernel_rows.inl"
