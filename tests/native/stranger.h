// A rank played by hand, for tests of connections.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <functional>
#include <string>

#include "hosts.h"

namespace stranger {

using namespace hosts;

constexpr uint32_t kMagic = 0x70634D31;
constexpr int kNotice = int(Lane::kNotice);
constexpr uint64_t kNoticeBytes = offsetof(Notice, text) + 1;  // of one without a text

struct Frame {  // as SocketApi sends it
  int32_t tag;
  uint32_t magic;
  uint64_t nbytes;
};

// A peer of one SocketApi that is played by hand.
struct Stranger {
  Stranger() {
    const Sockets both = connect(2);
    fd = both[1][0];
    api = join(both[0]);
  }
  ~Stranger() {
    hang_up();
    api->close();
  }
  void hang_up() {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
  void write(const void* data, size_t nbytes) const {
    expect(send(fd, data, nbytes, MSG_NOSIGNAL) == ssize_t(nbytes), "send");
  }
  void frame(int tag, uint64_t nbytes, uint32_t magic = kMagic) const {
    const Frame frame{tag, magic, nbytes};
    write(&frame, sizeof(frame));
  }
  void message(int tag, const std::string& data) const {
    frame(tag, data.size());
    write(data.data(), data.size());
  }
  int fd;
  std::shared_ptr<SocketApi> api;
};

// Waits at most 5 s.
inline bool soon(const std::function<bool()>& ready) {
  const uint64_t until = now_ns() + 5'000'000'000;
  return wait_until(kPatient, Bell{}, ready, [&](Pulse) { return now_ns() >= until; });
}

inline void expect_done(SocketApi& api, Request& req, const char* what) {
  expect(soon([&] { return api.test(req); }), what, " has not ended");
}

// The receive fails because its sender is dead, and can be taken back.
inline void expect_lost(SocketApi& api, Request& req, const char* what,
                        const char* kind = "PeerLost") {
  expect_kind(kind, [&] { expect_done(api, req, what); }, what);
  expect(api.loss(1).order == 1 && api.losses() == 1, what, ": not named");
  api.cancel(req);
  expect(api.test(req) && req == 0, what, ": not taken back");
}

}  // namespace stranger
