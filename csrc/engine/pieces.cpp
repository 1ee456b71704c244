// Where the pieces of a fold lie, and folding them.
#include <algorithm>
#include <cerrno>
#include <cstring>

#include "engine/engine.h"
#include "kernels/fold/fold.h"

namespace pycoll {
namespace {

constexpr uint64_t kDeathNs = 2'000'000'000;
// After so many bytes a rank checks whether the call has failed: the owners of the arrays wait for
// it to leave.
constexpr uint64_t kPieceBytes = 8 << 20;

bool overlap(const void* a, uint64_t a_bytes, const void* b, uint64_t b_bytes) {
  const auto first = reinterpret_cast<uintptr_t>(a), second = reinterpret_cast<uintptr_t>(b);
  return first < second + b_bytes && second < first + a_bytes;
}

}  // namespace

// Address of chunks [k, k + chunks) of a piece; lowers `length` to the elements they have here.
inline char* Engine::resolve(const Operand& operand, uint32_t k, uint32_t chunks,
                             uint64_t& length) const {
  const BoundCall& call = *call_;
  const Plan& plan = *call.plan;
  if (operand.buffer == static_cast<uint16_t>(Buffer::kStaging)) {
    return staging_ + operand.rank * staging_pitch_ + (operand.chunk + k) * call.stride;
  }
  const bool in = operand.buffer == static_cast<uint16_t>(Buffer::kIn);
  char* base = in ? in_ : out_;
  if (operand.rank != rank_) base = in ? peers_[operand.rank].in : peers_[operand.rank].out;
  uint32_t chunk = operand.chunk + k;
  if (chunk >= plan.chunks) chunk -= plan.chunks;
  const Layout layout = in ? call.in_layout : call.out_layout;
  uint64_t offset, extent;
  if (layout == Layout::kTable) [[unlikely]] {
    const PieceTable& table = in ? call.in_table : call.out_table;
    const size_t entry = size_t{operand.rank} * plan.chunks + chunk;
    offset = table.offset[entry];
    extent = table.length[entry];
  } else {
    offset = chunk * call.chunk;
    extent = offset < call.count ? std::min(call.count - offset, chunks * call.chunk) : 0;
    if (layout == Layout::kOwn) {
      offset -= uint64_t{operand.rank} * (plan.chunks / plan.world_size) * call.chunk;
    }
  }
  if (extent <= start_) {
    length = 0;
    return base;
  }
  length = std::min(length, extent - start_);
  return base + (offset + start_) * call.elem_bytes;
}

inline void Engine::fold_range(const Instr& instr, const Operand* operands, uint32_t k,
                               uint32_t chunks) {
  const BoundCall& call = *call_;
  uint64_t length = chunks == 1 ? reach_ : chunks * call.chunk;
  for (uint32_t i = 0; i < instr.nsrc; ++i) srcs_[i] = resolve(operands[i], k, chunks, length);
  operands += instr.nsrc;
  for (uint32_t i = 0; i < instr.ndst; ++i) dsts_[i] = resolve(operands[i], k, chunks, length);
  if (length > 0) fold_resolved(instr, operands, length);
}

// Folds srcs_ into dsts_, whose operands are `operands`.
inline void Engine::fold_resolved(const Instr& instr, const Operand* operands, uint64_t length) {
  const uint64_t most = std::max<uint64_t>(1, kPieceBytes / call_->elem_bytes);
  for (; length > most; length -= most) {
    fold_piece(instr, operands, most);
    if (faults_.pending()) throw_aborted();
    const uint64_t step = most * call_->elem_bytes;
    for (uint32_t i = 0; i < instr.nsrc; ++i) srcs_[i] = static_cast<const char*>(srcs_[i]) + step;
    for (uint32_t i = 0; i < instr.ndst; ++i) dsts_[i] = static_cast<char*>(dsts_[i]) + step;
  }
  fold_piece(instr, operands, length);
}

inline void Engine::fold_piece(const Instr& instr, const Operand* operands, uint64_t length) {
  const BoundCall& call = *call_;
  const bool complete = (instr.flags & kFoldComplete) != 0 && !call.scale_at_exit;
  const uint32_t scale_n = complete ? call.scale_n : 0;
  const uint64_t nbytes = length * call.elem_bytes;
  const auto in_staging = [&](uint32_t i) {
    return operands[i].buffer == static_cast<uint16_t>(Buffer::kStaging);
  };
  const bool copies = instr.nsrc == 1 && scale_n == 0;
  if (copies && call.across) return copy_from_peer(instr, operands[-1], nbytes);
  uint32_t staged = 0;
  for (uint32_t i = 0; i < instr.ndst; ++i) staged += in_staging(i);
  const uint64_t timed = results_.timed() ? (instr.ndst - staged) * nbytes : 0;
  const ResultStores::Clock clock(results_, timed);
  const bool large = nbytes >= StoreChoiceBySize::kLeastBytes;
  if (copies && (staged == 0 || !large)) {
    return copy_to_all(dsts_.get(), instr.ndst, srcs_[0], nbytes, stream_ && staged == 0);
  }
  if (copies) {  // each copy to a staging buffer is timed by itself
    for (uint32_t i = 0; i < instr.ndst; ++i) {
      if (in_staging(i)) {
        copy_to_staging(dsts_[i], srcs_[0], nbytes);
      } else {
        copy(dsts_[i], srcs_[0], nbytes, stream_);
      }
    }
    return;
  }
  const bool past_to_staging = staged > 0 && large && staging_stores_[nbytes].usually_past_caches();
  uint32_t past_caches = stream_ && staged == 0 ? kAll : 0;
  for (uint32_t i = 0; staged > 0 && i < std::min<uint32_t>(instr.ndst, 32); ++i) {
    past_caches |= uint32_t{in_staging(i) ? past_to_staging : stream_} << i;
  }
  const FoldSpec spec{call.dtype, call.op, (instr.flags & kFoldTree) != 0, scale_n, past_caches};
  fold(spec, srcs_.get(), instr.nsrc, dsts_.get(), instr.ndst, length);
}

// Chooses how the call that begins stores its results. A reduction in place stores where it has
// just read, so it stays in the caches; results that the same call reads again go past them only if
// all arrays together are larger than the caches anyway.
void Engine::begin_results(const BoundCall& call) {
  const bool in_place = overlap(in_, call.in_bytes, out_, call.out_bytes);
  const bool fresh = !in_place || !call.plan->reduces;
  const bool again = call.plan->rereads || call.scale_at_exit;
  if (fresh && !again && call.out_bytes >= ResultStores::kLeastBytes) {
    const uint32_t kind = call.fingerprint + (call.across ? 1 : 0) + (in_place ? 2 : 0);
    stream_ = results_.begin(kind, !call.streams);
  } else {
    stream_ = fresh && call.streams;
    results_.begin();
  }
}

// Copies srcs_[0] to dsts_, from the private memory of another rank if it lies there.
void Engine::copy_from_peer(const Instr& instr, const Operand& source, uint64_t nbytes) {
  const bool away = source.rank != rank_;
  if (away) read_peer(source.rank, dsts_[0], srcs_[0], nbytes);
  const ResultStores::Clock clock(results_, results_.timed() ? (instr.ndst - away) * nbytes : 0);
  for (uint32_t i = away; i < instr.ndst; ++i) {
    copy(dsts_[i], away ? dsts_[0] : srcs_[0], nbytes, stream_);
  }
}

// Copies from a peer's private memory. If its process is gone it has died, which its liveness lock
// shows a moment later.
void Engine::read_peer(uint32_t peer, void* to, const void* from, uint64_t nbytes) {
  if (peer_memory_->read(peer, to, from, nbytes)) return;
  const int error = errno;
  const auto never = [] { return false; };
  const uint64_t end = now_ns() + (error == ESRCH ? kDeathNs : 0);
  wait_until(kPatient, control_->bell(peer, 0), never, [&](Pulse) {
    if (faults_.pending()) throw_aborted();
    faults_.check_peers(iteration());
    return now_ns() >= end;
  });
  const char* reason = error == EFAULT
                           ? "part of the input there, or of the output here, is no memory"
                       : error == EPERM ? "has one of them become another user since?"
                                        : std::strerror(error);
  faults_.raise(Cause::kAbort, rank_, iteration(),
                "the kernel did not let it copy from the arrays of rank " + std::to_string(peer) +
                    ": " + reason + "; with PYCOLL_SINGLE_COPY=off the kernel is not asked");
}

void Engine::copy_to_staging(void* staging, const void* src, uint64_t nbytes) {
  StoreChoice& stores = staging_stores_[nbytes];
  const uint64_t begin = stores.timed() ? now_ns() : 0;
  copy(staging, src, nbytes, stores.past_caches());
  const uint64_t end = stores.timed() ? now_ns() : 0;
  stores.note(nbytes, end - begin);
}

void Engine::fold_pieces(const Instr& instr, const Operand* operands) {
  if (instr.count == 1) return fold_range(instr, operands, 0, 1);
  if (contiguous(instr, operands)) return fold_range(instr, operands, 0, instr.count);
  for (uint32_t k = 0; k < instr.count; ++k) fold_range(instr, operands, k, 1);
}

// Whether the chunks of every operand follow each other without gaps.
bool Engine::contiguous(const Instr& instr, const Operand* operands) const {
  const BoundCall& call = *call_;
  if (call.segments > 1 || call.in_layout == Layout::kTable || call.out_layout == Layout::kTable) {
    return false;
  }
  for (uint32_t i = 0; i < uint32_t{instr.nsrc} + instr.ndst; ++i) {
    const bool cell = operands[i].buffer == static_cast<uint16_t>(Buffer::kStaging);
    if (cell ? call.stride != call.chunk * call.elem_bytes
             : operands[i].chunk + instr.count > call.plan->chunks) {
      return false;
    }
  }
  return true;
}

void Engine::scale_out() {
  const Plan& plan = *call_->plan;
  const bool own = call_->out_layout == Layout::kOwn;
  const uint32_t share = plan.chunks / plan.world_size;
  const uint32_t first = own ? rank_ * share : 0, end = own ? first + share : plan.chunks;
  for (uint32_t chunk = first; chunk < end; ++chunk) {
    uint64_t length = reach_;
    const Operand piece{static_cast<uint16_t>(rank_), static_cast<uint16_t>(Buffer::kOut), chunk};
    char* data = resolve(piece, 0, 1, length);
    if (length > 0) scale(call_->dtype, data, length, call_->scale_n);
  }
}

}  // namespace pycoll
