#include "host_kernels.inl"

namespace pycoll::cuda {

PYCOLL_KERNEL_ROW(kProdKernels, ReduceOp::kProd);
PYCOLL_KERNEL_ROW(kMinKernels, ReduceOp::kMin);
PYCOLL_KERNEL_ROW(kMaxKernels, ReduceOp::kMax);
PYCOLL_KERNEL_ROW(kAndKernels, ReduceOp::kAnd);
PYCOLL_KERNEL_ROW(kOrKernels, ReduceOp::kOr);
PYCOLL_KERNEL_ROW(kXorKernels, ReduceOp::kXor);

namespace {

void empty(const Policy&, uint32_t, const void*) {}

}  // namespace

using Move = With<Copier<Policy>, 1>;
const KernelSet kMoveKernels = {reinterpret_cast<const void*>(&interpret<Move>), nullptr,
                                reinterpret_cast<const void*>(&fold<Move>), 1};
const void* const kEmptyKernel = reinterpret_cast<const void*>(&empty);

}  // namespace pycoll::cuda
