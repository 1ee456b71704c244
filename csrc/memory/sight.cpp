#include "memory/sight.h"

#include <algorithm>
#include <cstring>

#include "base/liveness.h"
#include "base/wait.h"

namespace pycoll {
namespace {

uint64_t since(uint64_t begin) {
  const uint64_t now = now_ns();
  return now > begin ? now - begin : 0;
}

std::string site_of(const RankBlock& block, uint32_t site) {
  if (site >= std::min(block.sites.load(std::memory_order_acquire), kSites)) return {};
  return {block.site_text[site], strnlen(block.site_text[site], kSiteBytes)};
}

// All but whether the awaited rank has arrived.
RankSight look_at(const RankBlock& block, uint32_t world_size, uint32_t calls) {
  RankSight sight{};
  sight.phase = Phase(block.phase.load(std::memory_order_acquire));
  sight.pid = block.pid.load(std::memory_order_relaxed);
  sight.starttime = block.starttime.load(std::memory_order_relaxed);
  sight.over = sight.phase != Phase::kAbsent && process_over(sight.pid, sight.starttime);
  sight.waiting_peer = block.waiting_peer.load(std::memory_order_acquire);
  sight.waiting_position = block.waiting_position.load(std::memory_order_relaxed);
  if (sight.waiting_peer >= 0 && sight.waiting_peer < int32_t(world_size)) {
    sight.waiting_ns = since(block.waiting_since_ns.load(std::memory_order_relaxed));
  } else {
    sight.waiting_peer = -1;
  }
  sight.message_way = MessageWay(block.message_way.load(std::memory_order_acquire));
  if (sight.message_way != MessageWay::kNone) {
    sight.message_peer = block.message_peer.load(std::memory_order_relaxed);
    sight.message_tag = block.message_tag.load(std::memory_order_relaxed);
    sight.message_ns = since(block.message_since_ns.load(std::memory_order_relaxed));
  }
  sight.queued = block.queued.load(std::memory_order_relaxed);
  if (sight.phase == Phase::kLeft) {
    sight.text.assign(block.leave_text, strnlen(block.leave_text, kTextBytes));
  }
  sight.call_seq = block.call_seq.load(std::memory_order_acquire);
  // The slot behind the newest may be written right now, so the oldest record is left out.
  const uint64_t most = std::min<uint64_t>({calls, kRecords - 1, sight.call_seq});
  for (uint64_t seq = sight.call_seq - most + 1; seq <= sight.call_seq; ++seq) {
    const CallRecord& record = block.records[seq % kRecords];
    CallSight call{seq,
                   record.iteration.load(std::memory_order_relaxed),
                   record.descriptor.load(std::memory_order_relaxed),
                   record.count.load(std::memory_order_relaxed),
                   record.done.load(std::memory_order_relaxed) != 0,
                   site_of(block, record.site.load(std::memory_order_relaxed))};
    if (record.call_seq.load(std::memory_order_acquire) == seq) sight.calls.push_back(call);
  }
  return sight;
}

}  // namespace

RankSight look_at(const ControlSegment& control, uint32_t rank, uint32_t calls) {
  RankSight sight = look_at(control.block(rank), control.geometry().world_size, calls);
  if (sight.waiting_peer >= 0) {
    const uint32_t position = sight.waiting_position;
    const auto peer = uint32_t(sight.waiting_peer);
    sight.arrived = has_reached(control.line(peer, position >> 16 & 1), position);
  }
  return sight;
}

RankSight look_at(const Board& board, uint32_t calls) {
  return look_at(board.block(), board.world_size(), calls);
}

}  // namespace pycoll
