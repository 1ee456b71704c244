// Kernels of and, or, xor; of plans that only move; and one that does nothing.
#include "cuda/kernels/kernels.inl"

namespace pycoll::cuda {
namespace {

__global__ void empty() {}

}  // namespace

PYCOLL_KERNEL_ROW(kAndKernels, ReduceOp::kAnd);
PYCOLL_KERNEL_ROW(kOrKernels, ReduceOp::kOr);
PYCOLL_KERNEL_ROW(kXorKernels, ReduceOp::kXor);

using Move = With<Copier<DevicePolicy>, 1>;
const KernelSet kMoveKernels = {reinterpret_cast<const void*>(&interpret<Move>), nullptr,
                                reinterpret_cast<const void*>(&fold<Move>), 1};
const void* const kEmptyKernel = reinterpret_cast<const void*>(&empty);

}  // namespace pycoll::cuda
