// A connection of two ranks that ends, or comes to a halt, after so many bytes.
#pragma once

#include <poll.h>

#include "hosts.h"

namespace hosts {

enum class Then { kEnds, kHalts };

// Passes on `limit` bytes of what rank 1 sends to rank 0, and everything that rank 0 sends to rank
// 1 meanwhile. Outlives the ranks.
class Relay {
 public:
  Relay(uint64_t limit, Then then) : limit_(limit), then_(then) {
    for (int rank : {0, 1}) {
      int ends[2];
      expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "socketpair");
      outer_[rank] = ends[0];
      inner_[rank] = ends[1];
    }
    thread_ = std::thread([this] { serve(); });
  }
  ~Relay() {
    thread_.join();
    for (const int fd : inner_) ::close(fd);
  }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  Sockets sockets() const { return {{-1, outer_[0]}, {outer_[1], -1}}; }

 private:
  void serve() {
    std::vector<char> room(4096);
    uint64_t passed = 0;
    for (;;) {
      pollfd looks[2] = {{inner_[0], POLLIN, 0}, {inner_[1], POLLIN, 0}};
      poll(looks, 2, -1);
      for (const int from : {0, 1}) {
        if ((looks[from].revents & (POLLIN | POLLHUP | POLLERR)) == 0) continue;
        const uint64_t most = from == 1 ? std::min<uint64_t>(room.size(), limit_ - passed) : 4096;
        const ssize_t n = most == 0 ? 0 : recv(inner_[from], room.data(), most, 0);
        if (n <= 0) return end();
        passed += from == 1 ? uint64_t(n) : 0;
        for (ssize_t sent = 0; sent < n;) {
          const ssize_t k =
              send(inner_[1 - from], room.data() + sent, size_t(n - sent), MSG_NOSIGNAL);
          if (k <= 0) return end();
          sent += k;
        }
        if (from == 1 && passed == limit_) return end();
      }
    }
  }

  // A halt lasts until both ranks have gone.
  void end() {
    if (then_ == Then::kEnds) {
      for (const int fd : inner_) shutdown(fd, SHUT_RDWR);
      return;
    }
    for (const int fd : inner_) {
      pollfd look{fd, 0, 0};
      poll(&look, 1, -1);
    }
  }

  uint64_t limit_;
  Then then_;
  int outer_[2], inner_[2];
  std::thread thread_;
};

}  // namespace hosts
