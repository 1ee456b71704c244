// Streams, sets of descriptors to wait for, and what they say of themselves.
#include "sockets.h"

#include "state.h"

#undef memcpy
#undef ioctl
#undef write
#undef close
#undef getsockopt
#undef setsockopt

namespace simulation {

constexpr int kFirst = kFirstSimulated;
constexpr uint64_t kNever = UINT64_MAX;

struct Part {
  uint64_t arrives_ns;
  std::string bytes;
  Clock clock;
};

struct Descriptor {
  enum Kind { kStream, kSet, kCounter } kind;
  uint32_t process;
  // Of a stream: what comes in.
  int other = -1;
  std::deque<Part> parts;
  size_t unread = 0, room = 0;
  uint64_t last_ns = 0, ends_ns = kNever;  // when the newest part arrives; when it ends
  bool broken = false;                     // by a reset: what has not been read is lost
  bool shut = false;                       // by its owner
  uint64_t cut_ns = kNever, mute_ns = kNever;
  std::map<int, epoll_event> waits;  // by set
  uint64_t count = 0;                // of a counter
};

static std::map<int, Descriptor>& all() {
  using Map = std::map<int, Descriptor>;
  if (world->descriptors == nullptr) world->descriptors = std::make_shared<Map>();
  return *static_cast<Map*>(world->descriptors.get());
}
static Descriptor* find(int fd) {
  if (fd < kFirst || world == nullptr) return nullptr;
  const auto found = all().find(fd);
  return found == all().end() ? nullptr : &found->second;
}
static Descriptor& add(Descriptor::Kind kind, uint32_t process, int& fd) {
  fd = kFirst + int(all().size());
  Descriptor& made = all()[fd];
  made.kind = kind;
  made.process = process;
  return made;
}

uint64_t delay_ns() {
  const uint64_t few = 5'000 + world->random() % 60'000;
  return world->random() % 16 == 0 ? few * 40 : few;
}

static uint64_t now_ns_() { return world->now_ns; }

static bool muted(const Descriptor& d) { return now_ns_() >= d.mute_ns; }

static void wake_set(const Descriptor& d, uint64_t at_ns) {
  for (const auto& [set, event] : d.waits) unblock(&all()[set], at_ns);
}

// No more comes in at an end.
static void end(Descriptor& d, uint64_t at_ns, bool broken) {
  if (d.ends_ns <= at_ns) return;
  d.ends_ns = std::max(at_ns, broken ? 0 : d.last_ns);
  d.broken = broken;
  wake_set(d, d.ends_ns);
}

static bool over(const Descriptor& d) { return now_ns_() >= std::min(d.ends_ns, d.cut_ns); }
static bool arrived(const Descriptor& d) {
  return !d.parts.empty() && d.parts.front().arrives_ns <= now_ns_();
}
static bool readable(const Descriptor& d) {
  if (d.kind == Descriptor::kCounter) return d.count > 0;
  return arrived(d) || over(d) || d.shut;
}
static bool writeable(const Descriptor& d) {
  const Descriptor& to = all()[d.other];
  return over(d) || d.shut || to.unread < to.room;
}
// When something may happen at an end.
static uint64_t next_ns(const Descriptor& d) {
  uint64_t next = std::min(d.ends_ns, d.cut_ns);
  if (!d.parts.empty()) next = std::min(next, d.parts.front().arrives_ns);
  return next > now_ns_() ? next : kNever;
}

std::pair<int, int> make_connection(uint32_t a, uint32_t b) {
  int fd_a = 0, fd_b = 0;
  add(Descriptor::kStream, a, fd_a);
  add(Descriptor::kStream, b, fd_b);
  all()[fd_a].other = fd_b;
  all()[fd_b].other = fd_a;
  all()[fd_a].room = all()[fd_b].room = 64u << world->random() % 10;
  return {fd_a, fd_b};
}

void cut(int fd, uint64_t at_ns) {
  for (const int end : {fd, all()[fd].other}) all()[end].cut_ns = at_ns;
}
void mute(int fd, uint64_t at_ns) {
  for (const int end : {fd, all()[fd].other}) all()[end].mute_ns = at_ns;
}

void end_connections(uint32_t process) {
  for (auto& [fd, d] : all()) {
    if (d.process != process || d.kind != Descriptor::kStream || d.shut) continue;
    d.shut = true;
    Descriptor& other = all()[d.other];
    if (muted(d)) continue;
    const uint64_t at = std::max(now_ns_(), d.unread > 0 ? 0 : other.last_ns) + delay_ns();
    end(other, at, d.unread > 0);  // a system that has data for nobody says so
  }
}

static ssize_t fail(int error) {
  errno = error;
  return -1;
}

static ssize_t take(Descriptor& d, char* to, size_t nbytes) {
  if (d.broken && over(d)) return fail(ECONNRESET);
  size_t taken = 0;
  while (taken < nbytes && arrived(d)) {
    Part& part = d.parts.front();
    const size_t n = std::min(nbytes - taken, part.bytes.size());
    note_write(to + taken, n);
    std::memcpy(to + taken, part.bytes.data(), n);
    join(me().clock, part.clock);
    part.bytes.erase(0, n);
    if (part.bytes.empty()) d.parts.pop_front();
    taken += n;
  }
  d.unread -= taken;
  if (taken > 0) wake_set(all()[d.other], now_ns_());
  if (taken > 0) return ssize_t(taken);
  if (now_ns_() >= d.cut_ns) return fail(ECONNRESET);
  return over(d) || d.shut ? 0 : fail(EAGAIN);
}

static ssize_t put(Descriptor& d, const msghdr& message) {
  Descriptor& to = all()[d.other];
  if (d.shut || over(d)) return fail(EPIPE);
  if (to.unread >= to.room) return fail(EAGAIN);
  const size_t most = 1 + world->random() % (to.room - to.unread);
  std::string bytes;
  for (size_t i = 0; i < message.msg_iovlen && bytes.size() < most; ++i) {
    const iovec& part = message.msg_iov[i];
    const size_t n = std::min(part.iov_len, most - bytes.size());
    note_read(part.iov_base, n);
    bytes.append(static_cast<const char*>(part.iov_base), n);
  }
  const auto sent = ssize_t(bytes.size());
  to.unread += bytes.size();
  if (to.shut) {  // nobody reads it
    if (!muted(d)) end(d, now_ns_() + delay_ns(), true);
    return sent;
  }
  to.last_ns = std::max(to.last_ns, now_ns_() + delay_ns());
  ++me().clock[world->running];
  const uint64_t arrives_ns = muted(d) ? kNever : to.last_ns;
  to.parts.push_back({arrives_ns, std::move(bytes), me().clock});
  wake_set(to, arrives_ns);
  return sent;
}

}  // namespace simulation

