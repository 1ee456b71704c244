// How a call over messages proceeds: agreement, segments, groups of messages. message_pieces.cpp
// has the rest: where pieces lie, and folding them.
#include "transports/messages/message_task.h"

#include <algorithm>
#include <cstring>

#include "base/erase_done.h"
#include "base/never_freed.h"

namespace pycoll {
namespace {

// Of a chunk, under way at the same time if a segment is smaller: what is received stays in the
// core's cache until folded.
constexpr uint64_t kInFlightBytes = 2 << 20;

uint32_t windows_of(const BoundCall& call) {
  if (call.segments == 1) [[likely]]
    return 1;
  const uint64_t fit = kInFlightBytes / std::max<uint64_t>(1, call.segment * call.elem_bytes);
  return std::min(call.segments, std::clamp(static_cast<uint32_t>(fit), 1u, kWindows));
}

}  // namespace

MessageTask::MessageTask(MessageLink& link, const BoundCall& call, const void* in, void* out,
                         Turn turn, Scratch& scratch)
    : link_(link),
      call_(call),
      in_(static_cast<char*>(const_cast<void*>(in))),
      out_(static_cast<char*>(out)),
      seq_(turn.seq),
      check_(turn.check),
      agreed_(turn.proven || (call.tiny && !call.agree)),
      scratch_(scratch),
      srcs_(scratch.srcs),
      dsts_(scratch.dsts) {
  if (link_.world_size() == 1) agreed_ = true;
  const uint32_t count = windows_of(call);
  const uint64_t pitch = call.plan->slots * call.stride;
  if (scratch.windows.size() < count) scratch.windows.resize(count);
  if (scratch.cells.size() < pitch * count) scratch.cells.resize(pitch * count);
  scratch.blocked.assign(link.world_size(), 0);
  windows_ = std::span(scratch.windows).first(count);
  blocked_ = scratch.blocked;
  for (uint32_t i = 0; i < count; ++i) {
    Window& window = windows_[i];
    window.active = window.posted = false;
    window.cells = scratch.cells.data() + i * pitch;
    window.segment = i;
  }
}

MessageTask::~MessageTask() {
  bool sends = false, over = false;
  try {
    std::vector<Request> receives;
    for (const Window& window : windows_) {
      for (const Transfer& t : window.open) {
        const bool receive = Opcode(t.instr->op) == Opcode::kRecv;
        if (!t.eager && receive) receives.push_back(t.request);
        sends = sends || !receive;
      }
    }
    if (!receives.empty()) link_.cancel_receives(receives);
    over = receives.empty();
  } catch (const std::exception&) {  // no memory, or the transport no longer answers
  }
  const bool used = sends || !over;  // by the transport, for good
  for (Window& window : windows_) {
    for (Transfer& t : window.open) {
      if (used) t.bounce.release();
    }
    window.open.clear();
  }
  if (used) never_free(std::move(scratch_.cells));
}

EagerHeader MessageTask::header(uint32_t nbytes) const {
  return {seq_, call_.descriptor, call_.count, check_, nbytes};
}

// The next eager message of a peer for this call, or null. Drops those of calls that were given up.
// A peer that is ahead has refused a call whose notice has not come yet: its message can wait.
const EagerHeader* MessageTask::receive_eager(Lane lane, uint32_t peer) {
  const EagerHeader* found = link_.receive_eager(lane, peer);
  while (found != nullptr && found->seq < seq_) {
    link_.release(lane, peer);
    found = link_.receive_eager(lane, peer);
  }
  if (found == nullptr || found->seq > seq_) return nullptr;
  if (found->descriptor != call_.descriptor || found->count != call_.count ||
      found->check != check_) {
    throw Disagreement{peer, *found};
  }
  return found;
}

bool MessageTask::advance() {
  waiting_ = {};
  if (!agreed_ && !agree() && !call_.tiny) return false;
  bool busy = false;
  const uint32_t first = static_cast<uint32_t>(Lane::kPayload) + seq_ % kBatch * kWindows;
  for (uint32_t i = 0; i < windows_.size(); ++i) {
    Window& window = windows_[i];
    for (;;) {
      if (!window.active) {
        if (window.segment >= call_.segments) break;
        begin(window);
      }
      if (!advance(window, static_cast<int>(first + i))) {
        busy = true;
        break;
      }
    }
  }
  if (busy || !agreed_ || !link_.flushed(seq_)) return false;
  if (!scaled_ && call_.scale_at_exit && out_ != nullptr) scale_out();
  scaled_ = true;
  return true;
}

// Dissemination (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization",
// IJPP 17(1), 1988): whoever comes to its end has heard, by others, from everybody.
bool MessageTask::agree() {
  const std::vector<uint32_t>& team = call_.team;
  const uint32_t n = team.empty() ? link_.world_size() : static_cast<uint32_t>(team.size());
  const uint32_t place =
      static_cast<uint32_t>(std::find(team.begin(), team.end(), link_.rank()) - team.begin());
  const uint32_t rank = team.empty() ? link_.rank() : place;
  const auto member = [&](uint32_t i) { return team.empty() ? i % n : team[i % n]; };
  const auto send_next = [&] {
    link_.open_eager();
    link_.send_eager(Lane::kAgreement, member(rank + distance_), header(0));
  };
  if (distance_ == 0 && n > 1) {
    distance_ = 1;
    send_next();
  }
  while (distance_ < n && n > 1) {
    const uint32_t peer = member(rank + n - distance_);
    const EagerHeader* found = receive_eager(Lane::kAgreement, peer);
    if (found == nullptr) {
      waiting_ = {static_cast<int32_t>(peer), kEntered};
      return false;
    }
    link_.release(Lane::kAgreement, peer);
    ++progress_;
    distance_ *= 2;
    if (distance_ < n) send_next();
  }
  agreed_ = true;
  return true;
}

void MessageTask::begin(Window& window) {
  window.pc = 0;
  window.active = true;
  window.posted = false;
  window.start = window.segment * call_.segment;
  window.reach = std::min(call_.segment, call_.largest - window.start);
}

// Runs a segment until it has to wait; true at its end.
bool MessageTask::advance(Window& window, int lane) {
  const std::vector<Instr>& code = call_.plan->code;
  while (window.pc < code.size()) {
    const Instr& instr = code[window.pc];
    if (Opcode(instr.op) == Opcode::kFold) {
      fold_pieces(window, instr);
      ++window.pc;
      continue;
    }
    if (!window.posted) post(window, lane);
    if (!complete(window)) return false;
    window.posted = false;
    while (Opcode(code[window.pc].op) != Opcode::kWait) ++window.pc;
    ++window.pc;
  }
  window.active = false;
  window.segment += static_cast<uint32_t>(windows_.size());  // the same in all ranks
  return true;
}

// Posts the messages up to the next WAIT: receives first, so that they find their place at once.
void MessageTask::post(Window& window, int lane) {
  const std::vector<Instr>& code = call_.plan->code;
  for (const Opcode op : {Opcode::kRecv, Opcode::kSend}) {
    for (size_t i = window.pc; Opcode(code[i].op) != Opcode::kWait; ++i) {
      const Instr& instr = code[i];
      if (Opcode(instr.op) != op) continue;
      const uint32_t step = call_.segments > 1 ? 1 : instr.count;
      for (uint32_t k = 0; k < instr.count; k += step) post_one(window, lane, instr, k, step);
    }
  }
  window.posted = true;
}

void MessageTask::post_one(Window& window, int lane, const Instr& instr, uint32_t first,
                           uint32_t chunks) {
  const Operand& operand = call_.plan->operands[instr.arg];
  Transfer transfer{&instr, first, chunks, call_.tiny};
  // Room first: what has been posted must not be forgotten for lack of it.
  if (window.open.size() == window.open.capacity()) window.open.reserve(2 * window.open.size() + 1);
  const uint64_t full = chunks * window.reach * call_.elem_bytes;
  if (Opcode(instr.op) == Opcode::kRecv) {
    if (!transfer.eager) {
      const Span place = span(window, operand, first, chunks);
      char* data = place.data;
      if (!place.whole) {
        transfer.bounce = std::make_unique_for_overwrite<char[]>(full);
        data = transfer.bounce.get();
      }
      const uint64_t least = needed(window, operand, first, chunks);
      link_.irecv(data, least, full, instr.peer, lane, transfer.request);
    }
  } else if (transfer.eager) {
    char* room = link_.open_eager();
    const uint64_t nbytes = gather(window, operand, first, chunks, room);
    link_.send_eager(Lane::kEager, instr.peer, header(static_cast<uint32_t>(nbytes)));
    return;
  } else {
    const Span place = span(window, operand, first, chunks);
    if (place.whole || chunks == 1) {
      link_.isend(place.data, place.nbytes, instr.peer, lane, transfer.request);
    } else {
      transfer.bounce = std::make_unique_for_overwrite<char[]>(full);
      const uint64_t nbytes = gather(window, operand, first, chunks, transfer.bounce.get());
      link_.isend(transfer.bounce.get(), nbytes, instr.peer, lane, transfer.request);
    }
  }
  window.open.push_back(std::move(transfer));
}

bool MessageTask::complete(Window& window) {
  ++pass_;
  bool found_missing = false;
  const auto done = [&](Transfer& t) {
    const uint32_t peer = t.instr->peer;
    bool over;
    if (t.eager) {
      over = blocked_[peer] != pass_ && take_eager(window, t);
      if (!over) blocked_[peer] = pass_;
    } else {
      over = link_.test(t.request);
      if (over && t.bounce != nullptr && Opcode(t.instr->op) == Opcode::kRecv) {
        const uint64_t full = t.chunks * window.reach * call_.elem_bytes;
        scatter(window, call_.plan->operands[t.instr->arg], t.first, t.chunks, t.bounce.get(),
                full);
      }
    }
    progress_ += over;
    if (!over && !found_missing) {
      found_missing = true;
      if (waiting_.peer < 0) waiting_ = {static_cast<int32_t>(peer), t.instr->round + 2};
    }
    return over;
  };
  erase_done(window.open, done);
  return window.open.empty();
}

bool MessageTask::take_eager(Window& window, Transfer& transfer) {
  const uint32_t peer = transfer.instr->peer;
  const EagerHeader* found = receive_eager(Lane::kEager, peer);
  if (found == nullptr) return false;
  const Operand& operand = call_.plan->operands[transfer.instr->arg];
  const uint64_t full = transfer.chunks * window.reach * call_.elem_bytes;
  if (found->nbytes > full ||
      found->nbytes < needed(window, operand, transfer.first, transfer.chunks)) {
    link_.reject(peer, "data of another size than this call has");
  }
  scatter(window, operand, transfer.first, transfer.chunks, found->data(), found->nbytes);
  link_.release(Lane::kEager, peer);
  return true;
}

}  // namespace pycoll
