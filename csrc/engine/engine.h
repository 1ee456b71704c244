// The engine runs the plans of one rank over a control segment, and over the symmetric heap for
// direct plans. It knows bytes and steps only. The protocol is section 2 of docs/architecture.md.
//
// This folder uses base/, memory/ and kernels/. Read plan.h and bind.h first, then this file and
// engine.cpp, which runs one iteration after the other. bind.cpp cuts a call into segments,
// pieces.cpp finds and folds the pieces, calls.cpp has what is around a call: which plan it runs,
// threads, the queue, closing. fault.h is how a communicator fails, helper_thread.h runs calls in
// the background, liveness_hold.h shows that the rank lives, survivors.h counts who is left for
// shrink. trace.h records calls, if asked to.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "base/fork_guard.h"
#include "base/one_thread.h"
#include "base/types.h"
#include "engine/bind.h"
#include "engine/copy_choice.h"
#include "engine/fault.h"
#include "engine/helper_thread.h"
#include "engine/liveness_hold.h"
#include "engine/peer_memory.h"
#include "engine/trace.h"
#include "kernels/fold/result_stores.h"
#include "memory/control.h"
#include "memory/heap.h"

namespace pycoll {

// The descriptor of an iteration in which the rank refused its arguments: kind 0xFF.
inline constexpr uint64_t kRefusedDescriptor = 0xFF;

struct EngineOptions {
  double timeout_s = 300;         // of a call, from the moment it first has to wait
  bool threads_as_ranks = false;  // all ranks are threads of this process and share the segment
  // Called without the GIL in sleep slices of waits on the caller's thread; true if a signal
  // handler raised. Null: not called.
  bool (*check_signals)(void* context) = nullptr;
  void* context = nullptr;
};

// What a call copies before and after it, because peers reach its arrays elsewhere than where the
// caller has them; see Registration. It belongs to the call: a queued call reads what the calls
// before it have written.
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
  using Ticket = HelperThread::Ticket;
  static constexpr double kDefaultTimeout = -1;

  // Claims the slot of `rank`. `heap` may be null if no plan is direct.
  Engine(std::shared_ptr<ControlSegment> control, std::shared_ptr<Heap> heap, uint32_t rank,
         const EngineOptions& options);
  // Like close(), but aborts the communicator if queued calls are still running.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  uint32_t rank() const { return rank_; }
  uint32_t world_size() const { return world_size_; }
  // False in a child made by fork, where only closing and destruction do no harm.
  bool at_home() const { return fork_guard_.at_home(); }
  // Lets waits depend on how the ranks of this machine share its cores. Before the first call in
  // the background, and while no other thread uses the engine.
  void share_cores(Sharing sharing) {
    sharing_ = sharing;
    policy_ = default_policy(sharing);
  }
  const WaitPolicy& policy() const { return policy_; }
  // Number of the running iteration, or of the next.
  uint64_t iteration() const { return iteration_.load(std::memory_order_relaxed); }
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

  // Whether a call would begin at once, and would wait for other processes only.
  bool prompt() const {
    return !options_.threads_as_ranks && (helper() == nullptr || helper()->idle());
  }

  // The same on the helper thread. The arrays must live until the ticket is done.
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

  // Takes part in the next call by reporting that this rank refused its arguments: consumes one
  // iteration on every rank. Waits until every rank has entered the previous call.
  void refuse(std::string_view text, uint32_t site = 0, double timeout_s = kDefaultTimeout);

  // Ends the communicator for all ranks (Revoked). Any thread.
  void abort(std::string_view text);
  // Reports that this rank leaves by an exception or exit: every peer raises PeerLeft.
  void leave(std::string_view text);
  // Excludes other threads, and signal handlers, until the result is destroyed.
  std::unique_ptr<Use> hold();
  // Throws ConcurrentUseError if a thread is inside, as close() would; not in a forked child.
  void check_unused() const;
  // Waits for queued calls, whether they succeed or not. For the thread that holds the engine.
  void drain();
  // Leaves in order. Waits for queued calls. Idempotent; also in a child made by fork.
  void close();
  bool closed() const { return (state_.load(std::memory_order_relaxed) & kClosed) != 0; }
  // Records every call from the next one on; null: no more. For the thread that makes the calls.
  void trace(std::shared_ptr<Trace> trace);

  // The snapshot behind Aborted; cause kNone if there was no abort. Any thread.
  Report report() { return faults_.report(); }

  // Other work of this thread, called often while it waits; true while there is some under way.
  // Null: none.
  void set_other_work(std::function<bool()> work) {
    other_work_ = std::move(work);
    attended_ = trace_ != nullptr || other_work_ != nullptr;
  }

  // The checks of a wait outside a call (tagged messages), but for the deadline: raises on an
  // abort, a lost peer, a signal; true if `peer` has closed (kAnyRank: if every other rank has).
  bool check(int32_t peer, Pulse pulse);

 private:
  enum class PeerState : uint8_t { kPending, kReady, kFailed, kMismatch, kAhead };
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

  // What makes a call take another way than usual, as bits of state_, and a wait's, of waiting_.
  static constexpr uint8_t kClosed = 1, kLeft = 2, kTraced = 4;
  static constexpr uint8_t kNoted = 1, kTimed = 2;

