// How a rank chooses its stores, on copies whose times are made up.
#include "calls.h"
#include "kernels/fold/store_choice.h"

namespace {

using namespace calls;

constexpr uint64_t kBytes = 1 << 20;
// Copies of kBytes, in ns: by ordinary stores to near peers and to far ones, and past the caches.
constexpr uint64_t kNear = 50'000, kFar = 250'000, kPast = 60'000;

// Makes `copies` copies that take so many ns with ordinary stores; returns how many went past the
// caches.
int copy(StoreChoice& stores, int copies, uint64_t ordinary_ns, uint64_t past_ns = kPast,
         uint64_t nbytes = kBytes) {
  int past = 0;
  for (int i = 0; i < copies; ++i) {
    past += stores.past_caches();
    // 0, which nothing beats: what nobody is to time.
    stores.note(nbytes, !stores.timed() ? 0 : stores.past_caches() ? past_ns : ordinary_ns);
  }
  return past;
}

void near_peers() {
  StoreChoice stores;
  expect(copy(stores, 60, kNear) == 12, "the other way is tried soon, while pages are cold");
  expect(copy(stores, 51'200 - 60, kNear) == 408, "then with four copies of 512");
  expect(!stores.usually_past_caches(), "peers are near");
  copy(stores, 5'120, 90'000, kNear);
  expect(!stores.usually_past_caches(), "peers would have to fetch from memory");
}

void far_peers() {
  StoreChoice stores;
  expect(copy(stores, 7, kFar) == 0, "ordinary stores are tried first");
  expect(copy(stores, 512 * 10, kFar) > 500 * 10, "peers are far");
  expect(stores.usually_past_caches(), "what nobody times follows");
  expect(copy(stores, 1'024, kFar) == 1'016, "ordinary stores are tried again");
}

void larger_than_the_caches() {
  StoreChoice stores(false);
  expect(copy(stores, 7, kNear) == 7, "past the caches at first");
  copy(stores, 512, kNear);
  expect(!stores.usually_past_caches(), "ordinary stores are faster");
  copy(stores, 1'024, kPast + 1);
  expect(stores.usually_past_caches(), "nothing has to be fetched again");
}

void small_copies() {
  StoreChoice stores;
  copy(stores, 1'024, 700, 110, 8 << 10);
  expect(!stores.usually_past_caches(), "memory is too far away for so few bytes");
  copy(stores, 1'024, 2'700, 170, 8 << 10);
  expect(stores.usually_past_caches(), "the peer is farther");
}

// The first copies find pages that nobody has touched: in relays all of them are of the first call.
void cold_pages() {
  StoreChoice stores;
  copy(stores, 16, 40 * kFar, 40 * kPast);
  copy(stores, 64, kFar);
  expect(stores.usually_past_caches(), "what cold pages cost is forgotten soon");
}

void peers_that_move() {
  StoreChoice stores;
  for (int round = 0; round < 5; ++round) {
    copy(stores, 1'100, kNear);
    expect(!stores.usually_past_caches(), "they are near again");
    copy(stores, 1'100, kFar);
    expect(stores.usually_past_caches(), "they are far again");
  }
}

void interrupts() {
  StoreChoice stores;
  for (int i = 0; i < 10'000; ++i) {
    const uint64_t usual = stores.past_caches() ? kPast : kNear;
    stores.note(kBytes, i % 3 == 0 ? 40 * usual : usual);
    expect(!stores.usually_past_caches(), "a copy that was interrupted says nothing");
  }
}

// Of three peers one has the same core, as where four ranks have two.
void near_and_far_peers() {
  StoreChoice stores;
  int past = 0;
  for (int i = 0; i < 10'000; ++i) {
    past += stores.past_caches();
    const uint64_t ordinary = i % 3 == 0 ? kNear : kFar;
    stores.note(kBytes, !stores.timed() ? 0 : stores.past_caches() ? kPast : ordinary);
  }
  expect(past > 9'000, "most peers are far");
}

// Copies after a try find the lines where the other way has left them, and so do the first tries.
void lines_that_moved() {
  StoreChoice stores;
  bool past = false;
  for (int i = 0, since = 0; i < 10'000; ++i) {
    since = stores.past_caches() == past ? since + 1 : 0;
    past = stores.past_caches();
    const uint64_t moved = past ? 1'000 : kFar;
    stores.note(kBytes, since < 2 ? moved : past ? kPast : 90'000);
    expect(!stores.usually_past_caches(), "what the first ones take does not count");
  }
}

void sizes() {
  StoreChoiceBySize stores;
  for (uint64_t nbytes = 4 << 10; nbytes < 64 << 10; nbytes *= 2) {
    expect(&stores[nbytes] == &stores[2 * nbytes - 1], "about the same size");
    expect((&stores[nbytes] == &stores[nbytes - 1]) == (nbytes == 4 << 10), "another size");
  }
  expect(&stores[32 << 10] == &stores[64 << 20], "all large ones go the same way");
  expect(&stores[0] == &stores[4 << 10], "those that are not timed belong to the smallest");
}

}  // namespace

int main() {
  return main_of({{"near peers", near_peers},
                  {"far peers", far_peers},
                  {"larger than the caches", larger_than_the_caches},
                  {"small copies", small_copies},
                  {"cold pages", cold_pages},
                  {"peers that move", peers_that_move},
                  {"interrupts", interrupts},
                  {"near and far peers", near_and_far_peers},
                  {"lines that moved", lines_that_moved},
                  {"sizes", sizes}});
}
