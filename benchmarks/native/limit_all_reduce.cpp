// The limit: an in-place all-reduce of two ranks that does nothing else. Each rank folds its half
// of both vectors and stores the sum in both; before and after, it raises a flag and waits for the
// other's. These are the folds and the synchronisation of two_shot_push on two ranks, without a
// plan, an argument, a check or a deadline.
//
// As a program it forks two ranks over one mapping and prints a table:
//   g++ -O3 -std=c++20 benchmarks/native/limit_all_reduce.cpp -o limit && ./limit
// As a library (-shared -fPIC) it is driven by benchmarks/overhead.py, in the very processes that
// also run pycoll.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

struct alignas(128) Flag {
  std::atomic<uint64_t> value;
};

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

void meet(Flag* mine, const Flag* theirs, uint64_t value) {
  mine->value.store(value, std::memory_order_release);
  while (theirs->value.load(std::memory_order_acquire) < value) pause_cpu();
}

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

// Bytes in front of the vectors, which hold the flags of both ranks.
extern "C" size_t limit_header_bytes() { return 4096; }

// Runs `calls` all-reduces, call i on slot i % slots, each `count` float32.
//   memory  header, then the slots of rank 0, then those of rank 1; `stride` bytes from slot to
//   slot done    calls made before, alike on both ranks
extern "C" void limit_all_reduce(void* memory, int rank, size_t count, size_t stride, size_t slots,
                                 uint64_t done, uint64_t calls) {
  Flag* flags = static_cast<Flag*>(memory);
  char* first = static_cast<char*>(memory) + limit_header_bytes();
  const size_t half = count / 2;
  const size_t start = rank == 0 ? 0 : half;
  const size_t length = rank == 0 ? half : count - half;
  for (uint64_t i = done; i < done + calls; ++i) {
    float* a = reinterpret_cast<float*>(first + i % slots * stride) + start;
    float* b = reinterpret_cast<float*>(first + (slots + i % slots) * stride) + start;
    meet(&flags[rank], &flags[1 - rank], 2 * i + 1);
    fold_both(a, b, length);
    meet(&flags[rank], &flags[1 - rank], 2 * i + 2);
  }
}

#ifndef LIMIT_AS_LIBRARY
namespace {

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median_us(void* memory, int rank, size_t nbytes, uint64_t* done) {
  const uint64_t calls = std::max<uint64_t>(20, (4 << 20) / (nbytes + 512));
  std::vector<double> runs;
  for (int run = 0; run < 21; ++run) {
    const double start = seconds_now();
    limit_all_reduce(memory, rank, nbytes / 4, nbytes, 1, *done, calls);
    runs.push_back((seconds_now() - start) * 1e6 / static_cast<double>(calls));
    *done += calls;
  }
  std::sort(runs.begin(), runs.end());
  return runs[runs.size() / 2];
}

}  // namespace

int main() {
  const size_t largest = 16 << 20;
  const size_t total = limit_header_bytes() + 2 * largest;
  void* memory = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return perror("mmap"), 1;
  const pid_t child = fork();
  if (child < 0) return perror("fork"), 1;
  const int rank = child == 0 ? 1 : 0;
  if (rank == 0) std::printf("%12s %12s %12s\n", "bytes", "us", "algbw GB/s");
  uint64_t done = 0;
  for (size_t nbytes = 8; nbytes <= largest; nbytes *= 8) {
    const double us = median_us(memory, rank, nbytes, &done);
    const double algbw = static_cast<double>(nbytes) / us * 1e-3;
    if (rank == 0) std::printf("%12zu %12.3f %12.2f\n", nbytes, us, algbw);
  }
  if (rank == 1) _exit(0);
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}
#endif
