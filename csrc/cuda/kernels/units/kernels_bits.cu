// Kernels of and, or, xor; of plans that only move; of gates; and one that does nothing.
#include "cuda/kernels/gate.h"
#include "cuda/kernels/kernels.inl"
#include "cuda/packets/low_latency_moves.h"

namespace pycoll::cuda {
namespace {

__global__ void empty() {}

__global__ void __launch_bounds__(kGateThreads) gate(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  const DevicePolicy p(shared);
  run_gate(p, launch, launch.first_rank);
}

__global__ void __launch_bounds__(kMaxThreads, 1) moves(const __grid_constant__ Launch launch) {
  __shared__ Shared shared;
  const DevicePolicy p(shared);
  run_rank_moves(p, launch, launch.first_rank + blockIdx.x / launch.nblocks,
                 blockIdx.x % launch.nblocks);
}

}  // namespace

PYCOLL_KERNEL_ROW(kAndKernels, ReduceOp::kAnd);
PYCOLL_KERNEL_ROW(kOrKernels, ReduceOp::kOr);
PYCOLL_KERNEL_ROW(kXorKernels, ReduceOp::kXor);

using Move = With<Copier<DevicePolicy>, 1>;
const KernelSet kMoveKernels = {reinterpret_cast<const void*>(&interpret<Move>), nullptr,
                                reinterpret_cast<const void*>(&moves),
                                reinterpret_cast<const void*>(&fold<Move>), 1};
const void* const kEmptyKernel = reinterpret_cast<const void*>(&empty);
const void* const kGateKernel = reinterpret_cast<const void*>(&gate);

}  // namespace pycoll::cuda
