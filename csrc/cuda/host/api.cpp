// The C interface: exceptions become a status and a text.
#include <algorithm>
#include <cstring>
#include <exception>
#include <string>

#include "cuda/host/group.h"
#include "cuda/optim/optim_launch.h"
#include "kernels/optim/exact_sum.h"

using namespace pycoll;        // NOLINT: the functions of the C interface live outside
using namespace pycoll::cuda;  // NOLINT

namespace {

thread_local std::string g_text;

int status_of(const Error& error) {
  static const struct {
    const char* kind;
    int status;
  } kKinds[] = {
      {"CudaUnavailable", PYCOLL_CUDA_UNAVAILABLE},
      {"ArgumentError", PYCOLL_CUDA_ARGUMENT},
      {"ScheduleError", PYCOLL_CUDA_SCHEDULE},
      {"TooLarge", PYCOLL_CUDA_TOO_LARGE},
  };
  for (const auto& entry : kKinds) {
    if (std::strcmp(entry.kind, error.kind()) == 0) return entry.status;
  }
  return PYCOLL_CUDA_RUNTIME;
}

template <typename Body>
int guarded(Body&& body) noexcept {
  try {
    g_text.clear();
    body();
    return PYCOLL_CUDA_OK;
  } catch (const Error& error) {
    g_text = error.what();
    return status_of(error);
  } catch (const std::exception& error) {
    g_text = error.what();
    return PYCOLL_CUDA_RUNTIME;
  }
}

void check_fold(int dtype, int op, int nsrc, int ndst, const void* const* srcs, void* const* dsts) {
  COLL_CHECK(pycoll_cuda_supports(dtype, op), "ArgumentError", "dtype ", dtype,
             " has no operation ", op);
  COLL_CHECK(nsrc >= 1 && nsrc <= kMaxRanks && ndst >= 1 && ndst <= kMaxRanks, "ArgumentError",
             "a fold of ", nsrc, " sources into ", ndst, " destinations; 1 to ", kMaxRanks,
             " are possible");
  const uintptr_t size = itemsize(static_cast<DType>(dtype));
  uintptr_t any = 0;
  for (int i = 0; i < nsrc; ++i) any |= reinterpret_cast<uintptr_t>(srcs[i]);
  for (int i = 0; i < ndst; ++i) any |= reinterpret_cast<uintptr_t>(dsts[i]);
  COLL_CHECK(any % size == 0, "ArgumentError", "a pointer is not a multiple of the element size ",
             size);
}

constexpr uint64_t kBytesPerBlock = uint64_t{kMaxThreads} * 16 * 4;
constexpr uint64_t kMostBlocks = 1024;

void launch_fold(int dtype, int op, int tree, uint32_t scale_n, const void* const* srcs, int nsrc,
                 void* const* dsts, int ndst, uint64_t count, void* stream) {
  const auto type = static_cast<DType>(dtype);
  const bool divides = op == int(ReduceOp::kAvg) && scale_n != 0;
  const KernelSet& kernels = kernels_for(type, static_cast<ReduceOp>(op), nsrc == 1 && !divides);
  COLL_CHECK(kernels.fold != nullptr, "ArgumentError", "there is no kernel for ", dtype_name(type),
             " ", op_name(static_cast<ReduceOp>(op)));
  FoldLaunch launch{};
  for (int i = 0; i < nsrc; ++i) launch.src[i] = static_cast<const char*>(srcs[i]);
  for (int i = 0; i < ndst; ++i) launch.dst[i] = static_cast<char*>(dsts[i]);
  launch.nsrc = static_cast<uint32_t>(nsrc);
  launch.ndst = static_cast<uint32_t>(ndst);
  launch.tree = tree != 0;
  launch.scale_n = divides ? scale_n : 0;
  launch.is_signed = type <= DType::kInt64;
  launch.nbytes = count * itemsize(type);
  if (launch.nbytes == 0) return;
  uint64_t blocks = (launch.nbytes + kBytesPerBlock - 1) / kBytesPerBlock;
  if (blocks > kMostBlocks) blocks = kMostBlocks;
  launch.slice = slice_of(launch.nbytes, 1, static_cast<uint32_t>(blocks));
  machine::launch(-1, kernels.fold, static_cast<int>(blocks), kMaxThreads, &launch, sizeof(launch),
                  false, stream);
}

}  // namespace

