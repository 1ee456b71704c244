#include "cuda/kernels/gate.h"
#include "cuda/kernels/multicast.h"
#include "cuda/messages/messages.h"
#include "cuda/packets/low_latency_moves.h"
#include "host_kernels.inl"

namespace pycoll::cuda {

PYCOLL_KERNEL_ROW(kProdKernels, ReduceOp::kProd);
PYCOLL_KERNEL_ROW(kMinKernels, ReduceOp::kMin);
PYCOLL_KERNEL_ROW(kMaxKernels, ReduceOp::kMax);
PYCOLL_KERNEL_ROW(kAndKernels, ReduceOp::kAnd);
PYCOLL_KERNEL_ROW(kOrKernels, ReduceOp::kOr);
PYCOLL_KERNEL_ROW(kXorKernels, ReduceOp::kXor);

namespace {

template <typename T>
struct WithElement : With<Folder<Policy, T, ReduceOp::kSum>, sizeof(T)> {
  using Element = T;
};

template <typename T>
void multicast(const Policy& p, uint32_t block, const void* parameter) {
  const Launch& launch = *static_cast<const Launch*>(parameter);
  run_rank_multicast<WithElement<T>>(p, launch, launch.first_rank, block);
}

void multicast_copies(const Policy& p, uint32_t block, const void* parameter) {
  const Launch& launch = *static_cast<const Launch*>(parameter);
  run_rank_multicast_copies(p, launch, launch.first_rank, block);
}

void gate(const Policy& p, uint32_t, const void* parameter) {
  const Launch& launch = *static_cast<const Launch*>(parameter);
  run_gate(p, launch, launch.first_rank);
}

void moves(const Policy& p, uint32_t block, const void* parameter) {
  const Launch& launch = *static_cast<const Launch*>(parameter);
  run_rank_moves(p, launch, launch.first_rank + block / launch.nblocks, block % launch.nblocks);
}

void message(const Policy& p, uint32_t block, const void* parameter) {
  run_messages(p, *static_cast<const MessageLaunch*>(parameter), block);
}

void empty(const Policy&, uint32_t, const void*) {}

}  // namespace

using Move = With<Copier<Policy>, 1>;
const KernelSet kMoveKernels = {reinterpret_cast<const void*>(&interpret<Move>), nullptr,
                                reinterpret_cast<const void*>(&moves),
                                reinterpret_cast<const void*>(&fold<Move>), 1};
const void* const kMulticastKernels[kMulticastTypes] = {
    reinterpret_cast<const void*>(&multicast<Half>),
    reinterpret_cast<const void*>(&multicast<BFloat>),
    reinterpret_cast<const void*>(&multicast<float>)};
const void* const kMulticastCopies = reinterpret_cast<const void*>(&multicast_copies);
const void* const kGateKernel = reinterpret_cast<const void*>(&gate);
const void* const kMessageKernel = reinterpret_cast<const void*>(&message);
const void* const kEmptyKernel = reinterpret_cast<const void*>(&empty);

}  // namespace pycoll::cuda
