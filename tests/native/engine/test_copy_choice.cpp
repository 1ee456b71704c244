// How ranks choose between cells and each other's memory, with work whose times are made up; and
// what ranks tell each other of the times of real calls.
#include <cstring>
#include <vector>

#include "calls.h"
#include "engine/copy_choice.h"

namespace {

using namespace calls;

struct Rank {
  CopyChoice choice{};
  bool able = true;
  uint64_t staged_ns = 0, read_ns = 0;
};

// Makes one call: every rank gets what the others report. Returns whether it read, which all ranks
// agree on.
bool call(std::vector<Rank>& ranks) {
  const bool reads = ranks[0].choice.reads();
  std::vector<ReportedTimes> reported;
  for (Rank& rank : ranks) reported.push_back(rank.choice.begin(rank.able));
  for (size_t i = 0; i < ranks.size(); ++i) {
    Rank& rank = ranks[i];
    expect(rank.choice.reads() == reads, "all ranks choose the same");
    for (size_t peer = 0; peer < ranks.size(); ++peer) {
      if (peer != i) rank.choice.add(reported[peer]);
    }
    rank.choice.end(rank.choice.timed() ? (reads ? rank.read_ns : rank.staged_ns) : 0);
  }
  return reads;
}

int reads_of(std::vector<Rank>& ranks, int calls) {
  int reads = 0;
  for (int i = 0; i < calls; ++i) reads += call(ranks);
  return reads;
}

void both_are_tried() {
  std::vector<Rank> ranks(3, Rank{{}, true, 50'000, 60'000});
  for (int round = 0; round < 2; ++round) {
    expect(reads_of(ranks, 2) == 0, "cells come first");
    expect(reads_of(ranks, 2) == 2, "then each other's memory");
  }
  expect(reads_of(ranks, 248) == 3 * 4, "and again: soon at first, then less and less often");
  expect(reads_of(ranks, 1'310) == 30, "three calls out of 131 go on trying");
}

void reading_is_faster() {
  std::vector<Rank> ranks(2, Rank{{}, true, 50'000, 20'000});
  reads_of(ranks, 2'000);
  expect(reads_of(ranks, 1'027 * 4) == 1'024 * 4, "what is hopeless is tried seldom");
}

void the_busiest_rank_decides() {
  std::vector<Rank> ranks(4, Rank{{}, true, 50'000, 1'000});
  ranks[2].read_ns = 80'000;
  reads_of(ranks, 8);
  expect(reads_of(ranks, 1'000) < 30, "one rank would hold all others up");
}

void one_rank_cannot() {
  std::vector<Rank> ranks(3, Rank{{}, true, 50'000, 1'000});
  ranks[1].able = false;
  expect(reads_of(ranks, 1'000) == 0, "nobody reads then");
}

void times_that_change() {
  std::vector<Rank> ranks(2, Rank{{}, true, 50'000, 20'000});
  for (int round = 0; round < 5; ++round) {
    for (Rank& rank : ranks) rank.read_ns = 20'000;
    reads_of(ranks, 3'000);
    expect(reads_of(ranks, 1'000) > 970, "reading is faster again");
    for (Rank& rank : ranks) rank.read_ns = 90'000;
    reads_of(ranks, 3'000);
    expect(reads_of(ranks, 1'000) < 30, "cells are faster again");
  }
}

// Arrays come to lie elsewhere, or are used in place: both ways take another time, and the faster
// one becomes the slower. Eight calls later all ranks know, if their calls take another time.
void calls_that_become_others() {
  struct Work {
    uint64_t staged_ns, read_ns;
  };
  const std::vector<Work> works = {{400'000, 360'000},
                                   {150'000, 240'000},
                                   {900'000, 600'000},
                                   {50'000, 80'000},
                                   {90'000, 60'000}};
  for (const int calls : {40, 41, 150, 1'000, 5'000}) {
    std::vector<Rank> ranks(2);
    for (size_t round = 0; round < 4 * works.size(); ++round) {
      const Work& work = works[round % works.size()];
      for (Rank& rank : ranks) rank.staged_ns = work.staged_ns, rank.read_ns = work.read_ns;
      const bool best = work.read_ns < work.staged_ns;
      int wrong = 0, in_a_row = 0, most = 0;
      for (int i = 0; i < calls; ++i) {
        in_a_row = call(ranks) == best ? 0 : in_a_row + 1;
        wrong += in_a_row > 0;
        most = std::max(most, in_a_row);
      }
      expect(most <= 8, "after ", calls, " calls the slower way is taken ", most,
             " times in a row");
      expect(wrong <= 8 + 3 * 5 + calls / 40, wrong, " of ", calls, " calls take the slower way");
    }
  }
}

// Times that vary by a fifth around a mean, and now and then by more, are no news.
void times_that_vary() {
  std::vector<Rank> ranks(2);
  uint32_t seed = 1;
  const auto drawn = [&](uint64_t ns) {
    seed = seed * 1'664'525 + 1'013'904'223;
    return ns * (80 + (seed >> 16) % 40 + ((seed >> 8) % 16 == 0 ? 200 : 0)) / 100;
  };
  int reads = 0;
  for (int i = 0; i < 10'000; ++i) {
    for (Rank& rank : ranks) rank.staged_ns = drawn(150'000), rank.read_ns = drawn(100'000);
    reads += call(ranks);
  }
  expect(reads > 9'600, "10000 calls, of which ", reads, " take the faster way");
}

void interrupts() {
  std::vector<Rank> ranks(2, Rank{{}, true, 50'000, 20'000});
  reads_of(ranks, 128);
  int reads = 0;
  for (int i = 0; i < 1'280; ++i) {
    for (Rank& rank : ranks) rank.read_ns = i % 3 == 0 ? 900'000 : 20'000;
    reads += call(ranks);
  }
  expect(reads > 1'200, "work that was interrupted says little");
}

// What a rank has reported of the time of staged calls, in its line of the last call; see Payload
// in engine.cpp.
float reported_staged_ns(const world::Rank& me, uint32_t rank) {
  float ns = 0;
  const auto& line = me.engine.control().line(rank, (me.engine.iteration() - 1) & 1);
  std::memcpy(&ns, line.payload + 3 * sizeof(uint64_t), sizeof(ns));
  return ns;
}

// Rank 1 meets rank 0, copies, and tells rank 0, which has nothing to do but wait for that. A rank
// that loses its core at the wrong moment tells something else, so a fifth of many calls will do;
// of a rank that counted its wait for work as one for its peer there would be none.
void who_waits_for_work_has_not_waited_for_a_rank_to_come() {
  constexpr uint64_t kCount = 1 << 19;
  const auto body = [](const world::Rank& me) {
    Builder plan(2, me.rank, 1, 1);
    if (me.rank == 0) plan.signal(1).wait(1, 2);
    if (me.rank == 1) plan.signal(1).wait(0, 1).fold({in(1, 0)}, {out(1, 0)}).signal(2);
    const uint32_t peer = 1 - me.rank;
    Binding reading = sum_of(Builder(2, me.rank, 1, 0, true)
                                 .signal(kEntered)
                                 .wait(peer, kEntered)
                                 .fold({in(peer, 0)}, {out(me.rank, 0)})
                                 .signal(kDone)
                                 .wait(peer, kDone)
                                 .done(),
                             kCount, 2);
    reading.across = true;
    Binding binding = sum_of(plan.done(), kCount);
    binding.alternative = me.engine.bind(reading);
    Ints x(kCount, 1), y(kCount);
    int fair = 0;
    float waited = 0, copied = 0;
    for (int turn = 0; turn < 25; ++turn) {
      binding.descriptor = 2 + turn;  // a call that has not told anything yet
      const auto call = me.engine.bind(binding);
      for (int i = 0; i < 8; ++i) me.engine.run(*call, x.data(), y.data());
      waited = reported_staged_ns(me, 0), copied = reported_staged_ns(me, 1);
      expect(copied > 0, "rank 1 has told a time");
      fair += waited > copied / 2;
    }
    expect(fair >= 5, "rank 0 tells ", waited, " ns of calls that take ", copied);
  };
  for (const Mode mode : kModes) {
    expect_all_fine(run(mode, {.cell_bytes = 8 * kCount}, body), name(mode));
  }
}

}  // namespace

int main() {
  return main_of({{"both are tried", both_are_tried},
                  {"reading is faster", reading_is_faster},
                  {"the busiest rank decides", the_busiest_rank_decides},
                  {"one rank cannot", one_rank_cannot},
                  {"times that change", times_that_change},
                  {"calls that become others", calls_that_become_others},
                  {"times that vary", times_that_vary},
                  {"interrupts", interrupts},
                  {"who waits for work has not waited for a rank to come",
                   who_waits_for_work_has_not_waited_for_a_rank_to_come}});
}
