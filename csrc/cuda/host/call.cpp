// Calls: plans in device memory, and launching them.
#include <algorithm>
#include <cstring>

#include "cuda/host/group.h"

using namespace pycoll;        // NOLINT: the types of the C interface live outside
using namespace pycoll::cuda;  // NOLINT

namespace {

constexpr uint64_t kBytesPerBlock = uint64_t{kMaxThreads} * 16;  // of a chunk, at least
constexpr int kLowLatencyThreads = 256;  // a packet each, where the device has room

bool is_signed(DType dtype) { return dtype <= DType::kInt64; }

// Lays things out one after the other, aligned to 16 bytes.
class Image {
 public:
  template <typename T>
  size_t add(const std::vector<T>& items) {
    const size_t at = (bytes_.size() + 15) / 16 * 16;
    bytes_.resize(at + items.size() * sizeof(T));
    if (!items.empty()) std::memcpy(bytes_.data() + at, items.data(), items.size() * sizeof(T));
    return at;
  }
  template <typename T>
  void put(size_t at, const T& item) {
    std::memcpy(bytes_.data() + at, &item, sizeof(T));
  }
  const std::vector<char>& bytes() const { return bytes_; }

 private:
  std::vector<char> bytes_;
};

}  // namespace

PycollCudaCall::PycollCudaCall(PycollCudaGroup& group, const PycollCudaCallSpec* specs, int nspecs)
    : group_(group) {
  const bool all = nspecs == int(group.world_size());
  COLL_CHECK(all || nspecs == int(group.ranks()), "ArgumentError", nspecs, " plans for ",
             group.ranks(), " ranks");
  const PycollCudaCallSpec* const own = all ? specs + group.first_rank() : specs;
  OneFold whole;
  bool moves = true;
  for (uint32_t r = 0; r < group.ranks(); ++r) {
    bound_.push_back(bind_spec(own[r], group.world_size(), group.first_rank() + r, group.key(),
                               group.cell_bytes()));
    const BoundCall &call = *bound_[r], &first = *bound_[0];
    COLL_CHECK(call.fingerprint == first.fingerprint && call.chunk == first.chunk &&
                   call.segments == first.segments && call.plan->chunks == first.plan->chunks,
               "ScheduleError", "rank ", r, " is given another call than rank 0");
    const OneFold one = recognise(call);
    if (r == 0) whole = one;
    whole.found = whole.found && one == whole;
    moves &= !call.plan->reduces;
  }
  const BoundCall& call = *bound_[0];
  moves = moves && call.scale_n == 0;
  kernels_ = &kernels_for(call.dtype, call.op, moves);
  COLL_CHECK(kernels_->interpret != nullptr, "ArgumentError", "there is no kernel for ",
             dtype_name(call.dtype), " ", op_name(call.op));
  special_ = whole.found && !whole.copies && !moves && kernels_->direct != nullptr;
  copies_ = whole.found && whole.copies && moves;
  tree_ = whole.tree;
  push_ = whole.push;
  own_chunk_ = whole.own_chunk;
  text_ = moves ? "move" : std::string(dtype_name(call.dtype)) + " " + op_name(call.op);
  shape_ = {};
  shape_.count = call.count;
  shape_.chunk = call.chunk;
  shape_.segment = call.segment;
  shape_.stride = call.stride;
  shape_.largest = call.largest;
  shape_.segments = call.segments;
  shape_.chunks = call.plan->chunks;
  shape_.slots = call.plan->slots;
  shape_.elem_bytes = call.elem_bytes;
  shape_.layout_in = static_cast<uint8_t>(call.in_layout);
  shape_.layout_out = static_cast<uint8_t>(call.out_layout);
  shape_.scale_at_exit = call.scale_at_exit;
  shape_.is_signed = is_signed(call.dtype);
  shape_.scale_n = call.scale_n;
  if (special_ && all) sent_bytes_ = packet_bytes(specs, whole);
  if (moves && all) {
    moved_ = moved(specs);
    sent_bytes_ = packet_bytes(moved_);
  }
  upload();
}

PycollCudaCall::~PycollCudaCall() {
  try {
    machine::wait_idle(group_.device());
  } catch (const Error&) {  // the device is lost
  }
}

