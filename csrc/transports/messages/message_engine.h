// The engine of a communicator over MPI: what Engine is for shared memory.
//
// Calls are counted; every rank makes the same calls, so a call has one number on all ranks. What
// goes wrong is told by notices on a lane of their own, which every wait looks at: a refusal costs
// one call, everything else ends the communicator. After a failure every rank tells every other
// what it was doing, waits kGraceNs for the others' words, and makes the same report of them.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/fork_guard.h"
#include "base/one_thread.h"
#include "transports/messages/message_task.h"

namespace pycoll {

struct MpiOptions {
  double timeout_s = 300;
  uint32_t crowd = 1;  // ranks on this host
  bool (*check_signals)(void* context) = nullptr;
  void* context = nullptr;
};

// What a rank tells when a communicator fails, or when it refuses or leaves.
struct Notice {
  enum Kind : uint32_t {
    kRecord = 1,   // the communicator fails
    kLeft = 2,     // by an exception
    kClosed = 3,   // in order
    kRefused = 4,  // its arguments of call `seq`
    kSpread = 5,   // raise this error
    kAsk = 6,      // it waits for the receiver, who compares calls
  };
  uint32_t kind = 0, src = 0;
  uint64_t seq = 0;    // of the call it is in, or of the next
  uint32_t cause = 0;  // Cause, if this rank has noticed one; kNone otherwise
  uint32_t culprit = 0;
  uint32_t in_call = 0;  // 1: it has entered call `seq`
  int32_t waiting_peer = -1;
  uint32_t waiting_step = 0;
  uint64_t waiting_ns = 0;
  uint64_t descriptor = 0, count = 0, check = 0;
  char site[kSiteBytes] = "";
  char name[32] = "";       // kSpread: kind of the error
  char text[6 << 10] = "";  // reason; last, so that only what is used is sent
};
static_assert(sizeof(Notice) <= MpiLink::kNoticeBytes);

struct MpiReport {
  Cause cause = Cause::kNone;
  uint32_t culprit = 0, reporter = 0;
  uint64_t iteration = 0;
  std::string text;
  std::vector<Notice> ranks;  // kind 0: this rank has not answered
};

class MpiEngine {
 public:
  using Ticket = uint64_t;
  static constexpr double kDefaultTimeout = -1;
  static constexpr uint64_t kGraceNs = 1'000'000'000;
  static constexpr uint32_t kLooks = 16;  // ranks to look at for notices, at a time

  MpiEngine(std::shared_ptr<MpiApi> api, MpiHandle comm, std::vector<int> members, uint32_t rank,
            uint32_t context, const MpiOptions& options);
  ~MpiEngine();
  MpiEngine(const MpiEngine&) = delete;
  MpiEngine& operator=(const MpiEngine&) = delete;

  uint64_t iteration() const { return seq_; }
  // See Engine. `segment_bytes`: of a chunk that is sent at once. `packet_bytes`, at most
  // kPacketBytes: of a message that is copied, so that its call needs no agreement.
  std::shared_ptr<const BoundCall> bind(Binding binding, uint64_t segment_bytes,
                                        uint64_t packet_bytes, bool agree,
                                        std::vector<uint32_t> team) const;
  uint32_t site(std::string_view text);
  void run(const BoundCall& call, const void* in, void* out, uint32_t site = 0,
           double timeout_s = kDefaultTimeout);
  // With MPI_THREAD_MULTIPLE it proceeds on a thread; otherwise inside done(), wait() and calls.
  // Any thread may wait for it.
  Ticket submit(std::shared_ptr<const BoundCall> call, const void* in, void* out, uint32_t site = 0,
                double timeout_s = kDefaultTimeout);
  // A train: at most kTrain calls of one thread that are under way at once, and move inside
  // start(), nudge() and finish(). Nothing else may be called meanwhile. The first shows whether
  // all ranks make this train: the second waits until it has.
  void start(const BoundCall& call, const void* in, void* out, uint32_t site, double timeout_s);
  // Moves what can be moved, if anything is under way; false if not. What goes wrong is thrown by
  // start() or finish(). If nothing is, peers who ask now and then get an answer.
  bool nudge();
  // Says in which call this rank is, before it starts a train or if it starts none.
  void enter(uint64_t descriptor, uint64_t count, uint32_t site);
  // Ends the oldest call of the train.
  void finish();
  // Takes back a train that will not be finished: what it was given of BoundCalls may go then.
  void give_up();
  bool done(Ticket ticket);
  void wait(Ticket ticket, double timeout_s = kDefaultTimeout);
  // See Engine.
  std::exception_ptr error(Ticket ticket) const;
  void forget(Ticket ticket);
  void refuse(std::string_view text, uint32_t site = 0);
  // Lets one call of the others pass, in which this rank has no part.
  void skip();
  // After a call that somebody has refused: waits a little for the notice of it. Whoever sent it
  // may have to wait until it is taken, and ranks that learn of it otherwise would not take it.
  void listen();
  void abort(std::string_view text);
  // Makes every rank raise an error of this kind with this text.
  void spread(const std::string& name, const std::string& text);
  // Looks for notices; throws what the communicator failed with, if it did.
  void poll();
  void leave(std::string_view text);
  void close();
  bool closed() const { return closed_; }
  MpiReport report() const;
  // Sends after a failure may still refer to arrays: keep them.
  bool failed() const { return failed_.load(); }

