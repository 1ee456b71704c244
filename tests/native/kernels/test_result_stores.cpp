// How stores into results are chosen, for calls whose times are made up.
#include "calls.h"
#include "kernels/fold/result_stores.h"

namespace {

using namespace calls;

constexpr uint64_t kBytes = 1 << 20;

uint64_t made_up_ns = 1;

// Makes `calls` calls of a kind whose stores take so long; returns how many stored past the caches.
int call(ResultStores& stores, uint32_t key, int calls, uint64_t ordinary_us, uint64_t past_us) {
  int past = 0;
  for (int i = 0; i < calls; ++i) {
    const bool way = stores.begin(key);
    past += way;
    made_up_ns += 20'000;  // what else the call does
    {
      const ResultStores::Clock clock(stores, stores.timed() ? kBytes : 0);
      made_up_ns += 1000 * (way ? past_us : ordinary_us);
    }
    stores.end();
  }
  return past;
}

ResultStores made_up() {
  return ResultStores([] { return made_up_ns; });
}

void kinds_are_apart() {
  ResultStores stores = made_up();
  expect(call(stores, 1, 7, 500, 20) == 0, "ordinary stores are tried first");
  expect(call(stores, 1, 200, 500, 20) > 180, "past the caches is faster");
  expect(call(stores, 3, 200, 20, 500) <= 16, "for another kind it is not");
  for (int i = 0; i < 20; ++i) {
    expect(call(stores, 1, 1, 500, 20) == 1 && call(stores, 3, 1, 20, 500) == 0,
           "calls of two kinds in turn keep their ways");
  }
}

void larger_than_the_caches() {
  ResultStores stores = made_up();
  expect(stores.begin(7, false), "past the caches at first");
  stores.end();
  expect(!stores.begin(9), "smaller ones are not");
  stores.end();
}

void nothing_to_choose() {
  ResultStores stores = made_up();
  call(stores, 1, 100, 500, 20);
  stores.begin();
  expect(!stores.timed(), "what has no choice is not timed");
  stores.end();
  expect(call(stores, 1, 1, 500, 20) == 1, "nor does it change what is known");
}

void calls_that_do_not_count() {
  ResultStores stores = made_up();
  call(stores, 1, 6, 500, 20);
  for (int i = 0; i < 20; ++i) expect(!stores.begin(1), "a call that has failed was no call");
  expect(call(stores, 1, 5, 500, 20) == 4, "the eighth tries the other way");
  for (int i = 0; i < 100; ++i) {
    expect(!stores.begin(3), "a rank that stores nothing tries nothing");
    stores.end();
  }
}

void many_kinds() {
  ResultStores stores = made_up();
  call(stores, 1, 100, 500, 20);
  for (uint32_t key = 3; key < 6003; key += 2) {
    stores.begin(key);
    stores.end();
  }
  expect(call(stores, 1, 1, 500, 20) == 0, "thousands of kinds are not all kept");
}

}  // namespace

int main() {
  return main_of({{"kinds are apart", kinds_are_apart},
                  {"larger than the caches", larger_than_the_caches},
                  {"nothing to choose", nothing_to_choose},
                  {"calls that do not count", calls_that_do_not_count},
                  {"many kinds", many_kinds}});
}