// The instructions and operands go to the device as they came: byte for byte.
void PycollCudaCall::upload() {
  Image image;
  std::vector<Program> programs(group_.ranks());
  image.add(programs);
  std::vector<size_t> code, operands;
  for (const auto& call : bound_) {
    code.push_back(image.add(call->plan->code));
    operands.push_back(image.add(call->plan->operands));
  }
  const BoundCall& call = *bound_[0];
  const size_t tables[4] = {image.add(call.in_table.offset), image.add(call.in_table.length),
                            image.add(call.out_table.offset), image.add(call.out_table.length)};
  memory_.reset(machine::allocate(group_.device(), image.bytes().size()));
  char* const base = static_cast<char*>(memory_.get());
  for (size_t r = 0; r < programs.size(); ++r) {
    const Program program{reinterpret_cast<const Instr*>(base + code[r]),
                          reinterpret_cast<const Operand*>(base + operands[r]),
                          static_cast<uint32_t>(bound_[r]->plan->code.size()), 0};
    image.put(r * sizeof(Program), program);
    programs_.push_back({program.code, program.operands, program.size,
                         static_cast<uint32_t>(bound_[r]->plan->operands.size())});
  }
  const auto words = [&](int i) { return reinterpret_cast<const uint64_t*>(base + tables[i]); };
  shape_.in_table = {words(0), words(1)};
  shape_.out_table = {words(2), words(3)};
  machine::copy_now(group_.device(), memory_.get(), image.bytes().data(), image.bytes().size());
}

PycollCudaProgram PycollCudaCall::program(int rank) const {
  const int64_t entry = int64_t{rank} - group_.first_rank();
  COLL_CHECK(entry >= 0 && entry < int64_t(programs_.size()), "ArgumentError", "rank ", rank,
             " is not run by this process");
  return programs_[static_cast<size_t>(entry)];
}

// Null where a multicast address neither makes the sum nor carries the blocks.
const void* PycollCudaCall::multicast_kernel() const {
  const BoundCall& call = *bound_[0];
  if (copies_ && group_.has_multicast()) return kMulticastCopies;
  const int type = static_cast<int>(call.dtype) - static_cast<int>(kFirstMulticastType);
  const bool sums = special_ && push_ && call.op == ReduceOp::kSum && call.scale_n == 0;
  const bool known = type >= 0 && type < kMulticastTypes;
  return sums && known && group_.has_multicast() ? kMulticastKernels[type] : nullptr;
}

PycollCudaMethod PycollCudaCall::choose(int method) const {
  const bool small =
      sent_bytes_ != 0 && sent_bytes_ * (group_.world_size() - 1) <= kLowLatencyBytes;
  switch (method) {
    case PYCOLL_CUDA_BEST:
      return small      ? PYCOLL_CUDA_LOW_LATENCY
             : special_ ? PYCOLL_CUDA_DIRECT
                        : PYCOLL_CUDA_INTERPRET;
    case PYCOLL_CUDA_INTERPRET:
      return PYCOLL_CUDA_INTERPRET;
    case PYCOLL_CUDA_DIRECT:
      COLL_CHECK(special_, "ArgumentError", "no kernel of its own runs this call");
      return PYCOLL_CUDA_DIRECT;
    case PYCOLL_CUDA_LOW_LATENCY:
      COLL_CHECK(
          sent_bytes_ != 0, "ArgumentError",
          "the low-latency protocol cannot run this call: it takes plans of one fold or of copies, "
          "and up to ",
          group_.packet_bytes(), " bytes from rank to rank");
      return PYCOLL_CUDA_LOW_LATENCY;
    case PYCOLL_CUDA_MULTICAST_SUM:
      // Small sums go in packets: their arrays need not lie where peers, or a switch, reach them.
      return !small && multicast_kernel() != nullptr ? PYCOLL_CUDA_MULTICAST_SUM
                                                     : choose(PYCOLL_CUDA_BEST);
    case PYCOLL_CUDA_COPIES:
      check_copies();
      return PYCOLL_CUDA_COPIES;
    default:
      throw_error("ArgumentError", "unknown method ", method);
  }
}

const void* PycollCudaCall::kernel(int method) const {
  const PycollCudaMethod chosen = choose(method);
  return chosen == PYCOLL_CUDA_MULTICAST_SUM ? multicast_kernel()
         : chosen == PYCOLL_CUDA_LOW_LATENCY ? kernels_->packets
         : chosen == PYCOLL_CUDA_COPIES      ? kGateKernel
         : chosen == PYCOLL_CUDA_DIRECT      ? kernels_->direct
                                             : kernels_->interpret;
}

int PycollCudaCall::default_threads(int method) const {
  return choose(method) == PYCOLL_CUDA_LOW_LATENCY ? kLowLatencyThreads : kMaxThreads;
}

// As many as have a whole pack of every chunk (or a packet) for each of their threads, and fit on
// the device.
int PycollCudaCall::default_blocks(int method, int threads) const {
  const auto kernel = machine::kernel_info(group_.device(), this->kernel(method), threads);
  const uint64_t packets = (sent_bytes_ + kPacketData - 1) / kPacketData;
  const uint64_t wanted = choose(method) == PYCOLL_CUDA_LOW_LATENCY
                              ? (packets + threads - 1) / threads
                              : shape_.segment * shape_.elem_bytes / kBytesPerBlock;
  const uint64_t fits = uint64_t(kernel.resident) / group_.ranks_on_device();
  const uint64_t most = std::min<uint64_t>(std::max<uint64_t>(fits, 1), group_.max_blocks());
  return static_cast<int>(std::clamp<uint64_t>(wanted, 1, most));
}

