// The engine: runs the plans of one rank over a control segment, and over the symmetric heap for
// direct plans. It knows bytes and steps only. The protocol is section 2 of docs/architecture.md.
//
// bind.cpp cuts a call into segments, one_call.cpp chooses its plan, engine.cpp runs one iteration
// after the other, pieces.cpp finds and folds the pieces, calls.cpp is everything around it:
// threads, the queue, closing.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/fork_guard.h"
#include "base/one_thread.h"
#include "base/types.h"
#include "engine/copy_choice.h"
#include "engine/fault.h"
#include "engine/liveness.h"
#include "engine/plan.h"
#include "kernels/fold/result_stores.h"
#include "memory/control.h"
#include "memory/cross_memory.h"
#include "memory/heap.h"

namespace pycoll {

// The descriptor of an iteration in which the rank refused its arguments: kind 0xFF.
inline constexpr uint64_t kRefusedDescriptor = 0xFF;

// Where chunk c of rank r lies in an array, in elements.
enum class Layout : uint8_t {
  kFull = 0,   // at c * chunk: the array holds the whole vector
  kOwn = 1,    // at (c - r * m) * chunk: r holds chunks r * m .. (r + 1) * m - 1 only,
               // where m = chunks / world_size
  kTable = 2,  // at offset[r * chunks + c], length[r * chunks + c] long
};

struct PieceTable {
  std::vector<uint64_t> offset, length;  // elements; [world_size * chunks]
};

struct BoundCall;

// A plan with numbers: everything of a call but the arrays. Two calls match when descriptor, count
// and check are equal on all ranks; everything else here must follow from those.
struct Binding {
  std::shared_ptr<const Plan> plan;  // has passed Plan::check
  DType dtype = DType::kUInt8;       // of folds with more than one source
  ReduceOp op = ReduceOp::kSum;
  uint32_t elem_bytes = 1;  // itemsize(dtype) if the plan reduces; any if it only moves
  uint64_t count = 0;       // elements of the whole vector; goes into the flag line
  uint64_t chunk = 0;       // elements of a chunk; in kFull and kOwn chunk c covers
                            // [c * chunk, min((c + 1) * chunk, count)) of the vector
  uint64_t descriptor = 0;  // kind:8 dtype:8 op:8 flags:8 root:16 algorithm:16
  // Checksum of the algorithm, whose number in the descriptor may be that of another one, too; goes
  // into the fingerprint.
  uint32_t check = 0;
  Layout in_layout = Layout::kFull, out_layout = Layout::kFull;
  PieceTable in_table, out_table;  // for kTable
  uint32_t scale_n = 0;            // kAvg: what complete folds divide by; 0: world_size
  bool scale_at_exit = false;      // kAvg: no fold divides; this rank's OUT is divided at the end
  // The plan is direct but the arrays are private: ranks copy out of those of others through the
  // kernel, and neither fold nor write there.
  bool across = false;
  // The plan is direct but only IN lies in the heap: peers do not touch OUT.
  bool input_only = false;
  // The same call, across; it runs instead where that turns out to be faster. Results are the same.
  std::shared_ptr<const BoundCall> alternative{};
};

// A Binding checked and cut into segments for the engines of one communicator. Immutable.
struct BoundCall : Binding {
  uint32_t fingerprint = 0;  // odd; 0 stands for a failed iteration
  uint32_t segments = 1;     // iterations per call
  uint64_t segment = 0;      // elements of a chunk per iteration
  uint64_t stride = 0;       // bytes between slots
  uint64_t largest = 0;      // elements of the largest chunk
  uint64_t in_bytes = 0;     // this rank's arrays must have at least these
  uint64_t out_bytes = 0;
  bool streams = false;          // the arrays of all ranks are 1.5 times the cache or more
  bool tiny = false;             // the slots lie in the flag line; messages: each fits one packet
  std::vector<uint32_t> team{};  // messages: the ranks that take part; empty: all
  bool agree = false;  // messages: a rank may not depend on all others, so they agree first
};

struct EngineOptions {
  double timeout_s = 300;         // of a call, from the moment it first has to wait
  bool threads_as_ranks = false;  // all ranks are threads of this process and share the segment
  // Called without the GIL in sleep slices of waits on the caller's thread; true if a signal
  // handler raised. Null: not called.
  bool (*check_signals)(void* context) = nullptr;
  void* context = nullptr;
};

// What is copied around a call whose arrays peers reach elsewhere than where the caller has them;
// see Registration. It belongs to the call: one that waits in the queue reads what those before it
// have written.
struct Detours {
  struct Copy {
    void* to;
    const void* from;
    uint64_t nbytes;
  };
  std::vector<Copy> before, after;  // the latter if the call has succeeded
};

// One rank of a communicator.
//
// Threads: run, submit, refuse, close and leave are for one thread at a time (ConcurrentUseError
// otherwise); abort, report, done and wait may be called from any.
//
// Errors of every call: Aborted (the communicator failed, for good), PeerRejected (another rank
// refused its arguments for this call; usable again at once), CommClosed, ForkedError,
// ConcurrentUseError, "Interrupted" (check_signals returned true; the communicator is aborted).
class Engine {
 public:
  using Ticket = Keeper::Ticket;
  static constexpr double kDefaultTimeout = -1;

