// The limit: an in-place all-reduce of two ranks that does nothing else. Each rank folds its half
// of both vectors and stores the sum in both; before and after, it raises a flag and waits for the
// other's. These are the folds and the synchronisation of two_shot_push on two ranks, without a
// plan, an argument, a check or a deadline. Driven by benchmarks/overhead.py and check.py.
#include "by_hand.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__x86_64__)
__attribute__((target("avx2"))) void fold_both(float* a, float* b, size_t count) {
  size_t i = 0;
  for (; i + 32 <= count; i += 32) {
    for (size_t j = i; j < i + 32; j += 8) {
      const __m256 sum = _mm256_add_ps(_mm256_loadu_ps(a + j), _mm256_loadu_ps(b + j));
      _mm256_storeu_ps(a + j, sum);
      _mm256_storeu_ps(b + j, sum);
    }
  }
  for (; i < count; ++i) a[i] = b[i] = a[i] + b[i];
}
#else
void fold_both(float* __restrict a, float* __restrict b, size_t count) {
  for (size_t i = 0; i < count; ++i) a[i] = b[i] = a[i] + b[i];
}
#endif

}  // namespace

// Runs `calls` all-reduces, each on the next slot, of `count` float32. Behind the header lie the
// slots of rank 0, then those of rank 1; `stride` bytes from slot to slot.
extern "C" void limit_all_reduce(Ranks ranks, size_t count, size_t stride, size_t slots,
                                 size_t calls) {
  const size_t half = count / 2;
  const size_t start = ranks.rank == 0 ? 0 : half;
  const size_t length = ranks.rank == 0 ? half : count - half;
  for (size_t i = 0; i < calls; ++i) {
    const size_t slot = *ranks.turn / 2 % slots;  // a call is two steps
    float* a = reinterpret_cast<float*>(ranks.bytes() + slot * stride) + start;
    float* b = reinterpret_cast<float*>(ranks.bytes() + (slots + slot) * stride) + start;
    ranks.meet();
    fold_both(a, b, length);
    ranks.meet();
  }
}