PycollCudaCallInfo PycollCudaCall::info(int method) const {
  PycollCudaCallInfo info{};
  const PycollCudaMethod chosen = choose(method);
  info.threads = default_threads(method);
  const auto kernel = machine::kernel_info(group_.device(), this->kernel(method), info.threads);
  const char* kind = chosen == PYCOLL_CUDA_LOW_LATENCY     ? "low_latency"
                     : chosen == PYCOLL_CUDA_INTERPRET     ? "interpret"
                     : chosen == PYCOLL_CUDA_MULTICAST_SUM ? "multicast"
                     : chosen == PYCOLL_CUDA_COPIES        ? "copies"
                     : push_                               ? "two_shot"
                                                           : "one_shot";
  const std::string name = std::string(kind) + " " + text_;
  name.copy(info.kernel, sizeof(info.kernel) - 1);
  const auto most = static_cast<int>(group_.max_blocks());
  info.max_blocks = std::min(kernel.resident / static_cast<int>(group_.ranks_on_device()), most);
  info.blocks = default_blocks(method, info.threads);
  info.registers = kernel.registers;
  info.local_bytes = kernel.local_bytes;
  info.shared_bytes = kernel.shared_bytes;
  info.segments = shape_.segments;
  for (size_t r = 0; r < bound_.size(); ++r) {
    info.in_bytes[r] = bound_[r]->in_bytes;
    info.out_bytes[r] = bound_[r]->out_bytes;
  }
  return info;
}

void PycollCudaCall::launch(const void* const* in, void* const* out, int nblocks, int nthreads,
                            int method, uint64_t timeout_ns, uint64_t absent, void* stream) const {
  const int threads = nthreads == 0 ? default_threads(method) : nthreads;
  COLL_CHECK(threads > 0 && threads <= kMaxThreads && threads % 32 == 0, "ArgumentError", nthreads,
             " threads per block; multiples of 32 up to ", kMaxThreads, " are possible");
  const int blocks = nblocks == 0 ? default_blocks(method, threads) : nblocks;
  COLL_CHECK(blocks > 0 && blocks <= int(group_.max_blocks()), "ArgumentError", nblocks,
             " blocks per rank; the group has room for ", group_.max_blocks());
  COLL_CHECK(absent == 0 || group_.is_virtual(), "ArgumentError",
             "only virtual ranks can be told to be absent");
  COLL_CHECK(!group_.aborted(), "ArgumentError", "the group was aborted; reset it first");
  if (method == PYCOLL_CUDA_COPIES) {
    COLL_CHECK(absent == 0, "ArgumentError", "ranks of copies cannot be absent");
    return launch_copies(in, out, timeout_ns == 0 ? kDefaultTimeoutNs : timeout_ns, stream);
  }
  Launch launch{};
  group_.place(launch);
  launch.shape = shape_;
  launch.nblocks = static_cast<uint32_t>(blocks);
  launch.fingerprint = (bound_[0]->fingerprint ^ launch.nblocks * 0x9E3779B9u) | 1;
  launch.tree = tree_;
  launch.push = push_;
  launch.own_chunk = own_chunk_;
  launch.moves = moved_.moves;
  launch.root = moved_.root;
  launch.slice = slice_of(shape_.segment, shape_.elem_bytes, launch.nblocks);
  launch.timeout_ns = timeout_ns == 0 ? kDefaultTimeoutNs : timeout_ns;
  launch.absent = absent;
  launch.programs = static_cast<const Program*>(memory_.get());
  const uint32_t unit = kernels_->elem_bytes;
  for (uint32_t r = 0; r < group_.ranks(); ++r) {
    launch.in[r] = static_cast<char*>(const_cast<void*>(in == nullptr ? nullptr : in[r]));
    launch.out[r] = static_cast<char*>(out == nullptr ? nullptr : out[r]);
    for (char* array : {launch.in[r], launch.out[r]}) {
      COLL_CHECK(reinterpret_cast<uintptr_t>(array) % unit == 0, "ArgumentError",
                 "an array of rank ", group_.first_rank() + r,
                 " is not aligned to its elements of ", unit, " bytes");
    }
    if (bound_[r]->plan->direct && choose(method) != PYCOLL_CUDA_LOW_LATENCY) {
      group_.check_in_heap(launch.in[r], bound_[r]->in_bytes, "input");
      group_.check_in_heap(launch.out[r], bound_[r]->out_bytes, "output");
    }
  }
  machine::launch(group_.device(), kernel(method), blocks * static_cast<int>(group_.ranks()),
                  threads, &launch, sizeof(launch), true, stream);
}
