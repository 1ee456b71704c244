#include "types.h"

namespace pycoll {
namespace {

constexpr size_t kItemsizes[kDTypeCount] = {1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8};

}  // namespace

bool fold_supports(DType dtype, ReduceOp op) {
  const bool bitwise = op == ReduceOp::kAnd || op == ReduceOp::kOr || op == ReduceOp::kXor;
  return !bitwise || dtype < DType::kFloat16;
}

size_t itemsize(DType dtype) { return kItemsizes[static_cast<size_t>(dtype)]; }

}  // namespace pycoll