  // Claims the slot of `rank`. `heap` may be null if no plan is direct. `regions`: the region of
  // the heap of each rank of this communicator (empty: region = rank).
  Engine(std::shared_ptr<ControlSegment> control, std::shared_ptr<Heap> heap, uint32_t rank,
         const EngineOptions& options, std::vector<uint32_t> regions = {});
  // Like close(), but aborts the communicator if queued calls are still running.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  uint32_t rank() const { return rank_; }
  uint32_t world_size() const { return world_size_; }
  // Number of the running iteration, or of the next.
  uint64_t iteration() const { return iteration_.load(std::memory_order_relaxed); }
  const std::shared_ptr<Heap>& heap() const { return heap_; }
  uint32_t region() const { return regions_[rank_]; }
  // Whether the last call has stored its results past the caches.
  bool past_caches() const { return stream_; }
  ControlSegment& control() { return *control_; }

  // Checks plan and numbers; throws ScheduleError or ArgumentError. Any thread, any time.
  std::shared_ptr<const BoundCall> bind(Binding binding) const;

  // Whether the next such call would run its alternative. For the thread that makes the calls.
  bool reads(const BoundCall& call) const;

  // Id of a call site text ("file:line function"), to be passed to calls. Not for the hot path:
  // callers keep the id. The last id stands for all texts that found no room.
  uint32_t site(std::string_view text);

  // Runs the call to its end; behind queued calls if there are any. `in` and `out` hold at least
  // call.in_bytes and call.out_bytes; null where the plan does not touch them. Throws ArgumentError
  // before anything is published when a direct call gets arrays outside the heap: then the caller
  // must refuse(), or its peers wait.
  void run(const BoundCall& call, const void* in, void* out, uint32_t site = 0,
           double timeout_s = kDefaultTimeout, std::shared_ptr<const Detours> detours = nullptr);

  // Whether a call would begin at once, and waits for other processes only.
  bool prompt() const {
    return !options_.threads_as_ranks && keeper_ != nullptr && keeper_->idle();
  }

  // The same on the keeper thread. The arrays must live until the ticket is done.
  Ticket submit(std::shared_ptr<const BoundCall> call, const void* in, void* out, uint32_t site = 0,
                double timeout_s = kDefaultTimeout,
                std::shared_ptr<const Detours> detours = nullptr);
  bool done(Ticket ticket) const;
  // Waits for a submitted call and throws its error. CollTimeout after timeout_s (< 0: no limit but
  // that of the call itself); the call then still runs.
  void wait(Ticket ticket, double timeout_s = kDefaultTimeout);
  // The error of a call that is done, null if it has none. It is kept until it is forgotten. In a
  // child made by fork it is ForkedError.
  std::exception_ptr error(Ticket ticket) const;
  void forget(Ticket ticket);

