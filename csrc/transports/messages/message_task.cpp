// How ranks come to know that they are in the same call.
#include "transports/messages/message_task.h"

#include <algorithm>

namespace pycoll {

MessageTask::MessageTask(MessageLink& link, const BoundCall& call, const void* in, void* out,
                         Turn turn)
    : link_(link),
      call_(call),
      in_(static_cast<char*>(const_cast<void*>(in))),
      out_(static_cast<char*>(out)),
      seq_(turn.seq),
      check_(turn.check),
      agreed_(turn.proven || (call.tiny && !call.agree) || link.world_size() == 1) {}

EagerHeader MessageTask::header(uint32_t nbytes) const {
  return {seq_, call_.descriptor, call_.count, check_, nbytes};
}

// Drops packets of calls that were given up. A peer that is ahead has refused a call whose notice
// has not come yet: its packet can wait.
const EagerHeader* MessageTask::receive(Lane lane, uint32_t peer) {
  const EagerHeader* found = link_.receive_eager(lane, peer);
  while (found != nullptr && found->seq < seq_) {
    link_.release(lane, peer);
    found = link_.receive_eager(lane, peer);
  }
  if (found == nullptr || found->seq > seq_) return nullptr;
  if (found->descriptor != call_.descriptor || found->count != call_.count ||
      found->check != check_) {
    throw Disagreement{peer, *found};
  }
  return found;
}

void MessageTask::send_agreement(uint32_t peer) {
  link_.open_eager();
  link_.send_eager(Lane::kAgreement, peer, header(0));
}

bool MessageTask::take_agreement(uint32_t peer) {
  if (receive(Lane::kAgreement, peer) == nullptr) {
    waiting_ = {static_cast<int32_t>(peer), kEntered};
    return false;
  }
  link_.release(Lane::kAgreement, peer);
  ++progress_;
  return true;
}

// Dissemination (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization",
// IJPP 17(1), 1988): whoever comes to its end has heard, by others, from everybody.
bool MessageTask::agree() {
  const std::vector<uint32_t>& team = call_.team;
  const uint32_t n = team.empty() ? link_.world_size() : static_cast<uint32_t>(team.size());
  const uint32_t place =
      static_cast<uint32_t>(std::find(team.begin(), team.end(), link_.rank()) - team.begin());
  const uint32_t rank = team.empty() ? link_.rank() : place;
  const auto member = [&](uint32_t i) { return team.empty() ? i % n : team[i % n]; };
  if (distance_ == 0 && n > 1) {
    distance_ = 1;
    send_agreement(member(rank + distance_));
  }
  while (distance_ < n && n > 1) {
    if (!take_agreement(member(rank + n - distance_))) return false;
    distance_ *= 2;
    if (distance_ < n) send_agreement(member(rank + distance_));
  }
  agreed_ = true;
  return true;
}

}  // namespace pycoll
