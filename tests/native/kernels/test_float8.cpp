// Folds of all pairs of 8-bit floats, by every instruction set of this CPU, against arithmetic on
// their values. tests/native/kernels/test_fold.cpp folds more of them, wherever they lie.
#include <string>
#include <vector>

#include "calls.h"
#include "fold_oracle.h"
#include "kernels/fold/fold.h"

namespace {

using namespace calls;

template <typename E>
void check_pairs(DType dtype, ReduceOp op, uint32_t scale_n) {
  std::vector<uint8_t> left(65536), right(65536), result(65536), expected(65536);
  for (size_t i = 0; i < left.size(); ++i) {
    left[i] = static_cast<uint8_t>(i >> 8);
    right[i] = static_cast<uint8_t>(i);
    const float value = oracle::combine(op, E::decode(left[i]), E::decode(right[i]));
    expected[i] = E::encode(scale_n != 0 ? oracle::divide(value, scale_n) : value);
  }
  for (const char* isa : {"base", "avx2", "avx512"}) {
    if (!force_isa(isa)) continue;
    const void* srcs[] = {left.data(), right.data()};
    void* dsts[] = {result.data()};
    fold({dtype, op, false, scale_n, 0}, srcs, 2, dsts, 1, left.size());
    for (size_t i = 0; i < left.size(); ++i) {
      expect(oracle::same<E>(result[i], expected[i]), isa, ": op ", int(op), " by ", scale_n,
             " of ", int(left[i]), " and ", int(right[i]), ": ", int(result[i]), ", not ",
             int(expected[i]));
    }
  }
}

template <typename E>
void check_all(DType dtype) {
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMin, ReduceOp::kMax}) {
    check_pairs<E>(dtype, op, 0);
  }
  for (const uint32_t scale_n : {1u, 2u, 3u, 65537u})
    check_pairs<E>(dtype, ReduceOp::kAvg, scale_n);
}

void e4m3() { check_all<oracle::Float8E4M3>(DType::kFloat8_E4M3FN); }

void e5m2() { check_all<oracle::Float8E5M2>(DType::kFloat8_E5M2); }

}  // namespace

int main() { return main_of({{"float8_e4m3fn", e4m3}, {"float8_e5m2", e5m2}}); }
