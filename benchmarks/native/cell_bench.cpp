// How fast bytes go from one core to another through a cell, with ordinary stores and with stores
// past the caches, beside the time that a flag takes there and back:
//   g++ -O3 -mavx2 -std=c++20 -pthread benchmarks/native/cell_bench.cpp -o cells && ./cells 0 1
// Its arguments are two cores. The host of a virtual machine moves them, so every line tells anew
// how far they are from each other.
#include <immintrin.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr size_t kBytes = 1 << 20, kCell = 256 << 10, kGap = 8192;
constexpr int kLines = 40, kTurns = 500, kCalls = 8;

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
  alignas(64) char cells[2 * (kCell + kGap)];
  char* cell(uint64_t i) { return cells + i % 2 * (kCell + kGap); }
};

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The reader's side of a line: answers flags, then empties cells filled in both ways.
void read_line(Shared& shared, char* out, uint64_t& turn) {
  for (int i = 0; i < kTurns; ++i) shared.full.wait(++turn), shared.empty.set(turn);
  for (size_t i = 0; i < 2 * kCalls * (kBytes / kCell); ++i) {
    shared.full.wait(++turn);
    ordinary(out + i * kCell % kBytes, shared.cell(turn), kCell);
    shared.empty.set(turn);
  }
}

double round_trip_ns(Shared& shared, uint64_t& turn) {
  const double begin = seconds();
  for (int i = 0; i < kTurns; ++i) shared.full.set(++turn), shared.empty.wait(turn);
  return (seconds() - begin) / kTurns * 1e9;
}

double gigabytes_per_s(Shared& shared, const char* in, uint64_t& turn, Copy copy) {
  const double begin = seconds();
  for (size_t i = 0; i < kCalls * (kBytes / kCell); ++i) {
    shared.empty.wait(++turn - 2);
    copy(shared.cell(turn), in + i * kCell % kBytes, kCell);
    shared.full.set(turn);
  }
  shared.empty.wait(turn);
  return kCalls * kBytes / (seconds() - begin) * 1e-9;
}

}  // namespace

int main(int argc, char** argv) {
  const int cores[] = {argc > 1 ? std::atoi(argv[1]) : 0, argc > 2 ? std::atoi(argv[2]) : 1};
  static Shared shared;
  static std::vector<char> in(kBytes, 1), out(kBytes, 1);
  std::thread reader([&] {
    pin(cores[1]);
    uint64_t turn = 0;
    for (int line = 0; line < kLines; ++line) read_line(shared, out.data(), turn);
  });
  pin(cores[0]);
  uint64_t turn = 0;
  std::puts("flag there and back ns | ordinary GB/s | past the caches GB/s");
  for (int line = 0; line < kLines; ++line) {
    const double ns = round_trip_ns(shared, turn);
    const double plain = gigabytes_per_s(shared, in.data(), turn, ordinary);
    const double past = gigabytes_per_s(shared, in.data(), turn, past_caches);
    std::printf("%22.0f | %13.1f | %20.1f\n", ns, plain, past);
  }
  reader.join();
}
