// The engine of a communicator over messages: what Engine is for shared memory.
//
// Calls are counted; every rank makes the same calls, so a call has one number on all ranks.
// Failures travel as notices on a lane of their own, which every wait looks at: a refusal costs one
// call, everything else ends the communicator. After a failure every rank sends every other a
// record of what it was doing, waits kRecordsWaitNs for theirs, and makes the same report of them.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "base/fork_guard.h"
#include "base/one_thread.h"
#include "base/reentrant_mutex.h"
#include "engine/engine.h"
#include "engine/trace.h"
#include "memory/board.h"
#include "transports/messages/packet_task.h"
#include "transports/messages/payload_task.h"
#include "transports/messages/unproven.h"

namespace pycoll {

struct MessageOptions {
  double timeout_s = 300;
  uint64_t cookie = 0;  // of its board; 0: it has none
  bool early = false;   // ranks may leave calls early: see unproven.h; alike on all ranks
  bool (*check_signals)(void* context) = nullptr;
  void* context = nullptr;
};

struct MessageReport {
  Cause cause = Cause::kNone;
  uint32_t culprit = 0, reporter = 0;
  uint64_t iteration = 0;
  std::string text;
  std::vector<Notice> ranks;  // kind 0: this rank has not answered
};

class MessageEngine {
 public:
  using Ticket = uint64_t;
  static constexpr double kDefaultTimeout = -1;
  static constexpr uint64_t kRecordsWaitNs = 1'000'000'000;
  static constexpr uint64_t kClosingNs = 100'000'000;  // for the last words of those who leave
  static constexpr uint32_t kPeersPerLook = 16;        // ranks to look at for notices, at a time

  // `members`, `context`: see MessageLink.
  MessageEngine(std::shared_ptr<Transport> api, std::vector<int> members, uint32_t rank,
                uint32_t context, const MessageOptions& options);
  ~MessageEngine();
  MessageEngine(const MessageEngine&) = delete;
  MessageEngine& operator=(const MessageEngine&) = delete;

  uint64_t iteration() const { return seq_; }
  // See Engine. `limits` are those of this rank's communicator, and at most kEagerBytes eager ones:
  // a call whose messages are no longer needs no agreement.
  std::shared_ptr<const BoundCall> bind(Binding binding, MessageLimits limits, bool agree,
                                        std::vector<uint32_t> team) const;
  uint32_t site(std::string_view text);
  void run(const BoundCall& call, const void* in, void* out, uint32_t site = 0,
           double timeout_s = kDefaultTimeout);
  // Whether a call would begin at once.
  bool prompt() const {
    return finished_ >= submitted_ && (helper() == nullptr || helper()->idle());
  }
  // Proceeds on the helper thread if the transport takes calls on any thread; otherwise inside
  // done(), wait() and other calls. Any thread may wait for it.
  Ticket submit(std::shared_ptr<const BoundCall> call, const void* in, void* out, uint32_t site = 0,
                double timeout_s = kDefaultTimeout);
  // A batch: at most kBatch calls of one thread that are under way at once, and make progress
  // inside start(), progress_batch() and finish(). Nothing else may be called meanwhile. The first
  // shows whether all ranks make this batch: the second waits for that.
  void start(const BoundCall& call, const void* in, void* out, uint32_t site, double timeout_s);
  // Makes progress if anything is under way; false if not. Failures are thrown by start() or
  // finish(). If nothing is under way, peers that question this rank get an answer.
  bool progress_batch();
  // What progress_batch() calls where a rank has reported a failure: this one's wait inside its
  // host is to end, since those it waits for may come late. Null: nothing.
  void set_end_wait(std::function<void()> end_wait) { end_wait_ = std::move(end_wait); }
  // Records in which call this rank is, before it starts a batch or if it starts none.
  void enter(uint64_t descriptor, uint64_t count, uint32_t site);
  // Ends the oldest call of the batch.
  void finish();
  // Cancels a batch that will not be finished: its BoundCalls may be freed then.
  void cancel_batch();
  bool done(Ticket ticket);
  void wait(Ticket ticket, double timeout_s = kDefaultTimeout);
  // See Engine.
  std::exception_ptr error(Ticket ticket) const;
  void forget(Ticket ticket);
  void refuse(std::string_view text, uint32_t site = 0);
  // Counts one call of the others in which this rank has no part.
  void skip();
  // After a call that somebody has refused: waits a little for the notice of it. Its sender may
  // have to wait until it is received, and a rank that learns of it otherwise would not receive it.
  void await_refusal();
  void abort(std::string_view text);
  // Makes every rank raise an error of this kind with this text.
  void raise_on_all(const std::string& name, const std::string& text);
  // Looks for notices and lost connections; throws what the communicator failed with, if it did.
  void poll();
  // Runs a part of a call, or of messages of users. An error of the transport ends the communicator
  // on every rank, and so does a lack of memory.
  template <typename F>
  void attempt(F&& part) {
    try {
      part();
    } catch (...) {
      end_attempt();
    }
  }
  void leave(std::string_view text);
  void check_unused() const;  // see Engine
  void close();
  // Before close(): waits until all ranks are known to have made the calls that this one has left
  // early, and throws what has become of them. The others must have closed, left or failed.
  void prove();
  // Those calls.
  std::vector<PastCall> unproven() const;
  bool closed() const { return closed_; }
  // Records every call from the next one on; null: no more. For the thread that makes the calls.
  void trace(std::shared_ptr<Trace> trace);
  // Counts how long batches wait, for whoever records their calls, and returns what was counted.
  uint64_t count_waits(bool on);
  // What this rank shows of itself; null if nobody can look. show() and shown() are around a call.
  Board* board() { return board_.get(); }
  RankBlock* shown_block() { return board_ == nullptr ? nullptr : &board_->block(); }
  void show(uint64_t descriptor, uint64_t count, uint32_t site);
  void shown(bool done);
  MessageReport report() const;
  // Sends after a failure may still refer to arrays: keep them.
  bool failed() const { return failed_.load(); }

