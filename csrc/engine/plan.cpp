#include "engine/plan.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace pycoll {
namespace {

struct Checker {
  const Plan& plan;
  size_t index = 0;
  std::vector<bool> awaited{};
  uint32_t published = 0;

  template <typename... Parts>
  void require(bool condition, const Parts&... parts) const {
    COLL_CHECK(condition, "ScheduleError", "plan of rank ", plan.rank, " of ", plan.world_size,
               ", instruction ", index, " of ", plan.code.size(), ": ", parts...);
  }

  void operand(const Operand& o, uint32_t count) const {
    require(o.rank < plan.world_size, "rank ", o.rank, " is not in the world");
    require(o.buffer <= uint16_t(Buffer::kStaging), "unknown buffer ", o.buffer);
    require(!plan.messages || o.rank == plan.rank, "touches memory of rank ", o.rank);
    if (o.buffer == uint16_t(Buffer::kStaging)) {
      require(o.chunk < plan.slots && count <= plan.slots - o.chunk, "slots ", o.chunk, "+", count,
              " of ", plan.slots);
    } else {
      require(o.chunk < plan.chunks && count <= plan.chunks, "chunks ", o.chunk, "+", count, " of ",
              plan.chunks);
      require(o.rank == plan.rank || plan.direct, "a staged plan touches an array of rank ",
              o.rank);
      require(o.rank == plan.rank || awaited[o.rank], "touches an array of rank ", o.rank,
              " before it waited for that rank");
    }
  }

  void fold(const Instr& instr) const {
    require(instr.nsrc > 0 && instr.ndst > 0, "a fold of ", instr.nsrc, " sources into ",
            instr.ndst, " destinations");
    require(instr.count > 0, "a fold of no chunk");
    const size_t end = size_t{instr.arg} + instr.nsrc + instr.ndst;
    require(end <= plan.operands.size(), "operands ", instr.arg, "..", end, " of ",
            plan.operands.size());
    for (size_t i = instr.arg; i < end; ++i) operand(plan.operands[i], instr.count);
    const size_t first_dst = size_t{instr.arg} + instr.nsrc;
    for (size_t s = instr.arg; instr.count > 1 && s < first_dst; ++s) {
      for (size_t d = first_dst; d < end; ++d) {
        require(!shifted(plan.operands[s], plan.operands[d], instr.count), "reads chunks ",
                plan.operands[s].chunk, "+", instr.count, " and writes ", plan.operands[d].chunk,
                "+", instr.count, " of the same memory");
      }
    }
  }

  // Whether pieces of so many chunks have some, but not all, in the same place.
  bool shifted(const Operand& a, const Operand& b, uint32_t count) const {
    if (a.rank != b.rank || a.buffer != b.buffer || a.chunk == b.chunk) return false;
    const uint32_t low = std::min(a.chunk, b.chunk), high = std::max(a.chunk, b.chunk);
    if (high - low < count) return true;
    const bool wraps = a.buffer != uint16_t(Buffer::kStaging);  // from the last chunk to the first
    return wraps && low + plan.chunks - high < count;
  }

  void peer(const Instr& instr) const {
    require(instr.peer < plan.world_size && instr.peer != plan.rank, "peer ", instr.peer);
  }

  void instruction(const Instr& instr) {
    switch (Opcode(instr.op)) {
      case Opcode::kFold:
        return fold(instr);
      case Opcode::kSignal:
        require(!plan.messages, "signals in a plan of messages");
        require(instr.arg > published && instr.arg <= kDone, "signals step ", instr.arg,
                " after step ", published);
        published = instr.arg;
        return;
      case Opcode::kWait:
        if (plan.messages) return require(instr.peer == kAllPeers, "waits for one rank");
        peer(instr);
        require(instr.arg >= 1 && instr.arg <= kDone, "waits for step ", instr.arg);
        awaited[instr.peer] = true;
        return;
      case Opcode::kSend:
      case Opcode::kRecv:
        peer(instr);
        require(plan.messages, "a message in a plan of shared memory");
        require(instr.arg < plan.operands.size(), "operand ", instr.arg, " of ",
                plan.operands.size());
        require(instr.count > 0, "a message of no chunk");
        return operand(plan.operands[instr.arg], instr.count);
      default:
        require(false, "unknown opcode ", unsigned{instr.op});
    }
  }
};

}  // namespace

void Plan::check() {
  COLL_CHECK(world_size >= 1 && rank < world_size && chunks >= 1, "ScheduleError", "plan of rank ",
             rank, " in a world of ", world_size, " with ", chunks, " chunks");
  Checker checker{*this};
  checker.awaited.assign(world_size, false);
  for (const Instr& instr : code) {
    checker.instruction(instr);
    ++checker.index;
  }
  bool open = false;  // messages that no WAIT completes
  for (const Instr& instr : code) {
    const auto op = Opcode(instr.op);
    if (op == Opcode::kSend || op == Opcode::kRecv) open = true;
    if (op == Opcode::kWait) open = false;
    checker.require(!open || op != Opcode::kFold || !messages,
                    "folds while messages are under way");
  }
  checker.require(!open, "ends while messages are under way");
  for (const Instr& instr : code) {
    if (Opcode(instr.op) != Opcode::kFold) continue;
    reduces |= instr.nsrc > 1;
    for (uint32_t i = instr.arg; i < instr.arg + instr.nsrc; ++i) {
      rereads |= operands[i].buffer == uint16_t(Buffer::kOut);
    }
  }
}

}  // namespace pycoll
