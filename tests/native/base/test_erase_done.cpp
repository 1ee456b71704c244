// Requests that have ended leave their list, also where a later one fails.
#include <stdexcept>

#include "base/erase_done.h"
#include "calls.h"

namespace {

using namespace calls;

constexpr int kDone = 0, kBroken = -1;  // others are under way

bool ended(int request) {
  if (request == kBroken) throw std::runtime_error("broken");
  return request == kDone;
}

void in_order() {
  std::vector<int> requests = {0, 1, 0, 2, 3, 0};
  erase_done(requests, ended);
  expect(requests == std::vector<int>{1, 2, 3}, "those under way stay in order");
}

void one_fails() {
  for (auto [given, left] : std::vector<std::pair<std::vector<int>, std::vector<int>>>{
           {{kBroken, 0, 1}, {kBroken, 0, 1}},
           {{0, 1, kBroken, 2}, {1, kBroken, 2}},
           {{1, 0, 2, 0, kBroken}, {1, 2, kBroken}}}) {
    bool thrown = false;
    try {
      erase_done(given, ended);
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    expect(thrown && given == left, "every request that is left is there once");
  }
}

}  // namespace

int main() { return main_of({{"in order", in_order}, {"one fails", one_fails}}); }
