#include "p2p/postbox.h"

#include <algorithm>

#include "base/never_freed.h"

namespace pycoll {
namespace {

// How the thread waits: other threads compute meanwhile, so it hardly spins.
constexpr WaitPolicy kBackground = {.spins = 20, .yield_us = 0};
// A thread that posts mostly waits at once, and then moves its messages itself: it is left to do so
// for a while, which doubles up to a limit whenever it was not needed to wake up.
constexpr std::chrono::microseconds kHeadStart(200), kLongHeadStart(1600);

}  // namespace

Postbox::Postbox(std::shared_ptr<Engine> engine, Offers offers)
    : engine_(std::move(engine)),
      boxes_(engine_, offers),
      rank_(engine_->rank()),
      bell_(engine_->control().doorbell(rank_)),
      blocked_(engine_->world_size()) {}

Postbox::Ticket Postbox::send(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst,
                              uint32_t tag) {
  Request request{};
  request.out = {static_cast<const char*>(data), nbytes, type, dst, tag};
  if (boxes_.small(nbytes)) {  // it leaves whole or not at all
    engine_->check(kNoRank, Pulse::kOnce);
    const std::lock_guard lock(mutex_);
    if (!closing_ && outgoing_.empty()) boxes_.push(request.out);
    if (request.out.sent) return 0;
  }
  return post(std::move(request));
}

Postbox::Ticket Postbox::recv(void* data, uint64_t nbytes, uint32_t type, int32_t src,
                              uint32_t tag) {
  Request request{};
  request.incoming = true;
  request.in = {static_cast<char*>(data), nbytes, type, src, tag};
  return post(std::move(request));
}

Postbox::Ticket Postbox::post(Request request) {
  engine_->check(kNoRank, Pulse::kOnce);
  std::lock_guard lock(mutex_);
  const Ticket ticket = request.ticket = ++newest_;
  enter(std::move(request));
  try {
    progress();
  } catch (...) {  // the caller may change or free the memory then
    fail_all(std::current_exception());
    requests_.erase(ticket);
    throw;
  }
  const auto it = requests_.find(ticket);
  if (!it->second.incoming && it->second.state == State::kDone) {
    requests_.erase(it);
    return 0;
  }
  wake_thread();
  return ticket;
}

// Enters a request, or leaves everything as it was.
void Postbox::enter(Request request) {
  const bool incoming = request.incoming;
  const Ticket ticket = request.ticket;
  std::deque<Ticket>& queue = incoming ? incoming_ : outgoing_;
  const auto it = requests_.emplace(ticket, std::move(request)).first;
  try {
    queue.push_back(ticket);
    if (incoming) recvs_.push_back(it->second.in);
  } catch (...) {
    std::erase(queue, ticket);
    requests_.erase(it);
    throw;
  }
}

void Postbox::wake_thread() {
  if (idle() || thread_busy_) return;
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread([this] { serve(); });
    } catch (const std::exception&) {
      return;  // a limit, or no memory: messages move while a thread waits
    }
  }
  thread_busy_ = true;
  work_->notify_one();
}

// Moves everything that can be moved.
void Postbox::progress() {
  if (closing_) return;
  if (boxes_.drain(recvs_)) looked_ = 0;
  progress_incoming();
  if (!outgoing_.empty()) progress_outgoing();
}

void Postbox::progress_outgoing() {
  blocked_.assign(blocked_.size(), false);
  std::erase_if(outgoing_, [&](Ticket ticket) {
    Request& request = requests_.at(ticket);
    const uint32_t dst = request.out.dst;
    if (blocked_[dst]) return false;
    boxes_.push(request.out);
    blocked_[dst] = !request.out.sent;
    if (request.out.sent) finish(request);
    return request.out.sent;
  });
}

void Postbox::progress_incoming() {
  while (looked_ < incoming_.size()) {
    const size_t i = looked_;
    std::optional<uint32_t> sender;
    std::exception_ptr error;
    try {
      sender = boxes_.collect(recvs_[i]);
    } catch (...) {
      error = std::current_exception();
    }
    if (!sender && error == nullptr) {
      ++looked_;
      continue;
    }
    Request& request = requests_.at(incoming_[i]);
    request.sender = sender.value_or(0);
    request.error = error;
    incoming_.erase(incoming_.begin() + static_cast<std::ptrdiff_t>(i));
    recvs_.erase(recvs_.begin() + static_cast<std::ptrdiff_t>(i));
    finish(request);
  }
}

