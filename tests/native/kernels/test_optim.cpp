// Checks csrc/kernels/optim/optim.h on every instruction set of this CPU: optimizer steps against
// the same formulas in plain C++, bit for bit, and sums of squares against 128-bit integers.
// Vectors end where their memory ends, so that the address sanitizer sees every element too many.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/fold/fold.h"
#include "kernels/optim/optim.h"

namespace {

using pycoll::DType;
using pycoll::OptimArgs;
using pycoll::OptimKind;

constexpr const char* kIsas[] = {"base", "avx2", "avx512"};
constexpr size_t kCounts[] = {0, 1, 2, 7, 16, 33, 511, 512, 513, 1500};

void check(bool condition, const char* isa, const char* what, size_t count) {
  if (condition) return;
  std::printf("%s: %s of %zu elements\n", isa, what, count);
  std::exit(1);
}

template <typename T>
std::vector<T> normal(size_t count, int seed, T scale) {
  std::mt19937 random(seed);
  std::normal_distribution<double> distribution;
  std::vector<T> x(count);
  for (T& value : x) value = T(distribution(random)) * scale;
  return x;
}

template <typename T>
struct State {
  std::vector<T> p, g, m, v;
  explicit State(size_t n)
      : p(normal<T>(n, 1, 1)), g(normal<T>(n, 2, 3)), m(normal<T>(n, 3, 1)), v(n) {
    for (size_t i = 0; i < n; ++i) v[i] = m[i] * m[i];
  }
};

template <typename T>
void plain_step(OptimKind kind, const OptimArgs& a, State<T>& s) {
  for (size_t i = 0; i < s.p.size(); ++i) {
    T g = s.g[i] * T(a.scale);
    if (kind == OptimKind::kAdamw) {
      const T p = s.p[i] * T(a.keep);
      s.m[i] = s.m[i] * T(a.beta1) + g * T(1 - a.beta1);
      s.v[i] = s.v[i] * T(a.beta2) + (g * g) * T(1 - a.beta2);
      s.p[i] = p - T(a.rate) * (s.m[i] / (std::sqrt(s.v[i]) * T(a.root) + T(a.eps)));
      continue;
    }
    g = g + s.p[i] * T(a.decay);
    if (kind != OptimKind::kSgd) s.m[i] = s.m[i] * T(a.beta1) + g;
    const T look = kind == OptimKind::kSgd        ? g
                   : kind == OptimKind::kNesterov ? T(g + s.m[i] * T(a.beta1))
                                                  : s.m[i];
    s.p[i] = s.p[i] - T(a.rate) * look;
  }
}

template <typename T>
void test_steps(const char* isa, DType type) {
  for (const size_t n : kCounts) {
    for (int k = 0; k < pycoll::kOptimKindCount; ++k) {
      State<T> fused(n), plain(n);
      OptimArgs args{fused.p.data(),
                     fused.g.data(),
                     {fused.m.data(), fused.v.data()},
                     nullptr,
                     n,
                     0.37,
                     0.99,
                     1e-2,
                     0.9,
                     0.999,
                     1.7,
                     1e-8,
                     0.01};
      plain_step(static_cast<OptimKind>(k), args, plain);
      optim_step(static_cast<OptimKind>(k), {type, type, DType::kFloat16}, args);
      const bool same =
          n == 0 || (std::memcmp(fused.p.data(), plain.p.data(), n * sizeof(T)) == 0 &&
                     std::memcmp(fused.m.data(), plain.m.data(), n * sizeof(T)) == 0 &&
                     std::memcmp(fused.v.data(), plain.v.data(), n * sizeof(T)) == 0);
      check(same, isa, "a step", n);
    }
  }
}

// Squares of integers below 2^20 add up exactly in 64 bits.
void test_squares(const char* isa) {
  for (const size_t n : kCounts) {
    std::vector<float> x(n);
    std::vector<int64_t> limbs(pycoll::kExactLimbs);
    std::mt19937 random(static_cast<unsigned>(n));
    uint64_t expected = 0;
    for (float& value : x) {
      const int64_t whole = static_cast<int64_t>(random() % (1 << 20)) >> (random() % 20);
      value = static_cast<float>(whole);
      expected += static_cast<uint64_t>(whole * whole);
    }
    check(optim_add_squares(DType::kFloat32, x.data(), n, limbs.data()) == 0, isa, "finite", n);
    uint64_t found = 0;  // kExactBias is a multiple of 32: units start at a limb
    for (int i = 0; i < 2; ++i) {
      found |= static_cast<uint64_t>(limbs[pycoll::kExactBias / 32 + i]) << (32 * i);
    }
    check(found == expected, isa, "the squares", n);
    if (n == 0) continue;
    x[n / 2] = INFINITY;
    check(optim_add_squares(DType::kFloat32, x.data(), n, limbs.data()) == 1, isa, "infinite", n);
    check(pycoll::optim_nonfinite(DType::kFloat32, x.data(), n) == 1, isa, "the count", n);
    std::vector<float> out(n);
    check(pycoll::optim_unscale(DType::kFloat32, x.data(), out.data(), n, 2.0) == 1, isa,
          "the unscaled", n);
  }
}

}  // namespace

int main() {
  for (const char* isa : kIsas) {
    if (!pycoll::force_isa(isa)) continue;
    test_steps<float>(isa, DType::kFloat32);
    test_steps<double>(isa, DType::kFloat64);
    test_squares(isa);
  }
  std::puts("ok");
}
