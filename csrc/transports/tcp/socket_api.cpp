#include "transports/tcp/socket_api.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <new>
#include <utility>

#include "base/error.h"
#include "kernels/fold/fold.h"
#include "transports/messages/wire.h"

namespace pycoll {
namespace {

constexpr uint32_t kMagic = 0x70634D31;
constexpr int kGoodbye = -1;                 // instead of a tag
constexpr int kTurns = 16;                   // reads from one rank before others have a turn
constexpr uint64_t kReadBytes = 1 << 20;     // at a time
constexpr uint64_t kAnswerNs = 200'000'000;  // for the goodbyes of others

// Tag of the notices of the communicator to which a tag belongs.
int notices_of(int tag) { return tag - tag % kLanes + static_cast<int>(Lane::kNotice); }

}  // namespace

SocketApi::SocketApi(std::vector<int> sockets, std::vector<std::string> names)
    : Transport(INT_MAX, true), peers_(sockets.size()), pid_(getpid()) {
  for (size_t r = 0; r < sockets.size(); ++r) peers_[r].socket = sockets[r];
  try {
    open(names);
  } catch (...) {
    forget();
    throw;
  }
}

void SocketApi::open(const std::vector<std::string>& names) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  COLL_CHECK(epoll_ >= 0 && wake_ >= 0, "TransportError", "epoll: ", std::strerror(errno));
  epoll_event event{.events = EPOLLIN, .data = {.u64 = peers_.size()}};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
  for (size_t r = 0; r < peers_.size(); ++r) {
    Peer& p = peers_[r];
    p.name = names.at(r);
    if (p.socket < 0) continue;
    fcntl(p.socket, F_SETFL, fcntl(p.socket, F_GETFL) | O_NONBLOCK);
    event = {.events = EPOLLIN, .data = {.u64 = r}};
    COLL_CHECK(epoll_ctl(epoll_, EPOLL_CTL_ADD, p.socket, &event) == 0, "TransportError",
               "the connection to ", p.name, ": ", std::strerror(errno));
  }
  thread_ = std::thread([this] { serve(); });
}

void SocketApi::isend(const void* data, uint64_t nbytes, int dst, int tag, Request& req) {
  const std::lock_guard lock(mutex_);
  Peer& p = peer(dst);
  auto* operation = new Operation{.peer = dst, .receives = false};
  req = reinterpret_cast<Request>(operation);
  if (p.lost || p.socket < 0 || closing_) {
    operation->done = true;
    return;
  }
  p.queue.push_back({{tag, kMagic, nbytes}, static_cast<const char*>(data), 0, operation});
  if (p.queue.size() == 1) send_queued(p);
}

void SocketApi::irecv(void* data, uint64_t least, uint64_t most, int src, int tag, Request& req) {
  const std::lock_guard lock(mutex_);
  Peer& p = peer(src);
  auto* operation = new Operation{src, true, static_cast<char*>(data), least, most, tag};
  req = reinterpret_cast<Request>(operation);
  std::deque<Message>& arrived = p.arrived[tag];
  const auto first = std::find_if(arrived.begin(), arrived.end(),
                                  [](const Message& m) { return m.taker == nullptr; });
  if (first == arrived.end()) {
    p.posted[tag].push_back(operation);
    return;
  }
  if (!fits(p, *operation, first->nbytes)) return;
  first->taker = operation;
  if (!first->complete) return;
  copy(operation->data, first->data.get(), first->nbytes);
  operation->done = true;
  arrived.erase(first);
}

bool SocketApi::test(Request& req) {
  if (req == 0) return true;
  auto* operation = reinterpret_cast<Operation*>(req);
  const std::lock_guard lock(mutex_);
  if (operation->done) {
    delete operation;
    req = 0;
    return true;
  }
  Peer& p = peer(operation->peer);
  if (p.lost && !p.said_goodbye && operation->receives && !notice_waits(p, operation->tag)) {
    const Loss found = describe_loss(p);
    throw Error(found.kind, found.text);
  }
  return false;
}

bool SocketApi::probe(int src, int tag) {
  const std::lock_guard lock(mutex_);
  const Peer& p = peer(src);
  const auto found = p.arrived.find(tag);
  return found != p.arrived.end() && !found->second.empty();
}

Loss SocketApi::loss(int rank) {
  const std::lock_guard lock(mutex_);
  return describe_loss(peer(rank));
}

void SocketApi::cancel(Request& req) {
  if (req == 0) return;
  auto* operation = reinterpret_cast<Operation*>(req);
  const std::lock_guard lock(mutex_);
  Peer& p = peer(operation->peer);
  if (std::erase(p.posted[operation->tag], operation) > 0 || p.lost) operation->done = true;
}

// Whether one waits that is for the communicator of this tag: others are read by others, or never.
bool SocketApi::notice_waits(const Peer& p, int tag) const {
  const auto found = p.arrived.find(notices_of(tag));
  return found != p.arrived.end() && !found->second.empty();
}