  // False in a child made by fork, where only closing and destruction do no harm.
  bool at_home() const { return fork_guard_.at_home(); }
  // Throws what a call made now would throw at once.
  void check_usable();
  void check_mpi() const;  // a part of it: TransportError after MPI.Finalize()

  // Ends the communicator on every rank, because this one has no memory for its part of a call: its
  // peers wait for that part, and would mistake this rank's next call for it. Throws MemoryError.
  [[noreturn]] void out_of_memory();

  // For tagged messages: see Engine::check. The caller holds no lock.
  bool check(int32_t peer, Pulse pulse);
  MessageLink& link() { return link_; }
  // See Engine.
  void share_cores(Sharing sharing);
  uint32_t world_size() const { return world_size_; }
  const WaitPolicy& policy() const { return policy_; }
  // What waits sleep on: the transport, which may wake them.
  Bell bell() const { return {.alarm = api_.get()}; }
  double timeout_s() const { return options_.timeout_s; }
  ReentrantMutex& mutex() { return mutex_; }

 private:
  struct Job {
    const BoundCall* call;
    const void* in;
    void* out;
    uint32_t site;
    double timeout_s;
    bool proven = false;
  };
  struct Queued {
    Job job;
    std::shared_ptr<const BoundCall> call;
  };
  struct Refusal {
    uint64_t seq;
    uint32_t origin;
    std::string text;
  };

  HelperThread* helper() const { return helper_.load(std::memory_order_acquire); }
  [[noreturn]] void end_attempt();
  void execute(const Job& job, bool signals);
  void begin(const Job& job, bool signals);
  void add_to_batch(const Job& job, bool signals);
  template <typename F>
  void drive(F&& ready);
  void advance_batch();
  void check_late_notices(const BoundCall& call);
  bool may_leave(const BoundCall& call) const;
  void look_back();
  void compare();
  void pass(const BoundCall& call);
  static PastCall past_of(const Notice& notice);
  void remember(PastCall call);
  void remember_refusal(const Notice& notice);
  const Refusal* refusal_of_made() const;
  const PastCall* past(uint32_t rank, uint64_t seq) const;
  uint64_t first_suspect(const Notice& record) const;
  void tell_past();
  uint64_t first_difference(uint64_t seq) const;
  void look_for_first(MessageReport& report) const;
  int32_t first_unproven() const;
  void check_proof(Pulse pulse, uint64_t since_ns);
  std::string site_text(uint32_t site) const;
  void answer();
  template <typename F>
  void in_batch(F&& part);
  void end();
  std::string name_dead_rank(const std::string& text);
  template <typename F>
  Ticket submit_to_helper(F&& work, HelperThread::Start start);
  void make_helper();
  void step_queue();
  void end_queued(std::exception_ptr error);
  void show_queue();
  void check_queue(Pulse pulse);
  bool await(Ticket until, double timeout_s);
  void settle();
  void record(Cause cause, uint32_t culprit, std::string_view text);
  void fail_quietly(Cause cause, std::string_view text);
  void set_failed(std::string_view kind, std::string_view text);
  void check_call(const MessageTask& task, Pulse pulse);
  void check_connections();
  void question(uint32_t peer);
  bool must_conclude() const;
  void receive_notices(uint32_t looks);
  void handle(const Notice& notice);
  Notice own_record(Notice::Kind kind) const;
  void notify_all(const Notice& notice);
  [[noreturn]] void fail(Cause cause, uint32_t culprit, std::string_view text = {});
  [[noreturn]] void conclude();
  [[noreturn]] void raise_failure();
  [[noreturn]] void raise_refused();
  void look_for_stale();
  void check_signals(Pulse pulse);
  void flush(uint64_t patience_ns, bool mail = false);
  // Whether a rank has closed this communicator, or left it; or all of its communicators, of which
  // this one may not have been: it had no memory for it, or none to tell.
  bool departed(uint32_t peer) const { return departed_[peer] || link_.left(peer); }
  bool others_departed() const;

