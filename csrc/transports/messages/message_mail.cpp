#include "transports/messages/message_mail.h"

#include <algorithm>
#include <cstring>

#include "base/erase_done.h"
#include "engine/fault.h"
#include "kernels/fold/fold.h"

namespace pycoll {

// Calls f(offset, bytes) for every part that one MPI message can carry.
template <typename F>
bool MpiMail::each_part(uint64_t nbytes, F&& f) {
  for (uint64_t at = 0; at < nbytes; at += MpiApi::kMostBytes) {
    f(at, std::min(nbytes - at, MpiApi::kMostBytes));
  }
  return true;
}

MpiMail::~MpiMail() {
  std::vector<MpiRequest> receives;
  for (const Message& m : arrived_) {
    receives.insert(receives.end(), m.under_way.begin(), m.under_way.end());
  }
  if (receives.empty()) return;
  bool over = false;
  try {
    engine_->link().withdraw(receives);
    over = receives.empty();
  } catch (const Error&) {  // MPI no longer answers
  }
  for (Message& m : arrived_) {
    if (!over && !m.under_way.empty()) m.own.release();  // it may still be written to
  }
}

std::vector<MpiRequest> MpiMail::post(const void* data, uint64_t nbytes, uint32_t type,
                                      uint32_t dst, uint32_t tag) {
  MpiLink& link = engine_->link();
  const bool bulk = nbytes > kPacketBytes;
  std::vector<MpiRequest> parts;
  if (dst == link.rank()) {
    Message message{dst, tag, type, nbytes, false, true};
    message.own = std::make_unique<char[]>(std::max<uint64_t>(1, nbytes));
    copy(message.own.get(), data, nbytes);
    arrived_.push_back(std::move(message));
    return parts;
  }
  char* room = link.open_packet();
  if (!bulk && nbytes > 0) std::memcpy(room, data, nbytes);
  const Head head{0,      uint64_t{tag} << 32 | type,
                  nbytes, static_cast<uint16_t>(link.rank()),
                  0,      bulk ? 0 : static_cast<uint32_t>(nbytes)};
  link.send_packet(Lane::kMail, dst, head);
  const auto* bytes = static_cast<const char*>(data);
  each_part(bulk ? nbytes : 0, [&](uint64_t at, uint64_t part) {
    link.isend(bytes + at, part, dst, static_cast<int>(Lane::kBulkMail), parts.emplace_back());
  });
  return parts;
}

void MpiMail::send(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst, uint32_t tag,
                   double timeout_s) {
  MpiEngine& engine = *engine_;
  const Use use(user_, engine.link().rank());
  engine.poll();
  const uint64_t deadline = deadline_after(timeout_s);
  std::vector<MpiRequest> parts;
  struct Count {
    MpiMail& mail;
    const std::vector<MpiRequest>& parts;
    ~Count() { mail.given_up_ += parts.empty() ? 0 : 1; }
  } count{*this, parts};
  {
    const std::lock_guard lock(engine.mutex());
    parts = post(data, nbytes, type, dst, tag);
  }
  const bool sent = wait_until(
      engine.policy(), Bell{},
      [&] {
        const std::lock_guard lock(engine.mutex());
        erase_done(parts, [&](MpiRequest& part) { return engine.link().test(part); });
        return parts.empty();
      },
      [&](Pulse pulse) {
        {
          const std::lock_guard lock(engine.mutex());
          drain();
        }
        return engine.check(static_cast<int32_t>(dst), pulse) || now_ns() >= deadline;
      });
  if (sent) return;
  COLL_CHECK(now_ns() >= deadline, "PeerLeft", "send from rank ", engine.link().rank(), " to rank ",
             dst, closed_text(static_cast<int32_t>(dst)));
  engine.abort("a send timed out half way");
  throw_error("CollTimeout", "send from rank ", engine.link().rank(), " to rank ", dst, " (tag ",
              tag, ", ", nbytes, " bytes): rank ", dst, " has not received it within ", timeout_s,
              " s. The communicator was aborted");
}

uint32_t MpiMail::recv(void* data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag,
                       double timeout_s) {
  MpiEngine& engine = *engine_;
  const Use use(user_, engine.link().rank());
  engine.poll();
  const uint64_t deadline = deadline_after(timeout_s);
  Message* found = nullptr;
  const auto arrived = [&] {
    const std::lock_guard lock(engine.mutex());
    drain();
    found = find(src, tag);
    if (found == nullptr) return false;
    return found->complete || found->nbytes != nbytes || found->type != type;
  };
  const bool done = wait_until(engine.policy(), Bell{}, arrived, [&](Pulse pulse) {
    return (engine.check(src, pulse) && found == nullptr) || now_ns() >= deadline;
  });
  const uint32_t rank = engine.link().rank();
  COLL_CHECK(done || now_ns() >= deadline, "PeerLeft", "recv on rank ", rank, " from ",
             rank_name(src), closed_text(src));
  COLL_CHECK(done, "CollTimeout", "recv on rank ", rank, " (tag ", tag, "): nothing from ",
             rank_name(src), " within ", timeout_s, " s");
  const std::lock_guard lock(engine.mutex());
  return *collect(data, nbytes, type, src, tag);
}

std::optional<uint32_t> MpiMail::collect(void* data, uint64_t nbytes, uint32_t type, int32_t src,
                                         uint32_t tag) {
  const Message* found = find(src, tag);
  if (found == nullptr) return std::nullopt;
  if (found->nbytes != nbytes || found->type != type) {
    throw_error("MismatchError", "recv on rank ", engine_->link().rank(), " (tag ", tag,
                ") expects ", nbytes, " bytes of ", type_name(type), "; rank ", found->src,
                " sent ", found->nbytes, " bytes of ", type_name(found->type),
                ". The message is kept: receive it into a fitting array");
  }
  if (!found->complete) return std::nullopt;
  if (found->bulk) engine_->poll();  // whoever gave up sending may have changed what was under way
  copy(data, found->own.get(), nbytes);
  const uint32_t sender = found->src;
  arrived_.remove_if([&](const Message& m) { return &m == found; });
  return sender;
}

void MpiMail::drain() {
  MpiLink& link = engine_->link();
  while (const Head* head = link.packet_of_any()) {
    Message message{head->src, static_cast<uint32_t>(head->descriptor >> 32),
                    static_cast<uint32_t>(head->descriptor), head->count,
                    head->count > kPacketBytes};
    if (!message.bulk) {
      message.own = std::make_unique<char[]>(std::max<uint64_t>(1, head->count));
      std::memcpy(message.own.get(), MpiLink::data(head), head->nbytes);
      message.complete = true;
    }
    link.drop(head);
    arrived_.push_back(std::move(message));
  }
  for (Message& m : arrived_) {
    if (m.bulk && !m.complete && first_bulk(m)) fetch(m);
  }
}

// Whether no other bare data of the same rank comes before.
bool MpiMail::first_bulk(const Message& message) const {
  for (const Message& m : arrived_) {
    if (&m == &message) return true;
    if (m.src == message.src && m.bulk && !m.complete) return false;
  }
  return true;
}

// Receives bare data.
void MpiMail::fetch(Message& message) {
  MpiLink& link = engine_->link();
  if (message.own == nullptr) {
    message.own = std::make_unique_for_overwrite<char[]>(message.nbytes);
    each_part(message.nbytes, [&](uint64_t at, uint64_t part) {
      link.irecv(message.own.get() + at, part, message.src, static_cast<int>(Lane::kBulkMail),
                 message.under_way.emplace_back());
    });
  }
  erase_done(message.under_way, [&](MpiRequest& part) { return link.test(part); });
  message.complete = message.under_way.empty();
}

MpiMail::Message* MpiMail::find(int32_t src, uint32_t tag) {
  for (Message& m : arrived_) {
    if ((src < 0 || static_cast<uint32_t>(src) == m.src) && m.tag == tag) return &m;
  }
  return nullptr;
}

}  // namespace pycoll