// Writes as much as the connection takes. The mutex is held.
void SocketApi::send_queued(Peer& p) {
  while (!p.queue.empty() && !p.lost) {
    Outgoing& out = p.queue.front();
    iovec parts[2];
    int count = 0;
    const uint64_t of_data = out.sent > sizeof(Frame) ? out.sent - sizeof(Frame) : 0;
    if (out.sent < sizeof(Frame)) {
      parts[count++] = {reinterpret_cast<char*>(&out.frame) + out.sent, sizeof(Frame) - out.sent};
    }
    if (out.frame.nbytes > of_data) {
      parts[count++] = {const_cast<char*>(out.data) + of_data, out.frame.nbytes - of_data};
    }
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<size_t>(count);
    const ssize_t n = sendmsg(p.socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n < 0) {  // what was received before is still to be read; then the loss shows
      shutdown(p.socket, SHUT_RDWR);  // the other end may have half a frame
      for (Outgoing& dropped : p.queue) {
        if (dropped.operation != nullptr) dropped.operation->done = true;
      }
      p.queue.clear();
      break;
    }
    out.sent += static_cast<uint64_t>(n);
    if (out.sent < sizeof(Frame) + out.frame.nbytes) continue;
    if (out.operation != nullptr) out.operation->done = true;
    p.queue.pop_front();
  }
  watch(p);
}

// Asks for a notice when more can be read, and written if there is something to write.
void SocketApi::watch(Peer& p) {
  if (p.lost || p.socket < 0) return;
  const uint32_t events = p.queue.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT;
  epoll_event event{.events = events, .data = {.u64 = static_cast<uint64_t>(&p - peers_.data())}};
  epoll_ctl(epoll_, EPOLL_CTL_MOD, p.socket, &event);
}

// Ends a connection: its rank has died, or has sent what no rank sends (`fault`).
void SocketApi::lose(Peer& p, std::string_view fault) {
  if (p.lost) return;
  p.lost = true;
  p.fault = fault;
  if (!fault.empty()) p.said_goodbye = false;
  if (!p.said_goodbye && p.socket >= 0) p.loss_order = ++losses_;
  epoll_ctl(epoll_, EPOLL_CTL_DEL, p.socket, nullptr);
  shutdown(p.socket, SHUT_RDWR);  // the other end hears of it if the fault is here
  for (Outgoing& out : p.queue) {
    if (out.operation != nullptr) out.operation->done = true;
  }
  p.queue.clear();
  if (p.message != nullptr) p.arrived[p.frame.tag].pop_back();  // nobody will have the rest
  p.message = nullptr;
}

Loss SocketApi::reject(int rank, const std::string& why) {
  const std::lock_guard lock(mutex_);
  lose(peer(rank), why);
  return describe_loss(peer(rank));
}

// Whether a message is as large as its receive expects; ends the connection otherwise.
bool SocketApi::fits(Peer& p, const Operation& operation, uint64_t nbytes) {
  if (nbytes >= operation.least && nbytes <= operation.most) return true;
  lose(p, "a message of another size than its receive expects");
  return false;
}

Loss SocketApi::describe_loss(const Peer& p) {
  if (p.loss_order == 0) return {};
  if (!p.fault.empty()) {
    return {p.loss_order, "TransportError",
            p.name + " has sent " + p.fault + ", so its connection was ended"};
  }
  if (p.refused_bytes == 0)
    return {p.loss_order, "PeerLost", p.name + " died: its connection has ended"};
  return {p.loss_order, "PeerLost",
          p.name + " is lost: there was no memory for a message of " +
              std::to_string(p.refused_bytes) +
              " bytes from it that nobody had asked for yet, so its connection was ended"};
}

// Reads what has come. The mutex is held.
void SocketApi::receive(Peer& p) {
  try {
    for (int turn = 0; turn < kTurns && !p.lost && receive_some(p); ++turn) {
    }
  } catch (const std::bad_alloc&) {  // there may be none for a text now either
    p.refused_bytes = std::max<uint64_t>(1, p.frame.nbytes);
    lose(p);
  }
}

// Reads once; false if nothing has come.
bool SocketApi::receive_some(Peer& p) {
  const bool in_frame = p.read < sizeof(Frame);
  char* to =
      in_frame ? reinterpret_cast<char*>(&p.frame) + p.read : p.into + (p.read - sizeof(Frame));
  const uint64_t wanted =
      in_frame ? sizeof(Frame) - p.read : sizeof(Frame) + p.frame.nbytes - p.read;
  const ssize_t n = recv(p.socket, to, std::min(wanted, kReadBytes), MSG_DONTWAIT);
  if (n < 0 && errno == EINTR) return true;
  if (n < 0 && errno == EAGAIN) return false;
  if (n <= 0) {
    lose(p);
    return false;
  }
  p.read += static_cast<uint64_t>(n);
  if (in_frame && p.read == sizeof(Frame)) begin_message(p);
  if (!p.lost && p.read >= sizeof(Frame) && p.read == sizeof(Frame) + p.frame.nbytes)
    end_message(p);
  return true;
}

