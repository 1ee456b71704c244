#include "engine/packets.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "engine/bind.h"

namespace pycoll {
namespace {

using Where = PacketPlan::Where;
using Piece = PacketPlan::Piece;
using Step = PacketPlan::Step;

constexpr size_t kNever = SIZE_MAX;

bool in_cells(const Operand& operand) {
  return operand.buffer == static_cast<uint16_t>(Buffer::kStaging);
}

// Which packets that a plan receives into slots may stay where they are: those that are read for
// the last time before the next one of their sender is taken.
class KeptPackets {
 public:
  explicit KeptPackets(const Plan& plan) : plan_(plan), last_read_(plan.code.size(), kNever) {
    for (size_t i = 0; i < plan.code.size(); ++i) note(i);
    std::map<uint16_t, size_t> next;  // receive of each peer
    for (size_t i = plan.code.size(); i-- > 0;) {
      if (Opcode(plan.code[i].op) != Opcode::kRecv) continue;
      const auto [later, last] = next.try_emplace(plan.code[i].peer, i);
      if (!last && last_read_[i] != kNever && last_read_[i] > later->second) last_read_[i] = kNever;
      later->second = i;
    }
  }

  // The instruction behind which the packet of a receive can be released; kNever: it is not kept.
  size_t last_read(size_t receive) const { return last_read_[receive]; }

 private:
  void note(size_t i) {
    const Instr& instr = plan_.code[i];
    const Operand* operands = plan_.operands.data() + instr.arg;
    if (Opcode(instr.op) == Opcode::kSend) read(operands[0], instr.count, i);
    if (Opcode(instr.op) == Opcode::kRecv) fill(operands[0], instr.count, i);
    if (Opcode(instr.op) != Opcode::kFold) return;
    for (uint32_t s = 0; s < instr.nsrc; ++s) read(operands[s], instr.count, i);
    for (uint32_t d = 0; d < instr.ndst; ++d) fill(operands[instr.nsrc + d], instr.count, kNever);
  }

  void read(const Operand& operand, uint32_t count, size_t i) {
    for (uint32_t k = 0; in_cells(operand) && k < count; ++k) {
      const auto found = filler_.find(operand.chunk + k);
      if (found != filler_.end()) last_read_[found->second] = i;
    }
  }

  void fill(const Operand& operand, uint32_t count, size_t receive) {
    for (uint32_t k = 0; in_cells(operand) && k < count; ++k) {
      if (receive == kNever) {
        filler_.erase(operand.chunk + k);
      } else {
        filler_[operand.chunk + k] = receive;
      }
    }
  }

  const Plan& plan_;
  std::unordered_map<uint32_t, size_t> filler_;  // by slot: the receive that has filled it
  std::vector<size_t> last_read_;
};

class PacketPlanner {
 public:
  explicit PacketPlanner(const BoundCall& call)
      : call_(call), code_(call.plan->code), kept_(*call.plan) {}

  PacketPlan plan() {
    for (size_t i = 0; i < code_.size();) {
      if (Opcode(code_[i].op) == Opcode::kFold) {
        fold(code_[i]);
        release_behind(i++);
      } else {
        i = exchange(i);
      }
    }
    if (call_.scale_at_exit) scale_out();
    for (const Step& step : plan_.steps) {
      plan_.most_pieces = std::max(plan_.most_pieces, step.pieces);
    }
    return std::move(plan_);
  }

 private:
  struct InPacket {
    uint16_t peer;
    uint64_t at;
  };

  const Operand& operand_of(const Instr& instr) const { return call_.plan->operands[instr.arg]; }

  Step& add(PacketPlan::Op op) {
    Step& step = plan_.steps.emplace_back();  // all zeros
    step.op = op;
    step.first = static_cast<uint32_t>(plan_.pieces.size());
    return step;
  }

