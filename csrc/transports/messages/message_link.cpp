#include "transports/messages/message_link.h"

#include <algorithm>
#include <cstring>

#include "base/erase_done.h"
#include "base/error.h"

namespace pycoll {
namespace {

constexpr uint64_t kBuffer = sizeof(Head) + kPacketBytes;
constexpr uint32_t kPatience = 200;  // tests of a notice that has begun to come
constexpr uint64_t kWithdrawNs = 20'000'000;

}  // namespace

MpiLink::MpiLink(std::shared_ptr<MpiApi> api, MpiHandle comm, std::vector<int> members,
                 uint32_t rank, uint32_t context)
    : api_(std::move(api)),
      comm_(comm),
      members_(std::move(members)),
      rank_(rank),
      context_(context),
      packets_(members_.size()),
      agreements_(members_.size()),
      mails_(members_.size()) {
  COLL_CHECK(static_cast<int64_t>(context) * kLanes + kLanes <= api_->facts().tag_ub,
             "TransportError", "communicator number ", context,
             " needs a greater tag than this MPI has (", api_->facts().tag_ub, ")");
}

MpiLink::~MpiLink() {
  std::vector<MpiRequest> open;
  for (std::vector<Inbox>* inboxes : {&packets_, &agreements_, &mails_}) {
    for (Inbox& inbox : *inboxes) {
      if (inbox.posted && !inbox.complete) open.push_back(inbox.request);
    }
  }
  if (notice_.posted) open.push_back(notice_.request);
  try {
    withdraw(open);
  } catch (const Error&) {
    open.resize(1);  // MPI no longer answers; keep the memory it may write to
  }
  const bool answers = fork_guard_.at_home() && !api_->ended();
  for (Parcel& p : parcels_) {
    try {
      if (answers && left(p)) continue;
    } catch (const Error&) {  // likewise
    }
    if (p.busy) p.buffer.release();  // nobody takes it any more, but MPI may still look at it
  }
  if (open.empty()) return;
  for (std::vector<Inbox>* inboxes : {&packets_, &agreements_, &mails_}) {
    for (Inbox& inbox : *inboxes) inbox.buffer.release();
  }
  notice_.buffer.release();
}

void MpiLink::withdraw(std::vector<MpiRequest>& receives) {
  if (!fork_guard_.at_home()) return;   // the requests, and what comes for them, are the parent's
  if (api_->ended()) receives.clear();  // with MPI all of them have ended
  for (MpiRequest& request : receives) api_->cancel(request);
  const uint64_t until = now_ns() + kWithdrawNs;
  wait_until(
      WaitPolicy{.spins = 100, .yield_us = 1000}, Bell{},
      [&] {
        erase_done(receives, [&](MpiRequest& request) { return api_->test(request); });
        return receives.empty();
      },
      [&](Pulse) { return now_ns() >= until; });
}

MpiLink::Parcel& MpiLink::parcel(uint64_t capacity, bool notice) {
  const auto free = [&](Parcel& p) {
    try {
      return left(p);
    } catch (const Error&) {  // what was for the dead must not keep a notice from the living
      if (!notice) throw;
      return true;
    }
  };
  // Some may wait long for their receivers: these are asked only if no other is free.
  for (const bool ask : {false, true}) {
    for (Parcel& p : parcels_) {
      if (p.capacity < capacity || (ask ? !free(p) : p.busy)) continue;
      open_ = static_cast<size_t>(&p - parcels_.data());
      return p;
    }
  }
  open_ = parcels_.size();
  parcels_.push_back({.buffer = std::make_unique<char[]>(capacity), .capacity = capacity});
  return parcels_.back();
}

// Whether a parcel has left its buffer, or never will.
bool MpiLink::left(Parcel& parcel) {
  try {
    if (parcel.busy && api_->test(parcel.request)) parcel.busy = false;
  } catch (const Error&) {
    parcel.busy = false;
    if (parcel.lane != Lane::kControl) throw;  // the dead need no notice
  }
  return !parcel.busy;
}

char* MpiLink::open_packet() { return parcel(kBuffer).buffer.get() + sizeof(Head); }

void MpiLink::send_packet(Lane lane, uint32_t peer, const Head& head) {
  Parcel& p = parcels_[open_];
  std::memcpy(p.buffer.get(), &head, sizeof(head));
  api_->isend(p.buffer.get(), sizeof(head) + head.nbytes, members_[peer],
              tag(static_cast<int>(lane)), comm_, p.request);
  p.lane = lane;
  p.seq = head.seq;
  p.busy = !api_->test(p.request);
}

const Head* MpiLink::poll(Inbox& inbox, uint32_t peer, Lane lane) {
  if (!inbox.posted) {
    const uint64_t room = lane == Lane::kAgree ? sizeof(Head) : kBuffer;
    if (inbox.buffer == nullptr) inbox.buffer = std::make_unique_for_overwrite<char[]>(room);
    api_->irecv(inbox.buffer.get(), room, members_[peer], tag(static_cast<int>(lane)), comm_,
                inbox.request);
    inbox.posted = true;
    inbox.complete = false;
  }
  if (!inbox.complete) inbox.complete = api_->test(inbox.request);
  return inbox.complete ? reinterpret_cast<const Head*>(inbox.buffer.get()) : nullptr;
}

const Head* MpiLink::packet(Lane lane, uint32_t peer) {
  return poll(lane == Lane::kAgree ? agreements_[peer] : packets_[peer], peer, lane);
}

const Head* MpiLink::packet_of_any() {
  for (uint32_t i = 0; i < world_size(); ++i) {
    next_ = (next_ + 1) % world_size();
    if (next_ == rank_) continue;
    if (const Head* found = poll(mails_[next_], next_, Lane::kMail)) return found;
  }
  return nullptr;
}

void MpiLink::drop(const Head* head) {
  for (Inbox* inbox : {&packets_[head->src], &agreements_[head->src], &mails_[head->src]}) {
    if (reinterpret_cast<const Head*>(inbox->buffer.get()) == head) inbox->posted = false;
  }
}

template <typename F>
bool MpiLink::all_left(F&& matters) {
  bool all = true;
  for (Parcel& p : parcels_) {
    if (p.busy && matters(p) && !left(p)) all = false;
  }
  return all;
}

bool MpiLink::flushed(uint64_t seq) {
  return all_left([&](const Parcel& p) {
    return p.seq == seq && (p.lane == Lane::kPacket || p.lane == Lane::kAgree);
  });
}

bool MpiLink::told(bool mail) {
  return all_left(
      [&](const Parcel& p) { return p.lane == Lane::kControl || (mail && p.lane == Lane::kMail); });
}

void MpiLink::drop_before(uint64_t seq) {
  for (const Lane lane : {Lane::kPacket, Lane::kAgree}) {
    std::vector<Inbox>& inboxes = lane == Lane::kAgree ? agreements_ : packets_;
    for (uint32_t peer = 0; peer < world_size(); ++peer) {
      if (peer == rank_) continue;
      Inbox& inbox = inboxes[peer];
      for (;;) {  // a receive is not posted for nothing: it takes a buffer
        const int wanted = tag(static_cast<int>(lane));
        if (!inbox.posted && !api_->probe(members_[peer], wanted, comm_)) break;
        const Head* found = poll(inbox, peer, lane);
        if (found == nullptr || found->seq >= seq) break;
        inbox.posted = false;
      }
    }
  }
}

void MpiLink::isend(const void* data, uint64_t nbytes, uint32_t peer, int lane, MpiRequest& req) {
  api_->isend(data, nbytes, members_[peer], tag(lane), comm_, req);
}

void MpiLink::irecv(void* data, uint64_t nbytes, uint32_t peer, int lane, MpiRequest& req) {
  api_->irecv(data, nbytes, members_[peer], tag(lane), comm_, req);
}

void MpiLink::send_notice(uint32_t peer, const void* data, uint64_t nbytes) {
  Parcel& p = parcel(kNoticeBytes, true);
  std::memcpy(p.buffer.get(), data, nbytes);
  api_->isend(p.buffer.get(), nbytes, members_[peer], tag(static_cast<int>(Lane::kControl)), comm_,
              p.request);
  p.lane = Lane::kControl;
  p.busy = true;
}

int32_t MpiLink::find_dead() {
  for (uint32_t peer = 0; peer < world_size(); ++peer) {
    try {
      if (peer != rank_) {
        api_->probe(members_[peer], tag(static_cast<int>(Lane::kControl)), comm_);
      }
    } catch (const Error&) {
      return static_cast<int32_t>(peer);
    }
  }
  return -1;
}

bool MpiLink::take_notice(void* data, uint64_t nbytes, uint32_t looks) {
  const int control = tag(static_cast<int>(Lane::kControl));
  for (uint32_t i = 0; i < std::min(world_size(), looks) && !notice_.posted; ++i) {
    next_ = (next_ + 1) % world_size();
    if (next_ == rank_ || !api_->probe(members_[next_], control, comm_)) continue;
    if (notice_.buffer == nullptr) notice_.buffer = std::make_unique<char[]>(kNoticeBytes);
    api_->irecv(notice_.buffer.get(), kNoticeBytes, members_[next_], control, comm_,
                notice_.request);
    notice_.posted = true;
  }
  if (!notice_.posted) return false;
  bool complete = false;  // it has come, or begun to: so this is a matter of moments
  for (uint32_t i = 0; i < kPatience && !complete; ++i) complete = api_->test(notice_.request);
  if (!complete) return false;
  notice_.posted = false;
  std::memcpy(data, notice_.buffer.get(), std::min(nbytes, kNoticeBytes));
  return true;
}

}  // namespace pycoll
