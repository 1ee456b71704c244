// Which calls packets can make: plans of one fold, and plans that together only copy.
#include "cuda/host/group.h"

using namespace pycoll;        // NOLINT: the types of the C interface live outside
using namespace pycoll::cuda;  // NOLINT

namespace {

constexpr uint32_t kNobody = ~uint32_t{0};

// Where a chunk of an output comes from: a chunk of an input.
struct Source {
  uint32_t rank = kNobody, chunk = 0;
};

// Notes where each chunk of each output comes from: [rank * chunks + chunk]. False: the plans do
// more than copy inputs into outputs, once each.
bool trace(const BoundCall& call, std::vector<Source>& sources) {
  const Plan& plan = *call.plan;
  for (const Instr& instr : plan.code) {
    if (Opcode(instr.op) != Opcode::kFold) continue;
    const Operand* const operands = plan.operands.data() + instr.arg;
    if (instr.nsrc != 1 || operands[0].buffer != uint16_t(Buffer::kIn)) return false;
    for (uint32_t d = 1; d <= instr.ndst; ++d) {
      if (operands[d].buffer != uint16_t(Buffer::kOut)) return false;
      for (uint32_t k = 0; k < instr.count; ++k) {
        Source& source =
            sources[operands[d].rank * plan.chunks + (operands[d].chunk + k) % plan.chunks];
        if (source.rank != kNobody) return false;
        source = {operands[0].rank, (operands[0].chunk + k) % plan.chunks};
      }
    }
  }
  return true;
}

// What a rank has for itself need not move: a plan in place leaves it where it is.
bool is(const Source& found, const Source& wanted, uint32_t rank) {
  if (found.rank == kNobody) return wanted.rank == rank;
  return found.rank == wanted.rank && found.chunk == wanted.chunk;
}

}  // namespace

// What the plans of all ranks do together, if packets can: kNone in `moves` if they cannot.
PycollCudaCall::Moved PycollCudaCall::moved(const PycollCudaCallSpec* specs) const {
  const BoundCall& first = *bound_[0];
  const uint32_t n = group_.world_size(), chunks = first.plan->chunks;
  if (n < 2 || first.segments != 1 || !first.plan->direct) return {};
  std::vector<Source> sources(size_t{n} * chunks);
  for (uint32_t r = 0; r < n; ++r) {
    const auto call = bind_spec(specs[r], n, r, group_.key(), group_.cell_bytes());
    if (call->fingerprint != first.fingerprint || call->plan->chunks != chunks ||
        call->in_layout != first.in_layout || call->out_layout != Layout::kFull ||
        !trace(*call, sources)) {
      return {};
    }
  }
  const bool blocks = chunks == n && first.count == n * first.chunk;
  const bool own = first.in_layout == Layout::kOwn, full = first.in_layout == Layout::kFull;
  bool gather = blocks && own, transpose = blocks && full, spread = full;
  uint32_t root = kNobody;
  for (const Source& source : sources) {
    if (source.rank != kNobody) root = source.rank;
  }
  for (uint32_t r = 0; r < n; ++r) {
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
      const Source& found = sources[r * chunks + chunk];
      gather = gather && is(found, {chunk, chunk}, r);
      transpose = transpose && is(found, {chunk, r}, r);
      spread = spread && is(found, {root, chunk}, r);
    }
  }
  if (gather) return {Moves::kGather, 0};
  if (transpose) return {Moves::kTranspose, 0};
  return spread ? Moved{Moves::kSpread, root} : Moved{};
}

// What each rank sends to each other one by packets; 0 if they cannot run the call: every rank has
// to run it so, whatever its own plan is.
uint64_t PycollCudaCall::packet_bytes(const PycollCudaCallSpec* specs, OneFold whole) const {
  const BoundCall& call = *bound_[0];
  const bool parts = own_chunk_ && !push_;  // a rank folds, and keeps, its own chunk only
  const uint64_t bytes = (parts ? call.chunk : call.count) * call.elem_bytes;
  if (bytes > group_.packet_bytes() || call.segments != 1 ||
      call.plan->chunks != (own_chunk_ ? group_.world_size() : 1) ||
      call.in_layout != Layout::kFull ||
      call.out_layout != (parts ? Layout::kOwn : Layout::kFull)) {
    return 0;
  }
  for (uint32_t r = 0; r < group_.world_size(); ++r) {
    const auto other =
        bind_spec(specs[r], group_.world_size(), r, group_.key(), group_.cell_bytes());
    if (other->fingerprint != call.fingerprint || recognise(*other) != whole) return 0;
  }
  return bytes;
}

// The same of a call that only copies.
uint64_t PycollCudaCall::packet_bytes(Moved moved) const {
  const BoundCall& call = *bound_[0];
  if (moved.moves == Moves::kNone) return 0;
  const uint64_t length = moved.moves == Moves::kSpread ? call.count : call.chunk;
  return length > group_.packet_bytes() / call.elem_bytes ? 0 : length * call.elem_bytes;
}
