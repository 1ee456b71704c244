// C interface of libpycoll_cuda.so: plans run by CUDA kernels over memory that ranks share.
//
// Plain C, so that ctypes can call it. Nothing here needs a driver to be loaded: on a machine
// without one every function that needs a device returns PYCOLL_CUDA_UNAVAILABLE with a text.
//
// Vocabulary
//   rank    one of `world_size` participants. Two kinds of group hold them:
//           virtual: all ranks are groups of blocks of one kernel on one device, in this process;
//           peer:    one rank per process (or per device), memory reached by CUDA IPC.
//   block   a thread block of a rank. Every rank runs the same number of blocks, and block b of a
//           rank owns the same slice of positions of every chunk, so it waits for nobody but block
//           b of its peers.
//   control device memory of a rank: its epoch, flags that peers write, an abort word.
//   cell    scratch memory of a rank: `slots` slots of a plan, twice (even and odd segments).
//   plan    the records of csrc/engine/plan.h (Instr of 20 bytes, Operand of 8), the bytes that
//           pycoll/schedule/lowering/compile.py makes for ranks in shared memory (peer_plan).
//   call    plans bound to dtype, operation and count, lying in device memory; launched many times.
//
// Streams. `stream` is a cudaStream_t as void*; null is the legacy default stream. Launches are
// ordered by their stream, asynchronous, and may be captured into a CUDA graph: everything that
// changes from one run to the next (the epoch) lives in control memory and is advanced by the
// kernel itself, and pointers are kernel parameters. All launches of one group must be ordered one
// after the other (one stream, or streams ordered by events), in the same order on all ranks: they
// share the control memory. A captured call must outlive the graph.
//
// Errors. Functions return a PycollCudaStatus; pycoll_cuda_last_error has the text of the newest
// failure on the calling thread. Nothing is launched when a launch returns an error. Failures
// inside a kernel (a peer that does not come, an abort, a call that does not match) do not
// surface as CUDA errors: the kernel ends, its output is undefined, and pycoll_cuda_group_error
// tells. A group that has failed stays failed until pycoll_cuda_group_reset: later launches end at
// once.
//
// Threads. Functions may be called from any thread; calls on one group must not overlap.
// Every function that takes a device, a group or a call leaves the current device as it was.
#pragma once

#include "cuda/host/pycoll_cuda_memory.h"

