#include "transports/messages/message_postbox.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/erase_done.h"
#include "engine/fault.h"
#include "kernels/fold/fold.h"

namespace pycoll {
namespace {

constexpr int kLooksForNotice = 3;

// Calls f(offset, bytes) for every part that one message of the transport can carry.
template <typename F>
void each_part(uint64_t nbytes, F&& f) {
  for (uint64_t at = 0; at < nbytes; at += Transport::kMostBytes) {
    f(at, std::min(nbytes - at, Transport::kMostBytes));
  }
}

}  // namespace

MessagePostbox::~MessagePostbox() {
  close();
  bool over = false;
  try {
    std::vector<Request> receives;
    for (const Message& m : arrived_) {
      receives.insert(receives.end(), m.requests.begin(), m.requests.end());
    }
    if (!receives.empty()) engine_->link().cancel_receives(receives);
    over = receives.empty();
  } catch (const std::exception&) {  // no memory, or the transport no longer answers
  }
  for (Message& m : arrived_) {
    if (!over && !m.requests.empty()) m.own.release();  // it may still be written to
  }
}

// Sends a message; the memory must stay until the requests returned are done.
std::vector<Request> MessagePostbox::post(const Item& item, const void* data) {
  MessageLink& link = engine_->link();
  const auto dst = static_cast<uint32_t>(item.peer);
  const uint64_t nbytes = item.nbytes;
  const bool rendezvous = nbytes > kEagerBytes;
  std::vector<Request> parts;
  if (dst == link.rank()) {
    Message message{dst, item.tag, item.type, nbytes};
    message.own = std::make_unique<char[]>(std::max<uint64_t>(1, nbytes));
    copy(message.own.get(), data, nbytes);
    arrived_.push_back(std::move(message));
    return parts;
  }
  engine_->attempt([&] {
    char* room = link.open_eager();
    if (!rendezvous && nbytes > 0) std::memcpy(room, data, nbytes);
    const EagerHeader header{0, uint64_t{item.tag} << 32 | item.type, nbytes, 0,
                             rendezvous ? 0 : static_cast<uint32_t>(nbytes)};
    link.send_eager(Lane::kMail, dst, header);
    const auto* bytes = static_cast<const char*>(data);
    each_part(rendezvous ? nbytes : 0, [&](uint64_t at, uint64_t part) {
      link.isend(bytes + at, part, dst, static_cast<int>(Lane::kMailPayload), parts.emplace_back());
    });
  });
  return parts;
}

// Moves the first message that matches to its array if it is there, and returns the sender. Claims
// it if it is still to come: a recv that was posted later is to get another one.
std::optional<uint32_t> MessagePostbox::collect(const Item& item) {
  const auto found = find(item.peer, item.tag, false);
  if (found == arrived_.end()) return std::nullopt;
  const MessageKind expected{item.nbytes, item.type}, sent{found->nbytes, found->type};
  if (sent != expected) {
    throw_mismatch(engine_->link().rank(), item.tag, expected, found->src, sent);
  }
  if (!found->complete) {
    found->claimed = true;
    return std::nullopt;
  }
  // Whoever gave up sending may have changed the payload that was under way, and has said before
  // that it gives up. Some MPI show what has come only at the second look or the third.
  for (int i = 0; item.nbytes > kEagerBytes && i < kLooksForNotice; ++i) engine_->poll();
  copy(item.data, found->own.get(), item.nbytes);
  const uint32_t sender = found->src;
  arrived_.erase(found);
  return sender;
}

// Receives every eager message that has arrived, and payload in the order of its announcements.
void MessagePostbox::drain() {
  engine_->attempt([&] { receive_all(); });
}

void MessagePostbox::receive_all() {
  MessageLink& link = engine_->link();
  for (uint32_t peer = 0; peer < link.world_size(); ++peer) {
    if (peer == link.rank()) continue;
    while (const EagerHeader* header = link.receive_eager(Lane::kMail, peer)) {
      Message message{peer, static_cast<uint32_t>(header->descriptor >> 32),
                      static_cast<uint32_t>(header->descriptor), header->count,
                      header->count <= kEagerBytes};
      if (message.complete) {
        message.own = std::make_unique<char[]>(std::max<uint64_t>(1, header->count));
        std::memcpy(message.own.get(), header->data(), header->nbytes);
      }
      link.release(Lane::kMail, peer);
      coming_ += message.complete ? 0 : 1;
      arrived_.push_back(std::move(message));
    }
  }
  if (coming_ == 0) return;                   // of many that wait none has to be looked at
  std::vector<bool> busy(link.world_size());  // ranks whose payload is on its way
  for (Message& m : arrived_) {
    if (m.complete || busy[m.src]) continue;
    receive_payload(m);
    busy[m.src] = !m.complete;
    coming_ -= m.complete ? 1 : 0;
  }
}

void MessagePostbox::receive_payload(Message& message) {
  MessageLink& link = engine_->link();
  if (message.own == nullptr) {
    try {
      message.own = std::make_unique_for_overwrite<char[]>(message.nbytes);
    } catch (const std::bad_alloc&) {
      link.reject(message.src, "a message of " + std::to_string(message.nbytes) +
                                   " bytes, for which this rank has no memory");
    }
    each_part(message.nbytes, [&](uint64_t at, uint64_t part) {
      link.irecv(message.own.get() + at, part, part, message.src,
                 static_cast<int>(Lane::kMailPayload), message.requests.emplace_back());
    });
  }
  erase_done(message.requests, [&](Request& part) { return link.test(part); });
  message.complete = message.requests.empty();
  if (message.complete) message.claimed = false;
}

std::list<MessagePostbox::Message>::iterator MessagePostbox::find(int32_t src, uint32_t tag,
                                                                  bool also_claimed) {
  return std::find_if(arrived_.begin(), arrived_.end(), [&](const Message& m) {
    return m.tag == tag && (src < 0 || static_cast<uint32_t>(src) == m.src) &&
           (also_claimed || !m.claimed);
  });
}

// The oldest message that was announced and that no posted recv is to get, as the last `progress`
// has found; src < 0 and tag < 0: any.
std::optional<MessagePostbox::Envelope> MessagePostbox::peek(int32_t src, int64_t tag) {
  for (const Message& m : arrived_) {
    if (src >= 0 && static_cast<uint32_t>(src) != m.src) continue;
    if (tag >= 0 && tag != m.tag) continue;
    if (m.claimed) continue;
    return Envelope{m.src, m.tag, m.type, m.nbytes};
  }
  return std::nullopt;
}

MessagePostbox::Ticket MessagePostbox::send(const void* data, uint64_t nbytes, uint32_t type,
                                            uint32_t dst, uint32_t tag) {
  COLL_CHECK(!engine_->check(static_cast<int32_t>(dst), Pulse::kOnce), "PeerLeft",
             "send from rank ", engine_->link().rank(), " to rank ", dst,
             closed_text(static_cast<int32_t>(dst)));
  const std::lock_guard lock(engine_->mutex());
  drain();  // throws if a rank has died
  Item item{.nbytes = nbytes, .type = type, .peer = static_cast<int32_t>(dst), .tag = tag};
  item.parts = post(item, data);
  item.sender = engine_->link().rank();
  if (item.parts.empty()) return 0;  // it was copied
  items_.emplace(++newest_, std::move(item));
  return newest_;
}

MessagePostbox::Ticket MessagePostbox::recv(void* data, uint64_t nbytes, uint32_t type, int32_t src,
                                            uint32_t tag) {
  engine_->poll();
  const std::lock_guard lock(engine_->mutex());
  return expect(data, nbytes, type, src, tag);
}

// Posts a recv. The mutex is held.
MessagePostbox::Ticket MessagePostbox::expect(void* data, uint64_t nbytes, uint32_t type,
                                              int32_t src, uint32_t tag) {
  Item item{.data = data, .nbytes = nbytes, .type = type, .peer = src, .tag = tag};
  item.incoming = true;
  items_.emplace(++newest_, std::move(item));
  incoming_.push_back(newest_);
  progress();
  return newest_;
}

// Moves everything that can be moved. The mutex is held.
void MessagePostbox::progress() {
  drain();
  if (coming_ > 0) {
    for (Message& m : arrived_) m.claimed = false;
  }
  std::erase_if(incoming_, [&](Ticket ticket) {
    Item& item = items_.at(ticket);
    try {
      const std::optional<uint32_t> sender = collect(item);
      if (!sender) return false;
      item.sender = *sender;
    } catch (const Error&) {
      item.error = std::current_exception();
    }
    item.done = true;
    return true;
  });
  engine_->attempt([&] {
    for (auto& [ticket, item] : items_) {
      if (item.incoming || item.done) continue;
      erase_done(item.parts, [&](Request& part) { return engine_->link().test(part); });
      item.done = item.parts.empty();
    }
  });
}

bool MessagePostbox::done(Ticket ticket) {
  if (!engine_->at_home()) return false;  // messages are the parent's; so may be the mutex
  const std::lock_guard lock(engine_->mutex());
  const auto found = items_.find(ticket);
  if (found == items_.end() || found->second.done) return true;
  engine_->check_mpi();
  progress();
  return found->second.done;
}

bool MessagePostbox::forget(Ticket ticket) {
  const std::lock_guard lock(engine_->mutex());
  const bool expected = std::erase(incoming_, ticket) > 0;
  items_.erase(ticket);
  return expected;
}

uint32_t MessagePostbox::wait(Ticket ticket, double timeout_s) {
  COLL_CHECK(engine_->at_home(), "ForkedError", "message ", ticket,
             " belongs to the parent process");
  Deadline deadline(timeout_s);
  Item* item = nullptr;
  {
    const std::lock_guard lock(engine_->mutex());
    const auto found = items_.find(ticket);
    COLL_CHECK(found != items_.end(), "ArgumentError", "message ", ticket,
               " was waited for, or its communicator closed");
    item = &found->second;  // stays where it is while others come and go
    COLL_CHECK(!item->awaited, "ConcurrentUseError", "another thread waits for message ", ticket);
    if (!item->done) engine_->check_mpi();
    item->awaited = true;
  }
  struct Leave {
    MessagePostbox& box;
    Ticket ticket;
    ~Leave() {
      const std::lock_guard lock(box.engine_->mutex());
      const auto left = box.items_.find(ticket);
      if (left != box.items_.end()) left->second.awaited = false;
    }
  } leave{*this, ticket};
  const auto arrived = [&] {
    const std::lock_guard lock(engine_->mutex());
    progress();
    return item->done;
  };
  bool finished = false;
  MessageNote note(engine_->shown_block());
  const MessageWay way = item->incoming ? MessageWay::kRecv : MessageWay::kSend;
  try {
    finished = wait_until(engine_->policy(), engine_->bell(), arrived, [&](Pulse pulse) {
      if (pulse == Pulse::kSlice) note.waits(way, item->peer, item->tag);
      const bool closed = engine_->check(item->peer, pulse);
      const std::lock_guard lock(engine_->mutex());
      // It still arrives if its sender has closed.
      const bool coming = item->incoming && find(item->peer, item->tag, true) != arrived_.end();
      return (closed && !coming) || deadline.passes();
    });
  } catch (const Error&) {  // whoever hears of it may change or free the memory
    const std::lock_guard lock(engine_->mutex());
    incoming_.clear();
    throw;
  }
  if (!finished) {
    COLL_CHECK(deadline.passed(), "PeerLeft", describe(*item), closed_text(item->peer));
    if (item->incoming) {
      throw_nothing_came(engine_->link().rank(), item->peer, item->tag, timeout_s);
    }
    throw_error("CollTimeout", describe(*item), ": rank ", item->peer,
                " has not received it within ", timeout_s, " s");
  }
  const std::lock_guard lock(engine_->mutex());
  const std::exception_ptr error = item->error;
  const uint32_t sender = item->sender;
  items_.erase(ticket);
  if (error != nullptr) std::rethrow_exception(error);
  return sender;
}

void MessagePostbox::send(const void* data, uint64_t nbytes, uint32_t type, uint32_t dst,
                          uint32_t tag, double timeout_s) {
  const Ticket ticket = send(data, nbytes, type, dst, tag);
  if (ticket != 0) finish_send(ticket, timeout_s);
}

void MessagePostbox::finish_send(Ticket ticket, double timeout_s) {
  std::string text;
  try {
    wait(ticket, timeout_s);
    return;
  } catch (const Error& error) {
    ++given_up_;
    if (std::strcmp(error.kind(), "CollTimeout") != 0 || engine_->failed()) throw;
    text = error.what();
  }
  engine_->abort("a send was not received in time");
  throw_error("CollTimeout", text, ". The communicator was aborted");
}

uint32_t MessagePostbox::recv(void* data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag,
                              double timeout_s) {
  return wait_or_forget(recv(data, nbytes, type, src, tag), timeout_s);
}

uint32_t MessagePostbox::wait_or_forget(Ticket ticket, double timeout_s) {
  try {
    return wait(ticket, timeout_s);
  } catch (const Error&) {
    forget(ticket);
    throw;
  }
}

std::optional<uint32_t> MessagePostbox::take_found(const Envelope& found, void* data,
                                                   uint64_t nbytes, uint32_t type,
                                                   double timeout_s) {
  const auto src = static_cast<int32_t>(found.src);
  Ticket ticket = 0;
  {
    const std::lock_guard lock(engine_->mutex());
    const std::optional<Envelope> first = peek(src, found.tag);
    if (!first || first->nbytes != found.nbytes) return {};
    ticket = expect(data, nbytes, type, src, found.tag);
  }
  return wait_or_forget(ticket, timeout_s);
}

std::optional<MessagePostbox::Envelope> MessagePostbox::probe(int32_t src, int64_t tag,
                                                              double timeout_s) {
  engine_->poll();
  Deadline deadline(timeout_s);
  std::optional<Envelope> found;
  const auto arrived = [&] {
    const std::lock_guard lock(engine_->mutex());
    progress();
    found = peek(src, tag);
    return found.has_value();
  };
  wait_until(engine_->policy(), engine_->bell(), arrived,
             [&](Pulse pulse) { return engine_->check(src, pulse) || deadline.passes(); });
  COLL_CHECK(found || deadline.passed(), "PeerLeft", "probe on rank ", engine_->link().rank(),
             " for ", rank_name(src), closed_text(src));
  return found;
}

std::string MessagePostbox::describe(const Item& item) const {
  return message_text(item.incoming, engine_->link().rank(), item.peer, item.tag, item.nbytes);
}

// What is still being sent may refer to memory of the user: the transport is closed after this.
void MessagePostbox::close() {
  if (!engine_->at_home()) return;  // a thread of the parent may hold the mutex for ever
  const std::lock_guard lock(engine_->mutex());
  incoming_.clear();
}

}  // namespace pycoll