  // Takes part in the next call by telling that this rank refused its arguments: consumes one
  // iteration on every rank. Waits until every rank has entered the call before.
  void refuse(std::string_view text, uint32_t site = 0, double timeout_s = kDefaultTimeout);

  // Ends the communicator for all ranks (Revoked). Any thread.
  void abort(std::string_view text);
  // Says that this rank leaves by an exception or exit: every peer raises PeerLeft.
  void leave(std::string_view text);
  // Keeps other threads, and signal handlers, out of this engine until the result is destroyed.
  std::unique_ptr<Use> hold();
  // Waits for queued calls, whatever becomes of them. For the thread that holds the engine.
  void drain();
  // Leaves in order. Waits for queued calls. Idempotent; also in a child made by fork.
  void close();
  bool closed() const { return closed_.load(std::memory_order_relaxed); }

  // The snapshot behind Aborted; cause kNone if there was no abort. Any thread.
  Report report() { return faults_.report(); }

  // Something else that this thread has to do while it waits: called often, and true as long as
  // there is something under way. Null: nothing.
  void set_meanwhile(std::function<bool()> meanwhile) { meanwhile_ = std::move(meanwhile); }

  // The checks of a wait outside a call (tagged messages; the deadline is the caller's affair):
  // raises on an abort, a lost peer, a signal; true if `peer` has closed (kAnyRank: if every other
  // rank has).
  bool check(int32_t peer, Pulse pulse);

 private:
  enum class Sight : uint8_t { kPending, kReady, kFailed, kMismatch, kAhead };
  struct Job {
    const BoundCall* call;
    const void* in;
    void* out;
    uint64_t in_offset, out_offset;  // in the heap, of a direct plan
    uint32_t site;
    double timeout_s;
    bool signals;  // runs on a thread of the caller
    std::shared_ptr<const Detours> detours;
  };
  struct Peer {
    uint64_t seen;   // newest iteration of this peer that was compared with ours
    char *in, *out;  // its arrays as of iteration `seen`: in our mapping, or across in its own
  };

  void check_usable() const;
  Job prepare(const BoundCall& call, const void* in, void* out, uint32_t site, double timeout_s);
  void run_queued(Keeper::Work work);
  Keeper& keeper();
  void check_signals(Pulse pulse);

  void execute(const Job& job);
  void execute_refusal(std::string_view text, uint32_t site, double timeout_s, bool signals);
  void begin_call(uint64_t descriptor, uint64_t count, uint32_t site, double timeout_s,
                  bool signals);
  void run_call(const Job& job, const BoundCall& call);
  void run_segments(const Job& job, const BoundCall& call);
  void part();
  void run_chosen(const Job& job);
  void begin_iteration(const Job& job, uint32_t segment);
  void fill_payload(const Job& job);
  void interpret(const Plan& plan);
  void end_iteration();
  void check_reads();
  void open_line();
  void close_iteration(bool failed);
  [[noreturn]] void aborted();

  void meet_everybody();
  void gate(bool continuing);
  void gate_on(uint32_t peer, bool continuing);
  void publish(uint32_t step);
  void await(uint32_t peer, uint32_t step);
  void await_slow(uint32_t peer, uint32_t step);
  void first_contact(uint32_t peer);
  void read_payload(uint32_t peer, const FlagLine& line);
  Sight watch(uint32_t peer, uint64_t iteration, uint32_t step, uint32_t fingerprint);
  bool check_call(uint32_t peer, uint32_t position, Pulse pulse);
  static Sight look(uint64_t flag, uint32_t want, uint32_t fingerprint);
  void done_waiting();
  [[noreturn]] void ahead(uint32_t peer);
  [[noreturn]] void peer_rejected(uint32_t peer, bool entered);
  void quiesce();

