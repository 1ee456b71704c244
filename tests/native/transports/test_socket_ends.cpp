// Connections that are closed, or never made: what is left of them.
#include <dirent.h>
#include <fcntl.h>

#include "stranger.h"

namespace {

using namespace stranger;

size_t open_files() {
  size_t count = 0;
  DIR* dir = opendir("/proc/self/fd");
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

// Of what the other side has not read, close() waits for a second, no longer.
void closes() {
  const auto data = std::make_unique<char[]>(4 << 20);
  Stranger peer;
  Request req = 0;
  peer.api->isend(data.get(), 4 << 20, 1, 0, req);
  const uint64_t start = now_ns();
  peer.api->close();
  peer.api->close();
  expect(now_ns() - start < 5'000'000'000, "late");
  expect(peer.api->test(req), "what was given up has not ended");
  peer.api->isend(data.get(), 4, 1, 0, req);
  expect(peer.api->test(req), "after close");
}

// What is read late, or slowly, still gets there, and the goodbye behind it.
void closes_behind_all() {
  for (const bool slowly : {false, true}) {
    constexpr size_t kBytes = 1 << 20;
    const Sockets both = connect(2);
    const int fd = both[1][0], little = 16 << 10;
    expect(setsockopt(both[0][1], SOL_SOCKET, SO_SNDBUF, &little, sizeof(little)) == 0,
           "SO_SNDBUF");
    const auto api = join(both[0]);
    const auto data = std::make_unique<char[]>(kBytes);
    Request req = 0;
    api->isend(data.get(), kBytes, 1, 0, req);
    std::atomic<size_t> got{0};
    std::jthread reader([&] {
      std::vector<char> room(slowly ? 32 << 10 : 1 << 20);
      usleep(slowly ? 0 : 1'500'000);
      ssize_t n = 1;
      while ((n = recv(fd, room.data(), room.size(), 0)) > 0) {
        got += size_t(n);
        if (slowly) usleep(50'000);
      }
    });
    api->close(slowly ? 0.5 : 5);
    reader.join();
    expect(got == kBytes + 2 * sizeof(Frame), got.load(), " bytes came, slowly: ", slowly);
    expect(api->test(req), "not sent");
    ::close(fd);
  }
}

void close_beside_calls() {
  for (int round = 0; round < 5; ++round) {
    const Stranger peer;
    std::atomic<bool> stop{false};
    std::jthread other([&] {
      char byte = 0;
      while (!stop) {
        Request req = 0;
        peer.api->isend(&byte, 1, 1, 0, req);
        expect_done(*peer.api, req, "sent or dropped");
        usleep(100);  // nobody reads it
      }
    });
    usleep(1000);
    peer.frame(-1, 0);  // goodbye
    peer.api->close();
    stop = true;
    other.join();
  }
}

// A constructor that throws leaves nothing open.
void not_made() {
  const size_t before = open_files();
  for (const bool named : {true, false}) {
    const Sockets both = connect(2);
    ::close(both[1][0]);
    const int file = ::open("/proc/self/exe", O_RDONLY | O_CLOEXEC);  // epoll takes no files
    std::vector<std::string> names = {"a", "b"};
    if (named) names.push_back("c");
    bool thrown = false;
    try {
      const SocketApi api({-1, both[0][1], file}, names);
    } catch (const std::exception&) {
      thrown = true;
    }
    expect(thrown && open_files() == before, open_files(), " files are open, of ", before);
  }
}

}  // namespace

int main() {
  return main_of({{"close", closes},
                  {"closes behind all", closes_behind_all},
                  {"close beside calls", close_beside_calls},
                  {"not made", not_made}});
}
