// Launches of sums over ranks + residual + RMSNorm.
#include <algorithm>

#include "cuda/host/group.h"

namespace pycoll::cuda {
namespace {

constexpr uint64_t kUnit = 8;  // elements that a thread takes at once, as in rms_norm.h

const void* kernel_of(int dtype) {
  constexpr DType kTypes[kNormTypes] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  const auto* const found = std::find(kTypes, kTypes + kNormTypes, static_cast<DType>(dtype));
  COLL_CHECK(found != kTypes + kNormTypes, "ArgumentError", "there is no RMSNorm of dtype ", dtype,
             "; float32, float16 and bfloat16 are possible");
  return kNormKernels[found - kTypes];
}

// As many threads as have something to do.
int default_threads(uint64_t hidden) {
  const uint64_t units = (hidden + kUnit - 1) / kUnit;
  return static_cast<int>(std::min<uint64_t>((units + 31) / 32 * 32, kMaxThreads));
}

// As few blocks of a rank as make its rows in as many turns as all that fit would need.
int default_blocks(const PycollCudaGroup& group, const PycollCudaNorm& norm, const void* kernel,
                   int threads) {
  const uint64_t n = norm.push != 0 ? group.world_size() : 1;
  const uint64_t rows = std::max<uint64_t>((norm.rows + n - 1) / n, 1);
  const auto resident = machine::kernel_info(group.device(), kernel, threads).resident;
  const uint64_t fits = static_cast<uint64_t>(resident) / group.ranks_on_device();
  const uint64_t most = std::clamp<uint64_t>(fits, 1, group.max_blocks());
  const uint64_t turns = (rows + most - 1) / most;
  return static_cast<int>((rows + turns - 1) / turns);
}

// Fills in the arrays; tells by `misaligned` which low bits of addresses are set anywhere.
void place_arrays(const PycollCudaGroup& group, const PycollCudaNorm& norm, NormLaunch& launch,
                  uintptr_t& misaligned) {
  const auto note = [&](const void* array, uint32_t rank, const char* name) {
    COLL_CHECK(array != nullptr || norm.rows == 0, "ArgumentError", name, " of rank ", rank,
               " is null");
    misaligned |= reinterpret_cast<uintptr_t>(array);
  };
  COLL_CHECK(norm.inputs != nullptr && norm.out != nullptr, "ArgumentError",
             "the arrays are missing");
  note(norm.weight, 0, "the weight");
  launch.weight = static_cast<const char*>(norm.weight);
  for (uint32_t r = 0; r < group.ranks(); ++r) {
    note(norm.inputs[r], r, "the input");
    note(norm.out[r], r, "the output");
    launch.call.in[r] = static_cast<char*>(const_cast<void*>(norm.inputs[r]));
    launch.call.out[r] = static_cast<char*>(norm.out[r]);
    if (norm.residual != nullptr) {
      note(norm.residual[r], r, "the residual");
      launch.residual[r] = static_cast<const char*>(norm.residual[r]);
    }
    if (norm.residual_out != nullptr) {
      note(norm.residual_out[r], r, "the new residual");
      launch.residual_out[r] = static_cast<char*>(norm.residual_out[r]);
    }
  }
}

}  // namespace

void launch_norm(const PycollCudaGroup& group, const PycollCudaNorm& norm, int nblocks,
                 int nthreads, uint64_t timeout_ns, uint64_t absent, void* stream) {
  COLL_CHECK(group.is_virtual(), "ArgumentError", "RMSNorm is for virtual ranks");
  COLL_CHECK(norm.hidden >= 1, "ArgumentError", "rows have no elements");
  const void* const kernel = kernel_of(norm.dtype);
  const int threads = nthreads == 0 ? default_threads(norm.hidden) : nthreads;
  COLL_CHECK(threads > 0 && threads <= kMaxThreads && threads % 32 == 0, "ArgumentError", nthreads,
             " threads per block; multiples of 32 up to ", kMaxThreads, " are possible");
  const int blocks = nblocks == 0 ? default_blocks(group, norm, kernel, threads) : nblocks;
  COLL_CHECK(blocks > 0 && blocks <= int(group.max_blocks()), "ArgumentError", nblocks,
             " blocks per rank; the group has room for ", group.max_blocks());
  COLL_CHECK(!group.aborted(), "ArgumentError", "the group was aborted; reset it first");
  NormLaunch launch{};
  uintptr_t misaligned = 0;
  place_arrays(group, norm, launch, misaligned);
  const uint64_t size = itemsize(static_cast<DType>(norm.dtype));
  COLL_CHECK(misaligned % size == 0, "ArgumentError", "an array is not aligned to its elements of ",
             size, " bytes");
  group.place(launch.call);
  launch.call.nblocks = static_cast<uint32_t>(blocks);
  launch.call.tree = norm.tree != 0;
  launch.call.push = norm.push != 0;
  launch.call.timeout_ns = timeout_ns == 0 ? kDefaultTimeoutNs : timeout_ns;
  launch.call.absent = absent;
  launch.rows = norm.rows;
  launch.hidden = norm.hidden;
  launch.eps = norm.eps;
  launch.vectors = norm.hidden % kUnit == 0 && misaligned % 16 == 0;
  machine::launch(group.device(), kernel, blocks * static_cast<int>(group.ranks()), threads,
                  &launch, sizeof(launch), true, stream);
}

}  // namespace pycoll::cuda
