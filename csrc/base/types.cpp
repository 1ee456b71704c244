#include "base/types.h"

#include <iterator>

namespace pycoll {
namespace {

constexpr size_t kItemsizes[kDTypeCount] = {1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 1, 1, 1};

}  // namespace

bool fold_supports(DType dtype, ReduceOp op) {
  const bool bitwise = op == ReduceOp::kAnd || op == ReduceOp::kOr || op == ReduceOp::kXor;
  if (dtype == DType::kBool) return bitwise || op == ReduceOp::kMin || op == ReduceOp::kMax;
  return !bitwise || dtype < DType::kFloat16;
}

size_t itemsize(DType dtype) { return kItemsizes[static_cast<size_t>(dtype)]; }

std::string type_name(uint32_t code) {
  constexpr const char* kNames[] = {
      "int8",   "int16",         "int32",       "int64",     "uint8",      "uint16",
      "uint32", "uint64",        "float16",     "bfloat16",  "float32",    "float64",
      "bool",   "float8_e4m3fn", "float8_e5m2", "complex64", "complex128", "object"};
  return code < std::size(kNames) ? kNames[code] : "dtype#" + std::to_string(code);
}

}  // namespace pycoll
