// What it takes to store a result out of a cell, in the ordinary way and past the caches, and then
// to read it: a result that comes again, and results in turn, which no cache holds. Two processes
// at once, as two ranks do; medians of the first. It links what `make build` has compiled:
//   engine=$(find csrc -name '*.cpp' ! -path '*/cuda/*' ! -path '*/bindings/*' | sed 's/cpp$/o/')
//   (cd build/objects-* && g++ -O2 -std=c++20 -march=native -pthread -I../../csrc \
//     ../../benchmarks/native/store_bench.cpp $engine -o ../stores) && build/stores
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "kernels/fold/fold.h"
#include "timing.h"

namespace {

constexpr size_t kCell = 512 << 10, kPool = 96 << 20, kMost = 4 << 20;
constexpr int kRounds = 61;
constexpr size_t kBatch = 8 << 20;  // bytes of a measurement, at least

// Segment by segment, as a collective that goes through cells.
void store(char* to, const char* cell, size_t nbytes, bool past_caches) {
  for (size_t at = 0; at < nbytes; at += kCell) {
    pycoll::copy(to + at, cell, std::min(kCell, nbytes - at), past_caches);
  }
}

void read(const char* from, size_t nbytes) {
  const auto* words = reinterpret_cast<const long*>(from);
  long sums[32] = {};
  for (size_t i = 0; i < nbytes / sizeof(long); i += 32) {
    for (size_t k = 0; k < 32; ++k) sums[k] += words[i + k];
  }
  for (long sum : sums) asm volatile("" : : "r"(sum));
}

struct Times {
  std::vector<double> store, both;  // us
};

class Results {
 public:
  Results(char* pool, const char* cell, size_t nbytes, bool again)
      : pool_(pool), cell_(cell), nbytes_(nbytes), slots_(again ? 1 : kPool / nbytes) {}

  double us(bool past_caches, bool reads) {
    const size_t calls = std::max<size_t>(1, kBatch / nbytes_);
    for (size_t i = 0; i < calls / 4; ++i) one(past_caches, reads);
    return seconds_of([&] { one(past_caches, reads); }, calls) * 1e6;
  }

 private:
  void one(bool past_caches, bool reads) {
    char* to = pool_ + turn_++ % slots_ * nbytes_;
    store(to, cell_, nbytes_, past_caches);
    if (reads) read(to, nbytes_);
  }

  char* pool_;
  const char* cell_;
  size_t nbytes_, slots_, turn_ = 0;
};

void measure(char* pool, const char* cell, size_t nbytes, bool again, bool print) {
  Results results(pool, cell, nbytes, again);
  Times ordinary, past;
  for (int i = 0; i < kRounds; ++i) {
    ordinary.store.push_back(results.us(false, false));
    past.store.push_back(results.us(true, false));
    ordinary.both.push_back(results.us(false, true));
    past.both.push_back(results.us(true, true));
  }
  if (!print) return;
  std::printf("| %4zu KiB | %7s | %7.1f | %7.1f | %7.1f | %7.1f |\n", nbytes >> 10,
              again ? "again" : "in turn", median(ordinary.store), median(past.store),
              median(ordinary.both), median(past.both));
  std::fflush(stdout);
}

}  // namespace

int main() {
  const pid_t child = fork();
  char* pool = memory(kPool);
  const char* cell = memory(kCell);
  if (child != 0) {
    std::puts("| size | results | stored us | past the caches us | and read us | past, read us |");
    std::puts("|---|---|---|---|---|---|");
  }
  for (size_t nbytes = 16 << 10; nbytes <= kMost; nbytes *= 4) {
    for (const bool again : {true, false}) measure(pool, cell, nbytes, again, child != 0);
  }
  if (child == 0) _exit(0);
  int status = 1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