void Postbox::finish(Request& request) {
  if (!request.incoming) request.sender = rank_;
  request.own.reset();
  request.state = request.error != nullptr ? State::kFailed : State::kDone;
}

void Postbox::withdraw_all() {
  for (const Ticket ticket : outgoing_) boxes_.withdraw(requests_.at(ticket).out);
}

void Postbox::fail_all(const std::exception_ptr& error) {
  boxes_.keep_copies();
  withdraw_all();
  for (const std::deque<Ticket>* queue : {&outgoing_, &incoming_}) {
    for (const Ticket ticket : *queue) {
      Request& request = requests_.at(ticket);
      request.error = error;
      finish(request);
    }
  }
  outgoing_.clear();
  incoming_.clear();
  recvs_.clear();
  looked_ = 0;
}

// In a child made by fork messages are the parent's, and so may be the mutex.
void Postbox::check_home() const {
  if (!engine_->at_home()) engine_->check(kNoRank, Pulse::kOnce);
}

bool Postbox::done(Ticket ticket) {
  if (!engine_->at_home()) return false;
  std::lock_guard lock(mutex_);
  try {
    progress();
  } catch (...) {  // wait() throws it
    fail_all(std::current_exception());
  }
  const auto it = requests_.find(ticket);
  return it == requests_.end() || it->second.state != State::kPosted;
}

bool Postbox::forget(Ticket ticket) {
  check_home();
  std::lock_guard lock(mutex_);
  const auto place = std::find(incoming_.begin(), incoming_.end(), ticket);
  const bool expected = place != incoming_.end();
  if (expected) {
    boxes_.keep_copies();
    looked_ = 0;  // what came for it may be for another one
    recvs_.erase(recvs_.begin() + (place - incoming_.begin()));
    incoming_.erase(place);
  }
  requests_.erase(ticket);
  return expected;
}

// The thread: moves messages while something is under way and no other thread waits.
void Postbox::serve() {
  auto head_start = kHeadStart;
  std::unique_lock lock(mutex_);
  while (!closing_) {
    work_->wait(lock, [&] { return closing_ || thread_busy_; });
    const Ticket newest = newest_;
    work_->wait_for(lock, head_start, [&] { return closing_; });
    head_start = std::min(2 * head_start, kLongHeadStart);
    thread_busy_ = !idle() || newest_ != newest;  // more may be posted: to be woken takes longer
    if (idle() || oldest() > newest) continue;
    lock.unlock();
    std::exception_ptr error;
    try {
      wait_until(
          kBackground, bell_,
          [&] {
            std::lock_guard guard(mutex_);
            const size_t before = under_way();
            if (!idle()) progress();
            if (under_way() < before) head_start = kHeadStart;
            thread_busy_ = !idle();
            return !thread_busy_;
          },
          [&](Pulse) { return engine_->check(kNoRank, Pulse::kOnce); });
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error == nullptr) continue;
    fail_all(error);
    thread_busy_ = false;
  }
}

Postbox::Ticket Postbox::oldest() const {
  if (incoming_.empty()) return outgoing_.front();
  return outgoing_.empty() ? incoming_.front() : std::min(incoming_.front(), outgoing_.front());
}

void Postbox::close() {
  std::thread last;  // of two threads that close at the same time one waits for it
  {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!engine_->at_home()) {             // a child has no thread to join, nor one to wait for
      never_free(std::move(thread_));      // never joined, never destroyed
      static_cast<void>(work_.release());  // its end would wait for the parent's thread
      return;
    }
    if (!lock) lock.lock();
    closing_ = true;
    withdraw_all();
    outgoing_.clear();
    incoming_.clear();
    recvs_.clear();
    looked_ = 0;
    boxes_.drop_all();
    work_->notify_one();
    last = std::move(thread_);
  }
  if (last.joinable()) last.join();
}

}  // namespace pycoll
