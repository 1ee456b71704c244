// What a plan of packets is made of, and that odd plans give what they should.
#include <map>

#include "hosts.h"

namespace {

using namespace hosts;
using Op = PacketPlan::Op;

std::shared_ptr<const BoundCall> bound(MessagePlan plan, uint32_t n, uint32_t r, uint64_t count,
                                       bool agree = false) {
  MessageLimits limits = limits_of(plan, n);
  limits.rank = r;
  const auto call = bind_messages(sum_of(plan(n, r), count), limits, agree, {});
  call->packets = plan_packets(*call, n);
  return call;
}

std::map<Op, int> steps_of(const BoundCall& call) {
  std::map<Op, int> found;
  for (const PacketPlan::Step& step : call.packets.steps) ++found[step.op];
  return found;
}

int kept_in(const BoundCall& call) {
  int kept = 0;
  for (const PacketPlan::Step& step : call.packets.steps) kept += step.kept;
  return kept;
}

// Rank 1 sends two packets at once; the first is read when the second has come.
std::shared_ptr<const Plan> two_at_once(uint32_t n, uint32_t r) {
  MessagePlanBuilder plan(n, r, 2, 2);
  if (r == 1) {
    plan.send(0, in(r, 0)).send(0, in(r, 1)).recv(0, out(r, 0), 2).wait();
    return plan.done();
  }
  plan.recv(1, cell(r, 0)).recv(1, cell(r, 1)).wait();
  for (uint32_t c = 0; c < 2; ++c) plan.fold({in(r, c), cell(r, c)}, out(r, c));
  return plan.send(1, out(r, 0), 2).wait().done();
}

// Both hand on what they got, twice: a slot is read after the next packet of its sender.
std::shared_ptr<const Plan> handed_on(uint32_t n, uint32_t r) {
  MessagePlanBuilder plan(n, r, 1, 2);
  const uint32_t peer = 1 - r;
  plan.recv(peer, cell(r, 0)).send(peer, in(r, 0)).wait();
  plan.recv(peer, cell(r, 1)).send(peer, cell(r, 0)).wait();
  return plan.fold({cell(r, 0), cell(r, 1)}, out(r, 0)).done();
}

void packets_stay_where_they_are() {
  const auto check = [](MessagePlan plan, uint32_t n, uint32_t r, int receives, int kept) {
    const auto call = bound(plan, n, r, 12 * n);
    auto steps = steps_of(*call);
    expect(call->tiny && steps[Op::kReceive] == receives, "receives ", steps[Op::kReceive]);
    expect(kept_in(*call) == kept && steps[Op::kRelease] == kept, "kept ", kept_in(*call));
  };
  check(sum_at_once, 4, 2, 3, 3);
  check(sum_in_ring, 4, 1, 6, 3);  // the others go straight to their array
  check(two_at_once, 2, 0, 2, 1);  // the later one
  check(two_at_once, 2, 1, 1, 0);
  check(handed_on, 2, 0, 2, 1);
}

void what_packets_tell() {
  const auto first = bound(from_first, 2, 0, 30, true), second = bound(from_first, 2, 1, 30, true);
  expect(first->packets.tells && !first->packets.hears && first->packets.other == 1, "the root");
  expect(!second->packets.tells && second->packets.hears && second->packets.other == 0, "a leaf");
  const auto many = bound(from_first, 3, 0, 30, true);
  expect(!many->packets.tells && !many->packets.hears, "of three ranks none hears of all");
  const auto all = bound(sum_at_once, 2, 0, 30);
  expect(!all->packets.tells && !all->packets.hears, "a call that need not agree");
}

void pieces_together() {
  const auto call = bound(from_first, 2, 0, 30, true);
  auto steps = steps_of(*call);
  expect(steps[Op::kSend] == 1 && steps[Op::kCopy] == 1, "three chunks in one step");
  const auto uneven = bound(from_first, 2, 0, 28, true);  // the last chunk has 8 elements of 10
  expect(steps_of(*uneven)[Op::kCopy] == 3, "chunks of different length");
  expect(bound(from_first, 2, 0, 0, true)->packets.pieces.empty(), "nothing to move");
}

void results() {
  for (const MessagePlan plan : {two_at_once, handed_on}) {
    run_all(
        {.n = 2, .timeout_s = 10},
        [=](const Host& me) {
          for (const uint64_t count : {0, 1, 2, 7, 64, 1000}) {
            for (int again = 0; again < 3; ++again) {
              Ints &x = me.array(count, me.rank + 1), &y = me.array(count);
              me.engine->run(*call_of(me, plan, count), x.data(), y.data());
              expect(y == Ints(count, 3), "a sum of ", count);
            }
          }
        },
        "odd plans");
  }
}

}  // namespace

int main() {
  return main_of({{"packets stay where they are", packets_stay_where_they_are},
                  {"what packets tell", what_packets_tell},
                  {"pieces together", pieces_together},
                  {"results", results}});
}
