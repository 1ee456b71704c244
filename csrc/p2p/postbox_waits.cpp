// The part of the postbox that waits.
#include <algorithm>
#include <sstream>
#include <string_view>

#include "memory/board.h"
#include "p2p/postbox.h"

namespace pycoll {
namespace {

// Whether a rank has gone: what it sent before is still received.
bool has_gone(const Aborted& end) {
  return end.cause() == Cause::kLost || end.cause() == Cause::kLeft;
}

}  // namespace

// A thread that waits, and moves all messages meanwhile.
class Postbox::Waiter {
 public:
  explicit Waiter(Postbox& box) : box_(box) {
    const std::lock_guard lock(box_.mutex_);
    ++box_.waiters_;
  }
  ~Waiter() {
    const std::lock_guard lock(box_.mutex_);
    --box_.waiters_;
    box_.wake_thread();
  }
  Waiter(const Waiter&) = delete;
  Waiter& operator=(const Waiter&) = delete;

 private:
  Postbox& box_;
};

uint32_t Postbox::wait(Ticket ticket, double timeout_s) {
  check_home();
  Deadline deadline(timeout_s);
  std::unique_lock lock(mutex_);
  const auto it = requests_.find(ticket);
  COLL_CHECK(it != requests_.end(), "ArgumentError", "message ", ticket,
             " was waited for, or its communicator closed");
  Request& request = it->second;  // stays where it is while others come and go
  COLL_CHECK(!request.awaited, "ConcurrentUseError", "another thread waits for message ", ticket);
  if (request.state != State::kPosted) return outcome(requests_.extract(it).mapped());
  request.awaited = true;
  const int32_t peer = request.incoming ? request.in.src : static_cast<int32_t>(request.out.dst);
  ++waiters_;
  lock.unlock();
  struct Leave {
    Postbox& box;
    Ticket ticket;
    ~Leave() {
      std::lock_guard lock(box.mutex_);
      const auto left = box.requests_.find(ticket);
      if (left != box.requests_.end()) left->second.awaited = false;
      --box.waiters_;
      box.wake_thread();
    }
  } leave{*this, ticket};
  const auto arrived = [&] {
    std::lock_guard guard(mutex_);
    progress();
    return request.state != State::kPosted;
  };
  bool finished = false;
  MessageNote note(&engine_->control().block(rank_));
  const MessageWay way = request.incoming ? MessageWay::kRecv : MessageWay::kSend;
  const uint32_t tag = request.incoming ? request.in.tag : request.out.tag;
  try {
    finished = wait_until(engine_->policy(), bell_, arrived, [&](Pulse pulse) {
      if (pulse == Pulse::kSlice) note.waits(way, peer, tag);
      try {
        return engine_->check(peer, pulse) || deadline.passes();
      } catch (const Aborted& end) {
        if (has_gone(end) && arrived()) return true;
        throw;
      }
    });
  } catch (...) {  // the caller may change or free the memory then
    std::lock_guard guard(mutex_);
    fail_all(std::current_exception());
    throw;
  }
  if (!finished) {
    COLL_CHECK(deadline.passed(), "PeerLeft", describe(request), closed_text(peer));
    if (request.incoming) throw_nothing_came(rank_, request.in.src, request.in.tag, timeout_s);
    throw_error("CollTimeout", late_text(request, timeout_s));
  }
  lock.lock();
  const auto ended = requests_.extract(ticket);
  lock.unlock();
  return outcome(ended.mapped());
}

uint32_t Postbox::outcome(const Request& ended) {
  if (ended.error != nullptr) std::rethrow_exception(ended.error);
  return ended.sender;
}

void Postbox::finish_send(Ticket ticket, double timeout_s) {
  check_home();
  try {
    wait(ticket, timeout_s);
    return;
  } catch (const Error& error) {
    const std::optional<Request> request = take_back(ticket);
    if (request && request->out.sent) return;
    if (!request || std::string_view(error.kind()) != "CollTimeout") throw;
    const std::string text = late_text(*request, timeout_s);
    engine_->abort("a send was not received in time");
    throw_error("CollTimeout", text, '.');
  }
}

// Forgets a message that is being sent; `sent` tells whether all of it had been taken.
std::optional<Postbox::Request> Postbox::take_back(Ticket ticket) {
  const std::lock_guard lock(mutex_);
  const auto it = requests_.find(ticket);
  if (it == requests_.end()) return {};
  Request request = std::move(it->second);
  requests_.erase(it);
  std::erase(outgoing_, ticket);
  if (request.state == State::kPosted) boxes_.withdraw(request.out);
  return request;
}

bool Postbox::leave_behind(Ticket ticket, double patience_s) {
  try {
    if (patience_s > 0) {
      wait(ticket, patience_s);
      return true;
    }
  } catch (const Error& error) {
    if (std::string_view(error.kind()) != "CollTimeout") throw;
  }
  {
    const std::lock_guard lock(mutex_);
    const auto it = requests_.find(ticket);
    if (it != requests_.end() && it->second.state == State::kPosted) {
      Mailboxes::SendRequest& out = it->second.out;
      try {
        it->second.own = std::make_unique_for_overwrite<char[]>(out.nbytes);
      } catch (const std::bad_alloc&) {  // it is small, so nothing of it has left
        std::erase(outgoing_, ticket);
        requests_.erase(it);
        throw;
      }
      std::copy_n(out.data, out.nbytes, it->second.own.get());
      out.data = it->second.own.get();
      return false;
    }
  }
  wait(ticket, patience_s);  // it has ended meanwhile
  return true;
}

uint32_t Postbox::take(void* data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag,
                       double timeout_s) {
  if (const auto sender = take_small({static_cast<char*>(data), nbytes, type, src, tag})) {
    return *sender;
  }
  const Waiter waiter(*this);
  return wait_or_forget(recv(data, nbytes, type, src, tag), timeout_s);
}

uint32_t Postbox::wait_or_forget(Ticket ticket, double timeout_s) {
  try {
    return wait(ticket, timeout_s);
  } catch (...) {
    forget(ticket);
    throw;
  }
}

std::optional<uint32_t> Postbox::take_found(const Envelope& found, void* data, uint64_t nbytes,
                                            uint32_t type, double timeout_s) {
  Request request{};
  request.incoming = true;
  request.in = {static_cast<char*>(data), nbytes, type, static_cast<int32_t>(found.src), found.tag};
  Ticket ticket = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto first = boxes_.peek(request.in.src, found.tag, recvs_);
    if (!first || first->nbytes != found.nbytes) return {};
    if (const auto sender = boxes_.collect(request.in)) return sender;
    ticket = request.ticket = ++newest_;  // not all of it has come
    enter(std::move(request));
  }
  return wait_or_forget(ticket, timeout_s);
}

