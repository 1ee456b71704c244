// Kernels of min.
#include "cuda/kernels/kernels.inl"

namespace pycoll::cuda {

PYCOLL_KERNEL_ROW(kMinKernels, ReduceOp::kMin);

}  // namespace pycoll::cuda
