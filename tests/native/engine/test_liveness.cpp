// Work in the background: in order, one at a time, whoever runs it.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <new>

#include "calls.h"
#include "engine/liveness.h"

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
  Keeper keeper(nullptr, 1);
  constexpr uint64_t kItems = 20000;
  std::vector<uint64_t> order;
  uint64_t helped_items = 0;
  Keeper::Ticket last = 0;
  for (uint64_t i = 0; i < kItems; ++i) {
    last = keeper.submit([&, i](bool helped) {
      order.push_back(i);
      helped_items += helped;
      if (i % 1000 == 7) usleep(100);
    });
    if (i % 100 == 50) usleep(50);  // the keeper gets to run some
    if (i % 10 == 9) keeper.help(last);
    if (i % 50 == 49) keeper.wait(last, kNeverGiveUp);
  }
  expect(keeper.wait(last, kNeverGiveUp) && keeper.idle(), "not everything was done");
  expect(order.size() == kItems, order.size(), " items ran");
  for (uint64_t i = 0; i < kItems; ++i) expect(order[i] == i, "item ", order[i], " at ", i);
  expect(helped_items > 0 && helped_items < kItems, helped_items, " items were helped with");
}

// Several threads wait for one queue; what one runs, the others wait for.
void several_wait() {
  Keeper keeper(nullptr, 1);
  std::vector<uint64_t> order;
  for (int round = 0; round < 500; ++round) {
    std::vector<Keeper::Ticket> tickets;
    for (int i = 0; i < 6; ++i) {
      tickets.push_back(keeper.submit([&order](bool) { order.push_back(order.size()); }));
    }
    std::vector<std::thread> threads;
    for (const Keeper::Ticket ticket : {tickets[5], tickets[2], tickets[0]}) {
      threads.emplace_back([&keeper, &order, ticket] {
        keeper.help(ticket);
        keeper.wait(ticket, kNeverGiveUp);
        expect(keeper.done(ticket), "an undone ticket");
      });
    }
    for (std::thread& thread : threads) thread.join();
    expect(keeper.idle() && order.size() == 6u * (round + 1), "round ", round);
  }
}

void help_stops_at_its_ticket() {
  Keeper keeper(nullptr, 1);
  std::atomic<bool> begun{false}, go{false}, here{false};
  const auto first = keeper.submit([&](bool helped) {
    begun = true;
    expect(!helped, "the first item belongs to the keeper");
    while (!go) usleep(100);
  });
  while (!begun) usleep(100);
  const auto second = keeper.submit([&](bool) { here = true; });
  keeper.help(second);  // cannot: the keeper is at work
  expect(!here && !keeper.done(first), "help ran beside the keeper");
  expect(!keeper.wait(second, [](Pulse) { return true; }), "a wait that gives up");
  go = true;
  expect(keeper.wait(second, kNeverGiveUp) && here, "the keeper goes on by itself");
}

void errors() {
  Keeper keeper(nullptr, 1);
  for (const bool help : {false, true}) {
    const auto bad = keeper.submit([](bool) { throw_error("TestError", "on purpose"); });
    const auto good = keeper.submit([](bool) {});
    if (help) keeper.help(good);
    keeper.wait(good, kNeverGiveUp);
    for (int i = 0; i < 2; ++i) {
      const std::exception_ptr error = keeper.error(bad);
      expect(error != nullptr, "the error is kept");
      expect_kind("TestError", [&] { std::rethrow_exception(error); }, "the error of the item");
    }
    keeper.forget(bad);
    expect(keeper.error(bad) == nullptr && keeper.error(good) == nullptr, "it is forgotten");
  }
}

// stop() comes while another thread runs an item, with more behind it.
void stop_finishes() {
  for (int round = 0; round < 200; ++round) {
    Keeper keeper(nullptr, 1);
    std::atomic<int> ran{0};
    std::atomic<bool> begun{false};
    Keeper::Ticket last = 0;
    for (int i = 0; i < 4; ++i) {
      last = keeper.submit([&](bool) {
        begun = true;
        usleep(round % 3 * 30);
        ++ran;
      });
    }
    std::thread helper([&] { keeper.help(last - round % 2); });
    while (!begun) usleep(10);
    keeper.stop();
    expect(ran == 4 && keeper.done(last), "round ", round, ": ", ran.load(), " items ran");
    helper.join();
  }
}

// Signals reach a thread that could not make a keeper.
void no_memory() {
  for (int enough = 0, failed = 1; failed != 0; ++enough) {
    failed = 0;
    left = enough;
    try {
      const Keeper keeper(nullptr, 1);
      left = -1;
    } catch (const std::bad_alloc&) {
      failed = 1;
    }
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, nullptr, &now);
    expect(sigismember(&now, SIGINT) == 0, "after ", enough, " allocations signals are blocked");
    expect(failed == 0 || enough < 100, "no keeper is made");
    expect(failed == 1 || enough > 0, "a keeper is made of nothing");
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