extern "C" {

int pycoll_cuda_abi(void) { return PYCOLL_CUDA_ABI; }
const char* pycoll_cuda_last_error(void) { return g_text.c_str(); }

int pycoll_cuda_device_count(int* count) {
  *count = 0;
  return guarded([&] { *count = machine::device_count(); });
}
int pycoll_cuda_versions(int* driver, int* runtime) {
  return guarded([&] { machine::versions(driver, runtime); });
}
int pycoll_cuda_device_properties(int device, PycollCudaDevice* properties) {
  *properties = {};
  return guarded([&] { machine::properties(device, *properties); });
}
int pycoll_cuda_preload(int device) {
  return guarded([&] { machine::preload(device); });
}
int pycoll_cuda_enable_peer_access(int device, int peer) {
  return guarded([&] { machine::enable_peer_access(device, peer); });
}

int pycoll_cuda_malloc(int device, size_t nbytes, void** pointer) {
  *pointer = nullptr;
  return guarded([&] { *pointer = machine::allocate(device, machine::exportable(nbytes)); });
}
int pycoll_cuda_free(void* pointer) {
  return guarded([&] { machine::release(pointer); });
}
int pycoll_cuda_copy(void* dst, const void* src, size_t nbytes, void* stream) {
  return guarded([&] { machine::copy(dst, src, nbytes, stream); });
}
int pycoll_cuda_synchronize(void* stream) {
  return guarded([&] { machine::synchronize(stream); });
}
int pycoll_cuda_ipc_export(const void* pointer, PycollCudaIpc* ipc) {
  *ipc = {};
  return guarded([&] { machine::ipc_export(pointer, *ipc); });
}
int pycoll_cuda_ipc_open(int device, const PycollCudaIpc* ipc, void** base, void** pointer) {
  *base = *pointer = nullptr;
  return guarded([&] { machine::ipc_open(device, *ipc, base, pointer); });
}
int pycoll_cuda_ipc_close(int device, void* base) {
  return guarded([&] { machine::ipc_close(device, base); });
}

int pycoll_cuda_vmm_support(int device, int* bits) {
  *bits = 0;
  return guarded([&] { *bits = machine::vmm_support(device); });
}
int pycoll_cuda_vmm_create(int device, uint64_t nbytes, PycollCudaMapping* mapping) {
  *mapping = {};
  return guarded([&] { machine::vmm_create(device, nbytes, *mapping); });
}
int pycoll_cuda_vmm_export(const PycollCudaMapping* mapping, PycollCudaShare* share,
                           int* descriptor) {
  *share = {};
  *descriptor = -1;
  return guarded([&] { machine::vmm_export(*mapping, *share, descriptor); });
}
int pycoll_cuda_vmm_open(int device, const PycollCudaShare* share, int descriptor,
                         PycollCudaMapping* mapping) {
  *mapping = {};
  return guarded([&] { machine::vmm_open(device, *share, descriptor, *mapping); });
}
int pycoll_cuda_vmm_close(const PycollCudaMapping* mapping) {
  return guarded([&] { machine::vmm_close(*mapping); });
}
int pycoll_cuda_multicast_create(int devices, uint64_t nbytes, PycollCudaMulticast* multicast,
                                 int* descriptor) {
  *multicast = {};
  *descriptor = -1;
  return guarded([&] { machine::multicast_create(devices, nbytes, *multicast, descriptor); });
}
int pycoll_cuda_multicast_open(int descriptor, uint64_t nbytes, PycollCudaMulticast* multicast) {
  *multicast = {};
  return guarded([&] { machine::multicast_open(descriptor, nbytes, *multicast); });
}
int pycoll_cuda_multicast_add(int device, PycollCudaMulticast* multicast) {
  return guarded([&] { machine::multicast_add(device, *multicast); });
}
int pycoll_cuda_multicast_bind(const PycollCudaMapping* memory, PycollCudaMulticast* multicast) {
  return guarded([&] { machine::multicast_bind(*memory, *multicast); });
}
int pycoll_cuda_multicast_close(PycollCudaMulticast* multicast) {
  return guarded([&] { machine::multicast_close(*multicast); });
}

int pycoll_cuda_supports(int dtype, int op) {
  return dtype >= 0 && dtype < kDTypeCount && op >= 0 && op < kReduceOpCount &&
         fold_supports(static_cast<DType>(dtype), static_cast<ReduceOp>(op)) &&
         kernels_for(static_cast<DType>(dtype), static_cast<ReduceOp>(op), false).fold != nullptr;
}
int pycoll_cuda_in_packets(int dtype, int op, int world_size, uint64_t nbytes) {
  const bool moves = op < 0;
  if ((!moves && !pycoll_cuda_supports(dtype, op)) || world_size < 2 || world_size > kMaxRanks) {
    return 0;
  }
  const KernelSet& kernels =
      moves ? kMoveKernels
            : kernels_for(static_cast<DType>(dtype), static_cast<ReduceOp>(op), false);
  return kernels.packets != nullptr && nbytes != 0 &&
         nbytes <= packet_data(static_cast<uint32_t>(world_size)) &&
         nbytes * (world_size - 1) <= kLowLatencyBytes;
}
int pycoll_cuda_fold(int dtype, int op, int tree, uint32_t scale_n, const void* const* srcs,
                     int nsrc, void* const* dsts, int ndst, uint64_t count, void* stream) {
  return guarded([&] {
    check_fold(dtype, op, nsrc, ndst, srcs, dsts);
    launch_fold(dtype, op, tree, scale_n, srcs, nsrc, dsts, ndst, count, stream);
  });
}

int pycoll_cuda_optim_step(const PycollCudaStep* step, void* stream) {
  return guarded([&] { launch_step(*step, stream); });
}
int pycoll_cuda_optim_unscale(int dtype, const void* in, void* out, uint64_t count, double scale,
                              uint64_t* odd, void* stream) {
  return guarded([&] { launch_unscale(dtype, in, out, count, scale, odd, stream); });
}
int pycoll_cuda_optim_nonfinite(int dtype, const void* data, uint64_t count, uint64_t* odd,
                                void* stream) {
  return guarded([&] { launch_nonfinite(dtype, data, count, odd, stream); });
}
int pycoll_cuda_optim_add_squares(int dtype, const void* data, uint64_t count, uint64_t* tally,
                                  void* stream) {
  return guarded([&] { launch_squares(dtype, data, count, tally, stream); });
}
int pycoll_cuda_add_limbs(int64_t* limbs, const uint64_t* tally) {
  static_assert(PYCOLL_CUDA_LIMBS == kExactLimbs);
  for (int i = 0; i < kExactLimbs; ++i) limbs[i] += static_cast<int64_t>(tally[i]);
  propagate_carries(limbs, kExactLimbs, 1);
  return PYCOLL_CUDA_OK;
}

int pycoll_cuda_group_virtual(int device, int world_size, int max_blocks, PycollCudaGroup** group) {
  *group = nullptr;
  return guarded([&] { *group = new PycollCudaGroup(device, -1, world_size, max_blocks, 0); });
}
int pycoll_cuda_group_peer(int device, int rank, int world_size, int max_blocks, uint64_t key,
                           PycollCudaGroup** group) {
  *group = nullptr;
  return guarded([&] {
    COLL_CHECK(rank >= 0, "ArgumentError", "rank ", rank, " of ", world_size);
    *group = new PycollCudaGroup(device, rank, world_size, max_blocks, key);
  });
}
int pycoll_cuda_group_control(PycollCudaGroup* group, void** control) {
  *control = nullptr;
  return guarded([&] { *control = group->control(); });
}
int pycoll_cuda_group_share(PycollCudaGroup* group, int ranks) {
  return guarded([&] { group->set_share(ranks); });
}
int pycoll_cuda_group_connect(PycollCudaGroup* group, void* const* controls, void* const* heaps,
                              uint64_t heap_bytes, void* const* cells, uint64_t cell_bytes) {
  return guarded([&] { group->connect(controls, heaps, heap_bytes, cells, cell_bytes); });
}
int pycoll_cuda_group_multicast(PycollCudaGroup* group, void* address) {
  return guarded([&] { group->set_multicast(address); });
}
int pycoll_cuda_group_destroy(PycollCudaGroup* group) {
  return guarded([&] { delete group; });
}
int pycoll_cuda_group_error(PycollCudaGroup* group, int rank, PycollCudaError* error) {
  *error = {};
  return guarded([&] { *error = group->error(rank); });
}
int pycoll_cuda_group_failed(PycollCudaGroup* group, int* failed) {
  return guarded([&] { *failed = group->failed(); });
}
int pycoll_cuda_group_abort(PycollCudaGroup* group) {
  return guarded([&] { group->abort(); });
}
int pycoll_cuda_group_reset(PycollCudaGroup* group) {
  return guarded([&] { group->reset(); });
}
int pycoll_cuda_group_set_epoch(PycollCudaGroup* group, uint32_t epoch) {
  return guarded([&] { group->set_epoch(epoch); });
}

int pycoll_cuda_call_create(PycollCudaGroup* group, const PycollCudaCallSpec* specs, int nspecs,
                            PycollCudaCall** call) {
  *call = nullptr;
  return guarded([&] { *call = new PycollCudaCall(*group, specs, nspecs); });
}
int pycoll_cuda_call_destroy(PycollCudaCall* call) {
  return guarded([&] { delete call; });
}
int pycoll_cuda_call_program(PycollCudaCall* call, int rank, PycollCudaProgram* program) {
  *program = {};
  return guarded([&] { *program = call->program(rank); });
}
int pycoll_cuda_call_info(PycollCudaCall* call, int method, PycollCudaCallInfo* info) {
  return guarded([&] { *info = call->info(method); });
}
int pycoll_cuda_launch(PycollCudaCall* call, const void* const* in, void* const* out, int nblocks,
                       int nthreads, int method, uint64_t timeout_ns, uint64_t absent,
                       void* stream) {
  return guarded(
      [&] { call->launch(in, out, nblocks, nthreads, method, timeout_ns, absent, stream); });
}
int pycoll_cuda_rms_norm(PycollCudaGroup* group, const PycollCudaNorm* norm, int nblocks,
                         int nthreads, uint64_t timeout_ns, uint64_t absent, void* stream) {
  return guarded(
      [&] { launch_norm(*group, *norm, nblocks, nthreads, timeout_ns, absent, stream); });
}
uint64_t pycoll_cuda_message_parts(int world_size, uint64_t nbytes, int slotted) {
  return message_parts(static_cast<uint32_t>(std::max(world_size, 1)), nbytes, slotted != 0);
}
int pycoll_cuda_send(PycollCudaGroup* group, const PycollCudaMessage* message, int nblocks,
                     int nthreads, uint64_t timeout_ns, void* stream) {
  return guarded(
      [&] { launch_message(*group, *message, false, nblocks, nthreads, timeout_ns, stream); });
}
int pycoll_cuda_receive(PycollCudaGroup* group, const PycollCudaMessage* message, int nblocks,
                        int nthreads, uint64_t timeout_ns, void* stream) {
  return guarded(
      [&] { launch_message(*group, *message, true, nblocks, nthreads, timeout_ns, stream); });
}
int pycoll_cuda_message_taken(PycollCudaGroup* group, const PycollCudaMessage* send, int* taken) {
  *taken = 0;
  return guarded([&] { *taken = is_taken(*group, *send); });
}
int pycoll_cuda_launch_empty(int nblocks, int nthreads, void* stream) {
  return guarded(
      [&] { machine::launch(-1, kEmptyKernel, nblocks, nthreads, nullptr, 0, true, stream); });
}

}  // extern "C"
