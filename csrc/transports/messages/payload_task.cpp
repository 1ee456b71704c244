// How a call with payload proceeds: segments, groups of messages. payload_pieces.cpp has the rest:
// where pieces lie, and folding them.
#include "transports/messages/payload_task.h"

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

PayloadTask::PayloadTask(MessageLink& link, const BoundCall& call, const void* in, void* out,
                         Turn turn, Scratch& scratch)
    : MessageTask(link, call, in, out, turn),
      scratch_(scratch),
      srcs_(scratch.srcs),
      dsts_(scratch.dsts) {
  const uint32_t count = windows_of(call);
  const uint64_t pitch = call.plan->slots * call.stride;
  if (scratch.windows.size() < count) scratch.windows.resize(count);
  if (scratch.cells.size() < pitch * count) scratch.cells.resize(pitch * count);
  windows_ = std::span(scratch.windows).first(count);
  for (uint32_t i = 0; i < count; ++i) {
    Window& window = windows_[i];
    window.active = window.posted = false;
    window.cells = scratch.cells.data() + i * pitch;
    window.segment = i;
  }
}

PayloadTask::~PayloadTask() {
  bool sends = false, over = false;
  try {
    std::vector<Request> receives;
    for (const Window& window : windows_) {
      for (const Transfer& t : window.open) {
        const bool receive = Opcode(t.instr->op) == Opcode::kRecv;
        if (receive) receives.push_back(t.request);
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

bool PayloadTask::advance() {
  waiting_ = {};
  if (!agreed_ && !agree()) return false;
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
  if (busy || !link_.flushed(seq_)) return false;
  if (!scaled_ && call_.scale_at_exit && out_ != nullptr) scale_out();
  scaled_ = true;
  return true;
}

void PayloadTask::begin(Window& window) {
  window.pc = 0;
  window.active = true;
  window.posted = false;
  window.start = window.segment * call_.segment;
  window.reach = std::min(call_.segment, call_.largest - window.start);
}

// Runs a segment until it has to wait; true at its end.
bool PayloadTask::advance(Window& window, int lane) {
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
void PayloadTask::post(Window& window, int lane) {
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

void PayloadTask::post_one(Window& window, int lane, const Instr& instr, uint32_t first,
                           uint32_t chunks) {
  const Operand& operand = call_.plan->operands[instr.arg];
  Transfer transfer{&instr, first, chunks};
  // Room first: what has been posted must not be forgotten for lack of it.
  if (window.open.size() == window.open.capacity()) window.open.reserve(2 * window.open.size() + 1);
  const uint64_t full = chunks * window.reach * call_.elem_bytes;
  const Span place = span(window, operand, first, chunks);
  if (Opcode(instr.op) == Opcode::kRecv) {
    char* data = place.data;
    if (!place.whole) {
      transfer.bounce = std::make_unique_for_overwrite<char[]>(full);
      data = transfer.bounce.get();
    }
    const uint64_t least = needed(window, operand, first, chunks);
    link_.irecv(data, least, full, instr.peer, lane, transfer.request);
  } else {
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

bool PayloadTask::complete(Window& window) {
  bool found_missing = false;
  const auto done = [&](Transfer& t) {
    const bool over = link_.test(t.request);
    if (over && t.bounce != nullptr && Opcode(t.instr->op) == Opcode::kRecv) {
      const uint64_t full = t.chunks * window.reach * call_.elem_bytes;
      scatter(window, call_.plan->operands[t.instr->arg], t.first, t.chunks, t.bounce.get(), full);
    }
    progress_ += over;
    if (!over && !found_missing) {
      found_missing = true;
      if (waiting_.peer < 0) waiting_ = {t.instr->peer, t.instr->round + 2};
    }
    return over;
  };
  erase_done(window.open, done);
  return window.open.empty();
}

}  // namespace pycoll
