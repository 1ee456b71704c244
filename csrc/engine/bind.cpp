// Checks a plan and its numbers, and cuts the call into segments that fit the staging buffers.
#include "engine/bind.h"

#include <algorithm>
#include <fstream>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "kernels/fold/fold.h"

namespace pycoll {
namespace {

constexpr uint64_t kLine = 64;
constexpr uint64_t kMostElements = uint64_t{1} << 48;
constexpr uint64_t kWideBytes = 1024;  // of an element
constexpr uint64_t kUsualCacheBytes = 32 << 20;
constexpr uint64_t kScratchBytes = 16 << 20;  // of one segment of messages

// Size of the cache that the first core shares with others, or a guess where Linux has no entry for
// it. (sysconf returns the sum over a processor's parts.)
uint64_t last_cache_bytes() {
  static const uint64_t found = [] {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
    uint64_t kibibytes = 0;
    return file >> kibibytes ? kibibytes << 10 : kUsualCacheBytes;
  }();
  return found;
}

class Binder {
 public:
  Binder(BoundCall& call, uint32_t rank, uint32_t max_operands)
      : call_(call), plan_(*call.plan), rank_(rank), max_operands_(max_operands) {}

  void check_numbers() const {
    COLL_CHECK(call_.elem_bytes > 0 && call_.count < kMostElements && call_.chunk < kMostElements,
               "ArgumentError", "count ", call_.count, " or chunk ", call_.chunk,
               " is too large, or the element size is ", call_.elem_bytes);
    COLL_CHECK(call_.chunk * plan_.chunks >= call_.count || both_tables(), "ScheduleError",
               plan_.chunks, " chunks of ", call_.chunk, " do not hold ", call_.count, " elements");
    check_layout(call_.in_layout, call_.in_table);
    check_layout(call_.out_layout, call_.out_table);
  }

  void check_code() const {
    for (const Instr& instr : plan_.code) {
      if (Opcode(instr.op) == Opcode::kFold) check_fold(instr);
    }
  }

  // Makes bytes the elements, if they are wide and only moved: a staging buffer need not hold a
  // whole one. Nothing but the call itself decides, since all ranks, and its alternative, must do
  // the same.
  void count_bytes() {
    if (call_.elem_bytes < kWideBytes || plan_.reduces) return;
    const uint64_t width = std::exchange(call_.elem_bytes, 1);
    for (uint64_t* elements : {&call_.count, &call_.chunk}) *elements *= width;
    for (PieceTable* table : {&call_.in_table, &call_.out_table}) {
      for (auto* column : {&table->offset, &table->length}) {
        for (auto& elements : *column) elements *= width;
      }
    }
  }

  // Segments of at most so many bytes of a chunk, and of all slots together; see PayloadTask.
  void cut_messages(const MessageLimits& limits) {
    call_.largest = std::max(largest(call_.in_layout, call_.in_table),
                             largest(call_.out_layout, call_.out_table));
    call_.segment = call_.largest;
    const uint64_t most = limits.message_chunks;
    for (const Instr& instr : plan_.code) {
      const bool message = Opcode(instr.op) == Opcode::kSend || Opcode(instr.op) == Opcode::kRecv;
      COLL_CHECK(!message || instr.count <= most, "ScheduleError", "a message of ", instr.count,
                 " chunks where no rank has one of more than ", most);
    }
    call_.tiny = most * call_.largest <= limits.eager_bytes / call_.elem_bytes;
    if (!call_.tiny && most > 0) {
      const uint64_t share = kScratchBytes / std::max<uint64_t>(1, limits.slots);
      const uint64_t room = std::min(limits.segment_bytes, std::max(share, limits.eager_bytes));
      call_.segment = std::min(call_.largest, std::max<uint64_t>(1, room / call_.elem_bytes));
      call_.segments = uint32_t((call_.largest + call_.segment - 1) / call_.segment);
    }
    call_.stride = call_.segment * call_.elem_bytes;
  }

  void cut(uint64_t cell_bytes) {
    call_.largest = std::max(largest(call_.in_layout, call_.in_table),
                             largest(call_.out_layout, call_.out_table));
    const uint64_t chunk_bytes = call_.largest * call_.elem_bytes;
    call_.segment = call_.largest;
    call_.stride = chunk_bytes;
    call_.tiny = !plan_.direct && plan_.slots * chunk_bytes <= kPayloadBytes;
    if (call_.tiny || plan_.slots == 0) return;
    const uint64_t room = cell_bytes / plan_.slots / kLine * kLine;  // bytes a slot can have
    COLL_CHECK(room >= call_.elem_bytes, "ArgumentError", "the algorithm needs ", plan_.slots,
               " slots of ", call_.elem_bytes, " bytes at least, in whole lines of ", kLine,
               ", and a cell has ", cell_bytes,
               ": call init(cell_bytes=", slots_bytes(call_.elem_bytes),
               ") or set PYCOLL_CELL_BYTES, or choose another algorithm");
    call_.segment = std::min(room / call_.elem_bytes, call_.largest);
    call_.stride = (call_.segment * call_.elem_bytes + kLine - 1) / kLine * kLine;
    if (call_.segment > 0) {
      call_.segments = uint32_t((call_.largest + call_.segment - 1) / call_.segment);
    }
  }

