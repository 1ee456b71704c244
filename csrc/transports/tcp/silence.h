// Whether the system at the other end of a TCP connection still answers.
//
// A process that dies has its connections ended by its system. A host without power or network ends
// nothing: who waits for it would wait for ever. So idle connections ask now and then (keepalive),
// and one is silent when its system has not answered for so long although it was asked. A process
// that is stopped is not silent: its system answers.
#pragma once

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <string>

#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44  // since Linux 6.15
#endif

namespace pycoll {

// Makes a connection ask often enough for `silent`: with questions when it is idle, else with data
// that it sends again. Without the last setting, which older systems refuse, it doubles its pauses,
// and may find out only much later that the network is back. Sockets that are not TCP's have no
// other system to ask.
inline void ask_often(int socket, double silence_s) {
  const auto set = [&](int level, int option, int value) {
    static_cast<void>(setsockopt(socket, level, option, &value, sizeof(value)));
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, static_cast<int>(silence_s / 3)));
  set(IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, static_cast<int>(silence_s / 6)));
  set(IPPROTO_TCP, TCP_RTO_MAX_MS, std::max(1000, static_cast<int>(silence_s * 1000 / 6)));
}

// Whether its system was asked more than once, by data or by questions, and has said nothing for
// `silence_s`.
inline bool silent(int socket, double silence_s) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return false;
  const int unanswered = info.tcpi_retransmits + info.tcpi_probes;
  return unanswered > 1 && info.tcpi_last_ack_recv >= silence_s * 1000;
}

// Ends a connection at once. The other end may still hear, and an orderly end would wait behind
// data that nobody acknowledges.
inline void reset(int socket) {
  const sockaddr nobody{.sa_family = AF_UNSPEC, .sa_data = {}};
  static_cast<void>(connect(socket, &nobody, sizeof(nobody)));
}

// What messages say of it.
inline std::string said_nothing(const std::string& to_whom, double silence_s) {
  char text[80];
  snprintf(text, sizeof(text), " for %.3g s, so it is down, or the network is", silence_s);
  return "its host has not answered " + to_whom + text;
}

}  // namespace pycoll
