#include "transports/messages/message_link.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "base/erase_done.h"
#include "base/error.h"

namespace pycoll {
namespace {

constexpr uint64_t kBufferBytes = sizeof(EagerHeader) + kEagerBytes;
constexpr uint32_t kNoticeTests = 200;  // of a notice that has begun to arrive
constexpr uint64_t kCancelNs = 20'000'000;
constexpr int kSilentLane = 5;  // on which nobody sends

}  // namespace

MessageLink::MessageLink(std::shared_ptr<Transport> api, std::vector<int> members, uint32_t rank,
                         uint32_t context)
    : api_(std::move(api)), members_(std::move(members)), rank_(rank), context_(context) {
  COLL_CHECK(static_cast<int64_t>(context) * kLanes + kLanes <= api_->greatest_tag,
             "TransportError", "communicator number ", context,
             " needs a greater tag than this MPI has (", api_->greatest_tag, ")");
  for (const Lane lane : {Lane::kEager, Lane::kAgreement, Lane::kMail}) {
    slots(lane).resize(members_.size());
  }
  slots(Lane::kNotice).resize(1);
}

MessageLink::~MessageLink() {
  bool over = false;
  try {
    std::vector<Request> open;
    for (std::vector<ReceiveSlot>& lane : slots_) {
      for (ReceiveSlot& slot : lane) {
        if (slot.posted && !slot.complete) open.push_back(slot.request);
      }
    }
    cancel_receives(open);
    over = open.empty();
  } catch (const std::exception&) {  // no memory, or the transport no longer answers
  }
  const bool answers = fork_guard_.at_home() && !api_->ended();
  for (SendBuffer& b : buffers_) {
    try {
      if (answers && sent(b)) continue;
    } catch (const std::exception&) {  // likewise
    }
    if (b.busy) b.buffer.release();  // nobody receives it any more, but it may still be read
  }
  if (over) return;
  for (std::vector<ReceiveSlot>& lane : slots_) {  // the transport may still write to it
    for (ReceiveSlot& slot : lane) slot.buffer.release();
  }
}

void MessageLink::cancel_receives(std::vector<Request>& receives) {
  if (!fork_guard_.at_home()) return;   // the requests, and what comes for them, are the parent's
  if (api_->ended()) receives.clear();  // with MPI all of them have ended
  for (Request& request : receives) api_->cancel(request);
  const uint64_t until = now_ns() + kCancelNs;
  wait_until(
      WaitPolicy{.spins = 100, .yield_us = 1000}, Bell{},
      [&] {
        erase_done(receives, [&](Request& request) { return api_->test(request); });
        return receives.empty();
      },
      [&](Pulse) { return now_ns() >= until; });
}

MessageLink::SendBuffer& MessageLink::free_buffer(uint64_t capacity, bool notice) {
  const auto free = [&](SendBuffer& b) {
    try {
      return sent(b);
    } catch (const Error&) {  // what was for the dead must not keep a notice from the living
      if (!notice) throw;
      return true;
    }
  };
  // Some may wait long for their receivers: these are tested only if no other is free.
  for (const bool test : {false, true}) {
    for (SendBuffer& b : buffers_) {
      if (b.capacity < capacity || (test ? !free(b) : b.busy)) continue;
      open_ = static_cast<size_t>(&b - buffers_.data());
      return b;
    }
  }
  open_ = buffers_.size();
  buffers_.push_back({.buffer = std::make_unique<char[]>(capacity), .capacity = capacity});
  return buffers_.back();
}

// Whether a message has left its buffer, or never will.
bool MessageLink::sent(SendBuffer& buffer) {
  try {
    if (buffer.busy && api_->test(buffer.request)) buffer.busy = false;
  } catch (const Error&) {
    buffer.busy = false;
    if (buffer.lane != Lane::kNotice) throw;  // the dead need no notice
  }
  return !buffer.busy;
}

char* MessageLink::open_eager() {
  return free_buffer(kBufferBytes).buffer.get() + sizeof(EagerHeader);
}

void MessageLink::send_eager(Lane lane, uint32_t peer, const EagerHeader& header) {
  SendBuffer& b = buffers_[open_];
  std::memcpy(b.buffer.get(), &header, sizeof(header));
  api_->isend(b.buffer.get(), sizeof(header) + header.nbytes, members_[peer], tag(lane), b.request);
  b.lane = lane;
  b.seq = header.seq;
  b.busy = !api_->test(b.request);
}

const EagerHeader* MessageLink::receive_eager(Lane lane, uint32_t peer) {
  ReceiveSlot& slot = slots(lane)[peer];
  if (!slot.posted) {
    const uint64_t room = lane == Lane::kAgreement ? sizeof(EagerHeader) : kBufferBytes;
    if (slot.buffer == nullptr) slot.buffer = std::make_unique_for_overwrite<char[]>(room);
    api_->irecv(slot.buffer.get(), sizeof(EagerHeader), room, members_[peer], tag(lane),
                slot.request);
    slot.posted = true;
    slot.complete = false;
  }
  if (!slot.complete) slot.complete = api_->test(slot.request);
  return slot.complete ? reinterpret_cast<const EagerHeader*>(slot.buffer.get()) : nullptr;
}

template <typename F>
bool MessageLink::all_sent(F&& matters) {
  bool all = true;
  for (SendBuffer& b : buffers_) {
    if (b.busy && matters(b) && !sent(b)) all = false;
  }
  return all;
}

bool MessageLink::flushed(uint64_t seq) {
  return all_sent([&](const SendBuffer& b) {
    return b.seq == seq && (b.lane == Lane::kEager || b.lane == Lane::kAgreement);
  });
}

bool MessageLink::notices_sent(bool mail) {
  return all_sent([&](const SendBuffer& b) {
    return b.lane == Lane::kNotice || (mail && b.lane == Lane::kMail);
  });
}

void MessageLink::drop_before(uint64_t seq) {
  for (const Lane lane : {Lane::kEager, Lane::kAgreement}) {
    for (uint32_t peer = 0; peer < world_size(); ++peer) {
      if (peer == rank_) continue;
      for (;;) {  // a receive is not posted for nothing: it takes a buffer
        if (!slots(lane)[peer].posted && !api_->probe(members_[peer], tag(lane))) break;
        const EagerHeader* found = receive_eager(lane, peer);
        if (found == nullptr || found->seq >= seq) break;
        release(lane, peer);
      }
    }
  }
}

void MessageLink::send_notice(uint32_t peer, const Notice& notice) {
  const uint64_t nbytes = offsetof(Notice, text) + std::strlen(notice.text) + 1;
  SendBuffer& b = free_buffer(sizeof(Notice), true);
  std::memcpy(b.buffer.get(), &notice, nbytes);
  api_->isend(b.buffer.get(), nbytes, members_[peer], tag(Lane::kNotice), b.request);
  b.lane = Lane::kNotice;
  b.busy = true;
}

void MessageLink::reject(uint32_t peer, const std::string& why) {
  const Loss loss = api_->reject(members_[peer], why);
  throw Error(loss.kind, loss.text);
}

int32_t MessageLink::first_lost(const std::vector<bool>& departed) const {
  if (api_->losses() == 0) return -1;
  uint32_t first = UINT32_MAX;
  int32_t found = -1;
  for (uint32_t peer = 0; peer < world_size(); ++peer) {
    if (peer == rank_ || departed[peer]) continue;
    const uint32_t order = loss(peer).order;
    if (order == 0 || order > first) continue;
    first = order;
    found = static_cast<int32_t>(peer);
  }
  return found;
}

int32_t MessageLink::find_dead(const std::vector<bool>& departed) {
  const int32_t lost = first_lost(departed);
  if (lost >= 0) return lost;
  for (uint32_t peer = 0; peer < world_size(); ++peer) {
    try {
      // Not where a message may wait: MPI would show that, and not that its sender has died.
      if (peer != rank_) api_->probe(members_[peer], tag(kSilentLane));
    } catch (const Error&) {
      return static_cast<int32_t>(peer);
    }
  }
  return -1;
}

bool MessageLink::take_notice(Notice& notice, uint32_t looks) {
  ReceiveSlot& slot = slots(Lane::kNotice).front();
  for (uint32_t i = 0; i < std::min(world_size(), looks) && !slot.posted; ++i) {
    next_ = (next_ + 1) % world_size();
    if (next_ == rank_ || !api_->probe(members_[next_], tag(Lane::kNotice))) continue;
    if (slot.buffer == nullptr) slot.buffer = std::make_unique<char[]>(sizeof(Notice));
    api_->irecv(slot.buffer.get(), 1, sizeof(Notice), members_[next_], tag(Lane::kNotice),
                slot.request);
    slot.posted = true;
  }
  if (!slot.posted) return false;
  bool complete = false;  // it has come, or begun to: so this is a matter of moments
  for (uint32_t i = 0; i < kNoticeTests && !complete; ++i) complete = api_->test(slot.request);
  if (!complete) return false;
  slot.posted = false;
  std::memcpy(&notice, slot.buffer.get(), sizeof(Notice));
  notice.text[sizeof(notice.text) - 1] = '\0';
  notice.src = next_;
  if (const char* why = wrong_ranks(notice, world_size())) reject(next_, why);
  return true;
}

}  // namespace pycoll
