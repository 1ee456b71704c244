#include "engine/plan.h"

#include <algorithm>
#include <iterator>
#include <tuple>
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
    require(o.buffer <= uint16_t(Buffer::kCell), "unknown buffer ", o.buffer);
    require(!plan.messages || o.rank == plan.rank, "touches memory of rank ", o.rank);
    if (o.buffer == uint16_t(Buffer::kCell)) {
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

// Chunks of the arrays of ranks: IN and OUT are the same, as they are in place.
class Chunks {
 public:
  explicit Chunks(uint32_t of_all) : of_all_(of_all) {}

  void add(const Operand& o, uint32_t count) {
    const uint64_t end = uint64_t{o.chunk} + count;
    spans_.push_back({o.rank, o.chunk, std::min<uint64_t>(end, of_all_)});
    if (end > of_all_) spans_.push_back({o.rank, 0, end - of_all_});  // from the last to the first
  }
  // Ends the additions.
  void sort() {
    std::sort(spans_.begin(), spans_.end());
    std::vector<Span> merged;
    for (const Span& span : spans_) {
      if (!merged.empty() && merged.back().rank == span.rank && span.first <= merged.back().end) {
        merged.back().end = std::max(merged.back().end, span.end);
      } else {
        merged.push_back(span);
      }
    }
    spans_ = std::move(merged);
  }
  bool meet(const Chunks& others) const {
    return std::any_of(others.spans_.begin(), others.spans_.end(), [&](const Span& other) {
      const auto after =
          std::lower_bound(spans_.begin(), spans_.end(), Span{other.rank, other.end, 0});
      return after != spans_.begin() && std::prev(after)->rank == other.rank &&
             std::prev(after)->end > other.first;
    });
  }

 private:
  struct Span {
    uint32_t rank;
    uint64_t first, end;
    bool operator<(const Span& other) const {
      return std::tie(rank, first, end) < std::tie(other.rank, other.first, other.end);
    }
  };
  uint64_t of_all_;
  std::vector<Span> spans_;
};

bool in_array(const Operand& o) { return o.buffer != uint16_t(Buffer::kCell); }

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
  look_at_stores();
}

void Plan::look_at_stores() {
  Chunks read(chunks), stored(chunks);
  for (const Instr& instr : code) {
    if (Opcode(instr.op) != Opcode::kFold) continue;
    const Operand* const source = operands.data() + instr.arg;
    const Operand* const target = source + instr.nsrc;
    for (const Operand* o = source; o < target; ++o) {
      if (in_array(*o)) read.add(*o, instr.count);
      rereads |= o->buffer == uint16_t(Buffer::kOut);
    }
    for (const Operand* o = target; o < target + instr.ndst; ++o) {
      const bool itself = instr.nsrc == 1 && in_array(*source) && source->rank == o->rank &&
                          source->chunk == o->chunk;
      if (in_array(*o) && !itself) stored.add(*o, instr.count);
    }
  }
  read.sort();
  rewrites = read.meet(stored);
}

}  // namespace pycoll
