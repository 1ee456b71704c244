// How connections end: their ranks die, their systems fall silent, or this rank leaves.
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>

#include "base/never_freed.h"
#include "base/wait.h"
#include "transports/tcp/silence.h"
#include "transports/tcp/socket_api.h"

namespace pycoll {
namespace {

constexpr uint64_t kGoodbyeNs = 200'000'000;  // for those of others

}  // namespace

Loss SocketApi::loss(int rank) {
  const std::lock_guard lock(mutex_);
  return describe_loss(peer(rank));
}

bool SocketApi::left(int rank) {
  const std::lock_guard lock(mutex_);
  return peer(rank).said_goodbye;
}

// Ends a connection: its rank has died, or has sent what no rank sends (`fault`).
void SocketApi::lose(Peer& p, std::string_view fault) {
  if (p.lost) return;
  p.lost = true;
  p.fault = fault.substr(0, p.fault.capacity());  // there may be no memory for more
  if (!fault.empty()) p.said_goodbye = false;
  if (!p.said_goodbye && p.socket >= 0) p.loss_order = ++losses_;
  end_look(p);
  for (const int set : {epoll_, arrivals_}) epoll_ctl(set, EPOLL_CTL_DEL, p.socket, nullptr);
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

// Ends the connections to systems that no longer answer. The mutex is held.
void SocketApi::end_silent() {
  for (Peer& p : peers_) {
    if (p.lost || p.socket < 0 || !pycoll::silent(p.socket, silence_s_)) continue;
    p.silent = true;
    reset(p.socket);
    lose(p);
  }
}

Loss SocketApi::describe_loss(const Peer& p) const {
  if (p.loss_order == 0) return {};
  if (!p.fault.empty()) {
    return {p.loss_order, "TransportError",
            p.name + " has sent " + p.fault + ", so its connection was ended"};
  }
  if (p.silent) {
    return {p.loss_order, "PeerLost",
            p.name + " cannot be reached: " + said_nothing(own_name_, silence_s_)};
  }
  if (p.refused_bytes == 0)
    return {p.loss_order, "PeerLost", p.name + " died: its connection has ended"};
  return {p.loss_order, "PeerLost",
          p.name + " is lost: there was no memory for a message of " +
              std::to_string(p.refused_bytes) +
              " bytes from it that nobody had asked for yet, so its connection was ended"};
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
    never_free(std::move(thread_));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (closing_) return;
    closing_ = true;
    for (Peer& p : peers_) {
      if (p.socket < 0 || p.lost) continue;
      try {
        p.queue.push_back({{kGoodbye, kMagic, 0}, nullptr, 0, nullptr});
        send_queued(p);
      } catch (const std::bad_alloc&) {
        lose(p);
      }
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
  wait_until(sleeping, Bell{}, answered, [&](Pulse) { return now_ns() >= start + kGoodbyeNs; });
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    const uint64_t one = 1;
    static_cast<void>(!write(wake_, &one, sizeof(one)));
  }
  if (thread_.joinable()) thread_.join();
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
  board_.reset();
  for (int* const fd : {&epoll_, &wake_, &moved_, &arrivals_}) ::close(std::exchange(*fd, -1));
}

}  // namespace pycoll
