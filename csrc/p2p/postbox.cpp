#include "p2p/postbox.h"

#include <unistd.h>

#include <algorithm>
#include <sstream>
#include <system_error>

namespace pycoll {
namespace {

// How the thread waits: it is there for whoever computes meanwhile, so it hardly spins.
constexpr WaitPolicy kBackground = {.spins = 20, .yield_us = 0};
// Whoever posts mostly waits at once; the thread lets him.
constexpr auto kHeadStart = std::chrono::microseconds(200);

}  // namespace

Postbox::Postbox(std::shared_ptr<Engine> engine, Offers offers)
    : engine_(std::move(engine)),
      boxes_(engine_, offers),
      rank_(engine_->rank()),
      bell_(engine_->control().doorbell(rank_)),
      policy_(default_policy(engine_->world_size())),
      pid_(static_cast<uint64_t>(getpid())) {}

Postbox::Ticket Postbox::send(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst,
                              uint32_t tag) {
  Item item{};
  item.out = {static_cast<const char*>(data), nbytes, type, dst, tag};
  return post(std::move(item));
}

Postbox::Ticket Postbox::recv(void* data, uint64_t nbytes, uint32_t type, int32_t src,
                              uint32_t tag) {
  Item item{};
  item.incoming = true;
  item.in = {static_cast<char*>(data), nbytes, type, src, tag};
  return post(std::move(item));
}

Postbox::Ticket Postbox::post(Item item) {
  engine_->check(kNoRank, Pulse::kOnce);
  std::lock_guard lock(mutex_);
  const Ticket ticket = item.ticket = ++newest_;
  (item.incoming ? incoming_ : outgoing_).push_back(ticket);
  if (item.incoming) wanted_.push_back(item.in);
  items_.emplace(ticket, std::move(item));
  try {
    progress();
  } catch (...) {  // whoever hears of it may change or free the memory
    fail_all(std::current_exception());
    items_.erase(ticket);
    throw;
  }
  const auto it = items_.find(ticket);
  if (!it->second.incoming && it->second.state == State::kDone) {
    items_.erase(it);
    return 0;
  }
  call_thread();
  return ticket;
}

void Postbox::call_thread() {
  if (idle() || awake_) return;
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { serve(); });
    } catch (const std::system_error&) {
      return;  // a limit: messages move while somebody waits
    }
  }
  awake_ = true;
  work_->notify_one();
}

// Moves everything that can be moved.
void Postbox::progress() {
  if (closing_) return;
  if (boxes_.drain(wanted_) || !incoming_.empty()) progress_incoming();
  std::vector<bool> blocked;  // ranks to which an older message has not left yet
  std::erase_if(outgoing_, [&](Ticket ticket) {
    Item& item = items_.at(ticket);
    const uint32_t dst = item.out.dst;
    if (blocked.size() <= dst) blocked.resize(dst + 1);
    if (blocked[dst]) return false;
    boxes_.push(item.out);
    blocked[dst] = !item.out.sent;
    if (item.out.sent) finish(item);
    return item.out.sent;
  });
}

void Postbox::progress_incoming() {
  for (size_t i = 0; i < incoming_.size();) {
    Item& item = items_.at(incoming_[i]);
    try {
      const std::optional<uint32_t> sender = boxes_.collect(item.in);
      if (!sender) {
        ++i;
        continue;
      }
      item.sender = *sender;
    } catch (...) {
      item.error = std::current_exception();
    }
    incoming_.erase(incoming_.begin() + static_cast<std::ptrdiff_t>(i));
    wanted_.erase(wanted_.begin() + static_cast<std::ptrdiff_t>(i));
    finish(item);
  }
}

void Postbox::finish(Item& item) {
  if (!item.incoming) item.sender = rank_;
  item.state = item.error != nullptr ? State::kFailed : State::kDone;
}

void Postbox::withdraw_all() {
  for (const Ticket ticket : outgoing_) boxes_.withdraw(items_.at(ticket).out);
}

void Postbox::fail_all(const std::exception_ptr& error) {
  boxes_.keep_copies();
  withdraw_all();
  for (const std::deque<Ticket>* queue : {&outgoing_, &incoming_}) {
    for (const Ticket ticket : *queue) {
      Item& item = items_.at(ticket);
      item.error = error;
      finish(item);
    }
  }
  outgoing_.clear();
  incoming_.clear();
  wanted_.clear();
}