// Receives a message that is here, or comes while this thread would spin: in fewer steps than a
// request takes. Small ones only, which never arrive in part.
std::optional<uint32_t> Postbox::take_small(const Mailboxes::RecvRequest& request) {
  if (!boxes_.small(request.nbytes)) return {};
  const auto taken = [&]() -> std::optional<uint32_t> {
    const std::lock_guard lock(mutex_);
    if (closing_ || !incoming_.empty()) return {};  // older requests come first
    try {
      boxes_.drain({&request, 1});
      if (!outgoing_.empty()) progress_outgoing();
    } catch (...) {  // of what has come, some may lie in the caller's memory
      fail_all(std::current_exception());
      throw;
    }
    return boxes_.collect(request);
  };
  try {
    engine_->check(request.src, Pulse::kOnce);
  } catch (const Aborted& end) {
    const auto sender = has_gone(end) ? taken() : std::nullopt;
    if (!sender) throw;
    return sender;
  }
  for (uint32_t spin = 0; spin <= engine_->policy().spins; ++spin) {
    if (const auto sender = taken()) return sender;
    cpu_pause();
  }
  return {};
}

std::optional<Postbox::Envelope> Postbox::probe(int32_t src, int64_t tag, double timeout_s) {
  check_home();
  Deadline deadline(timeout_s);
  std::optional<Envelope> found;
  const auto arrived = [&] {
    std::lock_guard guard(mutex_);
    progress();
    found = boxes_.peek(src, tag, recvs_);
    return found.has_value();
  };
  if (timeout_s <= 0 && engine_->policy().spins > 0) {  // no other rank needs this core
    if (!arrived()) engine_->check(src, Pulse::kOnce);
    return found;
  }
  const Waiter waiter(*this);
  wait_until(engine_->policy(), bell_, arrived,
             [&](Pulse pulse) { return engine_->check(src, pulse) || deadline.passes(); });
  COLL_CHECK(found || deadline.passed(), "PeerLeft", "probe on rank ", rank_, " for ",
             rank_name(src), closed_text(src));
  return found;
}

std::string Postbox::late_text(const Request& request, double timeout_s) const {
  std::ostringstream text;
  text << describe(request) << ": " << request.out.offset << " bytes taken within " << timeout_s
       << " s; rank " << request.out.dst << " has not received it";
  return text.str();
}

std::string Postbox::describe(const Request& request) const {
  const Mailboxes::RecvRequest& in = request.in;
  const Mailboxes::SendRequest& out = request.out;
  if (request.incoming) return message_text(true, rank_, in.src, in.tag, in.nbytes);
  return message_text(false, rank_, static_cast<int32_t>(out.dst), out.tag, out.nbytes);
}

}  // namespace pycoll
