// Tagged messages, sent and received in the background or not, on top of the mailboxes.
//
// send and recv return at once. A thread that waits moves all messages of the rank; while none
// waits and something is under way, a thread of the postbox does. Messages to one rank leave in the
// order in which they were posted, and messages with one source and tag arrive in that order.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "p2p/mailbox.h"

namespace pycoll {

// For any number of threads.
class Postbox {
 public:
  using Ticket = uint64_t;
  using Envelope = Mailboxes::Envelope;

  // `offers`: see Mailboxes.
  explicit Postbox(std::shared_ptr<Engine> engine, Offers offers = Offers::kNever);
  ~Postbox() { close(); }
  Postbox(const Postbox&) = delete;
  Postbox& operator=(const Postbox&) = delete;

  uint32_t world_size() const { return engine_->world_size(); }

  // The memory must stay as it is until the ticket is done. src < 0: from any rank. A send that is
  // done at once has no ticket: 0 is returned. Throw what Engine::check throws.
  Ticket send(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst, uint32_t tag);
  Ticket recv(void* data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag);

  // In a child made by fork nothing is, and to wait throws: messages are its parent's.
  bool done(Ticket ticket);

  // Gives up a recv that nobody waits for: its message, if it comes, is kept for another one, and
  // the memory may be changed. Harmless if it is done; then false.
  bool forget(Ticket ticket);

  // Waits until a message is here that no recv is waiting for, and leaves it; nothing if it has not
  // come within the time. src < 0 and tag < 0: any. Throws what Engine::check throws.
  std::optional<Envelope> probe(int32_t src, int64_t tag, double timeout_s);

  // Waits for the message, which one thread at a time may do, forgets the ticket and returns the
  // sender; of a sent message, this rank. Throws MismatchError if size or type of what is received
  // is another one (it stays), TransportError if there is no memory for a message that comes
  // meanwhile, and whatever Engine::check throws, but what arrived whole before its sender died or
  // left is still received. After CollTimeout the message is still under way and may be waited for
  // again.
  uint32_t wait(Ticket ticket, double timeout_s);

  // Waits likewise for a message that is sent. One that has not been received in time is taken
  // back, and the communicator aborted, as half of it may have been.
  void finish_send(Ticket ticket, double timeout_s);

  // Of a message that is sent: waits a moment for it to leave, and then copies what has not, so
  // that the memory may be changed. Returns whether it has left; then the ticket is forgotten.
  bool leave_behind(Ticket ticket, double patience_s);
  // See Mailboxes::small.
  bool small(uint64_t nbytes) const { return boxes_.small(nbytes); }

  // Receives as recv and wait do, without waking the thread. A message whose time is over or that
  // fails is forgotten.
  uint32_t take(void* data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag,
                double timeout_s);

  // Receives likewise the message that `probe` has found. Nothing, at once, if another thread has
  // received it meanwhile and the next one of its source and tag is of another size, or not here.
  std::optional<uint32_t> take_found(const Envelope& found, void* data, uint64_t nbytes,
                                     uint32_t type, double timeout_s);

  // Forgets everything that is under way and ends the thread: no message moves after that.
  // Idempotent.
  void close();

 private:
  class Waiter;
  enum class State : uint8_t { kPosted, kDone, kFailed };
  struct Request {
    Ticket ticket;
    bool incoming;
    Mailboxes::SendRequest out;
    Mailboxes::RecvRequest in;
    std::unique_ptr<char[]> own;  // of a message whose sender has gone on
    State state = State::kPosted;
    uint32_t sender = 0;
    std::exception_ptr error;
    bool awaited = false;
  };

  void check_home() const;
  Ticket post(Request request);
  void enter(Request request);
  std::optional<Request> take_back(Ticket ticket);
  std::optional<uint32_t> take_small(const Mailboxes::RecvRequest& request);
  static uint32_t outcome(const Request& ended);
  uint32_t wait_or_forget(Ticket ticket, double timeout_s);
  void progress();
  void progress_incoming();
  void progress_outgoing();
  void finish(Request& request);
  void fail_all(const std::exception_ptr& error);
  void withdraw_all();
  void serve();
  size_t under_way() const { return outgoing_.size() + incoming_.size(); }
  Ticket oldest() const;  // of what is
  bool idle() const { return closing_ || waiters_ > 0 || under_way() == 0; }
  void wake_thread();
  std::string describe(const Request& request) const;
  std::string late_text(const Request& request, double timeout_s) const;

  std::shared_ptr<Engine> engine_;
  Mailboxes boxes_;
  uint32_t rank_;
  Bell bell_;
  std::mutex mutex_;  // of everything below
  std::unordered_map<Ticket, Request> requests_;
  std::deque<Ticket> outgoing_, incoming_;     // posted and not done, in order
  std::vector<Mailboxes::RecvRequest> recvs_;  // of incoming_
  size_t looked_ = 0;                          // so many of them get nothing that is here
  std::vector<bool> blocked_;                  // ranks to which an older message has not left yet
  Ticket newest_ = 0;
  uint32_t waiters_ = 0;
  bool closing_ = false;
  bool thread_busy_ = false;  // the thread looks by itself whether there is something to do
  std::unique_ptr<std::condition_variable> work_ = std::make_unique<std::condition_variable>();
  std::thread thread_;
};

}  // namespace pycoll
