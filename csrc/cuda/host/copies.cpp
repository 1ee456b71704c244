// Calls that the copy engines make: plans in which a rank only copies inputs into its own output,
// after all have entered and before anybody leaves. What such a plan says is put on the stream copy
// by copy, with a gate before and behind; see kernels/gate.h.
#include <algorithm>

#include "cuda/host/group.h"

using namespace pycoll;        // NOLINT: the types of the C interface live outside
using namespace pycoll::cuda;  // NOLINT

namespace {

struct Place {
  uint64_t offset, length;  // elements
};

// Where a chunk of a rank lies in its array; as Pieces::resolve of kernels/interpreter.h.
Place place_of(const BoundCall& call, bool in, uint32_t rank, uint32_t chunk) {
  const Layout layout = in ? call.in_layout : call.out_layout;
  if (layout == Layout::kTable) {
    const PieceTable& table = in ? call.in_table : call.out_table;
    const size_t entry = size_t{rank} * call.plan->chunks + chunk;
    return {table.offset[entry], table.length[entry]};
  }
  const uint64_t first = chunk * call.chunk;
  const uint64_t length = first < call.count ? std::min(call.count - first, call.chunk) : 0;
  const uint64_t share = call.plan->chunks / call.plan->world_size;
  return {layout == Layout::kOwn ? first - rank * share * call.chunk : first, length};
}

// The first operand of a fold that copies an input into the output of this rank.
const Operand& operands_of(const BoundCall& call, const Instr& fold) {
  const Operand* const operand = call.plan->operands.data() + fold.arg;
  COLL_CHECK(fold.nsrc == 1 && fold.ndst == 1 && operand[0].buffer == uint16_t(Buffer::kIn) &&
                 operand[1].buffer == uint16_t(Buffer::kOut) &&
                 operand[1].rank == call.plan->rank && call.scale_n == 0,
             "ScheduleError", "the plan of rank ", call.plan->rank,
             " does more than copy inputs into its own output, which copy engines cannot do");
  return operand[0];
}

}  // namespace

void PycollCudaCall::check_copies() const {
  for (const auto& call : bound_) {
    COLL_CHECK(call->plan->direct, "ScheduleError",
               "copy engines make calls on arrays that peers reach, and these are not");
    for (const Instr& instr : call->plan->code) {
      if (Opcode(instr.op) == Opcode::kFold) (void)operands_of(*call, instr);
    }
  }
}

void PycollCudaCall::launch_copies(const void* const* in, void* const* out, uint64_t timeout_ns,
                                   void* stream) const {
  check_copies();
  Launch launch{};
  group_.place(launch);
  launch.shape = shape_;
  launch.nblocks = 1;
  launch.fingerprint = (bound_[0]->fingerprint ^ kCopiesFingerprint) | 1;
  launch.timeout_ns = timeout_ns;
  if (!group_.is_virtual()) {
    const uint32_t own = group_.first_rank();
    launch.in[0] = static_cast<char*>(const_cast<void*>(in[own]));
    launch.out[0] = static_cast<char*>(out[own]);
    group_.check_in_heap(launch.in[0], bound_[0]->in_bytes, "input");
    group_.check_in_heap(launch.out[0], bound_[0]->out_bytes, "output");
  }
  const bool gates = launch.exchange != 0;
  const auto pass = [&](Gate gate) {
    launch.gate = gate;
    machine::launch(group_.device(), kGateKernel, 1, kGateThreads, &launch, sizeof(launch), false,
                    stream);
  };
  if (gates) pass(Gate::kBegin);
  for (const auto& call : bound_) copy_all(*call, in, out, stream);
  if (gates) pass(Gate::kEnd);
}

void PycollCudaCall::copy_all(const BoundCall& call, const void* const* in, void* const* out,
                              void* stream) const {
  for (const Instr& instr : call.plan->code) {
    if (Opcode(instr.op) != Opcode::kFold) continue;
    const Operand* const source = &operands_of(call, instr);
    for (uint32_t k = 0; k < instr.count; ++k) {
      const uint32_t chunks = call.plan->chunks;
      const Place from = place_of(call, true, source[0].rank, (source[0].chunk + k) % chunks);
      const Place to = place_of(call, false, source[1].rank, (source[1].chunk + k) % chunks);
      const uint64_t nbytes = std::min(from.length, to.length) * call.elem_bytes;
      const char* const src =
          static_cast<const char*>(in[source[0].rank]) + from.offset * call.elem_bytes;
      char* const dst = static_cast<char*>(out[source[1].rank]) + to.offset * call.elem_bytes;
      if (nbytes != 0 && src != dst) machine::copy(dst, src, nbytes, stream);
    }
  }
}
