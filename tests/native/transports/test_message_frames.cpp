// What a member of a group over TCP may send that no rank sends: the connection ends with an error
// that names it, and nothing outside of the buffers of the receiver is touched.
//
//   test_message_frames [inputs [seed]]    mutates so many conversations; a thousand by default
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <random>

#include "hosts.h"
#include "jumping_clock.h"
#include "transports/messages/message_postbox.h"

// What a transport may still write to is never freed after a failure; test_message_deaths looks for
// other leaks. What was freed is watched for some inputs; more would cost fresh pages for each.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "detect_leaks=0:quarantine_size_mb=16"; }

static uint64_t g_seed = 0;  // of the running input: a report names it
extern "C" void __asan_on_error();
extern "C" void __asan_on_error() { std::fprintf(stderr, "seed %lu\n", g_seed); }

// More than that nobody gets, on any machine: sanitizers end the program instead.
[[gnu::noinline]] void* operator new(size_t nbytes) {
  constexpr size_t kMostBytes = size_t{1} << 34;
  void* data = nbytes > kMostBytes ? nullptr : std::malloc(nbytes + (nbytes == 0));
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
[[gnu::noinline]] void* operator new[](size_t nbytes) { return operator new(nbytes); }
[[gnu::noinline]] void operator delete[](void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, size_t) noexcept { std::free(data); }

namespace {

using namespace hosts;

constexpr uint32_t kMagic = 0x70634D31;
constexpr uint64_t kSmall = 20, kBig = 3000;  // elements: eager, and several segments

using Bytes = std::string;

template <typename T>
Bytes bytes_of(const T& value, size_t nbytes = sizeof(T)) {
  return Bytes(reinterpret_cast<const char*>(&value), nbytes);
}

// A frame as SocketApi sends it.
Bytes frame(int tag, const Bytes& data, uint32_t magic = kMagic) {
  return bytes_of(tag) + bytes_of(magic) + bytes_of(uint64_t{data.size()}) + data;
}
Bytes frame(Lane lane, const Bytes& data) { return frame(int(lane), data); }

Bytes eager(EagerHeader header, size_t nbytes) {
  header.nbytes = uint32_t(nbytes);
  return bytes_of(header) + Bytes(nbytes, '\1');
}
Bytes mail(uint64_t nbytes, size_t there) {
  return eager({0, uint64_t{7} << 32 | 1, nbytes, 0, 0}, there);
}
Bytes notice_of(Notice notice, size_t text = 1) {
  return bytes_of(notice, offsetof(Notice, text) + text);
}

// Connections without a thread: whoever waits moves them, and lets the next part of what the peer
// says arrive first. At the end the peer hangs up.
class Fed : public SocketApi {
 public:
  Fed(const Sockets& both, Bytes bytes, uint64_t seed)
      : SocketApi(both[0], {"rank 0", "rank 1"}, kSilenceS, false),
        peer_(both[1][0]),
        bytes_(std::move(bytes)),
        random_(seed),
        part_(1 + bytes_.size() / (1 + random_() % 8)) {}
  bool test(Request& req) override {
    move();
    return SocketApi::test(req);
  }
  bool probe(int src, int tag) override {
    move();
    return SocketApi::probe(src, tag);
  }
  void move() {
    if (said_ < bytes_.size()) {
      const size_t n = std::min<size_t>(1 + random_() % (2 * part_), bytes_.size() - said_);
      const ssize_t taken = send(peer_, &bytes_[said_], n, MSG_NOSIGNAL | MSG_DONTWAIT);
      said_ += taken > 0 ? size_t(taken) : errno == EAGAIN ? 0 : n;  // or nobody listens
    } else if (!over_) {
      over_ = true;
      shutdown(peer_, SHUT_RDWR);
    }
    serve_once(0);
  }
  void move_all() {
    while (!over_) move();
    move();
  }

 private:
  const int peer_;
  const Bytes bytes_;
  std::minstd_rand random_;
  const size_t part_;
  size_t said_ = 0;
  bool over_ = false;
};

// Rank 0, whose only peer is played by the test.
struct Victim {
  Victim() {
    const Sockets both = connect(2);
    fd = both[1][0];
    api = join(both[0]);
    engine = make_engine(api, {.n = 2, .timeout_s = 0.5}, 0);
  }
  Victim(const Bytes& bytes, uint64_t seed) {
    const Sockets both = connect(2);
    fd = both[1][0];
    api = fed = std::make_shared<Fed>(both, bytes, seed);
    const bool early = seed % 2 == 1;
    engine = make_engine(api, {.n = 2, .timeout_s = 0.5, .ranks_on_host = 1, .early = early}, 0);
  }
  ~Victim() {
    if (fed != nullptr) fed->move_all();
    engine->leave("over");
    engine.reset();
    hang_up();
    api->close();
  }
  void hang_up() {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
  void write(const Bytes& bytes) const {  // what does not fit was refused before
    static_cast<void>(!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT));
  }
  std::shared_ptr<const BoundCall> call(MessagePlan plan, uint64_t count) const {
    return engine->bind(sum_of(plan(2, 0), count, 1), limits_of(plan, 2, 8 << 10, 1 << 10),
                        plan == from_first, {});
  }
  void run(MessagePlan plan, uint64_t count) {
    in.assign(count, 1);
    out.assign(count, 0);
    engine->run(*call(plan, count), in.data(), out.data());
  }
  void recv() {
    MessagePostbox mailbox(engine);
    std::vector<char> data(40);
    mailbox.recv(data.data(), data.size(), 1, 1, 7, 0.3);
  }

  int fd;
  std::shared_ptr<SocketApi> api;
  std::shared_ptr<Fed> fed;  // or null
  std::shared_ptr<MessageEngine> engine;
  Ints in, out;
};

EagerHeader header_of(const BoundCall& call) {
  return {1, call.descriptor, call.count, call.check, 0};
}

void expect_rejected(const char* what, const std::function<void(Victim&)>& body) {
  Victim victim;
  std::string text;
  const std::string kind = kind_thrown([&] { body(victim); }, &text);
  const bool named = text.find("rank 1") != std::string::npos;
  expect(kind == "TransportError" && named, what, ": ", kind, ": ", text);
}

// Each field of each frame, one at a time.
void fields() {
  const auto in_recv = [](const char* what, const Bytes& bytes) {
    expect_rejected(what, [&](Victim& victim) {
      victim.write(bytes);
      victim.recv();
    });
  };
  in_recv("no magic", frame(int(Lane::kMail), mail(40, 40), 1));
  in_recv("a negative tag", frame(-5, mail(40, 40)));
  in_recv("no lane", frame(6, mail(40, 40)));
  in_recv("no header", frame(Lane::kMail, "short"));
  in_recv("more than it says", frame(Lane::kMail, mail(40, 40) + "more"));
  in_recv("less than it says", frame(Lane::kMail, mail(40, 40).substr(0, 50)));
  in_recv("count below the data", frame(Lane::kMail, mail(8, 40)));
  in_recv("count above the data", frame(Lane::kMail, mail(40, 8)));
  in_recv("a large count with data", frame(Lane::kMail, mail(100000, 40)));
  in_recv("more than any memory", frame(Lane::kMail, mail(uint64_t{1} << 62, 0)));
  in_recv("more than this memory", frame(Lane::kMail, mail(uint64_t{1} << 47, 0)));
  in_recv("payload of another size",
          frame(Lane::kMail, mail(100000, 0)) + frame(Lane::kMailPayload, Bytes(99999, 'x')));
  in_recv("payload larger than announced",
          frame(Lane::kMail, mail(100000, 0)) + frame(Lane::kMailPayload, Bytes(100001, 'x')));
  Notice notice;
  in_recv("a notice of no kind", frame(Lane::kNotice, notice_of(notice)));
  notice.kind = Notice::kRecord;
  in_recv("half a notice", frame(Lane::kNotice, notice_of(notice).substr(0, 40)));
  Notice other = notice;
  other.cause = 77;
  in_recv("no cause", frame(Lane::kNotice, notice_of(other)));
  other = notice;
  other.culprit = 2;
  in_recv("a culprit that is no rank", frame(Lane::kNotice, notice_of(other)));
  other = notice;
  other.waiting_peer = 9;
  in_recv("waits for no rank", frame(Lane::kNotice, notice_of(other)));
  other = notice;
  std::memset(other.site, 'x', sizeof(other.site));
  in_recv("a site without an end", frame(Lane::kNotice, notice_of(other)));
  other = notice;
  other.text[0] = 'x';
  in_recv("a text without an end", frame(Lane::kNotice, notice_of(other)));

  for (const size_t nbytes : {size_t{8}, size_t{1000}}) {
    expect_rejected("eager data of another size", [&](Victim& victim) {
      const auto call = victim.call(sum_in_ring, kSmall);
      victim.write(frame(Lane::kEager, eager(header_of(*call), nbytes)));
      victim.write(frame(Lane::kEager, eager(header_of(*call), nbytes)));
      victim.run(sum_in_ring, kSmall);
    });
  }
  expect_rejected("payload larger than its segment", [&](Victim& victim) {
    const auto call = victim.call(sum_in_ring, kBig);
    victim.write(frame(Lane::kAgreement, eager(header_of(*call), 0)));
    victim.write(frame(int(Lane::kPayload) + int(kWindows), Bytes(200000, 'x')));
    victim.run(sum_in_ring, kBig);
  });
}

// Everything that rank 1 sends in a sum of few, one of many elements, and to a mailbox.
std::vector<Bytes> conversation(const Victim& victim) {
  std::vector<Bytes> all;
  const auto small = victim.call(sum_in_ring, kSmall), big = victim.call(sum_in_ring, kBig);
  const uint64_t half = kSmall / 2 * sizeof(int64_t);
  for (int i = 0; i < 2; ++i) {
    all.push_back(frame(Lane::kEager, eager(header_of(*small), half)));
  }
  EagerHeader header = header_of(*big);
  header.seq = 2;
  all.push_back(frame(Lane::kAgreement, eager(header, 0)));
  for (int i = 0; i < 4; ++i) {
    all.push_back(frame(int(Lane::kPayload) + i % int(kWindows), Bytes(8 << 10, '\1')));
  }
  all.push_back(frame(Lane::kMail, mail(40, 40)));
  all.push_back(frame(Lane::kMail, mail(50000, 0)));
  all.push_back(frame(Lane::kMailPayload, Bytes(50000, 'x')));
  Notice notice;
  notice.kind = Notice::kRefused;
  notice.seq = 3;
  all.push_back(frame(Lane::kNotice, notice_of(notice)));
  notice.kind = Notice::kQuestion;
  all.push_back(frame(Lane::kNotice, notice_of(notice)));
  notice.kind = Notice::kPast;
  all.push_back(frame(Lane::kNotice, notice_of(notice)));
  notice.kind = Notice::kRecord;
  all.push_back(frame(Lane::kNotice, notice_of(notice, 4)));
  return all;
}

void mutate(std::vector<Bytes>& frames, std::mt19937_64& random) {
  const auto below = [&](size_t n) { return size_t(random() % n); };
  constexpr uint64_t kOdd[] = {0,
                               1,
                               8,
                               0xFF,
                               0x7FFF,
                               0xFFFF,
                               32768,
                               32769,
                               1 << 20,
                               1 << 30,
                               (1u << 30) + 1,
                               0x7FFFFFFF,
                               UINT32_MAX,
                               uint64_t{1} << 47,
                               uint64_t{1} << 62,
                               UINT64_MAX};
  for (size_t left = 1 + below(3); left > 0; --left) {
    const size_t chosen = below(frames.size());
    Bytes& bytes = frames[chosen];
    if (bytes.empty()) continue;
    // Mostly in the frame, the header and the fields of a notice.
    const size_t at = below(below(4) == 0 ? bytes.size() : std::min<size_t>(bytes.size(), 80));
    switch (below(8)) {
      case 0:
        bytes[at] = char(random());
        break;
      case 1:
        bytes[at] ^= char(1 << below(8));
        break;
      case 2: {
        const uint64_t odd = kOdd[below(std::size(kOdd))];
        const size_t width = size_t{1} << below(4), place = at / width * width;
        if (place + width <= bytes.size()) std::memcpy(&bytes[place], &odd, width);
        break;
      }
      case 3:
        bytes.resize(at);  // what follows is taken for the rest
        break;
      case 4:
        bytes.insert(at, Bytes(1 + below(40), char(random())));
        break;
      case 5:
        frames.insert(frames.begin() + std::ptrdiff_t(below(frames.size())), Bytes(bytes));
        break;
      case 6:
        std::swap(bytes, frames[below(frames.size())]);
        break;
      default: {  // another amount of data, of which the frame knows
        Bytes data = bytes.size() > 16 ? bytes.substr(16) : Bytes();
        data.resize(below(2 * data.size() + 1), '\2');
        int tag;
        std::memcpy(&tag, (bytes + Bytes(4, '\0')).data(), sizeof(tag));
        bytes = frame(tag, data);
      }
    }
  }
}

using Outcomes = std::map<std::string, uint64_t>;

// Time that this process has used or jumped over: the machine may be busy, or stop it for a while.
uint64_t spent_ns() {
  timespec used;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return uint64_t(used.tv_sec) * kSecond + uint64_t(used.tv_nsec);
}

// Rank 0 makes its calls.
void make_calls(Victim& victim, uint64_t seed, Outcomes& outcomes) {
  const std::function<void()> parts[] = {[&] { victim.run(sum_in_ring, kSmall); },
                                         [&] { victim.run(sum_in_ring, kBig); },
                                         [&] { victim.recv(); },
                                         [&] {
                                           victim.run(from_first, kSmall);
                                           victim.engine->prove();
                                         }};
  for (size_t i = 0; i < std::size(parts); ++i) {
    std::string text;
    const uint64_t start = spent_ns();
    const size_t part = i == 3 ? 3 : (i + 2 * (seed % 2)) % 3;
    const std::string kind = kind_thrown(parts[part], &text);
    ++outcomes[kind];
    const auto known = {"",        "TransportError", "PeerLost",     "PeerLeft",   "MismatchError",
                        "Revoked", "CollTimeout",    "PeerRejected", "CommClosed", "ScheduleError"};
    const bool fine = std::find(known.begin(), known.end(), kind) != known.end();
    expect(fine, "seed ", seed, ": ", kind, ": ", text);
    expect(spent_ns() - start < 20'000'000'000, "seed ", seed, " takes long");
  }
}

// What rank 1 says arrives while, or before, rank 0 makes its calls: of most inputs part by part in
// one thread, of every 64th from another thread. The connection ends soon.
void one_input(uint64_t seed, Outcomes& outcomes) {
  static const std::vector<Bytes> sound = conversation(Victim());
  g_seed = seed;
  std::mt19937_64 random(seed);
  std::vector<Bytes> frames = sound;
  mutate(frames, random);
  Bytes all;
  for (const Bytes& bytes : frames) all += bytes;
  g_alone = seed % 64 != 0;
  if (g_alone) {
    Victim victim(all, seed);
    return make_calls(victim, seed, outcomes);
  }
  Victim victim;
  victim.write(all);
  std::jthread end([&] {
    if (seed % 256 != 0) usleep(2000);
    shutdown(victim.fd, SHUT_RDWR);
  });
  make_calls(victim, seed, outcomes);
}

void mutations(uint64_t inputs, uint64_t seed) {
  Outcomes outcomes;
  for (uint64_t i = 0; i < inputs; ++i) one_input(seed + i, outcomes);
  expect(outcomes[""] > inputs / 4, "hardly a call succeeds: nothing is tested");
  expect(outcomes["TransportError"] > inputs / 4, "hardly a frame is found wrong");
  for (const auto& [kind, count] : outcomes) {
    if (inputs > 1000) std::printf("      %8lu %s\n", count, kind.empty() ? "fine" : kind.c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t inputs = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  return main_of({{"fields", fields}, {"mutations", [=] { mutations(inputs, seed); }}});
}