  // What this rank's arrays have of the call; tables may leave gaps.
  uint64_t touched_bytes() const {
    return touched_bytes(call_.in_layout, call_.in_table) +
           touched_bytes(call_.out_layout, call_.out_table);
  }

  uint64_t array_bytes(Layout layout, const PieceTable& table) const {
    uint64_t elements = call_.count;
    if (layout == Layout::kOwn) {
      const uint64_t own = plan_.chunks / plan_.world_size * call_.chunk, first = rank_ * own;
      elements = call_.count > first ? std::min(call_.count - first, own) : 0;
    } else if (layout == Layout::kTable) {
      elements = 0;
      for (size_t i = size_t{rank_} * plan_.chunks; i < size_t{rank_ + 1} * plan_.chunks; ++i) {
        if (table.length[i] > 0) elements = std::max(elements, table.offset[i] + table.length[i]);
      }
    }
    return elements * call_.elem_bytes;
  }

 private:
  // The setting cell_bytes that gives each slot so many bytes.
  uint64_t slots_bytes(uint64_t nbytes) const {
    const uint64_t need = plan_.slots * ((nbytes + kLine - 1) / kLine * kLine);
    return (need + kPage - 1) / kPage * kPage;
  }

  bool both_tables() const {
    return call_.in_layout == Layout::kTable && call_.out_layout == Layout::kTable;
  }

  void check_layout(Layout layout, const PieceTable& table) const {
    const size_t entries = layout == Layout::kTable ? size_t{plan_.world_size} * plan_.chunks : 0;
    COLL_CHECK(layout <= Layout::kTable && table.offset.size() == entries &&
                   table.length.size() == entries,
               "ScheduleError", "a piece table needs ", entries, " entries, got ",
               table.offset.size(), " offsets and ", table.length.size(), " lengths");
    for (size_t i = 0; i < entries; ++i) {
      COLL_CHECK(table.offset[i] < kMostElements && table.length[i] < kMostElements,
                 "ArgumentError", "entry ", i, " of a piece table is too large");
    }
    COLL_CHECK(layout != Layout::kOwn || plan_.chunks % plan_.world_size == 0, "ScheduleError",
               plan_.chunks, " chunks are not the same number for each of ", plan_.world_size,
               " ranks");
  }

  void check_fold(const Instr& instr) const {
    COLL_CHECK(instr.nsrc <= max_operands_ && instr.ndst <= max_operands_, "ScheduleError",
               "a fold of ", instr.nsrc, " sources into ", instr.ndst, " destinations; at most ",
               max_operands_, " are possible here");
    COLL_CHECK(instr.nsrc <= kMaxFoldSources, "ScheduleError", "a fold of ", instr.nsrc,
               " sources; at most ", kMaxFoldSources, " are possible");
    const bool computes = instr.nsrc > 1;
    COLL_CHECK(!computes || (fold_supports(call_.dtype, call_.op) &&
                             call_.elem_bytes == itemsize(call_.dtype)),
               "ArgumentError", "dtype ", int(call_.dtype), " with ", call_.elem_bytes,
               " bytes has no operation ", int(call_.op));
    const uint32_t share = plan_.chunks / plan_.world_size, targets = instr.arg + instr.nsrc;
    for (uint32_t i = instr.arg; i < instr.arg + instr.nsrc + instr.ndst; ++i) {
      const Operand& o = plan_.operands[i];
      if (o.buffer == uint16_t(Buffer::kStaging)) continue;
      COLL_CHECK(!call_.across || (instr.nsrc == 1 && (o.rank == rank_ || i < targets)),
                 "ScheduleError", "a plan that reads private memory folds, or writes to rank ",
                 o.rank);
      const bool in = o.buffer == uint16_t(Buffer::kIn);
      COLL_CHECK(!call_.input_only || in || o.rank == rank_, "ScheduleError",
                 "a plan that reaches inputs only touches an output of rank ", o.rank);
      const Layout layout = in ? call_.in_layout : call_.out_layout;
      COLL_CHECK(layout != Layout::kOwn ||
                     (o.chunk >= o.rank * share && o.chunk + instr.count <= (o.rank + 1) * share),
                 "ScheduleError", "rank ", o.rank, " does not hold chunks ", o.chunk, "+",
                 instr.count);
    }
  }

  uint64_t touched_bytes(Layout layout, const PieceTable& table) const {
    if (layout != Layout::kTable) return array_bytes(layout, table);
    const auto row = table.length.begin() + ptrdiff_t{rank_} * plan_.chunks;
    return std::accumulate(row, row + plan_.chunks, uint64_t{0}) * call_.elem_bytes;
  }

  uint64_t largest(Layout layout, const PieceTable& table) const {
    if (layout != Layout::kTable) return std::min(call_.chunk, call_.count);
    return table.length.empty() ? 0 : *std::max_element(table.length.begin(), table.length.end());
  }

