// How fast bytes go from one core to another through a cell, with ordinary stores and with stores
// past the caches, beside the time that a flag takes there and back:
//   g++ -O3 -mavx2 -std=c++20 -pthread benchmarks/native/cell_bench.cpp -o cells && ./cells 0 1 256
// Its arguments are two cores and the KiB of a cell. The host of a virtual machine moves them, so
// every line tells anew how far they are from each other. The other columns tell of either way the
// bytes that arrive in a second, and what a copy into a cell takes the core that makes it.
#include <immintrin.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <thread>

#include "timing.h"

namespace {

constexpr size_t kBytes = 1 << 20, kMostCell = 1 << 20, kGap = 8192;
constexpr int kLines = 40, kTurns = 500, kCalls = 8;
size_t g_cell = 256 << 10;  // bytes

struct alignas(128) Flag {
  std::atomic<uint64_t> value{0};
  void wait(uint64_t least) const {
    while (value.load(std::memory_order_acquire) < least) _mm_pause();
  }
  void set(uint64_t to) { value.store(to, std::memory_order_release); }
};

using Copy = void (*)(char*, const char*, size_t);

void ordinary(char* to, const char* from, size_t n) {
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n) : : "memory");
}

void past_caches(char* to, const char* from, size_t n) {
  for (size_t i = 0; i < n; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
  }
  _mm_sfence();
}

void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (pthread_setaffinity_np(pthread_self(), sizeof(set), &set) != 0) std::exit(1);
}

struct Shared {
  Flag full, empty;  // cells filled so far, and emptied
  alignas(64) char cells[2 * (kMostCell + kGap)];
  char* cell(uint64_t i) { return cells + i % 2 * (g_cell + kGap); }
};

// The reader's side of a line: answers flags, then empties cells filled in both ways.
void read_line(Shared& shared, char* out, uint64_t& turn) {
  for (int i = 0; i < kTurns; ++i) shared.full.wait(++turn), shared.empty.set(turn);
  for (size_t i = 0; i < 2 * kCalls * (kBytes / g_cell); ++i) {
    shared.full.wait(++turn);
    ordinary(out + i * g_cell % kBytes, shared.cell(turn), g_cell);
    shared.empty.set(turn);
  }
}

double round_trip_ns(Shared& shared, uint64_t& turn) {
  const double begin = seconds();
  for (int i = 0; i < kTurns; ++i) shared.full.set(++turn), shared.empty.wait(turn);
  return (seconds() - begin) / kTurns * 1e9;
}

struct Found {
  double gigabytes_per_s, copy_ns;
};

Found measure(Shared& shared, const char* in, uint64_t& turn, Copy copy) {
  const double begin = seconds();
  const size_t cells = kCalls * (kBytes / g_cell);
  std::vector<double> copies(cells);
  for (size_t i = 0; i < cells; ++i) {
    shared.empty.wait(++turn - 2);
    const double copy_begin = seconds();
    copy(shared.cell(turn), in + i * g_cell % kBytes, g_cell);
    copies[i] = seconds() - copy_begin;
    shared.full.set(turn);
  }
  shared.empty.wait(turn);
  const double all = seconds() - begin;
  return {kCalls * kBytes / all * 1e-9, median(copies) * 1e9};
}

}  // namespace

int main(int argc, char** argv) {
  const int cores[] = {argc > 1 ? std::atoi(argv[1]) : 0, argc > 2 ? std::atoi(argv[2]) : 1};
  g_cell = (argc > 3 ? std::strtoul(argv[3], nullptr, 10) : 256) << 10;
  if (g_cell == 0 || kBytes % g_cell != 0) return std::puts("KiB of a cell: a power of two"), 1;
  static Shared shared;
  static std::vector<char> in(kBytes, 1), out(kBytes, 1);
  std::thread reader([&] {
    pin(cores[1]);
    uint64_t turn = 0;
    for (int line = 0; line < kLines; ++line) read_line(shared, out.data(), turn);
  });
  pin(cores[0]);
  uint64_t turn = 0;
  std::puts("flag there and back ns | ordinary GB/s, copy ns | past the caches GB/s, copy ns");
  for (int line = 0; line < kLines; ++line) {
    const double ns = round_trip_ns(shared, turn);
    const Found plain = measure(shared, in.data(), turn, ordinary);
    const Found past = measure(shared, in.data(), turn, past_caches);
    std::printf("%22.0f | %13.1f %8.0f | %20.1f %8.0f\n", ns, plain.gigabytes_per_s, plain.copy_ns,
                past.gigabytes_per_s, past.copy_ns);
  }
  reader.join();
}
