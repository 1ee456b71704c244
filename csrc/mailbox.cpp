#include "mailbox.h"

#include <algorithm>
#include <cstring>

namespace pycoll {

namespace {
constexpr uint32_t kFragments = 4;  // per ring
}  // namespace

struct Mailboxes::Fragment {
  uint64_t message_bytes;
  uint32_t tag;
  uint32_t type;
  uint32_t nbytes;
  uint32_t unused;
  char data[];
};

// `sent` and `taken` count fragments and wrap; 0 <= sent - taken <= kFragments.
struct Mailboxes::Ring {
  alignas(64) std::atomic<uint32_t> sent;
  alignas(64) std::atomic<uint32_t> taken;
  alignas(64) char fragments[];
};

class Mailboxes::Deadline {
 public:
  explicit Deadline(double timeout_s)
      : limit_ns_(now_ns() + static_cast<uint64_t>(std::min(timeout_s, 1e9) * 1e9)) {}
  bool passed() const { return now_ns() >= limit_ns_; }

 private:
  uint64_t limit_ns_;
};

Mailboxes::Mailboxes(std::shared_ptr<Engine> engine)
    : engine_(std::move(engine)),
      control_(engine_->control()),
      rank_(engine_->rank()),
      world_size_(engine_->world_size()),
      policy_(default_policy(world_size_)) {
  const uint64_t nbytes = control_.geometry().mailbox_bytes;
  COLL_CHECK(nbytes >= kMinBytes, "TransportError", "mailboxes have ", nbytes, " bytes; at least ",
             kMinBytes, " are needed");
  const uint64_t room = (nbytes - sizeof(Ring)) / kFragments / 64 * 64;
  fragment_bytes_ = static_cast<uint32_t>(room - sizeof(Fragment));
}

Mailboxes::Ring& Mailboxes::ring(uint32_t src, uint32_t dst) const {
  return *reinterpret_cast<Ring*>(control_.mailbox(src, dst));
}

Mailboxes::Fragment& Mailboxes::fragment(Ring& ring, uint32_t index) const {
  const uint64_t pitch = fragment_bytes_ + sizeof(Fragment);
  return *reinterpret_cast<Fragment*>(ring.fragments + (index % kFragments) * pitch);
}

void Mailboxes::knock(uint32_t rank) {
  control_.block(rank).doorbell.fetch_add(1, std::memory_order_seq_cst);
  pycoll::ring(control_.doorbell(rank));
}

void Mailboxes::send(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst, uint32_t tag,
                     double timeout_s) {
  const Use use(user_, rank_);
  engine_->check(-1, 0, Pulse::kSpin);
  Ring& out = ring(rank_, dst);
  const Deadline deadline(timeout_s);
  uint64_t offset = 0;
  do {
    const uint32_t index = out.sent.load(std::memory_order_relaxed);
    const auto room = [&] {
      drain(nullptr);
      return index - out.taken.load(std::memory_order_acquire) < kFragments;
    };
    const bool sent = wait_until(policy_, control_.doorbell(rank_), room, [&](Pulse pulse) {
      return engine_->check(static_cast<int32_t>(dst), 0, pulse) || deadline.passed();
    });
    if (!sent) {
      COLL_CHECK(deadline.passed(), "PeerLeft", "send from rank ", rank_, " to rank ", dst,
                 ": the peer has closed its communicator");
      engine_->abort("a send timed out half way");
      throw_error("CollTimeout", "send from rank ", rank_, " to rank ", dst, " (tag ", tag, ", ",
                  nbytes, " bytes): ", offset, " bytes taken within ", timeout_s, " s; rank ", dst,
                  " has not received it. The communicator was aborted");
    }
    Fragment& part = fragment(out, index);
    part.message_bytes = nbytes;
    part.tag = tag;
    part.type = type;
    part.nbytes = static_cast<uint32_t>(std::min<uint64_t>(fragment_bytes_, nbytes - offset));
    if (part.nbytes > 0) {
      std::memcpy(part.data, static_cast<const char*>(data) + offset, part.nbytes);
    }
    offset += part.nbytes;
    out.sent.store(index + 1, std::memory_order_release);
    knock(dst);
  } while (offset < nbytes);
}

uint32_t Mailboxes::recv(void* data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag,
                         double timeout_s) {
  const Use use(user_, rank_);
  const Wanted wanted{static_cast<char*>(data), nbytes, type, src, tag};
  const Deadline deadline(timeout_s);
  Message* found = nullptr;
  const auto arrived = [&] {
    drain(&wanted);
    found = find(wanted);
    return found != nullptr && found->received == found->nbytes;
  };
  try {
    const auto give_up = [&](Pulse pulse) {
      try {
        return engine_->check(src, 0, pulse) || deadline.passed();
      } catch (const Aborted& end) {
        const bool ended = end.cause() == Cause::kLost || end.cause() == Cause::kLeft;
        if (ended && arrived()) return true;
        throw;
      }
    };
    give_up(Pulse::kSpin);
    const bool done = wait_until(policy_, control_.doorbell(rank_), arrived, give_up);
    COLL_CHECK(done || deadline.passed(), "PeerLeft", "recv on rank ", rank_, " from rank ", src,
               ": the peer has closed its communicator");
    COLL_CHECK(done, "CollTimeout", "recv on rank ", rank_, " (tag ", tag, "): nothing from ",
               src < 0 ? "any rank" : "rank " + std::to_string(src), " within ", timeout_s, " s");
  } catch (...) {
    keep_copies();
    throw;
  }
  if (found->nbytes != nbytes || found->type != type) {
    throw_error("MismatchError", "recv on rank ", rank_, " (tag ", tag, ") expects ", nbytes,
                " bytes of type ", type, "; rank ", found->src, " sent ", found->nbytes,
                " bytes of type ", found->type,
                ". The message is kept: receive it into a fitting array");
  }
  if (found->own != nullptr && nbytes > 0) std::memcpy(data, found->own.get(), nbytes);
  const uint32_t sender = found->src;
  arrived_.erase(arrived_.begin() + (found - arrived_.data()));
  return sender;
}

// Takes every fragment that lies in this rank's mailboxes; returns whether there was one.
bool Mailboxes::drain(const Wanted* wanted) {
  bool any = false;
  for (uint32_t src = 0; src < world_size_; ++src) {
    Ring& in = ring(src, rank_);
    while (in.sent.load(std::memory_order_acquire) != in.taken.load(std::memory_order_relaxed)) {
      take(src, wanted);
      any = true;
    }
  }
  return any;
}

// Takes one fragment. The first one of a message that is being waited for, and fits, makes the
// message go straight to the user's array.
void Mailboxes::take(uint32_t src, const Wanted* wanted) {
  Ring& in = ring(src, rank_);
  const uint32_t index = in.taken.load(std::memory_order_relaxed);
  const Fragment& part = fragment(in, index);
  const auto open = std::find_if(arrived_.rbegin(), arrived_.rend(), [&](const Message& m) {
    return m.src == src && m.received < m.nbytes;
  });
  Message* message = open == arrived_.rend() ? nullptr : &*open;
  if (message == nullptr) {
    const bool fits = wanted != nullptr && part.tag == wanted->tag && part.type == wanted->type &&
                      part.message_bytes == wanted->nbytes &&
                      (wanted->src < 0 || static_cast<uint32_t>(wanted->src) == src) &&
                      find(*wanted) == nullptr;
    std::unique_ptr<char[]> own(fits ? nullptr
                                     : new char[std::max<uint64_t>(1, part.message_bytes)]);
    char* data = fits ? wanted->data : own.get();
    arrived_.push_back({src, part.tag, part.type, part.message_bytes, 0, std::move(own), data});
    message = &arrived_.back();
  }
  if (part.nbytes > 0) std::memcpy(message->data + message->received, part.data, part.nbytes);
  message->received += part.nbytes;
  in.taken.store(index + 1, std::memory_order_release);
  knock(src);
}

Mailboxes::Message* Mailboxes::find(const Wanted& wanted) {
  for (Message& m : arrived_) {
    const bool from = wanted.src < 0 || static_cast<uint32_t>(wanted.src) == m.src;
    if (from && m.tag == wanted.tag) return &m;
  }
  return nullptr;
}

// Moves what has landed in a user's array so far to memory of our own, because the caller gives up.
void Mailboxes::keep_copies() {
  for (Message& m : arrived_) {
    if (m.own != nullptr) continue;
    m.own.reset(new char[std::max<uint64_t>(1, m.nbytes)]);
    if (m.received > 0) std::memcpy(m.own.get(), m.data, m.received);
    m.data = m.own.get();
  }
}

}  // namespace pycoll
