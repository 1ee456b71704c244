// Calls over messages in a queue that moves inside waits, where MPI is for one thread at a time.
#include "given_up.h"
#include "hosts.h"

namespace {

using namespace hosts;

constexpr uint64_t kLarge = 100000;  // elements of many segments

// The transport fails while a rank waits for a call in the queue, and asks the one that is late
// where it is: everybody hears of it.
void transport_fails_in_queue() {
  for (int after = 0; after < 8; ++after) {
    run_all(
        {.n = 2, .timeout_s = 10, .multiple = false},
        [=](const Host& me) {
          sum_ones(me);
          if (me.rank == 1) me.one_thread->fail_after(after);
          std::string text;
          const std::string kind = kind_thrown(
              [&] {
                for (int i = 0; i < 8; ++i) {
                  if (me.rank == 0) usleep(60000);
                  Ints &x = me.array(kLarge, 1), &y = me.array(kLarge);
                  const auto call = call_of(me, sum_in_ring, kLarge);
                  me.engine->wait(me.engine->submit(call, x.data(), y.data()), 20);
                  expect(y == Ints(kLarge, 2), "the sum is wrong");
                }
              },
              &text);
          expect(kind == "TransportError" && text.find("on purpose") != text.npos, kind, ": ",
                 text);
        },
        "transport fails in the queue");
  }
}

// One thread makes calls, others wait for them.
void waiting_threads(const Host& me) {
  constexpr int kCalls = 300, kWaiters = 3;
  std::vector<Ints> sums(kCalls);
  std::vector<Ints> ones(kCalls);
  std::atomic<int> made{0}, wrong{0};
  std::vector<std::jthread> waiters;
  for (int w = 0; w < kWaiters; ++w) {
    waiters.emplace_back([&, w] {
      for (int i = w; i < kCalls; i += kWaiters) {
        while (made.load() <= i) usleep(10);
        const auto ticket = MessageEngine::Ticket(i + 1);
        while (w == 0 && !me.engine->done(ticket)) usleep(10);
        if (kind_thrown([&] { me.engine->wait(ticket, 20); }) != "") ++wrong;
        if (sums[i] != Ints(ones[i].size(), 2 * i)) ++wrong;
      }
    });
  }
  for (int i = 0; i < kCalls; ++i) {
    ones[i] = Ints(i % 10 == 0 ? 20000 : 50, i);
    sums[i] = Ints(ones[i].size());
    const auto plan = i % 10 == 0 ? sum_in_ring : sum_at_once;
    me.engine->submit(call_of(me, plan, ones[i].size()), ones[i].data(), sums[i].data());
    made = i + 1;
  }
  waiters.clear();
  expect(wrong == 0, wrong.load(), " waits gave something else");
}

}  // namespace

int main() {
  const auto waits = [] {
    for (const bool multiple : {true, false}) {
      run_all({.n = 2, .multiple = multiple}, waiting_threads, "waiting threads");
    }
  };
  return main_of(
      {{"the transport fails in the queue", transport_fails_in_queue}, {"waiting threads", waits}});
}
