// How stores into results are chosen, for kinds of calls whose times the clock really takes.
#include <ctime>

#include "calls.h"
#include "result_stores.h"

namespace {

using namespace calls;

constexpr uint64_t kBytes = 1 << 20;

void pass_us(long us) {
  const uint64_t end = now_ns() + uint64_t(us) * 1000;
  while (now_ns() < end) {
  }
}

// Makes `calls` calls of a kind; returns how many stored past the caches.
int call(ResultStores& stores, uint32_t key, int calls, long ordinary_us, long past_us) {
  int past = 0;
  for (int i = 0; i < calls; ++i) {
    const bool way = stores.begin(key, kBytes);
    past += way;
    pass_us(20);  // what else the call does
    if (stores.timed()) {
      const ResultStores::Clock clock(stores, true);
      pass_us(way ? past_us : ordinary_us);
    }
    stores.end();
  }
  return past;
}

void kinds_are_apart() {
  ResultStores stores;
  expect(call(stores, 1, 7, 500, 20) == 0, "ordinary stores are tried first");
  expect(call(stores, 1, 200, 500, 20) > 180, "past the caches is faster");
  expect(call(stores, 3, 200, 20, 500) <= 12, "for another kind it is not");
  for (int i = 0; i < 20; ++i) {
    expect(call(stores, 1, 1, 500, 20) == 1 && call(stores, 3, 1, 20, 500) == 0,
           "calls of two kinds in turn keep their ways");
  }
}

void nothing_to_choose() {
  ResultStores stores;
  call(stores, 1, 100, 500, 20);
  stores.begin();
  expect(!stores.timed(), "what has no choice is not timed");
  stores.end();
  expect(call(stores, 1, 1, 500, 20) == 1, "nor does it change what is known");
}

void a_failed_call() {
  ResultStores stores;
  for (int i = 0; i < 100; ++i) {
    expect(!stores.begin(1, kBytes), "a call that does not end tells nothing");
  }
}

void many_kinds() {
  ResultStores stores;
  call(stores, 1, 100, 500, 20);
  for (uint32_t key = 3; key < 6003; key += 2) {
    stores.begin(key, kBytes);
    stores.end();
  }
  expect(!stores.begin(1, kBytes), "thousands of kinds are not all kept");
}

}  // namespace

int main() {
  return main_of({{"kinds are apart", kinds_are_apart},
                  {"nothing to choose", nothing_to_choose},
                  {"a failed call", a_failed_call},
                  {"many kinds", many_kinds}});
}