  // False in a child made by fork, where only closing and destruction do no harm.
  bool at_home() const { return fork_guard_.at_home(); }

  // Ends the communicator on every rank, because this one has no memory for its part of a call:
  // its peers wait for that part, and would take this rank's next call for it. Throws MemoryError.
  [[noreturn]] void out_of_memory();

  // For tagged messages: see Engine::check. The caller holds no lock.
  bool check(int32_t peer, Pulse pulse);
  MpiLink& link() { return link_; }
  const WaitPolicy& policy() const { return policy_; }
  double timeout_s() const { return options_.timeout_s; }
  std::recursive_mutex& mutex() { return mutex_; }

 private:
  struct Job {
    const BoundCall* call;
    const void* in;
    void* out;
    uint32_t site;
    double timeout_s;
    bool proven = false;
  };
  std::unique_ptr<MpiTask> make_task(const Job& job, uint64_t seq, uint32_t place);
  struct Queued {
    Job job;
    std::shared_ptr<const BoundCall> call;
  };

  void check_usable();
  void check_mpi() const;
  void execute(const Job& job, bool signals);
  void begin(const Job& job, bool signals);
  void add_to_train(const Job& job, bool signals);
  void drive(const std::function<bool()>& ready);
  void advance_train();
  void look_back(const BoundCall& call);
  void answer();
  template <typename F>
  void on_train(F&& part);
  void end();
  void attempt(const std::function<void()>& part);
  std::string name_dead(const std::string& text);
  template <typename F>
  Ticket give_to_helper(F&& work);
  void make_helper();
  void step_queue();
  void leave_queue(std::exception_ptr error);
  void check_queue(Pulse pulse);
  void await_helper(Ticket ticket, double timeout_s);
  void settle();
  void fail_quietly(Cause cause, std::string_view text);
  static const char* name_known(const std::string& name);
  void check_call(const MpiTask& task, Pulse pulse);
  void ask(uint32_t peer);
  bool must_conclude() const;
  void look_for_notices(uint32_t looks);
  void handle(const Notice& notice);
  Notice own_record(Notice::Kind kind) const;
  void tell_all(const Notice& notice);
  [[noreturn]] void fail(Cause cause, uint32_t culprit, std::string_view text = {});
  [[noreturn]] void conclude();
  [[noreturn]] void raise_failure();
  [[noreturn]] void rejected();
  void check_signals(Pulse pulse);
  void flush(uint64_t patience_ns, bool mail = false);
  bool others_gone() const;
  bool pump(Ticket until, double timeout_s);

  MpiLink link_;
  std::shared_ptr<MpiApi> api_;
  MpiOptions options_;
  WaitPolicy policy_;
  uint32_t rank_, world_size_;
  ForkGuard fork_guard_;
  // Of the link and of what notices change, when calls run on a thread and messages elsewhere, or
  // several threads wait for calls in the queue.
  mutable std::recursive_mutex mutex_;
  User user_{0};  // the thread that is inside

  uint64_t seq_ = 1;  // of the running call, or of the next
  bool in_call_ = false, signals_ = false;
  Job job_{};
  uint64_t deadline_ns_ = 0;
  Waiting waiting_{};
  uint64_t waiting_since_ns_ = 0;
  uint64_t answered_ns_ = 0;  // when answer() has looked
  uint64_t last_descriptor_ = 0, last_count_ = 0, last_check_ = 0;
  uint32_t last_site_ = 0;
  struct Car {
    std::unique_ptr<MpiTask> task;
    bool packets = false, over = false;
    uint32_t place = 0;  // of its scratch
  };
  MpiTask::Scratch scratch_[kTrain];  // outlives the tasks
  std::deque<Car> train_;             // the oldest has the number seq_
  uint64_t moved_ = 0;                // grows whenever something has arrived or left
  std::exception_ptr trouble_;        // met by nudge()

  struct Refused {
    uint32_t origin;
    std::string text;
  };
  std::map<uint64_t, Refused> refused_;              // by call
  uint64_t last_refusal_ = 0;                        // latest call that somebody has refused
  uint64_t stale_until_ = 0;                         // call that still looks for stale packets
  std::vector<Notice> asks_;                         // of calls that this rank has not left
  std::vector<uint32_t> asked_;                      // peers, in this call
  std::vector<bool> gone_;                           // has closed or left
  std::vector<Notice> records_;                      // kind 0: none yet
  uint64_t failing_seq_ = 0, failing_since_ns_ = 0;  // of the latest record
  bool someone_fails_ = false;                       // a record has come before we noticed anything
  std::atomic<bool> failed_{false};
  std::string failure_kind_, failure_text_;
  MpiReport report_;

  std::unordered_map<std::string, uint32_t> sites_;
  std::vector<std::string> site_texts_;
  mutable std::mutex site_mutex_;
  std::unique_ptr<HelperThread> helper_;    // with MPI_THREAD_MULTIPLE
  std::deque<Queued> queue_;          // without; mutex_ is of this, too
  std::unique_ptr<MpiTask> current_;  // of the oldest in queue_
  std::atomic<Ticket> submitted_{0}, finished_{0};
  // Never held while waiting: who asks for an error may hold Python's lock, for which a thread that
  // holds mutex_ may wait in a signal handler.
  mutable std::mutex errors_mutex_;
  std::map<Ticket, std::exception_ptr> errors_;
  std::atomic<bool> closed_{false}, left_{false};
};

}  // namespace pycoll