  void fold_pieces(const Instr& instr, const Operand* operands);
  void fold_range(const Instr& instr, const Operand* operands, uint32_t k, uint32_t chunks);
  void fold_resolved(const Instr& instr, const Operand* operands, uint64_t length);
  void fold_piece(const Instr& instr, const Operand* operands, uint64_t length);
  void copy_to_cell(void* cell, const void* src, uint64_t nbytes);
  void copy_across(const Instr& instr, const Operand& source, uint64_t nbytes);
  void read_peer(uint32_t peer, void* to, const void* from, uint64_t nbytes);
  void begin_results(const BoundCall& call);
  char* resolve(const Operand& operand, uint32_t k, uint32_t chunks, uint64_t& length) const;
  bool contiguous(const Instr& instr, const Operand* operands) const;
  void scale_out();

  // Touched in every call.
  std::atomic<uint64_t> iteration_;  // written by the thread that executes
  uint32_t rank_, world_size_;
  uint32_t position_ = 0;  // of the running iteration, step 0
  uint32_t fingerprint_ = 0;
  uint32_t step_ = 0;      // newest step published in the running iteration
  bool published_ = true;  // something was published in the running iteration
  bool signals_ = false;
  FlagLine* line_ = nullptr;  // ours, of the parity of the running iteration
  const BoundCall* call_ = nullptr;
  uint64_t descriptor_ = 0, count_ = 0;
  char *in_ = nullptr, *out_ = nullptr;
  bool stream_ = false;      // results are stored past the caches
  ResultStores results_;     // finds out whether they should be
  uint64_t start_ = 0;       // first element of the segment within a chunk
  uint64_t reach_ = 0;       // elements of the largest chunk in this segment
  char* cells_ = nullptr;    // slot 0 of rank 0
  uint64_t cell_pitch_ = 0;  // bytes between the cells of ranks
  StoreChoiceBySize cell_stores_;
  std::optional<CopyChoice> choice_;  // of the running call, if it has an alternative
  ToldTimes told_;                    // by this rank in it
  uint64_t met_since_ = 0;            // its first iteration
  uint64_t late_ns_ = 0;              // how long it has waited for peers to come to it
  std::unordered_map<uint32_t, CopyChoice> choices_;  // by fingerprint
  std::unique_ptr<PeerMemory> peer_memory_;           // null: ranks are threads
  std::unique_ptr<Peer[]> peers_;
  std::unique_ptr<const void*[]> srcs_;
  std::unique_ptr<void*[]> dsts_;
  uint32_t max_operands_;  // of one fold: sources, and destinations
  ForkGuard fork_guard_;
  User user_{0};  // the thread that is inside
  std::atomic<bool> closed_{false};
  std::atomic<bool> left_{false};

  uint64_t call_seq_ = 0;
  uint64_t previous_descriptor_ = 0, previous_count_ = 0;  // of the last iteration
  uint32_t previous_fingerprint_ = 0;
  bool previous_failed_ = true;  // nothing to compare with
  bool waiting_noted_ = false;
  double timeout_s_ = 0;
  uint64_t deadline_ns_ = 0;  // 0: the call has not had to wait yet

  std::shared_ptr<ControlSegment> control_;
  RankBlock* block_;
  std::shared_ptr<Heap> heap_;
  EngineOptions options_;
  WaitPolicy policy_;
  std::function<bool()> meanwhile_;
  std::vector<uint32_t> regions_;
  Faults faults_;
  std::unordered_map<std::string, uint32_t> sites_;
  std::mutex mutex_;  // of sites_, and of making keeper_
  std::unique_ptr<Keeper> keeper_;
};

// The clock's reading `timeout_s` from now; far in the future for infinity.
uint64_t deadline_after(double timeout_s);

// Checks a Binding for `rank` of the communicator and cuts it into segments; see Engine::bind.
std::shared_ptr<const BoundCall> bind_call(Binding binding, const Geometry& geometry,
                                           uint64_t cookie, uint32_t rank, uint32_t max_operands);

// Of a communicator that sends messages.
struct MessageLimits {
  uint32_t world_size = 1, rank = 0;
  uint64_t segment_bytes = 0;  // of a chunk that is sent at once
  uint64_t eager_bytes = 0;   // of a message that is copied into a packet
};

// The same for a plan of messages.
std::shared_ptr<const BoundCall> bind_messages(Binding binding, const MessageLimits& limits,
                                               bool agree, std::vector<uint32_t> team);

}  // namespace pycoll
