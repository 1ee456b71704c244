// Work in the background: in order, one at a time, whoever runs it.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <new>

#include "calls.h"
#include "engine/helper_thread.h"

namespace {

thread_local int left = -1;  // so many allocations succeed before one fails; -1: all

}  // namespace

[[gnu::noinline]] void* operator new(size_t nbytes) {
  void* data = left == 0 ? nullptr : std::malloc(std::max<size_t>(1, nbytes));
  if (left >= 0) --left;
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, size_t) noexcept { std::free(data); }

namespace {

using namespace calls;

constexpr auto kNeverGiveUp = [](Pulse) { return false; };

// Items write to memory that nothing guards but the order in which they run.
void in_order() {
  HelperThread helper({});
  constexpr uint64_t kItems = 20000;
  std::vector<uint64_t> order;
  uint64_t helped_items = 0;
  HelperThread::Ticket last = 0;
  for (uint64_t i = 0; i < kItems; ++i) {
    last = helper.submit([&, i](bool helped) {
      order.push_back(i);
      helped_items += helped;
      if (i % 1000 == 7) usleep(100);
    });
    if (i % 100 == 50) usleep(50);  // the helper gets to run some
    if (i % 10 == 9) helper.help(last);
    if (i % 50 == 49) helper.wait(last, kNeverGiveUp);
  }
  expect(helper.wait(last, kNeverGiveUp) && helper.idle(), "not everything was done");
  expect(order.size() == kItems, order.size(), " items ran");
  for (uint64_t i = 0; i < kItems; ++i) expect(order[i] == i, "item ", order[i], " at ", i);
  expect(helped_items > 0 && helped_items < kItems, helped_items, " items were helped with");
}

// Several threads wait for one queue; what one runs, the others wait for.
void several_wait() {
  HelperThread helper({});
  std::vector<uint64_t> order;
  for (int round = 0; round < 500; ++round) {
    std::vector<HelperThread::Ticket> tickets;
    for (int i = 0; i < 6; ++i) {
      tickets.push_back(helper.submit([&order](bool) { order.push_back(order.size()); }));
    }
    std::vector<std::thread> threads;
    for (const HelperThread::Ticket ticket : {tickets[5], tickets[2], tickets[0]}) {
      threads.emplace_back([&helper, &order, ticket] {
        helper.help(ticket);
        helper.wait(ticket, kNeverGiveUp);
        expect(helper.done(ticket), "an undone ticket");
      });
    }
    for (std::thread& thread : threads) thread.join();
    expect(helper.idle() && order.size() == 6u * (round + 1), "round ", round);
  }
}

void help_stops_at_its_ticket() {
  HelperThread helper({});
  std::atomic<bool> begun{false}, go{false}, here{false};
  const auto first = helper.submit([&](bool helped) {
    begun = true;
    expect(!helped, "the first item belongs to the helper");
    while (!go) usleep(100);
  });
  while (!begun) usleep(100);
  const auto second = helper.submit([&](bool) { here = true; });
  helper.help(second);  // cannot: the helper is at work
  expect(!here && !helper.done(first), "help ran beside the helper");
  expect(!helper.wait(second, [](Pulse) { return true; }), "a wait that gives up");
  go = true;
  expect(helper.wait(second, kNeverGiveUp) && here, "the helper goes on by itself");
}

void errors() {
  HelperThread helper({});
  for (const bool help : {false, true}) {
    const auto bad = helper.submit([](bool) { throw_error("TestError", "on purpose"); });
    const auto good = helper.submit([](bool) {});
    if (help) helper.help(good);
    helper.wait(good, kNeverGiveUp);
    for (int i = 0; i < 2; ++i) {
      const std::exception_ptr error = helper.error(bad);
      expect(error != nullptr, "the error is kept");
      expect_kind("TestError", [&] { std::rethrow_exception(error); }, "the error of the item");
    }
    helper.forget(bad);
    expect(helper.error(bad) == nullptr && helper.error(good) == nullptr, "it is forgotten");
  }
}

// stop() comes while another thread runs an item, with more behind it.
void stop_finishes() {
  for (int round = 0; round < 200; ++round) {
    HelperThread helper({});
    std::atomic<int> ran{0};
    std::atomic<bool> begun{false};
    HelperThread::Ticket last = 0;
    for (int i = 0; i < 4; ++i) {
      last = helper.submit([&](bool) {
        begun = true;
        usleep(round % 3 * 30);
        ++ran;
      });
    }
    std::thread other([&] { helper.help(last - round % 2); });
    while (!begun) usleep(10);
    helper.stop();
    expect(ran == 4 && helper.done(last), "round ", round, ": ", ran.load(), " items ran");
    other.join();
  }
}

// Signals reach a thread that could not make a helper.
void no_memory() {
  for (int enough = 0, failed = 1; failed != 0; ++enough) {
    failed = 0;
    left = enough;
    try {
      const HelperThread helper({});
      left = -1;
    } catch (const std::bad_alloc&) {
      failed = 1;
    }
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, nullptr, &now);
    expect(sigismember(&now, SIGINT) == 0, "after ", enough, " allocations signals are blocked");
    expect(failed == 0 || enough < 100, "no helper is made");
    expect(failed == 1 || enough > 0, "a helper is made of nothing");
  }
}

}  // namespace

int main() {
  return main_of({{"in order", in_order},
                  {"several wait", several_wait},
                  {"help stops at its ticket", help_stops_at_its_ticket},
                  {"errors", errors},
                  {"stop finishes", stop_finishes},
                  {"no memory", no_memory}});
}
