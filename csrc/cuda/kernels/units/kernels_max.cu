// Kernels of max.
#include "cuda/kernels/kernels.inl"

namespace pycoll::cuda {

PYCOLL_KERNEL_ROW(kMaxKernels, ReduceOp::kMax);

}  // namespace pycoll::cuda
