#include "p2p/mailbox.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <sstream>

#include "kernels/fold/fold.h"
#include "memory/board.h"

namespace pycoll {

namespace {
constexpr uint32_t kFragments = 4;         // per ring
constexpr uint64_t kMostRead = 256 << 20;  // bytes that one offer is for: then others have a turn

// What a fragment is, and the state of an offer: its reader sets it, or the sender that withdraws.
enum State : uint32_t { kHere, kOffered, kRead, kRefused, kWithdrawn };

// Messages whose sizes have the same highest bit go the same way.
uint64_t size_bit(uint64_t nbytes) { return std::bit_floor(nbytes); }

// So many bytes of a message have left.
void advance(Mailboxes::SendRequest& message, uint64_t nbytes) {
  message.offset += nbytes;
  message.sent = message.offset == message.nbytes;
}

}  // namespace

struct Mailboxes::Fragment {
  uint64_t message_bytes;
  uint32_t tag;
  uint32_t type;
  uint32_t nbytes;
  std::atomic<uint32_t> state;
  char data[];  // of an offer: the address
};

// `sent` and `taken` count fragments and wrap; 0 <= sent - taken <= kFragments. `wanted`: of which
// sizes the receiver wants offers, a bit each (size_bit).
struct Mailboxes::Ring {
  alignas(64) std::atomic<uint32_t> sent;
  alignas(64) std::atomic<uint32_t> taken;
  std::atomic<uint64_t> wanted;
  alignas(64) char fragments[];
};

Mailboxes::Mailboxes(std::shared_ptr<Engine> engine, Offers offers)
    : engine_(std::move(engine)),
      control_(engine_->control()),
      rank_(engine_->rank()),
      world_size_(engine_->world_size()),
      offers_(world_size_, offers) {
  offers_[rank_] = Offers::kNever;
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

void Mailboxes::ring_doorbell(uint32_t rank) {
  control_.block(rank).doorbell.fetch_add(1, std::memory_order_seq_cst);
  pycoll::ring(control_.doorbell(rank));
}

bool Mailboxes::large(uint64_t nbytes) const {
  return nbytes > uint64_t{kFragments} * fragment_bytes_;
}

bool Mailboxes::offers(const SendRequest& message) const {
  const Offers offers = offers_[message.dst];
  if (offers == Offers::kNever || !large(message.nbytes)) return false;
  const uint64_t wanted = ring(rank_, message.dst).wanted.load(std::memory_order_relaxed);
  return offers == Offers::kAlways || (wanted & size_bit(message.nbytes)) != 0;
}

void Mailboxes::push(SendRequest& message) {
  Ring& out = ring(rank_, message.dst);
  while (!message.sent) {
    if (message.offered && !is_answered(message)) return;
    if (message.sent) return;
    const uint32_t index = out.sent.load(std::memory_order_relaxed);
    if (index - out.taken.load(std::memory_order_acquire) >= kFragments) return;
    Fragment& part = fragment(out, index);
    part.message_bytes = message.nbytes;
    part.tag = message.tag;
    part.type = message.type;
    const uint64_t rest = message.nbytes - message.offset;
    const char* const data = message.data + message.offset;
    if (message.offset == 0) message.single_copy = offers(message);
    message.offered = message.single_copy;
    message.index = index;
    part.nbytes = static_cast<uint32_t>(
        std::min<uint64_t>(message.offered ? kMostRead : fragment_bytes_, rest));
    part.state.store(message.offered ? kOffered : kHere, std::memory_order_relaxed);
    if (message.offered) {
      std::memcpy(part.data, &data, sizeof(data));
    } else {
      copy(part.data, data, part.nbytes);
      advance(message, part.nbytes);
    }
    out.sent.store(index + 1, std::memory_order_release);
    ring_doorbell(message.dst);
  }
}

// Looks what has become of an offer; false if nothing yet.
bool Mailboxes::is_answered(SendRequest& message) {
  Ring& out = ring(rank_, message.dst);
  const uint32_t taken = out.taken.load(std::memory_order_acquire);
  if (static_cast<int32_t>(taken - message.index) <= 0) return false;
  const Fragment& part = fragment(out, message.index);
  message.offered = false;
  if (part.state.load(std::memory_order_relaxed) != kRead) {
    offers_[message.dst] = Offers::kNever;
    message.single_copy = false;
    return true;
  }
  advance(message, part.nbytes);
  return true;
}

bool Mailboxes::withdraw(SendRequest& message) {
  if (!message.offered) return message.sent;
  message.offered = false;
  Fragment& part = fragment(ring(rank_, message.dst), message.index);
  uint32_t state = kOffered;
  part.state.compare_exchange_strong(state, kWithdrawn, std::memory_order_acq_rel);
  if (state == kRead) advance(message, part.nbytes);
  return message.sent;
}

std::optional<uint32_t> Mailboxes::collect(const RecvRequest& request) {
  Message* found = find(request);
  if (found == nullptr || found->received != found->nbytes) return std::nullopt;
  const MessageKind expected{request.nbytes, request.type}, sent{found->nbytes, found->type};
  if (sent != expected) throw_mismatch(rank_, request.tag, expected, found->src, sent);
  if (found->own != nullptr) copy(request.data, found->own.get(), request.nbytes);
  const uint32_t sender = found->src;
  arrived_.erase(arrived_.begin() + (found - arrived_.data()));
  return sender;
}

bool Mailboxes::drain(std::span<const RecvRequest> requests) {
  if (lost_) return false;
  bool any = false;
  for (uint32_t src = 0; src < world_size_; ++src) {
    Ring& in = ring(src, rank_);
    while (in.sent.load(std::memory_order_acquire) != in.taken.load(std::memory_order_relaxed)) {
      take(src, requests);
      any = true;
    }
  }
  return any;
}

// Takes one fragment.
void Mailboxes::take(uint32_t src, std::span<const RecvRequest> requests) {
  Ring& in = ring(src, rank_);
  const uint32_t index = in.taken.load(std::memory_order_relaxed);
  Fragment& part = fragment(in, index);
  const auto open = std::find_if(arrived_.rbegin(), arrived_.rend(), [&](const Message& m) {
    return m.src == src && m.received < m.nbytes;
  });
  Message* message = open == arrived_.rend() ? nullptr : &*open;
  if (message == nullptr) {
    char* data = destination(src, part, requests);
    std::unique_ptr<char[]> own;
    if (data == nullptr && !(own = allocate(part.message_bytes))) {
      throw_error("TransportError", fail_without_memory(src, part.message_bytes));
    }
    if (data == nullptr) data = own.get();
    const bool offered = part.state.load(std::memory_order_relaxed) != kHere;
    const uint64_t now = large(part.message_bytes) ? now_ns() : 0;
    arrived_.push_back(
        {src, part.tag, part.type, part.message_bytes, 0, std::move(own), data, offered, now});
    message = &arrived_.back();
  }
  if (part.state.load(std::memory_order_relaxed) != kHere) {
    read_offer(part, *message);
  } else {
    copy(message->data + message->received, part.data, part.nbytes);
    message->received += part.nbytes;
    if (message->received == message->nbytes) choose(in, *message);
  }
  in.taken.store(index + 1, std::memory_order_release);
  ring_doorbell(src);
}

// Copies what a fragment offers out of the memory of the sender, or refuses. If the offer has been
// withdrawn meanwhile, there is no such message any more.
void Mailboxes::read_offer(Fragment& part, Message& message) {
  const int32_t pid = control_.block(message.src).pid.load(std::memory_order_relaxed);
  const char* data = nullptr;
  std::memcpy(&data, part.data, sizeof(data));
  // It was the sender's memory, not that of a process that reuses its pid, if the sender still
  // lives.
  const bool read = read_process(pid, message.data + message.received, data, part.nbytes) &&
                    PeerMemory::reaches(control_, message.src);
  uint32_t offered = kOffered;
  const bool lasts = part.state.compare_exchange_strong(offered, read ? kRead : kRefused,
                                                        std::memory_order_acq_rel);
  message.single_copy = read;
  if (lasts && read) message.received += part.nbytes;
  if (lasts && message.received == message.nbytes) choose(ring(message.src, rank_), message);
  if (!lasts) arrived_.erase(arrived_.begin() + (&message - arrived_.data()));
}

// A message is complete: chooses how its sender is to send the next one of its size.
void Mailboxes::choose(Ring& in, const Message& message) {
  if (!large(message.nbytes) || message.own != nullptr) return;
  CopyChoice& choice = choices_[{message.src, size_bit(message.nbytes)}];
  if (message.single_copy == choice.reads()) {  // not begun before the sender knew
    uint64_t ns = now_ns() - message.begins_ns;
    // What its first fragment took was over when it was seen.
    if (!message.single_copy) ns += ns * fragment_bytes_ / (message.nbytes - fragment_bytes_);
    // As if it were of the least of those sizes that go the same way.
    const double share = static_cast<double>(size_bit(message.nbytes)) / message.nbytes;
    choice.begin(true);
    choice.end(static_cast<uint64_t>(static_cast<double>(ns) * share));
  }
  const uint64_t others = in.wanted.load(std::memory_order_relaxed) & ~size_bit(message.nbytes);
  in.wanted.store(others | (choice.reads() ? size_bit(message.nbytes) : 0),
                  std::memory_order_relaxed);
}

// Where a new message can go at once: to the user's array of the first call that waits for
// its source and tag, if it fits, and if no older message is for that call. Null otherwise.
char* Mailboxes::destination(uint32_t src, const Fragment& part,
                             std::span<const RecvRequest> requests) {
  for (const RecvRequest& w : requests) {
    const bool matches = part.tag == w.tag && (w.src < 0 || static_cast<uint32_t>(w.src) == src);
    if (!matches) continue;
    const bool fits = part.type == w.type && part.message_bytes == w.nbytes;
    return fits && find(w) == nullptr ? w.data : nullptr;
  }
  return nullptr;
}

Mailboxes::Message* Mailboxes::find(const RecvRequest& request) {
  for (Message& m : arrived_) {
    const bool from = request.src < 0 || static_cast<uint32_t>(request.src) == m.src;
    if (from && m.tag == request.tag) return &m;
  }
  return nullptr;
}

std::optional<Mailboxes::Envelope> Mailboxes::peek(int32_t src, int64_t tag,
                                                   std::span<const RecvRequest> requests) {
  for (const Message& m : arrived_) {
    if (src >= 0 && static_cast<uint32_t>(src) != m.src) continue;
    if (tag >= 0 && tag != m.tag) continue;
    const auto gets_it = [&](const RecvRequest& request) { return find(request) == &m; };
    if (m.own == nullptr || std::any_of(requests.begin(), requests.end(), gets_it)) continue;
    return Envelope{m.src, m.tag, m.type, m.nbytes};
  }
  return std::nullopt;
}

// Memory of our own for a message, or null. Limits of address space are usual on clusters.
std::unique_ptr<char[]> Mailboxes::allocate(uint64_t nbytes) {
  return std::unique_ptr<char[]>(new (std::nothrow) char[std::max<uint64_t>(1, nbytes)]);
}

// A message cannot be kept, nor can what comes behind it: the communicator has failed. Returns why.
std::string Mailboxes::fail_without_memory(uint32_t src, uint64_t nbytes) {
  lost_ = true;
  std::ostringstream text;
  text << "rank " << rank_ << " has no memory for a message of " << nbytes << " bytes from rank "
       << src << " that no call there waits for";
  try {
    engine_->abort(text.str());
  } catch (const Error&) {  // it has been closed
  }
  return text.str() + '.';
}

void Mailboxes::keep_copies() {
  for (Message& m : arrived_) {
    if (m.own != nullptr) continue;
    m.own = allocate(m.nbytes);
    if (m.own == nullptr) {
      fail_without_memory(m.src, m.nbytes);
      break;
    }
    copy(m.own.get(), m.data, m.received);
    m.data = m.own.get();
  }
  std::erase_if(arrived_, [](const Message& m) { return m.own == nullptr; });
}

}  // namespace pycoll