  // Chunk k of an operand. Without `read` it is about to be written.
  Piece piece(const Operand& operand, uint32_t k, bool read) {
    const PiecePlace place = place_of(call_, operand, k, 0, call_.largest);
    const uint64_t nbytes = place.length * call_.elem_bytes;
    if (place.buffer == Buffer::kIn) return {Where::kIn, 0, 0, place.at, nbytes};
    if (place.buffer == Buffer::kOut) return {Where::kOut, 0, 0, place.at, nbytes};
    const auto found = slots_.find(operand.chunk + k);
    if (found != slots_.end() && read) {
      return {Where::kPacket, found->second.peer, 0, found->second.at, nbytes};
    }
    if (found != slots_.end()) slots_.erase(found);
    return {Where::kCells, 0, 0, place.at, nbytes};
  }

  // The messages up to the next WAIT. What is sent is copied before anything is received.
  size_t exchange(size_t begin) {
    size_t end = begin;
    while (Opcode(code_[end].op) != Opcode::kWait) ++end;
    for (size_t i = begin; i < end; ++i) {
      if (Opcode(code_[i].op) == Opcode::kSend) send(code_[i]);
    }
    for (size_t i = begin; i < end; ++i) release_behind(i);
    const std::vector<size_t> receives = receives_of(begin, end);
    auto together = static_cast<uint32_t>(receives.size());
    for (const size_t i : receives) receive(i, together--);
    return end + 1;
  }

  // Those of one peer behind each other.
  std::vector<size_t> receives_of(size_t begin, size_t end) const {
    std::map<uint16_t, size_t> places;  // of each peer, in order of their first receives
    std::vector<std::vector<size_t>> by_peer;
    for (size_t i = begin; i < end; ++i) {
      if (Opcode(code_[i].op) != Opcode::kRecv) continue;
      const auto [place, fresh] = places.try_emplace(code_[i].peer, by_peer.size());
      if (fresh) by_peer.emplace_back();
      by_peer[place->second].push_back(i);
    }
    std::vector<size_t> receives;
    for (const auto& own : by_peer) receives.insert(receives.end(), own.begin(), own.end());
    return receives;
  }

  // The bytes of a message up to the last chunk that has any.
  uint32_t add_pieces(Step& step, const Instr& instr, bool read) {
    uint32_t end = 0;
    for (uint32_t k = 0; k < instr.count; ++k) {
      Piece part = piece(operand_of(instr), k, read);
      if (part.nbytes == 0) continue;
      part.place = static_cast<uint32_t>(k * pitch());
      end = part.place + static_cast<uint32_t>(part.nbytes);
      plan_.pieces.push_back(part);
      ++step.pieces;
    }
    return end;
  }

  void send(const Instr& instr) {
    Step& step = add(PacketPlan::Op::kSend);
    step.peer = instr.peer;
    step.most = add_pieces(step, instr, true);
  }

  // A slot may stand for a chunk at the end of a vector, which is shorter: that shows where the
  // packet is read. What fills an array must have all of its bytes.
  void receive(size_t i, uint32_t together) {
    const Instr& instr = code_[i];
    const Operand& operand = operand_of(instr);
    Step& step = add(PacketPlan::Op::kReceive);
    step.peer = instr.peer;
    step.round = instr.round;
    step.together = together;
    step.most = static_cast<uint32_t>(instr.count * pitch());
    if (kept_.last_read(i) == kNever) {
      const uint32_t end = add_pieces(step, instr, false);
      step.least = in_cells(operand) ? 0 : end;
      return;
    }
    step.kept = true;
    for (uint32_t k = 0; k < instr.count; ++k) {
      slots_[operand.chunk + k] = {instr.peer, k * pitch()};
    }
    released_[kept_.last_read(i)].push_back(instr.peer);
  }

  void release_behind(size_t i) {
    for (const uint16_t peer : released_[i]) add(PacketPlan::Op::kRelease).peer = peer;
    released_.erase(i);
  }

