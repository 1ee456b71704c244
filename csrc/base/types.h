// Element types, reduction operations and the steps of a rank. The numbers are those of
// pycoll/types.py and pycoll/schedule/lowering/plan.py; a test compares them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace pycoll {

inline constexpr uint64_t kPage = 4096;  // bytes, in which memory is mapped and given back

enum class DType : uint8_t {
  kInt8 = 0,
  kInt16 = 1,
  kInt32 = 2,
  kInt64 = 3,
  kUInt8 = 4,
  kUInt16 = 5,
  kUInt32 = 6,
  kUInt64 = 7,
  kFloat16 = 8,
  kBFloat16 = 9,
  kFloat32 = 10,
  kFloat64 = 11,
  kBool = 12,  // a byte; any but 0 is true, and 1 is what a fold stores
  kFloat8_E4M3FN = 13,
  kFloat8_E5M2 = 14,
};
inline constexpr int kDTypeCount = 15;

enum class ReduceOp : uint8_t {
  kSum = 0,
  kProd = 1,
  kMin = 2,
  kMax = 3,
  kAvg = 4,
  kAnd = 5,
  kOr = 6,
  kXor = 7,
};
inline constexpr int kReduceOpCount = 8;

// Steps a rank can publish; ordinary lines use 2 .. kDone - 1.
inline constexpr uint32_t kEntered = 1;
inline constexpr uint32_t kDone = 0xFFFE;
inline constexpr uint32_t kFailed = 0xFFFF;

// Whether op is defined for dtype: bitwise operations for integers and bool; arithmetic not for
// bool.
bool fold_supports(DType dtype, ReduceOp op);

size_t itemsize(DType dtype);

// Of messages that are Python objects, packed.
inline constexpr uint32_t kObjectType = 17;

// What the number that travels with a message stands for; as type_name of pycoll/types.py.
std::string type_name(uint32_t code);

}  // namespace pycoll
