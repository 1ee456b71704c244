// The least that a rank does in a collective: it reads so much of its own arrays and writes so much
// of them, once, waits for nobody and fetches nothing from anybody. On the same cores nothing that
// does the collective can be faster. Driven by benchmarks/compare.py --limits.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

using Vector [[gnu::vector_size(32), gnu::aligned(4), gnu::may_alias]] = float;

// The sum goes where the compiler cannot see that nobody looks at it.
void read(const float* from, size_t count) {
  Vector sums[8] = {};
  for (size_t i = 0; i + 64 <= count; i += 64) {
    for (size_t k = 0; k < 8; ++k) sums[k] += *reinterpret_cast<const Vector*>(from + i + 8 * k);
  }
  for (const Vector& sum : sums) asm volatile("" : : "x"(sum));
}

void copy_vectors(float* to, const float* from, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    *reinterpret_cast<Vector*>(to + i) = *reinterpret_cast<const Vector*>(from + i);
  }
  std::memcpy(to + i, from + i, (count - i) * sizeof(float));
}

void copy_string(float* to, const float* from, size_t count) {
#if defined(__x86_64__)
  size_t bytes = count * sizeof(float);
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
#else
  std::memcpy(to, from, count * sizeof(float));
#endif
}

// Past the caches; `to` lies on a line.
void copy_streaming(float* to, const float* from, size_t count) {
#if defined(__AVX__)
  for (; count >= 8; to += 8, from += 8, count -= 8) {
    _mm256_stream_ps(to, _mm256_loadu_ps(from));
  }
#endif
  std::memcpy(to, from, count * sizeof(float));
#if defined(__AVX__)
  _mm_sfence();
#endif
}

constexpr decltype(&copy_vectors) kCopies[] = {copy_vectors, copy_string, copy_streaming};

}  // namespace

// Reads `reads` elements of `in` and writes `writes` of `out`; where they are the same array, the
// same elements. `how`: with which stores, of kCopies.
extern "C" void one_pass(const float* in, size_t reads, float* out, size_t writes, int how) {
  if (in == out && reads > 0 && writes > 0) {
    for (size_t i = 0; i < reads; ++i) out[i] += 1;
    return;
  }
  static const float some[4096] = {};
  const size_t both = std::min(reads, writes);
  kCopies[how](out, in, both);
  read(in + both, reads - both);
  for (size_t i = both; i < writes; i += std::size(some)) {
    kCopies[how](out + i, some, std::min(std::size(some), writes - i));
  }
}