  BoundCall& call_;
  const Plan& plan_;
  uint32_t rank_;
  uint32_t max_operands_;
};

// Checks everything and calls cut(binder) to choose the segments.
template <typename Cut>
std::shared_ptr<BoundCall> bound(Binding binding, uint32_t world_size, uint32_t rank,
                                 uint32_t max_operands, bool messages, Cut cut) {
  COLL_CHECK(binding.plan != nullptr, "ScheduleError", "there is no plan to bind");
  const Plan& plan = *binding.plan;
  COLL_CHECK(plan.world_size == world_size && plan.rank == rank, "ScheduleError", "a plan of rank ",
             plan.rank, " of ", plan.world_size, " cannot run on rank ", rank, " of ", world_size);
  COLL_CHECK(plan.messages == messages, "ScheduleError",
             messages ? "a plan for shared memory cannot send messages"
                      : "a plan with messages cannot run on shared memory");
  auto call = std::make_shared<BoundCall>();
  static_cast<Binding&>(*call) = std::move(binding);
  Binder binder(*call, rank, max_operands);
  binder.check_numbers();
  binder.check_code();
  if (!messages) binder.count_bytes();
  cut(binder);
  call->in_bytes = binder.array_bytes(call->in_layout, call->in_table);
  call->out_bytes = binder.array_bytes(call->out_layout, call->out_table);
  if (call->op != ReduceOp::kAvg) {
    call->scale_n = 0;
    call->scale_at_exit = false;
  } else if (call->scale_n == 0) {
    call->scale_n = world_size;
  }
  return call;
}

}  // namespace

PiecePlace place_of(const BoundCall& call, const Operand& operand, uint32_t k, uint64_t start,
                    uint64_t reach) {
  const Plan& plan = *call.plan;
  const auto buffer = static_cast<Buffer>(operand.buffer);
  if (buffer == Buffer::kStaging) return {buffer, (operand.chunk + k) * call.stride, reach};
  const bool in = buffer == Buffer::kIn;
  uint32_t chunk = operand.chunk + k;
  if (chunk >= plan.chunks) [[unlikely]]
    chunk %= plan.chunks;
  const Layout layout = in ? call.in_layout : call.out_layout;
  uint64_t offset, extent;
  if (layout == Layout::kTable) {
    const PieceTable& table = in ? call.in_table : call.out_table;
    const size_t entry = size_t{operand.rank} * plan.chunks + chunk;
    offset = table.offset[entry];
    extent = table.length[entry];
  } else {
    offset = chunk * call.chunk;
    extent = offset < call.count ? std::min(call.count - offset, call.chunk) : 0;
    if (layout == Layout::kOwn) {
      offset -= uint64_t{operand.rank} * (plan.chunks / plan.world_size) * call.chunk;
    }
  }
  if (extent <= start) return {buffer, 0, 0};
  return {buffer, (offset + start) * call.elem_bytes, std::min(reach, extent - start)};
}

uint32_t fingerprint_of(uint64_t cookie, uint64_t descriptor, uint64_t count, uint32_t check) {
  uint64_t x = cookie ^ check;
  for (const uint64_t word : {descriptor, count}) {  // the finaliser of splitmix64
    x += word + 0x9E3779B97F4A7C15;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB;
    x ^= x >> 31;
  }
  return static_cast<uint32_t>(x) | 1;
}

std::shared_ptr<const BoundCall> bind_call(Binding binding, const Geometry& geometry,
                                           uint64_t cookie, uint32_t rank, uint32_t max_operands) {
  uint64_t touched = 0;
  auto call = bound(std::move(binding), geometry.world_size, rank, max_operands, false,
                    [&](Binder& binder) {
                      binder.cut(geometry.cell_bytes);
                      touched = binder.touched_bytes();
                    });
  call->fingerprint = fingerprint_of(cookie, call->descriptor, call->count, call->check);
  call->streams = touched * geometry.world_size >= last_cache_bytes() * 3 / 2;
  if (const BoundCall* other = call->alternative.get()) {
    COLL_CHECK(other->across && other->count == call->count && !call->plan->direct && !call->tiny,
               "ScheduleError", "this call cannot have that alternative");
  }
  return call;
}

std::shared_ptr<BoundCall> bind_messages(Binding binding, const MessageLimits& limits, bool agree,
                                         std::vector<uint32_t> team) {
  for (const uint32_t member : team) {
    COLL_CHECK(member < limits.world_size, "ScheduleError", "rank ", member, " of a team of ",
               limits.world_size);
  }
  auto call = bound(std::move(binding), limits.world_size, limits.rank, UINT16_MAX, true,
                    [&](Binder& binder) { binder.cut_messages(limits); });
  call->agree = agree;
  call->team = std::move(team);
  // Teams of one call may cut it differently, each in its way.
  if (call->team.empty()) {
    call->check = fingerprint_of(call->check, call->segment, call->segments, call->tiny);
  }
  return call;
}

}  // namespace pycoll
