// From plans and numbers to what kernels take.
#include <algorithm>

#include "cuda/host/group.h"

namespace pycoll::cuda {
namespace {

constexpr uint64_t kSlotAlignment = 64;
constexpr uint32_t kMostSegments = 1 << 14;  // far below the 2^15 epochs that positions tell apart

template <typename T>
std::vector<T> copy_of(const void* data, uint32_t count) {
  const auto* first = static_cast<const T*>(data);
  return first == nullptr ? std::vector<T>() : std::vector<T>(first, first + count);
}

PieceTable table_of(const uint64_t* offset, const uint64_t* length, size_t entries) {
  PieceTable table;
  if (offset == nullptr || length == nullptr) return table;
  table.offset.assign(offset, offset + entries);
  table.length.assign(length, length + entries);
  return table;
}

}  // namespace

std::shared_ptr<const BoundCall> bind_spec(const PycollCudaCallSpec& spec, uint32_t world_size,
                                           uint32_t rank, uint64_t key, uint64_t cell_bytes) {
  COLL_CHECK(spec.dtype < kDTypeCount && spec.op < kReduceOpCount, "ArgumentError", "dtype ",
             spec.dtype, " or operation ", spec.op, " is unknown");
  COLL_CHECK(spec.rank == rank, "ScheduleError", "the plan of rank ", rank, " is one of rank ",
             spec.rank);
  auto plan = std::make_shared<Plan>();
  plan->code = copy_of<Instr>(spec.code, spec.ninstructions);
  plan->operands = copy_of<Operand>(spec.operands, spec.noperands);
  plan->world_size = world_size;
  plan->rank = rank;
  plan->chunks = spec.chunks;
  plan->slots = spec.slots;
  plan->rounds = spec.rounds;
  plan->direct = spec.direct != 0;
  plan->check();
  bool enters = world_size == 1;
  for (const Instr& instr : plan->code) {
    enters |= Opcode(instr.op) == Opcode::kSignal && instr.arg == kEntered;
    COLL_CHECK(instr.flags <= (kFoldTree | kFoldComplete), "ScheduleError", "the plan of rank ",
               rank, " has an instruction with unknown flags ", unsigned{instr.flags});
  }
  COLL_CHECK(enters, "ScheduleError", "the plan of rank ", rank, " never says that it has entered");
  const size_t entries = size_t{world_size} * spec.chunks;
  Binding binding;
  binding.plan = std::move(plan);
  binding.dtype = static_cast<DType>(spec.dtype);
  binding.op = static_cast<ReduceOp>(spec.op);
  binding.elem_bytes = spec.itemsize;
  binding.count = spec.count;
  binding.chunk = spec.chunk;
  binding.descriptor = spec.descriptor;
  binding.in_layout = static_cast<Layout>(spec.layout_in);
  binding.out_layout = static_cast<Layout>(spec.layout_out);
  binding.in_table = table_of(spec.in_offset, spec.in_length, entries);
  binding.out_table = table_of(spec.out_offset, spec.out_length, entries);
  binding.scale_n = spec.scale_n;
  binding.scale_at_exit = spec.scale_at_exit != 0;
  Geometry geometry;
  geometry.world_size = world_size;
  geometry.cell_bytes = cell_bytes;
  auto call =
      std::make_shared<BoundCall>(*bind_call(std::move(binding), geometry, key, rank, kMaxRanks));
  if (call->tiny) {  // there are no flag lines to put slots in
    call->stride = (call->stride + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
    COLL_CHECK(call->plan->slots * call->stride <= cell_bytes, "ScheduleError", "a plan with ",
               call->plan->slots, " slots needs cells of more than ", cell_bytes, " bytes");
  }
  COLL_CHECK(call->segments <= kMostSegments, "ScheduleError", "a call in ", call->segments,
             " segments needs larger cells than ", cell_bytes, " bytes");
  return call;
}

OneFold recognise(const BoundCall& call) {
  const Plan& plan = *call.plan;
  const uint32_t n = plan.world_size, rank = plan.rank;
  OneFold none;
  if (!plan.direct || n < 2 || call.scale_at_exit || plan.code.size() != 2 * size_t{n} + 1) {
    return none;
  }
  const auto awaits_all = [&](uint32_t first, uint32_t step) {
    for (uint32_t i = 0; i + 1 < n; ++i) {
      const Instr& instr = plan.code[first + i];
      if (Opcode(instr.op) != Opcode::kWait || instr.arg != step) return false;
      if (instr.peer != i + (i >= rank)) return false;
    }
    return true;
  };
  const auto signals = [&](uint32_t i, uint32_t step) {
    return Opcode(plan.code[i].op) == Opcode::kSignal && plan.code[i].arg == step;
  };
  const Instr& fold = plan.code[n];
  if (!signals(0, kEntered) || !awaits_all(1, kEntered) || !signals(n + 1, kDone) ||
      !awaits_all(n + 2, 2) || Opcode(fold.op) != Opcode::kFold || fold.count != 1 ||
      (fold.nsrc != n && fold.nsrc != 1) || (fold.ndst != 1 && fold.ndst != n)) {
    return none;
  }
  if (call.scale_n != 0 && (fold.flags & kFoldComplete) == 0) return none;
  const bool push = fold.ndst == n, own_chunk = plan.chunks > 1, copies = fold.nsrc == 1;
  if (copies && !(push && own_chunk)) return none;
  const uint32_t chunk = own_chunk ? rank : 0;
  const Operand* operands = plan.operands.data() + fold.arg;
  for (uint32_t i = 0; i < uint32_t{fold.nsrc} + fold.ndst; ++i) {
    const bool source = i < fold.nsrc;
    const uint32_t holder = source ? (copies ? rank : i) : push ? i - fold.nsrc : rank;
    const Buffer buffer = source ? Buffer::kIn : Buffer::kOut;
    if (operands[i].rank != holder || operands[i].buffer != uint16_t(buffer) ||
        operands[i].chunk != chunk) {
      return none;
    }
  }
  return {true, (fold.flags & kFoldTree) != 0, push, own_chunk, copies};
}

const KernelSet& kernels_for(DType dtype, ReduceOp op, bool moves) {
  if (moves) return kMoveKernels;
  if (dtype == DType::kBool && op == ReduceOp::kMin) op = ReduceOp::kAnd;
  if (dtype == DType::kBool && op == ReduceOp::kMax) op = ReduceOp::kOr;
  static const KernelSet* const kRows[kReduceOpCount] = {kSumKernels, kProdKernels, kMinKernels,
                                                         kMaxKernels, kSumKernels,  kAndKernels,
                                                         kOrKernels,  kXorKernels};
  return kRows[static_cast<size_t>(op)][static_cast<size_t>(dtype)];
}

const char* dtype_name(DType dtype) {
  static const char* const kNames[kDTypeCount] = {"i8",  "i16", "i32",  "i64",  "u8",
                                                  "u16", "u32", "u64",  "f16",  "bf16",
                                                  "f32", "f64", "bool", "e4m3", "e5m2"};
  return kNames[static_cast<size_t>(dtype)];
}

const char* op_name(ReduceOp op) {
  static const char* const kNames[kReduceOpCount] = {"sum", "prod", "min", "max",
                                                     "avg", "and",  "or",  "xor"};
  return kNames[static_cast<size_t>(op)];
}

}  // namespace pycoll::cuda
