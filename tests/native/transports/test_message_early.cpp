// Calls that ranks leave early: what they give, and how they fail.
#include <unistd.h>

#include "hosts.h"

namespace {

using namespace hosts;

constexpr size_t kMost = UnprovenCalls::kMost;

// Broadcasts and sums in turn; the receivers are slow now and then, the arrays are used again.
void results() {
  for (const bool multiple : {true, false}) {
    for (const uint32_t n : {2u, 3u, 5u}) {
      run_all(
          {.n = n, .multiple = multiple, .early = true},
          [](const Host& me) {
            for (int i = 0; i < 300; ++i) {
              const auto count = uint64_t(1 + i % 7 * 150);
              const bool all = i % 29 == 28;
              const auto call = call_of(me, all ? sum_at_once : from_first, count);
              Ints x(count, me.rank == 0 || all ? i : -1), y(count);
              if (me.rank == 1 && i % 50 == 0) usleep(2000);
              if (i % 3 == 0) {
                me.engine->wait(me.engine->submit(call, x.data(), y.data()));
              } else {
                me.engine->run(*call, x.data(), y.data());
              }
              x.assign(count, -2);
              expect(y == Ints(count, all ? int64_t(me.n) * i : i), "call ", i);
            }
            me.engine->prove();
            expect(me.engine->unproven().empty(), "not all calls are proven");
          },
          "results");
    }
  }
}

// A root makes so many calls and no more before the others have entered the first.
void bound() {
  std::atomic<size_t> made{0};
  run_all(
      {.n = 2, .early = true},
      [&](const Host& me) {
        if (me.rank == 1) {
          while (made < kMost) usleep(100);
          usleep(50000);
          expect(made == kMost, made.load(), " calls are ahead");
        }
        for (size_t i = 0; i < 2 * kMost; ++i) {
          sum_ones(me, 100, from_first);
          if (me.rank == 0) ++made;
        }
      },
      "bound");
}

// The odd rank makes another call: all raise it, in that call or later, and know who did what.
void mismatch(uint32_t n, uint32_t odd, MessagePlan plan, uint64_t count, uint64_t descriptor) {
  run_all(
      {.n = n, .early = true},
      [=](const Host& me) {
        sum_ones(me);
        const bool mine = me.rank == odd;
        const uint64_t first = me.engine->iteration();
        const auto calls = [&] {
          sum_ones(me, mine ? count : 50, mine ? plan : from_first, -1, mine ? descriptor : 1);
          for (size_t i = 0; i < me.rank % 3 * 4; ++i) sum_ones(me, 60, from_first);
          me.engine->prove();
        };
        expect_kind("MismatchError", calls, "a call or the end");
        const MessageReport report = me.engine->report();
        expect(report.cause == Cause::kMismatch && report.iteration == first, "about call ",
               report.iteration, " instead of ", first);
        for (uint32_t r = 0; r < n; ++r) {
          const Notice& other = report.ranks[r];
          if (other.kind == 0 || other.seq != first) continue;
          expect(other.count == (r == odd ? count : 50), "rank ", r, " has count ", other.count);
        }
        expect_kind("MismatchError", [&] { sum_ones(me); }, "the next call");
      },
      "mismatch");
}

void mismatches() {
  for (const uint32_t n : {2u, 3u, 4u}) {
    for (const uint32_t odd : {0u, n - 1}) {
      mismatch(n, odd, from_first, 50, 2);
      mismatch(n, odd, from_first, 49, 1);
      mismatch(n, odd, from_first, 100000, 1);
      mismatch(n, odd, sum_at_once, 50, 2);
      mismatch(n, odd, sum_in_ring, 100000, 3);
    }
  }
}

// A refusal of a call that may be left early ends the communicator; any other does not.
void refusals() {
  for (const uint32_t refuser : {0u, 1u, 2u}) {
    run_all(
        {.n = 3, .early = true},
        [=](const Host& me) {
          for (int i = 0; i < 12; ++i) {
            sum_ones(me, 20, from_first);
            if (i % 2 == 0) continue;
            if (me.rank == refuser) {
              me.engine->refuse("too many dimensions");
            } else {
              expect_kind("PeerRejected", [&] { sum_ones(me); }, "refused");
            }
          }
          sum_ones(me);
          const auto calls = [&] {
            if (me.rank == refuser) {
              me.engine->refuse("too many dimensions");
            } else {
              sum_ones(me, 20, from_first);
            }
            for (size_t i = 0; i < me.rank * 5; ++i) sum_ones(me, 60, from_first);
            sum_ones(me);
          };
          expect_kind("MismatchError", calls, "refused");
          const MessageReport report = me.engine->report();
          expect(report.culprit == refuser && report.text.find("dimensions") != report.text.npos,
                 "rank ", report.culprit, ": ", report.text);
        },
        "refusal");
  }
}

// A rank that leaves, or closes, before a call that others have left.
void departures() {
  for (const bool leaves : {true, false}) {
    run_all(
        {.n = 3, .early = true},
        [=](const Host& me) {
          sum_ones(me);
          if (me.rank == 2) return leaves ? me.engine->leave("it goes") : me.engine->close();
          const auto calls = [&] {
            sum_ones(me, 20, from_first);
            me.engine->prove();
          };
          expect_kind("PeerLeft", calls, "a call or the end");
        },
        "departure");
  }
}

// Who ends waits for the others, and no longer than calls do.
void patience() {
  std::atomic<bool> over{false};
  run_all(
      {.n = 2, .timeout_s = 0.2, .early = true},
      [&](const Host& me) {
        sum_ones(me, 20, from_first);
        if (me.rank == 0) expect_kind("CollTimeout", [&] { me.engine->prove(); }, "the end");
        if (me.rank == 0) over = true;
        while (!over) usleep(1000);
        if (me.rank == 1) me.engine->prove();
      },
      "patience");
}

}  // namespace

int main() {
  return main_of({{"results", results},
                  {"bound", bound},
                  {"mismatches", mismatches},
                  {"refusals", refusals},
                  {"departures", departures},
                  {"patience", patience}});
}