using namespace simulation;

int simulated_epoll_create(int) {
  int fd = -1;
  add(Descriptor::kSet, me().process, fd);
  return fd;
}

int simulated_eventfd(unsigned, int) {
  int fd = -1;
  add(Descriptor::kCounter, me().process, fd);
  return fd;
}

int simulated_epoll_ctl(int set, int what, int fd, epoll_event* event) {
  point();
  Descriptor* d = find(fd);
  if (d == nullptr) return -1;
  if (what == EPOLL_CTL_DEL) {
    d->waits.erase(set);
  } else {
    d->waits[set] = *event;
  }
  wake_set(*d, now_ns_());
  return 0;
}

int simulated_epoll_wait(int set, epoll_event* events, int most, int timeout_ms) {
  const uint64_t until = world->now_ns + uint64_t(timeout_ms) * 1'000'000;
  for (;;) {
    point();
    int count = 0;
    uint64_t next = until;
    for (auto& [fd, d] : all()) {
      const auto waits = d.waits.find(set);
      if (waits == d.waits.end() || count == most) continue;
      const auto& [wanted, data] = waits->second;
      const bool stream = d.kind == Descriptor::kStream;
      uint32_t found = readable(d) ? wanted & uint32_t{EPOLLIN} : 0;
      if (stream && over(d)) found |= EPOLLHUP;
      if ((wanted & EPOLLOUT) != 0 && stream && writeable(d)) found |= EPOLLOUT;
      if (found != 0) events[count++] = {.events = found, .data = data};
      if (stream) next = std::min(next, next_ns(d));
    }
    if (count > 0 || world->now_ns >= until) return count;
    block(find(set), next);
  }
}

int simulated_ioctl(int fd, unsigned long request, void* to) {
  if (fd < kFirst) return ioctl(fd, request, to);
  point();
  const Descriptor& other = all()[find(fd)->other];
  int bytes = 0;  // that have not arrived
  for (const Part& part : other.parts) {
    if (part.arrives_ns > world->now_ns) bytes += int(part.bytes.size());
  }
  *static_cast<int*>(to) = bytes;
  return 0;
}

int simulated_getsockopt(int fd, int, int, void* value, socklen_t*) {
  point();
  const Descriptor& d = *find(fd);
  auto& info = *static_cast<tcp_info*>(value);
  if (!muted(d)) return 0;
  info.tcpi_retransmits = 2;
  info.tcpi_last_ack_recv = uint32_t((world->now_ns - d.mute_ns) / 1'000'000);
  return 0;
}

int simulated_setsockopt(int, int, int, const void*, socklen_t) { return 0; }

int simulated_connect(int fd, const sockaddr*, socklen_t) {  // to nobody: it ends here at once
  end(*find(fd), world->now_ns, true);
  return 0;
}

ssize_t simulated_sendmsg(int fd, const msghdr* message, int) {
  point();
  return put(*find(fd), *message);
}

ssize_t simulated_recv(int fd, void* to, size_t nbytes, int) {
  point();
  return take(*find(fd), static_cast<char*>(to), nbytes);
}

ssize_t simulated_write(int fd, const void* from, size_t nbytes) {
  if (fd < kFirst) return write(fd, from, nbytes);
  point();
  Descriptor& d = *find(fd);
  ++d.count;
  wake_set(d, world->now_ns);
  return ssize_t(nbytes);
}

int simulated_eventfd_write(int fd, eventfd_t value) {
  return simulated_write(fd, &value, sizeof(value)) > 0 ? 0 : -1;
}

int simulated_eventfd_read(int fd, eventfd_t* value) {
  point();
  *value = std::exchange(find(fd)->count, 0);
  return 0;
}

int simulated_shutdown(int fd, int) {
  point();
  if (find(fd) == nullptr) return -1;
  Descriptor& d = *find(fd);
  if (d.shut) return 0;
  d.shut = true;
  Descriptor& other = all()[d.other];
  if (!muted(d)) end(other, std::max(world->now_ns, other.last_ns) + delay_ns(), false);
  return 0;
}

int simulated_close(int fd) {
  if (fd < kFirst) return close(fd);
  if (world == nullptr) return 0;
  Descriptor* d = find(fd);
  if (d != nullptr && d->kind == Descriptor::kStream) simulated_shutdown(fd, 0);
  return 0;
}
