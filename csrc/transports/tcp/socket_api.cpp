#include "transports/tcp/socket_api.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
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

#include "base/descriptors.h"
#include "base/error.h"
#include "kernels/fold/fold.h"
#include "transports/messages/wire.h"
#include "transports/tcp/silence.h"

namespace pycoll {
namespace {

constexpr int kTurns = 16;                 // reads from one rank before others have a turn
constexpr uint64_t kReadBytes = 1 << 20;   // at a time
constexpr double kLookMs = 200;            // most between two looks at the connections
constexpr uint64_t kAheadBytes = 1 << 10;  // to read at once where a frame is expected
constexpr uint32_t kLooksToRead = 16;      // tests in a row until a test reads
constexpr uint32_t kMostLookedAt = 8;      // peers that tests read: a read costs 0.3 us
constexpr int kEndMs = 1;                  // with fewer tests than these the thread reads again
constexpr uint32_t kFewLooks = 4;
constexpr size_t kFaultBytes = 120;  // of a text, for which there may be no memory later

// Tag of the notices of the communicator to which a tag belongs.
int notices_of(int tag) { return tag - tag % kLanes + static_cast<int>(Lane::kNotice); }

}  // namespace

SocketApi::SocketApi(std::vector<int> sockets, std::vector<std::string> names, double silence_s,
                     bool own_thread)
    : Transport(INT_MAX, true),
      peers_(sockets.size()),
      silence_s_(silence_s),
      look_ms_(static_cast<int>(std::clamp(silence_s * 1000 / 8, 10.0, kLookMs))),
      pid_(getpid()) {
  for (size_t r = 0; r < sockets.size(); ++r) peers_[r].socket = sockets[r];
  try {
    open(names);
    if (!own_thread) return;
    const auto own =
        std::find_if(peers_.begin(), peers_.end(), [](const Peer& p) { return p.socket < 0; });
    const auto n = static_cast<uint32_t>(peers_.size());
    board_ = Board::make(0, n, static_cast<uint32_t>(own - peers_.begin()), n);
    thread_ = std::thread([this] {
      while (serve_once(look_ms_)) {
      }
    });
  } catch (...) {
    forget();
    throw;
  }
}

void SocketApi::open(const std::vector<std::string>& names) {
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  moved_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  arrivals_ = epoll_create1(EPOLL_CLOEXEC);
  COLL_CHECK(epoll_ >= 0 && wake_ >= 0 && moved_ >= 0 && arrivals_ >= 0, "TransportError",
             "epoll: ", std::strerror(errno));
  for (int* fd : {&epoll_, &wake_, &moved_, &arrivals_}) move_above_streams(*fd);
  epoll_event event{.events = EPOLLIN, .data = {.u64 = peers_.size()}};
  epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
  epoll_ctl(arrivals_, EPOLL_CTL_ADD, moved_, &event);
  for (size_t r = 0; r < peers_.size(); ++r) {
    Peer& p = peers_[r];
    p.name = names.at(r);
    p.fault.reserve(kFaultBytes);
    if (p.socket < 0) {
      own_name_ = p.name;
      continue;
    }
    move_above_streams(p.socket);
    p.ahead = std::make_unique_for_overwrite<char[]>(kAheadBytes);
    fcntl(p.socket, F_SETFL, fcntl(p.socket, F_GETFL) | O_NONBLOCK);
    ask_often(p.socket, silence_s_);
    event = {.events = p.watched = EPOLLIN, .data = {.u64 = r}};
    for (const int set : {epoll_, arrivals_}) {
      COLL_CHECK(epoll_ctl(set, EPOLL_CTL_ADD, p.socket, &event) == 0, "TransportError",
                 "the connection to ", p.name, ": ", std::strerror(errno));
    }
  }
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
  Peer& p = peer(operation->peer);
  if (!operation->done && operation->receives) look(p);
  if (operation->done) {
    if (!p.looked_at) p.looks = 0;
    delete operation;
    req = 0;
    return true;
  }
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

// Asks for a notice when more can be read, unless tests read it, and written if there is something
// to write.
void SocketApi::watch(Peer& p) {
  if (p.lost || p.socket < 0) return;
  const uint32_t in = p.looked_at ? 0 : uint32_t{EPOLLIN};
  const uint32_t out = p.queue.empty() ? 0 : uint32_t{EPOLLOUT};
  const uint32_t events = in | out;
  if (events == p.watched) return;
  p.watched = events;
  epoll_event event{.events = events, .data = {.u64 = static_cast<uint64_t>(&p - peers_.data())}};
  epoll_ctl(epoll_, EPOLL_CTL_MOD, p.socket, &event);
}

// Somebody waits for this peer: reads what has come, once it is plain that the wait takes a while.
// The mutex is held.
void SocketApi::look(Peer& p) {
  if (p.lost || p.socket < 0) return;
  ++p.looks;
  if (!p.looked_at) {
    if (p.looks < kLooksToRead || looked_at_ == kMostLookedAt) return;
    p.looked_at = true;
    watch(p);
    if (looked_at_++ == 0) eventfd_write(wake_, 1);  // the thread sleeps no longer than kEndMs
  }
  receive(p);
}

void SocketApi::end_look(Peer& p) {
  if (!p.looked_at) return;
  p.looked_at = false;
  p.looks = 0;
  --looked_at_;
  watch(p);
}

// Gives the thread back what nobody waits for any more. The mutex is held.
void SocketApi::end_looks() {
  const uint64_t now = now_ns();
  if (looked_at_ == 0 || now < next_end_ns_) return;
  next_end_ns_ = now + uint64_t{kEndMs} * 1'000'000;
  for (Peer& p : peers_) {
    if (p.looks < kFewLooks) end_look(p);
    p.looks = 0;
  }
}

// Whether a message is as large as its receive expects; ends the connection otherwise.
bool SocketApi::fits(Peer& p, const Operation& operation, uint64_t nbytes) {
  if (nbytes >= operation.least && nbytes <= operation.most) return true;
  lose(p, "a message of another size than its receive expects");
  return false;
}

// Reads what has come. The mutex is held.
void SocketApi::receive(Peer& p) {
  try {
    p.drained = false;
    const auto more = [&](int turn) { return turn < kTurns && !p.drained; };
    for (int turn = 0; !p.lost && (p.ahead_at < p.ahead_end || more(turn)); ++turn) {
      if (!receive_some(p)) break;
    }
  } catch (const std::bad_alloc&) {  // there may be none for a text now either
    p.refused_bytes = std::max<uint64_t>(1, p.frame.nbytes);
    lose(p);
  }
}

// Reads at most so many bytes, like recv(); where few are wanted, what is behind them as well.
int64_t SocketApi::read_from(Peer& p, char* to, uint64_t wanted) {
  const bool ahead = wanted < kAheadBytes;
  if (p.ahead_at == p.ahead_end) {
    const uint64_t most = ahead ? kAheadBytes : std::min(wanted, kReadBytes);
    const ssize_t n = recv(p.socket, ahead ? p.ahead.get() : to, most, MSG_DONTWAIT);
    p.drained = n >= 0 && static_cast<uint64_t>(n) < most;
    if (n <= 0 || !ahead) return n;
    p.ahead_at = 0;
    p.ahead_end = static_cast<uint64_t>(n);
  }
  const uint64_t n = std::min(wanted, p.ahead_end - p.ahead_at);
  std::memcpy(to, p.ahead.get() + p.ahead_at, n);
  p.ahead_at += n;
  return static_cast<int64_t>(n);
}

// Takes one piece of what has come; false if nothing has.
bool SocketApi::receive_some(Peer& p) {
  const bool in_frame = p.read < sizeof(Frame);
  char* to =
      in_frame ? reinterpret_cast<char*>(&p.frame) + p.read : p.into + (p.read - sizeof(Frame));
  const uint64_t wanted =
      in_frame ? sizeof(Frame) - p.read : sizeof(Frame) + p.frame.nbytes - p.read;
  const int64_t n = read_from(p, to, wanted);
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

void SocketApi::sleep(uint32_t us) {
  const timespec slice = {us / 1'000'000, long{us % 1'000'000} * 1000};
  pollfd any{.fd = arrivals_, .events = POLLIN, .revents = 0};
  ++sleepers_;
  const int found = ppoll(&any, 1, &slice, nullptr);
  --sleepers_;
  eventfd_t woken;
  if (found > 0) eventfd_read(moved_, &woken);
}

bool SocketApi::serve_once(int wait_ms) {
  constexpr int kEvents = 16;
  epoll_event events[kEvents];
  if (looked_at_ > 0) wait_ms = std::min(wait_ms, kEndMs);
  const int count = epoll_wait(epoll_, events, kEvents, wait_ms);
  const std::lock_guard lock(mutex_);
  if (closed_) return false;
  end_looks();
  if (now_ns() >= next_look_ns_) {
    end_silent();
    show_links();
    next_look_ns_ = now_ns() + static_cast<uint64_t>(look_ms_) * 1'000'000;
  }
  for (int i = 0; i < count; ++i) {
    if (events[i].data.u64 >= peers_.size()) {
      eventfd_t woken;
      eventfd_read(wake_, &woken);
      continue;
    }
    Peer& p = peers_[events[i].data.u64];
    if (!p.lost && (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) receive(p);
    if (!p.lost && (events[i].events & EPOLLOUT) != 0) send_queued(p);
  }
  if (count > 0 && sleepers_ > 0) eventfd_write(moved_, 1);
  return true;
}

}  // namespace pycoll
