// Work of the helper thread runs once and in order, whoever runs it, and without anybody who waits.
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "calls.h"
#include "engine/helper_thread.h"

namespace {

using namespace calls;
using pycoll::HelperThread;
using std::chrono::microseconds, std::chrono::milliseconds, std::chrono::seconds;
using Start = HelperThread::Start;

// What has run, and who has run it.
struct Log {
  std::vector<int> order;
  size_t helped = 0;

  HelperThread::Work work(int number) {
    return [this, number](bool by_helper) {
      order.push_back(number);
      helped += by_helper;
    };
  }
};

bool comes(const HelperThread& helper, HelperThread::Ticket ticket) {
  const auto until = std::chrono::steady_clock::now() + seconds(20);
  while (!helper.done(ticket)) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(microseconds(50));
  }
  return true;
}

// Makes the naps long: this thread runs everything for a while.
void run_all_here(HelperThread& helper, Log& log) {
  const auto until = std::chrono::steady_clock::now() + milliseconds(5);
  while (std::chrono::steady_clock::now() < until) {
    helper.help(helper.submit(log.work(-1), Start::kSoon));
    expect(comes(helper, helper.last()), "it has run");
  }
  log.order.clear();
}

void nobody_waits() {
  HelperThread helper({1, 2});
  Log log;
  for (const Start start : {Start::kSoon, Start::kNow}) {
    run_all_here(helper, log);
    expect(comes(helper, helper.submit(log.work(7), start)), "it runs by itself");
    expect(log.order == std::vector{7}, "once");
  }
}

void behind_helped_work() {
  HelperThread helper({1, 2});
  Log log;
  for (const Start start : {Start::kSoon, Start::kNow}) {
    run_all_here(helper, log);
    const HelperThread::Ticket first = helper.submit(log.work(1), Start::kSoon);
    const HelperThread::Ticket second = helper.submit(log.work(2), start);
    helper.help(first);
    expect(comes(helper, second), "what is behind it runs by itself");
    expect(log.order == std::vector{1, 2}, "in order");
  }
}

void many_rounds() {
  std::mt19937 random(1);
  HelperThread helper({1, 2});
  Log log;
  int number = 0;
  for (int round = 0; round < 3000; ++round) {
    for (unsigned i = random() % 4; i > 0; --i) {
      helper.submit(log.work(number++), random() % 2 == 0 ? Start::kSoon : Start::kNow);
    }
    if (random() % 2 == 0) helper.help(helper.last());
    if (random() % 3 == 0) std::this_thread::sleep_for(microseconds(random() % 400));
    if (random() % 4 != 0) continue;
    expect(comes(helper, helper.last()), "all of it has run");
    expect(log.order.size() == size_t(number), "once");
  }
  helper.stop();
  bool sorted = log.order.size() == size_t(number);
  for (int i = 0; sorted && i < number; ++i) sorted = log.order[size_t(i)] == i;
  expect(sorted && helper.idle(), "in order, up to the end");
  expect(log.helped > 0 && log.helped < log.order.size(), "some here, some there");
}

}  // namespace

int main() {
  return main_of({{"nobody waits", nobody_waits},
                  {"behind helped work", behind_helped_work},
                  {"many rounds", many_rounds}});
}
