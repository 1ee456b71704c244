// Rows of kernels.h. Whoever includes this has defined, in pycoll::cuda and an anonymous namespace,
// Policy, the kernels interpret<W>, direct<W>, low_latency<W> and fold<W>, and kHasInterpreter<T,
// kOp>.
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/visit.h"

namespace pycoll::cuda {
namespace {

template <typename T, ReduceOp kOp>
KernelSet kernel_set() {
  if constexpr (std::is_void_v<T>) {
    return {};
  } else {
    using W = With<Folder<Policy, T, kOp>, sizeof(T)>;
    KernelSet set{};
    if constexpr (kHasInterpreter<T, kOp>) {
      set.interpret = reinterpret_cast<const void*>(&interpret<W>);
    }
    set.fold = reinterpret_cast<const void*>(&fold<W>);
    if constexpr (kHasDirect<T, kOp>) {
      set.direct = reinterpret_cast<const void*>(&direct<W>);
      set.packets = reinterpret_cast<const void*>(&low_latency<W>);
    }
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
#define PYCOLL_KERNEL_ROW(name, op)                                                         \
  KernelRow name = {set_of<op, 0>(),  set_of<op, 1>(),  set_of<op, 2>(),  set_of<op, 3>(),  \
                    set_of<op, 4>(),  set_of<op, 5>(),  set_of<op, 6>(),  set_of<op, 7>(),  \
                    set_of<op, 8>(),  set_of<op, 9>(),  set_of<op, 10>(), set_of<op, 11>(), \
                    set_of<op, 12>(), set_of<op, 13>(), set_of<op, 14>()};                  \
  static_assert(kDTypeCount == 15)

}  // namespace pycoll::cuda