  bool usual() const { return at_home() && state_.load(std::memory_order_relaxed) == 0; }
  void check_usable() const;
  template <bool kTrace>
  [[gnu::always_inline]] void run_now(const BoundCall& call, const void* in, void* out,
                                      uint32_t site, double timeout_s,
                                      std::shared_ptr<const Detours>&& detours);
  template <bool kTrace>
  Ticket queue(std::shared_ptr<const BoundCall>&& call, const void* in, void* out, uint32_t site,
               double timeout_s, std::shared_ptr<const Detours>&& detours);
  void execute_traced(const Job& job);
  const WaitPolicy& attend(uint32_t peer);
  void end_of_wait();
  Job prepare(const BoundCall& call, const void* in, void* out, uint32_t site, double timeout_s);
  void run_queued(HelperThread::Work work);
  HelperThread* helper() const { return helper_.load(std::memory_order_acquire); }
  HelperThread& started_helper();
  void check_signals(Pulse pulse);

  void execute(const Job& job);
  void execute_refusal(std::string_view text, uint32_t site, double timeout_s, bool signals);
  void begin_call(uint64_t descriptor, uint64_t count, uint32_t site, double timeout_s,
                  bool signals);
  void run_call(const Job& job, const BoundCall& call);
  void run_segments(const Job& job, const BoundCall& call);
  void leave_direct_call();
  void run_with_choice(const Job& job);
  void begin_iteration(const Job& job, uint32_t segment);
  void fill_payload(const Job& job);
  void interpret(const Plan& plan);
  void end_iteration();
  void check_reads();
  void open_line();
  void close_iteration(bool failed);
  [[noreturn]] void throw_aborted();

  void await_entry_of_all();
  void gate(bool continuing);
  void gate_peer(uint32_t peer, bool continuing);
  void publish(uint32_t step);
  void await(uint32_t peer, uint32_t step);
  void await_slow(uint32_t peer, uint32_t step);
  void compare_calls(uint32_t peer);
  void read_payload(uint32_t peer, const FlagLine& line);
  PeerState wait_for_line(uint32_t peer, uint64_t iteration, uint32_t step, uint32_t fingerprint);
  bool check_call(uint32_t peer, uint32_t position, Pulse pulse);
  static PeerState classify(uint64_t flag, uint32_t want, uint32_t fingerprint);
  void done_waiting();
  [[noreturn]] void throw_ahead(uint32_t peer);
  [[noreturn]] void peer_rejected(uint32_t peer, bool entered);
  void quiesce();

  void fold_pieces(const Instr& instr, const Operand* operands);
  void fold_range(const Instr& instr, const Operand* operands, uint32_t k, uint32_t chunks);
  void fold_resolved(const Instr& instr, const Operand* operands, uint64_t length);
  void fold_piece(const Instr& instr, const Operand* operands, uint64_t length);
  void copy_to_staging(void* staging, const void* src, uint64_t nbytes);
  void copy_from_peer(const Instr& instr, const Operand& source, uint64_t nbytes);
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
  bool stream_ = false;         // results are stored past the caches
  ResultStores results_;        // chooses whether they are
  uint64_t start_ = 0;          // first element of the segment within a chunk
  uint64_t reach_ = 0;          // elements of the largest chunk in this segment
  char* staging_ = nullptr;     // slot 0 of rank 0
  uint64_t staging_pitch_ = 0;  // bytes between the staging buffers of ranks
  StoreChoiceBySize staging_stores_;
  std::optional<CopyChoice> choice_;  // of the running call, if it has an alternative
  ReportedTimes reported_;            // by this rank in it
  uint64_t first_iteration_ = 0;      // its first iteration
  uint64_t entry_wait_ns_ = 0;        // how long it has waited for peers to enter it
  std::unordered_map<uint32_t, CopyChoice> choices_;  // by fingerprint
  std::unique_ptr<PeerMemory> peer_memory_;           // null: ranks are threads
  std::unique_ptr<Peer[]> peers_;
  std::unique_ptr<const void*[]> srcs_;
  std::unique_ptr<void*[]> dsts_;
  uint32_t max_operands_;  // of one fold: sources, and destinations
  ForkGuard fork_guard_;
  User user_{0};                   // the thread that is inside
  std::atomic<uint8_t> state_{0};  // kClosed, kLeft, kTraced

  uint64_t call_seq_ = 0;
  uint64_t previous_descriptor_ = 0, previous_count_ = 0;  // of the last iteration
  uint32_t previous_fingerprint_ = 0;
  bool previous_failed_ = true;  // nothing to compare with
  uint8_t waiting_ = 0;          // kNoted, kTimed
  bool attended_ = false;        // see attend()
  double timeout_s_ = 0;
  Deadline deadline_;  // not set: the call has not had to wait yet

  std::shared_ptr<ControlSegment> control_;
  RankBlock* block_;
  std::shared_ptr<Heap> heap_;
  EngineOptions options_;
  Sharing sharing_;
  WaitPolicy policy_;
  std::function<bool()> other_work_;
  std::shared_ptr<Trace> trace_;
  TracedCall traced_;
  Faults faults_;
  std::unordered_map<std::string, uint32_t> sites_;
  std::mutex mutex_;  // of sites_, and of making helper_
  std::unique_ptr<HelperThread> own_helper_;
  std::atomic<HelperThread*> helper_{nullptr};  // from the first call in the background on
  std::unique_ptr<LivenessHold> alive_;         // null: ranks that are threads need none
};

}  // namespace pycoll
