// Moves data through the engine by hand-written plans, checked against loops over plain arrays.
#include <numeric>

#include "plans.h"
#include "world.h"

namespace {

using namespace world;
using namespace plans;

constexpr size_t kSizes[] = {0, 1, 2, 3, 10, 11, 1000};

// One kind of call with its oracle; values are small integers, so every order gives the same sum.
struct Case {
  const char* name;
  bool direct;
  uint64_t kind;
  std::shared_ptr<const Plan> (*plan)(uint32_t n, uint32_t rank);
  Layout in_layout, out_layout;
  uint64_t (*chunk)(uint64_t count, uint32_t n);
  int64_t (*result)(uint32_t n, uint64_t index, uint64_t salt);
};

int64_t value(uint32_t rank, uint64_t index, uint64_t salt) {
  return int64_t((index * 7 + rank * 13 + salt * 31) % 1001) - 500;
}
int64_t sum(uint32_t n, uint64_t index, uint64_t salt) {
  int64_t total = 0;
  for (uint32_t q = 0; q < n; ++q) total += value(q, index, salt);
  return total;
}
int64_t of_root(uint32_t n, uint64_t index, uint64_t salt) { return value(n - 1, index, salt); }
int64_t own(uint32_t, uint64_t index, uint64_t salt) { return value(7, index, salt); }
uint64_t whole(uint64_t count, uint32_t) { return count; }
uint64_t shares(uint64_t count, uint32_t n) { return (count + n - 1) / n; }

const Case kCases[] = {
    {"one-shot", false, 1, [](uint32_t n, uint32_t r) { return one_shot(n, r); }, Layout::kFull,
     Layout::kFull, whole, sum},
    {"two-shot direct", true, 2, two_shot_direct, Layout::kFull, Layout::kFull, shares, sum},
    {"ring", false, 3, ring, Layout::kFull, Layout::kFull, shares, sum},
    {"pull from root", false, 4,
     [](uint32_t n, uint32_t r) { return from_root(n, r, n - 1, false); }, Layout::kFull,
     Layout::kFull, whole, of_root},
    {"push from root", false, 5,
     [](uint32_t n, uint32_t r) { return from_root(n, r, n - 1, true); }, Layout::kFull,
     Layout::kFull, whole, of_root},
    {"scatter of sums", false, 6, scatter_sum, Layout::kFull, Layout::kOwn, shares, sum},
    {"collect", false, 7, collect, Layout::kOwn, Layout::kFull, shares, own},
    {"collect direct", true, 8, collect_direct, Layout::kOwn, Layout::kFull, shares, own},
};

Binding binding_of(const Case& c, uint32_t n, uint32_t rank, uint64_t count) {
  Binding binding;
  binding.plan = c.plan(n, rank);
  binding.dtype = DType::kInt64;
  binding.elem_bytes = 8;
  binding.count = count;
  binding.chunk = c.chunk(count, n);
  binding.descriptor = c.kind;
  binding.in_layout = c.in_layout;
  binding.out_layout = c.out_layout;
  return binding;
}

// The part [first, end) of the vector that an array with this layout holds.
std::pair<uint64_t, uint64_t> part(Layout layout, const Binding& b, uint32_t rank) {
  if (layout == Layout::kFull) return {0, b.count};
  return {std::min(b.count, rank * b.chunk), std::min(b.count, (rank + 1) * b.chunk)};
}

// Arrays of a rank that are reused by many calls.
struct Arrays {
  int64_t *in, *out;
  std::vector<int64_t> own_in, own_out;
  Arrays(const Rank& me, size_t count, bool direct) : own_in(count + 2), own_out(count + 2) {
    in = direct ? me.symmetric<int64_t>(count + 2) : own_in.data();
    out = direct ? me.symmetric<int64_t>(count + 2) : own_out.data();
  }
};

void call_and_check(const Rank& me, const Case& c, const BoundCall& call, Arrays& arrays,
                    uint64_t salt, bool in_place, bool queued = false) {
  const auto [in_first, in_end] = part(c.in_layout, call, me.rank);
  const auto [first, end] = part(c.out_layout, call, me.rank);
  constexpr int64_t kGuard = 0x5EC0DE;
  const uint32_t writer = c.result == own ? 7 : me.rank;  // "own" does not depend on the rank
  for (uint64_t i = in_first; i < in_end; ++i) arrays.in[i - in_first] = value(writer, i, salt);
  int64_t* out = in_place ? arrays.in : arrays.out;
  out[end - first] = kGuard;
  if (queued) {
    const std::shared_ptr<const BoundCall> borrowed(&call, [](const BoundCall*) {});
    me.engine.wait(me.engine.submit(borrowed, arrays.in, out));
  } else {
    me.engine.run(call, arrays.in, out);
  }
  for (uint64_t i = first; i < end; ++i) {
    const int64_t want = c.result(me.n, i, salt);
    expect(out[i - first] == want, c.name, " n=", me.n, " count=", call.count, " rank ", me.rank,
           " element ", i, ": expected ", want, ", got ", out[i - first]);
  }
  expect(out[end - first] == kGuard, c.name, ": wrote past the end");
}

void every_case_and_size() {
  for (const Mode mode : kModes) {
    for (const uint32_t n : {1u, 2u, 3u, 4u, 5u}) {
      for (const uint64_t cell_bytes : {640u, 65536u}) {  // small: many segments
        const Config config{.n = n, .cell_bytes = cell_bytes};
        expect_all_fine(run(mode, config,
                            [](const Rank& me) {
                              uint64_t salt = 0;
                              for (const Case& c : kCases) {
                                Arrays arrays(me, 1000, c.direct);
                                for (const size_t count : kSizes) {
                                  const auto call =
                                      me.engine.bind(binding_of(c, me.n, me.rank, count));
                                  const bool symmetric = c.in_layout == c.out_layout;
                                  call_and_check(me, c, *call, arrays, ++salt, false);
                                  call_and_check(me, c, *call, arrays, ++salt, symmetric);
                                  call_and_check(me, c, *call, arrays, ++salt, false, true);
                                }
                              }
                            }),
                        name(mode));
      }
    }
  }
}

// A fixed random sequence of calls, so that every pair of kinds follows each other somewhere.
void random_sequence(Mode mode, uint32_t n, uint64_t calls, uint64_t start_iteration) {
  const Config config{.n = n, .cell_bytes = 1024, .start_iteration = start_iteration};
  expect_all_fine(run(mode, config,
                      [calls](const Rank& me) {
                        std::vector<std::shared_ptr<const BoundCall>> bound;
                        Arrays arrays(me, 200, true);
                        constexpr size_t kCounts[] = {0, 1, 3, 200};
                        for (const Case& c : kCases) {
                          for (const size_t count : kCounts) {
                            bound.push_back(me.engine.bind(binding_of(c, me.n, me.rank, count)));
                          }
                        }
                        uint64_t state = 12345;
                        for (uint64_t i = 0; i < calls; ++i) {
                          state = state * 6364136223846793005 + 1442695040888963407;
                          const size_t pick = (state >> 33) % bound.size();
                          call_and_check(me, kCases[pick / std::size(kCounts)], *bound[pick],
                                         arrays, i, false);
                        }
                      }),
                  std::string("sequence, ") + name(mode));
}

void sequences() {
  for (const Mode mode : kModes) {
    random_sequence(mode, 2, 20000, 2);
    random_sequence(mode, 3, 5000, 65000);
    random_sequence(mode, 4, 3000, 0xFFFF'FFFF - 500);
  }
}

void hundred_thousand_calls() {
  for (const Mode mode : kModes) {
    for (const size_t which : {0, 3}) {  // a symmetric kind, and one without back-pressure
      expect_all_fine(run(mode, {.n = 2},
                          [which](const Rank& me) {
                            Arrays arrays(me, 1, false);
                            const auto call =
                                me.engine.bind(binding_of(kCases[which], me.n, me.rank, 1));
                            expect(call->tiny, "8 bytes are tiny");
                            for (uint64_t i = 0; i < 100000; ++i) {
                              call_and_check(me, kCases[which], *call, arrays, i, true);
                            }
                          }),
                      "many calls");
    }
  }
}

// avg, divided by the fold that sees every rank, or at the end.
void averages() {
  for (const bool at_exit : {false, true}) {
    expect_all_fine(run(Mode::kThreads, {.n = 3, .cell_bytes = 640},
                        [at_exit](const Rank& me) {
                          std::vector<float> in(500), out(500);
                          for (size_t i = 0; i < in.size(); ++i)
                            in[i] = float(value(me.rank, i, 0));
                          Binding binding;
                          binding.plan = one_shot(me.n, me.rank);
                          binding.dtype = DType::kFloat32;
                          binding.elem_bytes = 4;
                          binding.op = ReduceOp::kAvg;
                          binding.count = binding.chunk = in.size();
                          binding.scale_at_exit = at_exit;
                          me.engine.run(*me.engine.bind(binding), in.data(), out.data());
                          for (size_t i = 0; i < in.size(); ++i) {
                            const float want = float(sum(3, i, 0)) / 3.0f;
                            expect(out[i] == want, "avg of element ", i, ": expected ", want,
                                   ", got ", out[i]);
                          }
                        }),
                    "avg");
  }
}

// Rank q contributes q + 1 records of 12 bytes; they come out back to front.
void tables() {
  for (const uint64_t cell_bytes : {64u, 4096u}) {
    expect_all_fine(run(Mode::kThreads, {.n = 4, .cell_bytes = cell_bytes},
                        [](const Rank& me) {
                          struct Item {
                            int32_t rank, index, sum;
                          };
                          PieceTable in_table, out_table;
                          for (uint32_t r = 0; r < me.n; ++r) {
                            for (uint32_t q = 0, at = 10; q < me.n; ++q) {
                              in_table.offset.push_back(0);
                              in_table.length.push_back(q == r ? 3 * (q + 1) : 0);
                              at -= q + 1;
                              out_table.offset.push_back(3 * at);
                              out_table.length.push_back(3 * (q + 1));
                            }
                          }
                          Binding binding;
                          binding.plan = collect(me.n, me.rank);
                          binding.elem_bytes = sizeof(Item);
                          binding.count = 30;
                          binding.in_layout = binding.out_layout = Layout::kTable;
                          binding.in_table = in_table;
                          binding.out_table = out_table;
                          const auto call = me.engine.bind(binding);
                          expect(call->in_bytes == 36 * (me.rank + 1) && call->out_bytes == 360,
                                 "sizes of arrays");
                          std::vector<Item> in, out(30);
                          for (int32_t i = 0; i < int32_t(3 * (me.rank + 1)); ++i) {
                            in.push_back({int32_t(me.rank), i, int32_t(me.rank) + i});
                          }
                          me.engine.run(*call, in.data(), out.data());
                          for (int32_t q = 3, at = 0; q >= 0; --q) {
                            for (int32_t i = 0; i < 3 * (q + 1); ++i, ++at) {
                              const Item& item = out[size_t(at)];
                              expect(item.rank == q && item.index == i && item.sum == q + i,
                                     "record ", at);
                            }
                          }
                        }),
                    "tables");
  }
}

// Several queued calls, a blocking one behind them, and two communicators in one process.
void queues_and_two_engines() {
  for (const Mode mode : kModes) {
    const int fd = memory_file();
    std::shared_ptr<ControlSegment> shared;
    if (mode == Mode::kThreads) shared = ControlSegment::open(fd, {.world_size = 3});
    expect_all_fine(
        run(mode, {.n = 3},
            [&](const Rank& me) {
              EngineOptions options;
              options.threads_as_ranks = me.mode == Mode::kThreads;
              const auto control = shared ? shared : ControlSegment::open(fd, {.world_size = 3});
              Engine other(control, nullptr, 2 - me.rank, options);
              const auto call = me.engine.bind(binding_of(kCases[2], 3, me.rank, 700));
              const auto other_call = other.bind(binding_of(kCases[2], 3, 2 - me.rank, 300));
              for (uint64_t round = 0; round < 200; ++round) {
                std::vector<std::vector<int64_t>> in(4), out(4, std::vector<int64_t>(700));
                std::vector<Engine::Ticket> tickets;
                for (uint64_t k = 0; k < 4; ++k) {
                  for (uint64_t i = 0; i < 700; ++i) in[k].push_back(value(me.rank, i, round + k));
                  if (k == 3) break;
                  tickets.push_back(me.engine.submit(call, in[k].data(), out[k].data()));
                }
                std::vector<int64_t> x(300, me.rank);
                other.run(*other_call, x.data(), x.data());
                me.engine.run(*call, in[3].data(), out[3].data());
                for (const Engine::Ticket ticket : tickets) {
                  expect(me.engine.done(ticket), "a blocking call overtook a queued one");
                  me.engine.wait(ticket);
                }
                for (uint64_t k = 0; k < 4; ++k) {
                  for (uint64_t i = 0; i < 700; ++i) {
                    expect(out[k][i] == sum(3, i, round + k), "queued call ", k, ", element ", i);
                  }
                }
                expect(x == std::vector<int64_t>(300, 3), "the other communicator");
              }
            }),
        name(mode));
    close(fd);
  }
}

// The calls that try it store large results past the caches: 7 to 10, whatever the time.
void large_results() {
  for (const Mode mode : kModes) {
    const auto call_often = [](const Rank& me) {
      for (const Case& c : kCases) {
        Arrays arrays(me, 20'000, c.direct);
        const auto call = me.engine.bind(binding_of(c, me.n, me.rank, 19'999));
        for (uint64_t i = 0; i < 11; ++i) {
          call_and_check(me, c, *call, arrays, i, false);
          expect(i > 6 || !me.engine.past_caches(), c.name, ": call ", i, " tries it already");
          expect(i <= 6 || me.engine.past_caches(), c.name, ": call ", i, " does not try it");
        }
        if (c.in_layout != c.out_layout) continue;
        for (uint64_t i = 0; i < 30; ++i) {
          call_and_check(me, c, *call, arrays, i, true);
          expect(!call->plan->reduces || !me.engine.past_caches(), c.name, ": it has just read");
        }
      }
    };
    expect_all_fine(run(mode, {.n = 3}, call_often), name(mode));
  }
}

void what_is_stored_again() {
  expect(one_shot(3, 1)->reduces && two_shot_direct(3, 1)->reduces, "sums store where they read");
  expect(!from_root(3, 0, 0, false)->reduces && !collect_direct(3, 1)->reduces, "moves do not");
  const auto again = [](const Operand& from) {
    return Builder(1, 0, 8, 1).fold({from}, {cell(0, 0)}).done()->rereads;
  };
  expect(again(out(0, 3)) && !again(in(0, 3)) && !again(cell(0, 0)), "what has been stored");
}

// Informational; nothing is asserted about time.
void latencies() {
  for (const Mode mode : kModes) {
    expect_all_fine(run(mode, {.n = 2},
                        [](const Rank& me) {
                          Arrays arrays(me, 1, false);
                          const auto call = me.engine.bind(binding_of(kCases[0], me.n, me.rank, 1));
                          constexpr int kBatches = 2000, kCalls = 100;
                          std::vector<uint64_t> batch_ns;
                          for (int b = 0; b < kBatches; ++b) {
                            const uint64_t start = now_ns();
                            for (int i = 0; i < kCalls; ++i)
                              me.engine.run(*call, arrays.in, arrays.in);
                            batch_ns.push_back(now_ns() - start);
                          }
                          std::sort(batch_ns.begin(), batch_ns.end());
                          if (me.rank != 0) return;
                          std::printf("      8 B, 2 ranks, %s: p25 %.0f ns, median %.0f ns\n",
                                      name(me.mode), double(batch_ns[kBatches / 4]) / kCalls,
                                      double(batch_ns[kBatches / 2]) / kCalls);
                        }),
                    "latency");
  }
}

}  // namespace

int main() {
  return main_of({{"every case and size", every_case_and_size},
                  {"random sequences and wrap", sequences},
                  {"100,000 calls", hundred_thousand_calls},
                  {"avg", averages},
                  {"piece tables", tables},
                  {"queues, two engines", queues_and_two_engines},
                  {"large results", large_results},
                  {"what is stored again", what_is_stored_again},
                  {"latency", latencies}});
}
