// Where the pieces of a call with payload lie, packing them, and folding them.
//
// On the wire chunk k of a message stands at k * reach elements. Chunks at the end of a vector may
// be shorter than that; a rank that receives into a scratch slot does not know which ones are, so
// what is received is bounded by the full length, and what counts is what the destination has.
#include <algorithm>

#include "kernels/fold/fold.h"
#include "transports/messages/payload_task.h"

namespace pycoll {

// Address of chunk k of a piece in the segment of a window, and how many elements it has there.
char* PayloadTask::resolve(const Window& window, const Operand& operand, uint32_t k,
                           uint64_t& length) const {
  const PiecePlace place = place_of(call_, operand, k, window.start, window.reach);
  length = place.length;
  if (place.buffer == Buffer::kStaging) return window.cells + place.at;
  return (place.buffer == Buffer::kIn ? in_ : out_) + place.at;
}

PayloadTask::Span PayloadTask::span(const Window& window, const Operand& operand, uint32_t first,
                                    uint32_t chunks) const {
  uint64_t length;
  char* data = resolve(window, operand, first, length);
  const uint64_t pitch = window.reach * call_.elem_bytes;
  bool whole = length == window.reach;
  uint64_t nbytes = length * call_.elem_bytes;
  for (uint32_t k = 1; k < chunks && whole; ++k) {
    whole =
        resolve(window, operand, first + k, length) == data + k * pitch && length == window.reach;
    nbytes += length * call_.elem_bytes;
  }
  return {data, nbytes, whole};
}

// The bytes that a message must have to fill its destination; 0 for a slot, which may stand for a
// chunk at the end of a vector.
uint64_t PayloadTask::needed(const Window& window, const Operand& operand, uint32_t first,
                             uint32_t chunks) const {
  if (operand.buffer == static_cast<uint16_t>(Buffer::kStaging)) return 0;
  for (uint32_t k = chunks; k-- > 0;) {
    uint64_t length;
    resolve(window, operand, first + k, length);
    if (length > 0) return (k * window.reach + length) * call_.elem_bytes;
  }
  return 0;
}

// Copies chunks to where they stand on the wire; returns the bytes up to the last that has any.
uint64_t PayloadTask::gather(const Window& window, const Operand& operand, uint32_t first,
                             uint32_t chunks, char* to) {
  const uint64_t pitch = window.reach * call_.elem_bytes;
  uint64_t end = 0;
  for (uint32_t k = 0; k < chunks; ++k) {
    uint64_t length;
    const char* data = resolve(window, operand, first + k, length);
    if (length == 0) continue;
    copy(to + k * pitch, data, length * call_.elem_bytes);
    end = k * pitch + length * call_.elem_bytes;
  }
  return end;
}

void PayloadTask::scatter(const Window& window, const Operand& operand, uint32_t first,
                          uint32_t chunks, const char* from, uint64_t nbytes) {
  const uint64_t pitch = window.reach * call_.elem_bytes;
  for (uint32_t k = 0; k < chunks && k * pitch < nbytes; ++k) {
    uint64_t length;
    char* data = resolve(window, operand, first + k, length);
    const uint64_t there = std::min(length * call_.elem_bytes, nbytes - k * pitch);
    copy(data, from + k * pitch, there);
  }
}

// Folds chunks one by one, or all at once where every operand has them in one piece.
void PayloadTask::fold_pieces(Window& window, const Instr& instr) {
  const Operand* operands = call_.plan->operands.data() + instr.arg;
  const uint32_t total = uint32_t{instr.nsrc} + instr.ndst;
  const bool together =
      instr.count > 1 && std::all_of(operands, operands + total, [&](const Operand& o) {
        return span(window, o, 0, instr.count).whole;
      });
  const uint32_t step = together ? instr.count : 1;
  const bool complete = (instr.flags & kFoldComplete) != 0 && !call_.scale_at_exit;
  const FoldSpec spec{call_.dtype, call_.op, (instr.flags & kFoldTree) != 0,
                      complete ? call_.scale_n : 0, false};
  srcs_.resize(instr.nsrc);
  dsts_.resize(instr.ndst);
  for (uint32_t k = 0; k < instr.count; k += step) {
    uint64_t count = window.reach;
    for (uint32_t i = 0; i < total; ++i) {
      uint64_t length;
      char* data = resolve(window, operands[i], k, length);
      count = std::min(count, length);
      if (i < instr.nsrc) {
        srcs_[i] = data;
      } else {
        dsts_[i - instr.nsrc] = data;
      }
    }
    count *= step;
    if (count == 0) continue;
    if (instr.nsrc == 1 && spec.scale_n == 0) {
      for (void* dst : dsts_) {
        if (dst != srcs_[0]) copy(dst, srcs_[0], count * call_.elem_bytes, false);
      }
    } else {
      fold(spec, srcs_.data(), instr.nsrc, dsts_.data(), instr.ndst, count);
    }
  }
}

void PayloadTask::scale_out() {
  const Plan& plan = *call_.plan;
  const bool own = call_.out_layout == Layout::kOwn;
  const uint32_t share = plan.chunks / plan.world_size, rank = link_.rank();
  const uint32_t first = own ? rank * share : 0, end = own ? first + share : plan.chunks;
  Window whole;
  whole.reach = call_.largest;
  for (uint32_t chunk = first; chunk < end; ++chunk) {
    uint64_t length;
    const Operand piece{static_cast<uint16_t>(plan.rank), static_cast<uint16_t>(Buffer::kOut),
                        chunk};
    char* data = resolve(whole, piece, 0, length);
    if (length > 0) scale(call_.dtype, data, length, call_.scale_n);
  }
}

}  // namespace pycoll