  // Chunk by chunk, or all at once where every operand has them in one piece.
  void fold(const Instr& instr) {
    const Operand* operands = call_.plan->operands.data() + instr.arg;
    const uint32_t total = uint32_t{instr.nsrc} + instr.ndst;
    std::vector<std::vector<Piece>> rows(instr.count);
    for (uint32_t i = 0; i < total; ++i) {  // sources first: a slot may be both
      for (uint32_t k = 0; k < instr.count; ++k) {
        rows[k].push_back(piece(operands[i], k, i < instr.nsrc));
      }
    }
    if (joined(rows)) {
      for (Piece& part : rows[0]) part.nbytes *= instr.count;
      rows.resize(1);
    }
    const bool complete = (instr.flags & kFoldComplete) != 0 && !call_.scale_at_exit;
    const FoldSpec spec{call_.dtype, call_.op, (instr.flags & kFoldTree) != 0,
                        complete ? call_.scale_n : 0, 0};
    for (const std::vector<Piece>& row : rows) add_fold(row, instr.nsrc, spec);
  }

  bool joined(const std::vector<std::vector<Piece>>& rows) const {
    for (size_t k = 0; k < rows.size(); ++k) {
      for (size_t i = 0; i < rows[k].size(); ++i) {
        const Piece &first = rows[0][i], &part = rows[k][i];
        if (part.nbytes != pitch() || part.where != first.where || part.peer != first.peer ||
            part.at != first.at + k * pitch()) {
          return false;
        }
      }
    }
    return rows.size() > 1;
  }

  void add_fold(const std::vector<Piece>& row, uint32_t sources, const FoldSpec& spec) {
    uint64_t nbytes = UINT64_MAX;
    for (const Piece& part : row) nbytes = std::min(nbytes, part.nbytes);
    if (nbytes == 0) return;
    const bool copies = sources == 1 && spec.scale_n == 0;
    Step& step = add(copies ? PacketPlan::Op::kCopy : PacketPlan::Op::kFold);
    step.pieces = static_cast<uint32_t>(row.size());
    step.sources = sources;
    step.count = copies ? nbytes : nbytes / call_.elem_bytes;
    step.spec = spec;
    plan_.pieces.insert(plan_.pieces.end(), row.begin(), row.end());
  }

  void scale_out() {
    const Plan& plan = *call_.plan;
    const bool own = call_.out_layout == Layout::kOwn;
    const uint32_t share = plan.chunks / plan.world_size;
    const uint32_t first = own ? plan.rank * share : 0, end = own ? first + share : plan.chunks;
    for (uint32_t chunk = first; chunk < end; ++chunk) {
      const Operand operand{static_cast<uint16_t>(plan.rank), static_cast<uint16_t>(Buffer::kOut),
                            chunk};
      const Piece part = piece(operand, 0, true);
      if (part.nbytes == 0) continue;
      Step& step = add(PacketPlan::Op::kScale);
      step.pieces = 1;
      step.count = part.nbytes / call_.elem_bytes;
      plan_.pieces.push_back(part);
    }
  }

  uint64_t pitch() const { return call_.largest * call_.elem_bytes; }

  const BoundCall& call_;
  const std::vector<Instr>& code_;
  const KeptPackets kept_;
  std::unordered_map<uint32_t, InPacket> slots_;      // whose content is in a packet
  std::map<size_t, std::vector<uint16_t>> released_;  // peers, by instruction
  PacketPlan plan_;
};

}  // namespace

PacketPlan plan_packets(const BoundCall& call, uint32_t world_size) {
  PacketPlan plan = PacketPlanner(call).plan();
  const size_t ranks = call.team.empty() ? world_size : call.team.size();
  if (!call.agree || ranks != 2) return plan;
  for (const Step& step : plan.steps) {
    const bool sends = step.op == PacketPlan::Op::kSend;
    const bool receives = step.op == PacketPlan::Op::kReceive;
    plan.tells = plan.tells || sends;
    plan.hears = plan.hears || receives;
    if (sends || receives) plan.other = step.peer;
  }
  return plan;
}

}  // namespace pycoll