bool Postbox::done(Ticket ticket) {
  std::lock_guard lock(mutex_);
  try {
    progress();
  } catch (const Error&) {  // wait() tells of it
    fail_all(std::current_exception());
  }
  const auto it = items_.find(ticket);
  return it == items_.end() || it->second.state != State::kPosted;
}

uint32_t Postbox::wait(Ticket ticket, double timeout_s) {
  const uint64_t deadline = deadline_after(timeout_s);
  std::unique_lock lock(mutex_);
  const auto it = items_.find(ticket);
  COLL_CHECK(it != items_.end(), "ArgumentError", "message ", ticket,
             " was waited for, or its communicator closed");
  Item& item = it->second;  // stays where it is while others come and go
  COLL_CHECK(!item.awaited, "ConcurrentUseError", "another thread waits for message ", ticket);
  item.awaited = true;
  const int32_t peer = item.incoming ? item.in.src : static_cast<int32_t>(item.out.dst);
  ++waiters_;
  lock.unlock();
  struct Leave {
    Postbox& box;
    Ticket ticket;
    ~Leave() {
      std::lock_guard lock(box.mutex_);
      const auto left = box.items_.find(ticket);
      if (left != box.items_.end()) left->second.awaited = false;
      --box.waiters_;
      box.call_thread();
    }
  } leave{*this, ticket};
  const auto arrived = [&] {
    std::lock_guard guard(mutex_);
    progress();
    return item.state != State::kPosted;
  };
  bool finished = false;
  try {
    finished = wait_until(policy_, bell_, arrived, [&](Pulse pulse) {
      return engine_->check(peer, pulse) || now_ns() >= deadline;
    });
  } catch (const Error&) {  // whoever hears of it may change or free the memory
    std::lock_guard guard(mutex_);
    fail_all(std::current_exception());
    throw;
  }
  if (!finished) {
    COLL_CHECK(now_ns() >= deadline, "PeerLeft", describe(item), closed_text(peer));
    throw_error("CollTimeout", describe(item), ": not done within ", timeout_s, " s");
  }
  lock.lock();
  const std::exception_ptr error = item.error;
  const uint32_t sender = item.sender;
  items_.erase(ticket);
  lock.unlock();
  if (error != nullptr) std::rethrow_exception(error);
  return sender;
}

std::string Postbox::describe(const Item& item) const {
  std::ostringstream out;
  if (!item.incoming) {
    out << "send from rank " << rank_ << " to rank " << item.out.dst << " (tag " << item.out.tag
        << ", " << item.out.nbytes << " bytes)";
  } else {
    out << "recv on rank " << rank_ << " from " << rank_name(item.in.src) << " (tag " << item.in.tag
        << ", " << item.in.nbytes << " bytes)";
  }
  return out.str();
}

// The thread: moves messages while something is under way and nobody waits.
void Postbox::serve() {
  std::unique_lock lock(mutex_);
  while (!closing_) {
    work_->wait(lock, [&] { return closing_ || awake_; });
    lock.unlock();
    std::this_thread::sleep_for(kHeadStart);
    std::exception_ptr error;
    try {
      wait_until(
          kBackground, bell_,
          [&] {
            std::lock_guard guard(mutex_);
            if (!idle()) progress();
            awake_ = !idle();
            return !awake_;
          },
          [&](Pulse) { return engine_->check(kNoRank, Pulse::kOnce); });
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error == nullptr) continue;
    fail_all(error);
    awake_ = false;
  }
}

void Postbox::close() {
  std::thread last;  // of two who close at the same time one waits for it
  {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (static_cast<uint64_t>(getpid()) != pid_) {
      static_cast<void>(new std::thread(std::move(thread_)));  // never joined, never destroyed
      static_cast<void>(work_.release());  // its end would wait for the parent's thread
      return;
    }
    if (!lock) lock.lock();
    closing_ = true;
    withdraw_all();
    outgoing_.clear();
    incoming_.clear();
    wanted_.clear();
    work_->notify_one();
    last = std::move(thread_);
  }
  if (last.joinable()) last.join();
}

}  // namespace pycoll
