// Times fold over sources, destinations, dtypes and sizes, beside a plain hand-written AVX2 loop
// where one exists (float32, two sources, one or two destinations). The two alternate sample by
// sample, so that a disturbance hits both. GB/s (10^9) counts every source read and every
// destination written once.
//
//   g++ -O3 -std=c++20 -ffp-contract=off -Icsrc benchmarks/native/fold_bench.cpp
//   csrc/kernels/*.cpp csrc/kernels/fold/fold.cpp
//       csrc/base/types.cpp -o /tmp/fold_bench && /tmp/fold_bench [isa]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/fold/fold.h"

namespace {

using pycoll::DType;

constexpr int kSamples = 41;
constexpr double kSampleSeconds = 200e-6;

using PlainLoop = void (*)(const float* a, const float* b, float* x, float* y, size_t count);

#if defined(__x86_64__)
// count is a multiple of 32.
template <bool kTwoDestinations>
__attribute__((target("avx2"), noinline)) void plain_avx2(const float* a, const float* b, float* x,
                                                          float* y, size_t count) {
  for (size_t i = 0; i < count; i += 32) {
    for (size_t j = i; j < i + 32; j += 8) {
      const __m256 sum = _mm256_add_ps(_mm256_loadu_ps(a + j), _mm256_loadu_ps(b + j));
      _mm256_storeu_ps(x + j, sum);
      if (kTwoDestinations) _mm256_storeu_ps(y + j, sum);
    }
  }
}
#endif

PlainLoop plain_loop(DType dtype, int nsrc, int ndst) {
#if defined(__x86_64__)
  if (dtype == DType::kFloat32 && nsrc == 2 && ndst <= 2 && __builtin_cpu_supports("avx2")) {
    return ndst == 1 ? plain_avx2<false> : plain_avx2<true>;
  }
#else
  (void)dtype, (void)nsrc, (void)ndst;
#endif
  return nullptr;
}

const char* short_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "f32";
    case DType::kBFloat16:
      return "bf16";
    case DType::kFloat8_E4M3FN:
      return "e4m3";
    default:
      return "e5m2";
  }
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds of one of so many runs.
template <typename F>
double seconds_of(F&& f, int runs) {
  const double begin = now();
  for (int i = 0; i < runs; ++i) f();
  return (now() - begin) / runs;
}

double median(std::vector<double>& times) {
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

template <typename F>
int repeats_for(F& f) {
  seconds_of(f, 3);
  return static_cast<int>(kSampleSeconds / seconds_of(f, 3)) + 1;
}

struct Timing {
  double median;
  double minimum;
};

Timing summarise(std::vector<double>& times) {
  return {median(times), *std::min_element(times.begin(), times.end())};
}

void bench(const pycoll::FoldSpec& spec, int nsrc, int ndst, size_t nbytes) {
  // Buffers start at different lines of a page, so that they do not compete for the same sets of a
  // cache.
  const size_t pitch = (nbytes + 4095) / 4096 * 4096 + 320;
  const size_t all = static_cast<size_t>(nsrc + ndst) * pitch;
  std::vector<char> buffers(all);
  std::vector<const void*> srcs;
  std::vector<void*> dsts;
  for (int b = 0; b < nsrc; ++b) srcs.push_back(&buffers[b * pitch]);
  for (int b = nsrc; b < nsrc + ndst; ++b) dsts.push_back(&buffers[b * pitch]);
  const size_t count = nbytes / pycoll::itemsize(spec.dtype);
  auto run_fold = [&] { pycoll::fold(spec, srcs.data(), nsrc, dsts.data(), ndst, count); };
  const PlainLoop plain = plain_loop(spec.dtype, nsrc, ndst);
  auto run_plain = [&] {
    plain(static_cast<const float*>(srcs[0]), static_cast<const float*>(srcs[1]),
          static_cast<float*>(dsts[0]), static_cast<float*>(dsts[ndst - 1]), count);
  };
  const int repeats = repeats_for(run_fold);
  std::vector<double> fold_seconds;
  std::vector<double> plain_seconds;
  for (int s = 0; s < kSamples; ++s) {
    fold_seconds.push_back(seconds_of(run_fold, repeats));
    if (plain != nullptr) plain_seconds.push_back(seconds_of(run_plain, repeats));
  }
  const Timing fold_time = summarise(fold_seconds);
  const double gb = static_cast<double>(nsrc + ndst) * nbytes * 1e-9;
  std::printf("%-9s %-6s %-4s %4d %4d %9zu %10.1f %10.1f", pycoll::isa_name(),
              spec.tree ? "tree" : "serial", short_name(spec.dtype), nsrc, ndst, nbytes,
              gb / fold_time.median, gb / fold_time.minimum);
  if (plain != nullptr) {
    const Timing plain_time = summarise(plain_seconds);
    std::printf(" %10.1f %10.1f %8.2f %8.2f", gb / plain_time.median, gb / plain_time.minimum,
                plain_time.median / fold_time.median, plain_time.minimum / fold_time.minimum);
  }
  std::printf("%s\n", spec.nontemporal ? "  nontemporal" : "");
}

void bench_latency(size_t count) {
  alignas(64) float a[64] = {}, b[64] = {}, sum[64];
  const void* srcs[] = {a, b};
  void* dsts[] = {sum};
  const pycoll::FoldSpec spec{DType::kFloat32, pycoll::ReduceOp::kSum, false, 0, false};
  auto run = [&] { pycoll::fold(spec, srcs, 2, dsts, 1, count); };
  std::vector<double> times;
  for (int s = 0; s < kSamples; ++s) times.push_back(seconds_of(run, 20000));
  const Timing timing = summarise(times);
  std::printf("2 sources of %2zu float32: median %.1f ns, minimum %.1f ns\n", count,
              timing.median * 1e9, timing.minimum * 1e9);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && !pycoll::force_isa(argv[1])) {
    std::fprintf(stderr, "this CPU has no %s\n", argv[1]);
    return 1;
  }
  for (size_t count : {1, 2, 4, 16, 64}) bench_latency(count);
  std::printf("%-9s %-6s %-4s %3s %4s %9s %10s %10s %10s %10s %8s %8s\n", "isa", "shape", "dtype",
              "S", "D", "bytes", "GB/s med", "GB/s best", "plain med", "plain best", "x median",
              "x best");
  constexpr size_t kSizes[] = {4 << 10, 64 << 10, 1 << 20, 16 << 20};
  const auto sum = pycoll::ReduceOp::kSum;
  for (DType dtype :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat8_E4M3FN, DType::kFloat8_E5M2}) {
    for (int nsrc : {2, 4, 8, 16, 64}) {
      for (int ndst : {1, 2, 4}) {
        if (nsrc > 8 && ndst > 1) continue;
        for (size_t nbytes : kSizes) {
          bench({dtype, sum, false, 0, false}, nsrc, ndst, nbytes);
          if (ndst == 1 && nsrc > 2) bench({dtype, sum, true, 0, false}, nsrc, ndst, nbytes);
          if (nbytes >= 1 << 20) bench({dtype, sum, false, 0, true}, nsrc, ndst, nbytes);
        }
      }
    }
  }
  return 0;
}