  MessageLink link_;
  std::shared_ptr<Transport> api_;
  MessageOptions options_;
  Sharing sharing_;
  WaitPolicy policy_;
  uint32_t rank_, world_size_;
  ForkGuard fork_guard_;
  // Of the link and of what notices change: calls may run on the helper thread beside messages of
  // users, and several threads may wait for calls in the queue.
  mutable ReentrantMutex mutex_;
  User user_{0};  // the thread that is inside

  uint64_t seq_ = 1;  // of the running call, or of the next
  bool in_call_ = false, signals_ = false;
  Job job_{};
  Deadline deadline_;
  Waiting waiting_{};
  uint64_t waiting_since_ns_ = 0;
  uint64_t answered_ns_ = 0;  // when answer() has looked
  std::function<void()> end_wait_;
  uint64_t last_descriptor_ = 0, last_count_ = 0, last_check_ = 0;
  uint32_t last_site_ = 0;
  uint64_t looked_back_ns_ = 0;    // the latest look_back()
  bool early_ = false;             // this rank leaves the running call early
  std::atomic<bool> told_{false};  // its caller knows that the communicator has failed
  UnprovenCalls unproven_;         // those that it has left so
  std::vector<PastCall> theirs_;   // those that others speak of
  std::vector<Refusal> refusals_;  // since all calls were proven, of this rank too
  struct Room {                    // of a task, and its memory, which outlives it
    alignas(PacketTask) std::byte packets[sizeof(PacketTask)];
    alignas(PayloadTask) std::byte payload[sizeof(PayloadTask)];
    PacketTask::Scratch of_packets;
    PayloadTask::Scratch of_payload;
  };
  struct Leave {
    void operator()(MessageTask* task) const { task->~MessageTask(); }
  };
  using RoomedTask = std::unique_ptr<MessageTask, Leave>;
  RoomedTask make_task(Room& room, const Job& job, uint64_t seq);
  struct BatchCall {
    RoomedTask task;
    bool over = false;
    uint32_t place = 0;  // of its room
  };
  Room rooms_[kBatch];
  std::vector<BatchCall> batch_;    // the oldest, first, has the number seq_
  uint64_t moved_ = 0;              // grows whenever something has arrived or left
  std::exception_ptr batch_error_;  // caught by progress_batch()

  struct Refused {
    uint32_t origin;
    std::string text;
  };
  std::map<uint64_t, Refused> refused_;  // by call
  uint64_t last_refusal_ = 0;            // latest call that somebody has refused
  uint64_t stale_until_seq_ = 0;         // call that still looks for stale eager messages
  std::vector<Notice> questions_;        // of calls that this rank has not left
  std::vector<uint32_t> questioned_;     // peers, in this call
  std::vector<bool> departed_;           // has closed or left
  std::vector<Notice> records_;          // kind 0: none yet
  uint64_t failing_seq_ = 0, failing_since_ns_ = 0;  // of the latest record
  bool someone_fails_ = false;                       // a record has come before we noticed anything
  std::atomic<bool> failed_{false};
  std::string failure_kind_, failure_text_;
  MessageReport report_;

  std::unique_ptr<Board> board_;
  std::shared_ptr<Trace> trace_;
  bool traced_ = false;  // the running call is
  bool timed_ = false;
  uint64_t waited_ = 0;  // in it, in ticks

  std::unordered_map<std::string, uint32_t> sites_;
  std::vector<std::string> site_texts_;
  mutable std::mutex site_mutex_;
  std::unique_ptr<HelperThread> own_helper_;  // if the transport takes calls on any thread
  std::atomic<HelperThread*> helper_{nullptr};
  std::deque<Queued> queue_;  // otherwise; guarded by mutex_, too
  RoomedTask current_;        // of the oldest in queue_
  std::atomic<Ticket> submitted_{0}, finished_{0};
  // Never held while waiting: a thread that asks for an error may hold the GIL, for which a thread
  // that holds mutex_ may wait in a signal handler.
  mutable std::mutex errors_mutex_;
  std::map<Ticket, std::exception_ptr> errors_;
  std::atomic<bool> closed_{false}, left_{false};
};

}  // namespace pycoll
