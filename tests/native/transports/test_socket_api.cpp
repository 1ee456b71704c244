// Messages over connections: what peers send that is odd.
#include "stranger.h"

namespace {

using namespace stranger;

void in_any_order() {
  const Stranger peer;
  SocketApi& api = *peer.api;
  char a[8] = "", b[8] = "";
  Request one = 0, two = 0;
  api.irecv(a, 0, 8, 1, 14, one);
  peer.message(9, "first");
  peer.message(14, "second");
  peer.message(9, "");
  expect_done(api, one, "posted");
  expect(std::string(a) == "second", "posted");
  expect(soon([&] { return api.probe(1, 9); }) && !api.probe(1, 14), "probe");
  api.irecv(b, 0, 8, 1, 9, two);
  expect_done(api, two, "had come");
  expect(std::string(b) == "first", "had come");
  peer.frame(9, 6);
  api.irecv(a, 0, 8, 1, 9, one);
  expect_done(api, one, "empty");
  api.irecv(a, 0, 8, 1, 9, one);  // posted while it is on its way, maybe before
  api.cancel(one);
  peer.write("last!", 6);
  if (!soon([&] { return api.test(one); })) expect(false, "neither taken back nor received");
}

// Frames that come at once, wherever they break off: each message is its own.
void many_at_once() {
  const Stranger peer;
  SocketApi& api = *peer.api;
  constexpr size_t kMessages = 200;
  std::string bytes;
  for (size_t i = 0; i < kMessages; ++i) {
    const Frame frame{9, kMagic, i % 7 == 0 ? 3000 : i};
    bytes.append(reinterpret_cast<const char*>(&frame), sizeof(frame));
    bytes.append(frame.nbytes, char(i));
  }
  std::jthread writer([&] { peer.write(bytes.data(), bytes.size()); });
  for (size_t i = 0; i < kMessages; ++i) {
    const size_t nbytes = i % 7 == 0 ? 3000 : i;
    std::string data(nbytes, '?');
    Request req = 0;
    api.irecv(data.data(), nbytes, nbytes, 1, 9, req);
    expect_done(api, req, "one of many");
    expect(data == std::string(nbytes, char(i)), "message ", i);
  }
}

// Tests move what they wait for, without the thread.
void read_by_tests() {
  const Sockets both = connect(2);
  SocketApi api(both[0], {"rank 0", "rank 1"}, SocketApi::kSilenceS, false);
  const Frame frame{9, kMagic, 2};
  char data[2] = "";
  Request req = 0;
  api.irecv(data, 2, 2, 1, 9, req);
  for (const std::string_view part :
       {std::string_view(reinterpret_cast<const char*>(&frame), 5),
        std::string_view(reinterpret_cast<const char*>(&frame) + 5, 11), std::string_view("ab")}) {
    expect(!api.test(req), "before all had come");
    expect(send(both[1][0], part.data(), part.size(), MSG_NOSIGNAL) == ssize_t(part.size()),
           "send");
    for (int i = 0; i < 100 && req != 0; ++i) api.test(req);
  }
  expect(req == 0 && data[0] == 'a' && data[1] == 'b', "tests have not read it");
  api.irecv(data, 2, 2, 1, 9, req);
  ::close(both[1][0]);
  expect_kind("PeerLost", [&] { expect_done(api, req, "of the dead"); }, "nor that it died");
  api.cancel(req);
  expect(api.test(req), "not taken back");
}

// Once nobody waits any more, the thread reads again.
void read_again_by_the_thread() {
  const Stranger peer;
  SocketApi& api = *peer.api;
  char data[2] = "";
  Request req = 0;
  for (int round = 0; round < 3; ++round) {
    api.irecv(data, 1, 1, 1, 8, req);
    for (int i = 0; i < 1000; ++i) expect(!api.test(req), "nothing was sent");
    peer.message(9, "x");
    expect(soon([&] { return api.probe(1, 9); }), "nobody has read");
    peer.message(8, "y");
    expect_done(api, req, "what was waited for");
    api.irecv(data, 1, 1, 1, 9, req);
    expect_done(api, req, "what had come");
  }
}

// Whoever sends what is no frame is not read any more; and nothing of former messages is touched.
void no_frames() {
  for (const auto& [tag, nbytes, magic] : std::vector<Frame>{{13, 0, 0},
                                                             {13, 12, 0},
                                                             {13, uint64_t{2} << 30, kMagic},
                                                             {-1, 0, 1},
                                                             {-1, 64, kMagic}}) {
    for (const bool posted : {true, false}) {
      const Stranger peer;
      SocketApi& api = *peer.api;
      auto data = std::make_unique<char[]>(4);
      Request req = 0;
      if (posted) api.irecv(data.get(), 0, 4, 1, 13, req);
      peer.message(13, "abcd");
      if (!posted) {
        expect(soon([&] { return api.probe(1, 13); }), "nothing has come");
        api.irecv(data.get(), 0, 4, 1, 13, req);
      }
      expect_done(api, req, "a good message");
      data.reset();
      char more[4];
      api.irecv(more, 0, 4, 1, 13, req);
      // At once: the connection is ended as soon as the frame has been read.
      const Frame frame{tag, static_cast<uint32_t>(magic), nbytes};
      std::string bytes(reinterpret_cast<const char*>(&frame), sizeof(frame));
      if (nbytes == 12 || nbytes == 64) bytes.append(size_t(nbytes), 'x');
      peer.write(bytes.data(), bytes.size());
      expect_lost(api, req, "no frame", "TransportError");
    }
  }
}

// A message breaks off after any number of bytes: receives fail, whether they came before or after.
void breaks_off() {
  const std::string data(40, 'x');
  for (size_t cut = 0; cut < sizeof(Frame) + data.size(); cut += 5) {
    for (const bool before : {true, false}) {
      Stranger peer;
      SocketApi& api = *peer.api;
      const auto into = std::make_unique<char[]>(data.size());
      Request req = 0;
      if (before) api.irecv(into.get(), 0, data.size(), 1, 11, req);
      const Frame frame{11, kMagic, data.size()};
      std::string bytes(reinterpret_cast<const char*>(&frame), sizeof(frame));
      bytes = (bytes + data).substr(0, cut);
      peer.write(bytes.data(), bytes.size());
      if (!before && cut >= sizeof(Frame)) {
        expect(soon([&] { return api.probe(1, 11); }), "nothing has begun to come");
      }
      peer.hang_up();
      if (!before) api.irecv(into.get(), 0, data.size(), 1, 11, req);
      expect_lost(api, req, "broken off");
    }
  }
}

// A notice that waits is read before the loss is told. One that broke off will never be read, and
// one for another communicator says nothing here.
void notices_of_the_dead() {
  for (const int tag : {kNotice, kLanes + kNotice}) {
    for (const bool whole : {true, false}) {
      Stranger peer;
      SocketApi& api = *peer.api;
      char data[4];
      Notice notice;
      notice.kind = Notice::kClosed;
      Request req = 0, other = 0;
      api.irecv(data, 0, 4, 1, 8, req);
      peer.frame(tag, kNoticeBytes);
      peer.write(&notice, kNoticeBytes - !whole);
      expect(soon([&] { return api.probe(1, tag); }), "no notice");
      peer.hang_up();
      if (whole && tag == kNotice) {
        usleep(20000);
        expect(!api.test(req) && api.probe(1, tag), "the loss came before the notice");
        api.irecv(&notice, 1, sizeof(notice), 1, tag, other);
        expect_done(api, other, "notice");
      }
      expect_lost(api, req, "after the notice");
      if (!whole && tag != kNotice) expect(!api.probe(1, tag), "half a notice is left");
    }
  }
}

// The same where the notice has been asked for when it breaks off.
void half_a_notice_taken() {
  Stranger peer;
  SocketApi& api = *peer.api;
  char data[4];
  Notice notice;
  Request req = 0, taken = 0;
  api.irecv(data, 0, 4, 1, 8, req);
  peer.frame(kNotice, kNoticeBytes);
  peer.write(&notice, kNoticeBytes - 1);
  expect(soon([&] { return api.probe(1, kNotice); }), "no notice");
  api.irecv(&notice, 1, sizeof(notice), 1, kNotice, taken);
  peer.hang_up();
  expect_lost(api, req, "a message");
  expect_lost(api, taken, "the notice");
}

// What is sent to the dead is dropped; its memory is free.
void sends_to_the_dead() {
  Stranger peer;
  SocketApi& api = *peer.api;
  auto data = std::make_unique<char[]>(4 << 20);
  Request first = 0, second = 0;
  api.isend(data.get(), 4 << 20, 1, 0, first);
  api.isend(data.get(), 100, 1, 0, second);
  expect(!api.test(first) && !api.test(second), "sent without anybody who reads");
  peer.hang_up();
  expect_done(api, first, "first");
  expect_done(api, second, "second");
  data.reset();
  char one = 0;
  api.isend(&one, 1, 1, 0, first);
  expect_done(api, first, "afterwards");
}

// Sleeps for ten seconds while `act` is repeated; true if that has ended the sleep.
bool wakes(SocketApi& api, const std::function<void()>& act) {
  std::atomic<bool> over = false;
  std::thread sleeper([&] {
    api.sleep(10'000'000);
    over = true;
  });
  const bool woken = soon([&] {
    act();
    usleep(1000);
    return over.load();
  });
  sleeper.join();
  return woken;
}

// Who sleeps is woken by what comes, and by what the thread has sent meanwhile; nothing else.
void wakes_sleepers() {
  Stranger peer;
  SocketApi& api = *peer.api;
  const uint64_t start = now_ns();
  api.sleep(20'000);
  expect(now_ns() - start >= 20'000'000, "woken by nothing");
  expect(wakes(api, [&] { peer.message(8, "abcd"); }), "not woken by messages");
  const auto data = std::make_unique<char[]>(64 << 20);
  Request req = 0;
  api.isend(data.get(), 64 << 20, 1, 0, req);
  char some[1 << 14];
  expect(wakes(api, [&] { expect(recv(peer.fd, some, sizeof(some), 0) > 0, "nothing sent"); }),
         "not woken by the room for more");
  peer.hang_up();
  expect_done(api, req, "what nobody reads any more");
}

}  // namespace

int main() {
  return main_of({{"in any order", in_any_order},
                  {"many at once", many_at_once},
                  {"read by tests", read_by_tests},
                  {"read again by the thread", read_again_by_the_thread},
                  {"no frames", no_frames},
                  {"breaks off", breaks_off},
                  {"notices of the dead", notices_of_the_dead},
                  {"half a notice taken", half_a_notice_taken},
                  {"sends to the dead", sends_to_the_dead},
                  {"wakes sleepers", wakes_sleepers}});
}
