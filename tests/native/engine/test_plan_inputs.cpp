// Plans in which bytes are wrong: check() refuses them, or they run and touch no other memory than
// their arrays.
//
//   test_plan_inputs [inputs [seed]]    mutates so many plans; a thousand by default
#include <cstring>
#include <random>

#include "calls.h"

// What was freed is watched a little, and millions of inputs are not slowed down by fresh pages.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "quarantine_size_mb=4"; }

namespace {

using namespace calls;

using Random = std::minstd_rand;  // its state is small: most inputs take microseconds

constexpr uint32_t kChunks = 4, kSlots = 3;
constexpr uint64_t kCount = 37;
constexpr size_t kGuard = 4096;
constexpr char kPattern = 0x5a;

// A plan of a rank that is alone: copies, folds over several chunks, and all buffers.
Plan sound() {
  Builder plan(1, 0, kChunks, kSlots);
  plan.fold({in(0, 0)}, {cell(0, 0)}, 2)
      .fold({in(0, 2), cell(0, 1)}, {cell(0, 2), out(0, 1)}, 1, kFoldTree)
      .signal(kEntered)
      .fold({in(0, 3), in(0, 0), cell(0, 2)}, {out(0, 3)})
      .fold({in(0, 1)}, {out(0, 1)}, 3)
      .signal(3);
  return *plan.done();
}

template <typename T>
void flip(std::vector<T>& records, Random& random) {
  if (records.empty()) return;
  auto* bytes = reinterpret_cast<unsigned char*>(records.data());
  const size_t at = random() % (records.size() * sizeof(T));
  const unsigned char odd[] = {0, 1, 2, 3, 4, 0x7f, 0x80, 0xff};
  bytes[at] = random() % 2 == 0 ? bytes[at] ^ (1 << random() % 8) : odd[random() % std::size(odd)];
}

Plan mutated(Random& random) {
  static const Plan kSound = sound();
  Plan plan = kSound;
  for (uint64_t i = 0; i <= random() % 3; ++i) {
    switch (random() % 8) {
      case 0:
        plan.chunks = uint32_t(random() % 8);
        break;
      case 1:
        plan.slots = uint32_t(random() % 8);
        break;
      case 2:
        plan.code.erase(plan.code.begin() + long(random() % plan.code.size()));
        break;
      case 3:
        plan.operands.pop_back();
        break;
      case 4:
        plan.code.push_back(plan.code[random() % plan.code.size()]);
        break;
      case 5:
        flip(plan.code, random);
        break;
      default:
        flip(plan.operands, random);
    }
    if (plan.code.empty()) break;
  }
  return plan;
}

struct Guarded {
  explicit Guarded(size_t nbytes) : bytes(nbytes + 2 * kGuard, kPattern), nbytes(nbytes) {}
  char* data() { return bytes.data() + kGuard; }
  bool intact() const {
    static const std::vector<char> guard(kGuard, kPattern);
    return std::memcmp(bytes.data(), guard.data(), kGuard) == 0 &&
           std::memcmp(bytes.data() + kGuard + nbytes, guard.data(), kGuard) == 0;
  }
  std::vector<char> bytes;
  size_t nbytes;
};

// Whether the plan was taken, and ran.
bool runs(const Rank& me, const Plan& given, uint64_t seed) {
  auto plan = std::make_shared<Plan>(given);
  static Guarded x(kCount * 8), y(kCount * 8);
  try {
    plan->check();
    Binding binding = sum_of(plan, kCount);
    binding.chunk = (kCount + plan->chunks - 1) / plan->chunks;
    const auto call = me.engine.bind(binding);
    me.engine.run(*call, x.data(), y.data());
  } catch (const Error& error) {
    expect(std::string(error.kind()) != "PeerLost", "seed ", seed, ": ", error.what());
    return false;
  }
  expect(x.intact() && y.intact(), "seed ", seed, ": wrote outside of an array");
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t inputs = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  world::expect_all_fine(world::run(world::Mode::kThreads, {.n = 1},
                                    [&](const Rank& me) {
                                      uint64_t taken = 0;
                                      expect(runs(me, sound(), 0), "the plan itself");
                                      for (uint64_t seed = first; seed < first + inputs; ++seed) {
                                        Random random(seed);
                                        taken += runs(me, mutated(random), seed);
                                      }
                                      expect(taken > inputs / 20, "too few plans are taken");
                                      expect(taken < inputs, "no plan is refused");
                                    }),
                         "plans with wrong bytes");
  return 0;
}
