// What the system knows of the connections, shown to those who look at the job.
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>

#include "transports/tcp/socket_api.h"

namespace pycoll {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr uint64_t kEveryNs = 190'000'000;
constexpr uint64_t kPerLinkNs = 1'000'000;  // with many connections less often: a look costs 1 us

}  // namespace

std::shared_ptr<const Board> SocketApi::board() {
  const std::lock_guard lock(mutex_);
  return board_;
}

// Called again and again by the thread that serves them; the mutex is held.
void SocketApi::show_links() {
  const uint64_t now = coarse_ns();
  const uint64_t pause = std::max(kEveryNs, kPerLinkNs * peers_.size());
  if (board_ == nullptr || now < shown_ns_ + pause) return;
  shown_ns_ = now;
  for (size_t r = 0; r < peers_.size(); ++r) {
    if (peers_[r].socket < 0) continue;
    tcp_info info{};
    socklen_t length = sizeof(info);
    int unacked = 0;
    if (getsockopt(peers_[r].socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
    ioctl(peers_[r].socket, SIOCOUTQ, &unacked);
    Link& link = board_->link(static_cast<uint32_t>(r));
    link.sent.store(info.tcpi_bytes_acked, kRelaxed);
    link.received.store(info.tcpi_bytes_received, kRelaxed);
    link.unacked.store(static_cast<uint64_t>(unacked), kRelaxed);
    link.busy_us.store(info.tcpi_busy_time, kRelaxed);
    link.rtt_us.store(info.tcpi_rtt, kRelaxed);
    link.retransmits.store(info.tcpi_total_retrans, kRelaxed);
    link.ack_age_ms.store(info.tcpi_last_ack_recv, kRelaxed);
    link.retries.store(info.tcpi_retransmits, kRelaxed);
    link.seen_ns.store(now_ns(), std::memory_order_release);
  }
}

}  // namespace pycoll
