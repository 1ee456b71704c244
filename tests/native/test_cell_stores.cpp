// How a rank chooses its stores, on copies whose times are made up.
#include "calls.h"
#include "cell_stores.h"

namespace {

using namespace calls;

constexpr uint64_t kBytes = 1 << 20;

// Makes `copies` copies that take so many ns with ordinary stores and with those past the caches;
// returns how many went past them.
int copy(CellStores& stores, int copies, uint64_t ordinary_ns, uint64_t past_ns) {
  int past = 0;
  for (int i = 0; i < copies; ++i) {
    past += stores.past_caches();
    stores.note(kBytes, stores.past_caches() ? past_ns : ordinary_ns);
  }
  return past;
}

void near_peers() {
  CellStores stores;
  expect(copy(stores, 12'800, 50'000, 60'000) == 100, "one copy of 128 is made the other way");
  expect(!stores.usually_past_caches(), "peers are near");
  copy(stores, 1'280, 90'000, 50'000);
  expect(!stores.usually_past_caches(), "what is not clearly faster does not count");
}

void far_peers() {
  CellStores stores;
  expect(copy(stores, 7, 250'000, 60'000) == 0, "ordinary stores are tried first");
  expect(copy(stores, 128 * 10, 250'000, 60'000) > 128 * 9, "peers are far");
  expect(stores.usually_past_caches(), "what nobody times follows");
  expect(copy(stores, 256, 250'000, 60'000) == 254, "ordinary stores are tried again");
}

void peers_that_move() {
  CellStores stores;
  for (int round = 0; round < 5; ++round) {
    copy(stores, 640, 50'000, 60'000);
    expect(!stores.usually_past_caches(), "they are near again");
    copy(stores, 640, 250'000, 60'000);
    expect(stores.usually_past_caches(), "they are far again");
  }
}

void interrupts() {
  CellStores stores;
  for (int i = 0; i < 1'000; ++i) {
    const bool past = stores.past_caches();
    const uint64_t usual = past ? 60'000 : 50'000;
    stores.note(kBytes, i % 3 == 0 ? 40 * usual : usual);
    expect(!stores.usually_past_caches(), "a copy that was interrupted says nothing");
  }
}

}  // namespace

int main() {
  return main_of({{"near peers", near_peers},
                  {"far peers", far_peers},
                  {"peers that move", peers_that_move},
                  {"interrupts", interrupts}});
}
