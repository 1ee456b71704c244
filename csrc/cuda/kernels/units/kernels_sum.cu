// Kernels of sum and avg.
#include "cuda/kernels/kernels.inl"

namespace pycoll::cuda {

PYCOLL_KERNEL_ROW(kSumKernels, ReduceOp::kSum);

}  // namespace pycoll::cuda
