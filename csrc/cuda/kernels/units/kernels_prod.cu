// Kernels of prod.
#include "cuda/kernels/kernels.inl"

namespace pycoll::cuda {

PYCOLL_KERNEL_ROW(kProdKernels, ReduceOp::kProd);

}  // namespace pycoll::cuda
