// Using the engine wrongly: plans, memory, threads and processes that it must refuse.
#include "calls.h"
#include "kernels/fold/fold.h"

namespace {

using namespace calls;

void forked() {
  expect_all_fine(run(Mode::kForks, {.n = 2},
                      [](const Rank& me) {
                        add_ones(me);
                        const pid_t child = fork();
                        if (child == 0) {
                          const bool right = kind_thrown([&] { add_ones(me); }) == "ForkedError";
                          me.engine.close();
                          _exit(right ? 0 : 1);
                        }
                        int status = -1;
                        waitpid(child, &status, 0);
                        expect(status == 0, "no ForkedError in the child");
                        add_ones(me);
                      }),
                  "fork");
}

void concurrent_use() {
  expect_all_fine(run(Mode::kThreads, {.n = 2},
                      [](const Rank& me) {
                        if (me.rank == 0) {
                          std::thread second([&] { add_ones(me); });
                          usleep(50000);
                          expect_kind(
                              "ConcurrentUseError", [&] { me.engine.refuse("x"); }, "two threads");
                          second.join();
                        } else {
                          usleep(150000);
                          add_ones(me);
                        }
                        me.engine.close();
                        me.engine.close();
                        expect_kind("CommClosed", [&] { add_ones(me); }, "after close");
                        expect_kind("CommClosed", [&] { me.engine.abort("x"); }, "after close");
                      }),
                  "concurrent use");
}

void memory() {
  const int fd = memory_file();
  const auto control = ControlSegment::open(fd, {.world_size = 2});
  control->claim(1);
  expect_kind("TransportError", [&] { control->claim(1); }, "claimed twice");
  expect_kind("TransportError", [&] { ControlSegment::open(fd, {.world_size = 3}); }, "size");
  expect_kind(
      "TransportError", [&] { ControlSegment::open(fd, {.world_size = 2, .start_iteration = 5}); },
      "geometry");
  expect(ftruncate(fd, 0) != 0, "the segment is not sealed");
  const int huge = memory_file();
  expect_kind(
      "TransportError",
      [&] { ControlSegment::open(huge, {.world_size = 4096, .cell_bytes = 1 << 30}); },
      "more memory than there is");
  close(huge);

  const int heap_fd = memory_file();
  Heap heap(heap_fd, 2, 1 << 20), same(heap_fd, 2, 1 << 20);
  const uint64_t a = heap.alloc(1, 5000), b = heap.alloc(1, 1), c = heap.alloc(1, 4096);
  expect(a == (1 << 20) + 4096 && b == a + 8192 && c == b + 4096, "first fit");
  heap.at(b)[0] = 7;
  expect(same.at(b)[0] == 7, "shared");
  heap.free(b);
  expect(heap.alloc(1, 8192) == c + 4096 && heap.alloc(1, 100) == b, "first fit again");
  expect(heap.at(b)[0] == 0, "given back");
  expect(heap.contains(heap.at(a), 5000) && !heap.contains(&heap, 1) &&
             !heap.contains(heap.at(0), heap.bytes() + 1),
         "contains");
  expect_kind("MemoryError", [&] { heap.alloc(0, (1 << 20) + 1); }, "larger than a region");
  heap.alloc(0, 1 << 20);
  expect_kind("MemoryError", [&] { heap.alloc(0, 1); }, "full region");
  expect_kind("TransportError", [&] { heap.free(b + 1); }, "free of nothing");
  expect_kind("TransportError", [&] { Heap(heap_fd, 3, 1 << 20); }, "another size");
  close(heap_fd);
  close(fd);
}

void bad_plans() {
  const auto check = [](const char* what, const std::function<void(Builder&)>& build) {
    Builder plan(2, 0, 2, 1);
    build(plan);
    expect_kind("ScheduleError", [&] { plan.done(); }, what);
  };
  check("no source", [](Builder& p) { p.fold({}, {out(0, 0)}); });
  check("no destination", [](Builder& p) { p.fold({in(0, 0)}, {}); });
  check("chunk", [](Builder& p) { p.fold({in(0, 2)}, {out(0, 0)}); });
  check("slot", [](Builder& p) { p.fold({in(0, 0)}, {cell(0, 1)}); });
  check("slots", [](Builder& p) { p.fold({in(0, 0)}, {cell(0, 0)}, 2); });
  check("rank", [](Builder& p) { p.fold({cell(2, 0)}, {out(0, 0)}); });
  check("peer's array", [](Builder& p) { p.wait(1, 1).fold({in(1, 0)}, {out(0, 0)}); });
  check("wait for itself", [](Builder& p) { p.wait(0, 1); });
  check("step", [](Builder& p) { p.signal(kFailed); });
  check("steps go down", [](Builder& p) { p.signal(5).signal(5); });
  Builder early(2, 0, 2, 0, true);
  expect_kind("ScheduleError", [&] { early.fold({in(1, 0)}, {out(0, 0)}).done(); }, "no wait");
  auto wide = std::make_shared<Plan>(
      *Builder(1, 0, 1, 0)
           .fold(std::vector<Operand>(kMaxFoldSources + 1, in(0, 0)), {out(0, 0)}, 1, kFoldTree)
           .done());
  wide->messages = true;
  expect_kind(
      "ScheduleError", [&] { bind_messages(sum_of(wide, 8), {}, false, {}); }, "too many sources");
  expect_all_fine(
      run(Mode::kThreads, {.n = 1, .cell_bytes = 64},
          [](const Rank& me) {
            const auto plan = Builder(1, 0, 4, 4).fold({in(0, 0)}, {cell(0, 0)}, 4).done();
            expect_kind(
                "ArgumentError", [&] { me.engine.bind(sum_of(plan, 100)); }, "cell too small");
            Binding binding = sum_of(one_shot(1, 0), 100);
            binding.chunk = 99;
            expect_kind("ScheduleError", [&] { me.engine.bind(binding); }, "chunks too small");
            auto* x = me.symmetric<int64_t>(8);
            const auto direct = me.engine.bind(sum_of(two_shot_direct(1, 0), 8, 2));
            Ints own(8);
            expect_kind(
                "ArgumentError", [&] { me.engine.run(*direct, x, own.data()); }, "not in the heap");
            me.engine.run(*direct, x, x);
          }),
      "bind");
}

}  // namespace

int main() {
  std::vector<Test> tests = {{"concurrent use, use after close", concurrent_use},
                             {"memory", memory},
                             {"bad plans", bad_plans}};
  if (kModes.size() > 1) tests.push_back({"fork", forked});
  return main_of(tests);
}
