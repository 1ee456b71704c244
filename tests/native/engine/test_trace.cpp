// The ring of a trace: what is added is taken in order, or counted as lost; and its bell.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "base/wait.h"
#include "calls.h"
#include "engine/trace.h"

namespace {

using namespace calls;
using namespace pycoll;

constexpr uint64_t kCalls = 100'000;
constexpr size_t kPackedBytes = 38;

void add(Trace& trace, uint64_t number) {
  TraceRecord& record = trace.open();
  record.enter = record.leave = ticks();
  record.descriptor = 1;
  record.count = number;
  record.waited = 0;
  record.site = 0;
  trace.close(record);
}

std::vector<uint64_t> taken(Trace& trace) {
  std::array<TraceRecord, 5> some;
  std::vector<uint64_t> numbers;
  while (const size_t n = trace.take(some.data(), some.size())) {
    for (size_t i = 0; i < n; ++i) numbers.push_back(some[i].count);
  }
  return numbers;
}

void a_full_ring() {
  Trace trace(8);
  for (uint64_t round = 0; round < 5; ++round) {
    std::vector<uint64_t> expected;
    for (uint64_t i = 0; i < 10; ++i) {
      add(trace, i);
      if (i < 7) expected.push_back(i);
    }
    expect(trace.lost() == 3 * (round + 1), "one place stays free; lost: ", trace.lost());
    expect(taken(trace) == expected, "the first ones are kept, in order");
    for (uint64_t i = 0; i < round; ++i) add(trace, i);  // the ring begins elsewhere
    expect(taken(trace).size() == round && trace.empty(), "there is room again");
  }
}

// Numbers ascend, and none is both lost and taken.
void one_adds_another_takes() {
  const auto bell = std::make_shared<TraceBell>();
  Trace trace(256, {}, bell);
  std::atomic<bool> over{false};
  uint64_t got = 0, next = 0, seen = 0;
  std::thread taker([&] {
    for (bool last = false; !last;) {
      last = over.load();
      seen = bell->wait(static_cast<uint32_t>(seen), 1000);
      for (const uint64_t number : taken(trace)) {
        expect(number >= next, "out of order");
        next = number + 1;
        ++got;
      }
    }
  });
  for (uint64_t i = 0; i < kCalls; ++i) add(trace, i);
  over = true;
  taker.join();
  expect(got + trace.lost() == kCalls, got, " taken and ", trace.lost(), " lost");
}

// The thread that writes may be replaced by another one while it still waits.
void two_wait_for_a_bell() {
  TraceBell bell;
  std::atomic<int> woken{0};
  const auto wait = [&] {
    const uint64_t begin = now_ns();
    for (uint32_t seen = 0; seen < 3;) seen = bell.wait(seen, 60'000'000);
    expect(now_ns() - begin < 50'000'000'000, "a ring was missed");
    ++woken;
  };
  std::thread one(wait), other(wait);
  for (int i = 0; i < 3; ++i) bell.ring();
  one.join();
  other.join();
  expect(woken == 2, "both have heard all rings");
}

void files() {
  int ends[2];
  expect(pipe2(ends, O_NONBLOCK) == 0, "pipe2");
  Trace trace(1 << 12);
  for (uint64_t i = 0; i < 4000; ++i) add(trace, i);
  expect(trace.write(ends[1]) == EAGAIN, "a pipe takes less than that");
  std::vector<char> bytes(4000 * kPackedBytes);
  const ssize_t n = read(ends[0], bytes.data(), bytes.size());
  const uint64_t whole = static_cast<uint64_t>(n) / kPackedBytes;
  expect(whole > 0 && trace.lost() == 4000 - whole, "what is not whole is lost: ", trace.lost());
  expect(trace.empty() && trace.counts().at(1).calls == 4000, "all are counted");
  add(trace, 0);
  expect(trace.write(-1) == 0 && trace.lost() == 4001 - whole, "to no file: lost");
  add(trace, 0);
  expect(trace.write(ends[1]) == 0 && trace.lost() == 4001 - whole, "the pipe has room again");
  for (const int end : ends) close(end);
}

}  // namespace

int main() {
  return main_of({{"a full ring", a_full_ring},
                  {"one adds, another takes", one_adds_another_takes},
                  {"two wait for a bell", two_wait_for_a_bell},
                  {"files", files}});
}