void SocketApi::begin_message(Peer& p) {
  p.operation = nullptr;
  p.message = nullptr;
  if (p.frame.magic != kMagic) return lose(p, "what is no frame");
  if (p.said_goodbye) return lose(p, "a frame behind its goodbye");
  if (p.frame.tag == kGoodbye && p.frame.nbytes == 0) {
    p.said_goodbye = true;
    return;
  }
  if (const char* why = wrong_size(p.frame.tag, p.frame.nbytes)) return lose(p, why);
  std::deque<Operation*>& posted = p.posted[p.frame.tag];
  if (!posted.empty()) {
    if (!fits(p, *posted.front(), p.frame.nbytes)) return;
    p.operation = posted.front();
    p.into = p.operation->data;
    posted.pop_front();
    return;
  }
  Message message{std::make_unique_for_overwrite<char[]>(std::max<uint64_t>(1, p.frame.nbytes)),
                  p.frame.nbytes};
  p.into = message.data.get();
  std::deque<Message>& arrived = p.arrived[p.frame.tag];
  arrived.push_back(std::move(message));
  p.message = &arrived.back();
}

void SocketApi::end_message(Peer& p) {
  p.read = 0;
  if (p.operation == nullptr && p.message == nullptr) return;  // a goodbye
  if (const char* why = wrong_content(p.frame.tag, p.into, p.frame.nbytes)) return lose(p, why);
  if (p.operation != nullptr) p.operation->done = true;
  Message* message = std::exchange(p.message, nullptr);
  if (message == nullptr) return;
  message->complete = true;
  Operation* taker = message->taker;
  if (taker == nullptr) return;
  copy(taker->data, message->data.get(), message->nbytes);
  taker->done = true;
  p.arrived[p.frame.tag].pop_back();  // it is the newest; older ones were taken before
}

void SocketApi::serve() {
  constexpr int kEvents = 16;
  epoll_event events[kEvents];
  for (;;) {
    const int count = epoll_wait(epoll_, events, kEvents, -1);
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 >= peers_.size()) continue;
      Peer& p = peers_[events[i].data.u64];
      if (!p.lost && (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) receive(p);
      if (!p.lost && (events[i].events & EPOLLOUT) != 0) send_queued(p);
    }
  }
}

// Bytes that may not have reached the ranks that have not said goodbye, who still want them.
uint64_t SocketApi::unsent() {
  const std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (const Peer& p : peers_) {
    if (p.socket < 0 || p.lost || p.said_goodbye) continue;
    for (const Outgoing& out : p.queue) bytes += sizeof(Frame) + out.frame.nbytes - out.sent;
    int in_system = 0;
    if (ioctl(p.socket, SIOCOUTQ, &in_system) == 0) bytes += static_cast<uint64_t>(in_system);
  }
  return bytes;
}

void SocketApi::close(double patience_s) {
  if (getpid() != pid_) {
    if (thread_.joinable()) static_cast<void>(new std::thread(std::move(thread_)));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (closing_) return;
    closing_ = true;
    for (Peer& p : peers_) {
      if (p.socket < 0 || p.lost) continue;
      p.queue.push_back({{kGoodbye, kMagic, 0}, nullptr, 0, nullptr});
      send_queued(p);
    }
  }
  const WaitPolicy sleeping{.spins = 0, .yield_us = 0};
  const uint64_t start = now_ns();
  uint64_t least = UINT64_MAX, deadline = 0;
  const auto delivered = [&] {
    const uint64_t left = unsent();
    if (left < least) deadline = now_ns() + static_cast<uint64_t>(patience_s * 1e9);
    least = std::min(least, left);
    return left == 0;
  };
  wait_until(sleeping, Bell{}, delivered, [&](Pulse) { return now_ns() >= deadline; });
  const auto answered = [&] {
    const std::lock_guard lock(mutex_);
    return std::all_of(peers_.begin(), peers_.end(),
                       [&](const Peer& p) { return p.socket < 0 || p.lost || p.said_goodbye; });
  };
  wait_until(sleeping, Bell{}, answered, [&](Pulse) { return now_ns() >= start + kAnswerNs; });
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    const uint64_t one = 1;
    static_cast<void>(!write(wake_, &one, sizeof(one)));
  }
  thread_.join();
  const std::lock_guard lock(mutex_);
  for (Peer& p : peers_) lose(p);  // ends what it was given and has not sent
  forget();
}

void SocketApi::forget() {
  for (Peer& p : peers_) {
    if (p.socket >= 0) ::close(p.socket);
    p.socket = -1;
    p.lost = true;
  }
  ::close(epoll_);
  ::close(wake_);
  epoll_ = wake_ = -1;
}

}  // namespace pycoll