#ifdef __cplusplus
extern "C" {
#endif

// Raised when a struct or a meaning changes; additions alone do not raise it.
#define PYCOLL_CUDA_ABI 1
#define PYCOLL_CUDA_MAX_RANKS 64    // world_size, and sources or destinations of one fold
#define PYCOLL_CUDA_MAX_BLOCKS 256  // blocks per rank

typedef enum {
  PYCOLL_CUDA_OK = 0,
  PYCOLL_CUDA_UNAVAILABLE = 1,  // no driver, no device, or a driver too old for this library
  PYCOLL_CUDA_ARGUMENT = 2,     // an argument is out of range, or cells too small; the text tells
  PYCOLL_CUDA_SCHEDULE = 3,     // a plan is malformed or does not fit its group
  PYCOLL_CUDA_TOO_LARGE = 4,    // the blocks do not fit on the device at once; nothing was launched
  PYCOLL_CUDA_RUNTIME = 5,      // the CUDA runtime failed; the text has its name for the error
} PycollCudaStatus;

PYCOLL_CUDA_API int pycoll_cuda_abi(void);  // PYCOLL_CUDA_ABI of the library

// Text of the newest failure on this thread; "" if there was none. Valid until the next call of
// this interface on this thread.
PYCOLL_CUDA_API const char* pycoll_cuda_last_error(void);

// ---- devices -----------------------------------------------------------------------------------

typedef struct {
  char name[256];
  uint8_t uuid[16];
  int32_t major, minor;  // compute capability
  int32_t multiprocessors;
  int32_t cooperative;  // 1: cooperative launches are possible
  int32_t max_threads_per_block;
  int32_t pci_domain, pci_bus, pci_device;
  int32_t runnable;  // 1: this library has code for it
  int32_t reserved;
  uint64_t memory_bytes;
  uint64_t l2_bytes;
} PycollCudaDevice;

// Number of devices. UNAVAILABLE (and *count = 0) without driver or device.
PYCOLL_CUDA_API int pycoll_cuda_device_count(int* count);

// Versions as CUDA counts them (13000 is 13.0). *driver = 0 without a driver; *runtime = 0 where
// the kernels are compiled for the host, as in the tests. Never fails.
PYCOLL_CUDA_API int pycoll_cuda_versions(int* driver, int* runtime);

PYCOLL_CUDA_API int pycoll_cuda_device_properties(int device, PycollCudaDevice* properties);

// Loads every kernel of the library on `device`. To be called before the first launch in a process
// whose peers may already spin: loading lazily can wait for the whole device. Idempotent, some
// milliseconds. The functions that make groups call it too.
PYCOLL_CUDA_API int pycoll_cuda_preload(int device);

// Lets kernels on `device` reach memory of `peer` in this process. Idempotent.
PYCOLL_CUDA_API int pycoll_cuda_enable_peer_access(int device, int peer);

// ---- one fold ----------------------------------------------------------------------------------

// Element types and operations are numbered as in csrc/base/types.h and pycoll/types.py.

// 1 if there are kernels for the operation on that type, else 0.
PYCOLL_CUDA_API int pycoll_cuda_supports(int dtype, int op);
// 1 if calls of one fold that send so many bytes from rank to rank go in packets by default: then
// no rank reaches another one's arrays. op < 0: calls that only copy, of any type.
PYCOLL_CUDA_API int pycoll_cuda_in_packets(int dtype, int op, int world_size, uint64_t nbytes);

// dsts[d][i] = srcs[0][i] op srcs[1][i] op ... for all i < count and d < ndst, on one device: the
// contract of csrc/kernels/fold/fold.h, with the same bits (but for those inside a NaN). srcs and
// dsts are host arrays of device pointers, read before the function returns; 1 <= nsrc, ndst <=
// MAX_RANKS. tree: 1 combines along the in-order balanced tree, 0 left to right. scale_n > 0
// divides the result by it (op avg only). Pointers are multiples of the itemsize; 16-byte vectors
// are used when all pointers agree modulo 16. A destination may be identical to a source; otherwise
// they do not overlap. An ordinary launch on `stream` of the current device; may be captured.
PYCOLL_CUDA_API int pycoll_cuda_fold(int dtype, int op, int tree, uint32_t scale_n,
                                     const void* const* srcs, int nsrc, void* const* dsts, int ndst,
                                     uint64_t count, void* stream);

// ---- optimizers --------------------------------------------------------------------------------

// Fused passes over flat vectors on the current device: the contract of csrc/kernels/optim/optim.h,
// with the same bits (but for those inside a NaN of float16, float32 or float64). Types are
// float16, bfloat16, float32 and float64, numbered as above. Pointers are multiples of the
// itemsize; 16-byte vectors are used where all vectors of a pass are aligned alike. Ordinary
// launches on `stream`; may be captured, with the scalars of that time.

// A step. `state` is the type of param and slots; with float64 all types are that.
typedef struct {
  int32_t kind;  // OptimKind of csrc/kernels/optim/optim.h
  int32_t state;
  int32_t grad_type;
  int32_t copy_type;  // of `copy`: float16 or bfloat16
  void* param;
  const void* grad;
  void* slots[2];  // as the kind has them, else null
  void* copy;      // takes the new parameter, rounded; null: nothing does
  uint64_t count;  // elements of every vector
  double scale;    // what follows is explained at OptimArgs of csrc/kernels/optim/optim.h
  double keep;
  double rate;
  double beta1;
  double beta2;
  double root;
  double eps;
  double decay;
} PycollCudaStep;

PYCOLL_CUDA_API int pycoll_cuda_optim_step(const PycollCudaStep* step, void* stream);

// out = in * scale in float32 (float64 for float64). The number of results that are not finite is
// added to *odd, in device memory; out may be identical to in.
PYCOLL_CUDA_API int pycoll_cuda_optim_unscale(int dtype, const void* in, void* out, uint64_t count,
                                              double scale, uint64_t* odd, void* stream);

// Adds the number of infinities and NaNs to *odd, in device memory.
PYCOLL_CUDA_API int pycoll_cuda_optim_nonfinite(int dtype, const void* data, uint64_t count,
                                                uint64_t* odd, void* stream);

// Adds the square of each finite element to tally[0 .. LIMBS), an accumulator of
// csrc/kernels/optim/optim.h whose carries are not propagated, and the number of those that are not
// finite to tally[LIMBS]. In device memory; a limb has room for 2^20 calls.
#define PYCOLL_CUDA_LIMBS 70
PYCOLL_CUDA_API int pycoll_cuda_optim_add_squares(int dtype, const void* data, uint64_t count,
                                                  uint64_t* tally, void* stream);

// On the host: adds tally[0 .. LIMBS), copied there, to an accumulator, and propagates carries.
PYCOLL_CUDA_API int pycoll_cuda_add_limbs(int64_t* limbs, const uint64_t* tally);

// ---- groups ------------------------------------------------------------------------------------

typedef struct PycollCudaGroup PycollCudaGroup;

// Makes a group of `world_size` virtual ranks on `device`, with control memory and error records.
// 1 <= world_size <= MAX_RANKS; 1 <= max_blocks <= MAX_BLOCKS blocks per rank at most.
PYCOLL_CUDA_API int pycoll_cuda_group_virtual(int device, int world_size, int max_blocks,
                                              PycollCudaGroup** group);

// Makes this process's end of a group with one rank per process. Before the first launch: export
// pycoll_cuda_group_control with pycoll_cuda_ipc_export, exchange, open, and connect.
// `key` is the same on all ranks (mixed into what calls are compared by).
PYCOLL_CUDA_API int pycoll_cuda_group_peer(int device, int rank, int world_size, int max_blocks,
                                           uint64_t key, PycollCudaGroup** group);

// Own control memory of a peer group (device memory of the library's, freed with the group).
PYCOLL_CUDA_API int pycoll_cuda_group_control(PycollCudaGroup* group, void** control);

// Peer group: sets how many of its ranks run on one device at most, 1 to world_size; 1 until then.
// So many have to fit on the device side by side, as ranks wait for each other in their kernels:
// the default number of blocks leaves room for them. The same on all ranks, before the first
// launch.
PYCOLL_CUDA_API int pycoll_cuda_group_share(PycollCudaGroup* group, int ranks);

// Gives the addresses in this process of the memory of all ranks. Arrays of world_size device
// pointers (read before return), own entries included:
//   controls  peer group: the control memory of every rank. Virtual group: null.
//   heaps     peer group: the symmetric heap of every rank, heap_bytes long; arrays of calls with
//             direct plans must lie inside one's own. They may lie at different offsets on
//             different ranks: offsets are exchanged by the kernel. Null: no direct plans.
//             Virtual group: null (any device memory will do).
//   cells     scratch memory of every rank, 2 * cell_bytes each, 16-byte aligned. Null and 0: plans
//             with slots are refused. Plans whose slots do not fit run in several segments.
// Owned by the caller, and in use until the group is gone. May be called again between launches.
PYCOLL_CUDA_API int pycoll_cuda_group_connect(PycollCudaGroup* group, void* const* controls,
                                              void* const* heaps, uint64_t heap_bytes,
                                              void* const* cells, uint64_t cell_bytes);

// Peer group: sets the address of a multicast object over the heaps of all ranks, from their
// beginning on; null for none. The same choice on all ranks, between launches.
PYCOLL_CUDA_API int pycoll_cuda_group_multicast(PycollCudaGroup* group, void* address);

// Frees the group. Waits until the device is idle; calls of the group must be destroyed before, and
// in a peer group every rank must have stopped launching before anybody destroys.
PYCOLL_CUDA_API int pycoll_cuda_group_destroy(PycollCudaGroup* group);

typedef enum {
  PYCOLL_CUDA_NO_ERROR = 0,
  PYCOLL_CUDA_TIMEOUT = 1,   // `rank` waited for `peer` longer than the timeout
  PYCOLL_CUDA_ABORTED = 2,   // pycoll_cuda_group_abort
  PYCOLL_CUDA_MISMATCH = 3,  // `peer` runs another call: expected and seen are the fingerprints
  PYCOLL_CUDA_FOLLOWED = 4,  // another rank gave up while `rank` waited for `peer` (`peer` is
                             // `rank`: before it did anything)
} PycollCudaErrorKind;

// What a kernel wrote before it gave up. Positions are epoch << 16 | step, with the steps of
// docs/architecture.md (1 entered, i + 2 line i done, 0xFFFE left). 48 bytes.
typedef struct {
  uint32_t kind;         // PycollCudaErrorKind
  uint32_t rank;         // the rank that gave up
  uint32_t peer;         // the rank it waited for
  uint32_t block;        // in which block
  uint32_t step;         // newest step that `rank` had published
  uint32_t expected;     // position it waited for (mismatch: own fingerprint)
  uint32_t seen;         // position it saw last (mismatch: the fingerprint of `peer`)
  uint32_t instruction;  // of its plan; 0xFFFFFFFF: before or after the plan; or of a message
  uint64_t waited_ns;
  uint64_t reserved;
} PycollCudaError;

// Reads the record of a rank (peer group: own rank only) from host memory; never waits. kind is
// NO_ERROR while it has not given up. When one rank gives up, every other one that still waits
// follows, and records for which rank it waited: a record whose peer does not wait itself names the
// missing rank.
PYCOLL_CUDA_API int pycoll_cuda_group_error(PycollCudaGroup* group, int rank,
                                            PycollCudaError* error);

// 1 in *failed if any rank of this process has given up, or the group was aborted.
PYCOLL_CUDA_API int pycoll_cuda_group_failed(PycollCudaGroup* group, int* failed);

// Makes running and later kernels of this process's ranks leave, and through them those of peers.
// Returns at once; any thread, also while another one synchronises.
PYCOLL_CUDA_API int pycoll_cuda_group_abort(PycollCudaGroup* group);

// Makes a failed group usable again: clears control memory and records. Waits for the device. In a
// peer group all ranks must reset between two barriers of the host.
PYCOLL_CUDA_API int pycoll_cuda_group_reset(PycollCudaGroup* group);

// Sets the epoch of the next call of this process's ranks, 0 <= epoch < 65536, on all ranks,
// between calls; waits for the device. For tests of the wrap-around.
PYCOLL_CUDA_API int pycoll_cuda_group_set_epoch(PycollCudaGroup* group, uint32_t epoch);

// ---- calls -------------------------------------------------------------------------------------

typedef struct PycollCudaCall PycollCudaCall;

// One rank's plan with numbers: the arguments of _C.Plan and Engine.bind.
typedef struct {
  const void* code;      // ninstructions Instr records
  const void* operands;  // noperands Operand records
  uint32_t ninstructions;
  uint32_t noperands;
  uint32_t rank;
  uint32_t chunks;  // of the full vector
  uint32_t slots;   // of a cell
  uint32_t rounds;
  uint32_t direct;  // 1: peers read and write users' arrays; 0: through cells
  uint32_t dtype;
  uint32_t op;
  uint32_t itemsize;   // bytes of an element
  uint32_t layout_in;  // Layout of csrc/engine/bind.h: 0 full, 1 own part, 2 table
  uint32_t layout_out;
  uint32_t scale_n;           // avg: what complete folds divide by; else 0
  uint32_t scale_at_exit;     // avg: 1: this rank's output is divided at the end instead
  uint64_t count;             // elements of the full vector
  uint64_t chunk;             // elements of a chunk
  uint64_t descriptor;        // what ranks must agree on, as in pycoll/runtime/calls/plans.py
  const uint64_t* in_offset;  // [world_size * chunks] elements, for layout 2; else null
  const uint64_t* in_length;
  const uint64_t* out_offset;
  const uint64_t* out_length;
} PycollCudaCallSpec;

// Checks the plans and copies them to the device. `specs`: world_size of them, in rank order; for a
// peer group this rank's alone will do, but only who knows all plans can choose packets, as all
// ranks have to: give all, or one, on all of them. What they point at is read before return.
// SCHEDULE for plans that are malformed, send messages, or need cells that are missing; ARGUMENT
// for numbers. Allocates device memory: make calls before a graph is captured.
PYCOLL_CUDA_API int pycoll_cuda_call_create(PycollCudaGroup* group, const PycollCudaCallSpec* specs,
                                            int nspecs, PycollCudaCall** call);
// Waits for the device, then frees the call.
PYCOLL_CUDA_API int pycoll_cuda_call_destroy(PycollCudaCall* call);

// Where the plan of a rank (peer group: own rank) lies in device memory: the same bytes as in its
// spec. For inspection.
typedef struct {
  const void* code;
  const void* operands;
  uint32_t ninstructions;
  uint32_t noperands;
} PycollCudaProgram;
PYCOLL_CUDA_API int pycoll_cuda_call_program(PycollCudaCall* call, int rank,
                                             PycollCudaProgram* program);

// Which code runs a call. A plan that is one fold of all ranks' inputs, in rank order, into one's
// own output (one shot) or into everybody's (two shot, push) is recognised by its instructions and
// has kernels of its own for the common types: one for small messages, in packets through control
// memory, and one that reads and writes the arrays of peers. Plans of all ranks that together copy
// inputs into outputs, so that all get the blocks of all, a block of each, or one rank's vector, go
// in packets, too. Every other plan is interpreted. The bits of the result are the same.
typedef enum {
  PYCOLL_CUDA_BEST = 0,           // the one that is fastest
  PYCOLL_CUDA_INTERPRET = 1,      // the interpreter, always
  PYCOLL_CUDA_DIRECT = 2,         // the one that reads the arrays of peers; ARGUMENT without one
  PYCOLL_CUDA_LOW_LATENCY = 3,    // packets; ARGUMENT where they cannot run the call
  PYCOLL_CUDA_MULTICAST_SUM = 4,  // over a multicast address, in an order that nothing states: sums
                                  // of float16, bfloat16, float32 by two shots; and blocks that
                                  // are pushed to all ranks; otherwise as BEST
  PYCOLL_CUDA_COPIES = 5,  // copies on the stream, for copy engines, between two small kernels:
                           // for direct plans in which ranks only copy inputs into their own
                           // output, on all ranks; SCHEDULE for others. `in` and `out` of a launch
                           // have world_size entries in a peer group, too: addresses here
} PycollCudaMethod;

typedef struct {
  char kernel[64];       // "interpret f32 sum", "one_shot bf16 sum", "low_latency f32 sum", ...
  int32_t max_blocks;    // blocks per rank that fit on the device at once, with those of its peers
  int32_t blocks;        // what a launch with nblocks = 0 uses
  int32_t threads;       // what a launch with nthreads = 0 uses
  int32_t registers;     // per thread
  int32_t local_bytes;   // per thread; 0: nothing is spilled
  int32_t shared_bytes;  // per block
  uint64_t segments;     // iterations per call
  uint64_t in_bytes[PYCOLL_CUDA_MAX_RANKS];   // what each rank's arrays must hold at least
  uint64_t out_bytes[PYCOLL_CUDA_MAX_RANKS];  // (peer group: entry 0)
} PycollCudaCallInfo;

PYCOLL_CUDA_API int pycoll_cuda_call_info(PycollCudaCall* call, int method,
                                          PycollCudaCallInfo* info);

// Launches a call: one cooperative kernel, on the group's device.
//   in, out     device pointers, multiples of the itemsize: world_size each for a virtual group
//               (entry r is rank r's array), one each for a peer group. Read before return. Null
//               where a rank's plan does not touch the array. in[r] == out[r] (in place) needs
//               plans compiled for it. The arrays must live until the kernel is done.
//   nblocks     blocks per rank, 0 for the default; the same on all ranks of a peer group.
//   nthreads    threads per block, a multiple of 32 up to 512; 0 for the default.
//   timeout_ns  of one wait; 0: 60 s.
//   absent      virtual groups, for tests of failures: bit r makes rank r leave at once without
//               taking part. 0 otherwise.
// Errors: ARGUMENT (also when the group was aborted and not reset); TOO_LARGE; RUNTIME.
PYCOLL_CUDA_API int pycoll_cuda_launch(PycollCudaCall* call, const void* const* in,
                                       void* const* out, int nblocks, int nthreads, int method,
                                       uint64_t timeout_ns, uint64_t absent, void* stream);

// A cooperative kernel that does nothing: the floor below every launch, for benchmarks.
PYCOLL_CUDA_API int pycoll_cuda_launch_empty(int nblocks, int nthreads, void* stream);

#ifdef __cplusplus
}
#endif
