// Connections that end or halt at any point of what the engine over messages does: the right error,
// soon, and no memory touched that its caller has got back.
#include <algorithm>

#include "given_up.h"
#include "relay.h"
#include "transports/messages/message_postbox.h"

namespace {

using namespace hosts;

constexpr uint64_t kLarge = 100000;  // elements of many segments
constexpr MessagePlan kPlans[] = {sum_at_once, sum_in_ring, from_first};

// The connection ends after any number of bytes: during agreements, eager messages, payload.
void dies(uint64_t limit, const HostBody& body) {
  const Relay relay(limit, Then::kEnds);
  run_all(
      {.n = 2, .timeout_s = 20},
      [&](const Host& me) {
        std::string text;
        const uint64_t start = now_ns();
        const std::string kind = kind_thrown([&] { body(me); }, &text);
        expect(kind == "PeerLost", "after ", limit, " bytes: ", kind, ": ", text);
        expect(now_ns() - start < 10'000'000'000, "late");
        expect_kind("PeerLost", [&] { sum_ones(me); }, "the next call");
      },
      "dies", relay.sockets());
}

void deaths() {
  for (const uint64_t limit : {0u, 16u, 47u, 48u, 60u, 4000u, 99999u, 900001u}) {
    for (const MessagePlan plan : kPlans) {
      // Who needs nothing of the dead learns of it from the next call that does.
      dies(limit, [plan](const Host& me) {
        sum_ones(me, kLarge, plan);
        for (;;) sum_ones(me, 500, sum_in_ring);
      });
    }
  }
}

void deaths_behind_the_queue() {
  for (const uint64_t limit : {100u, 50000u, 300000u}) {
    dies(limit, [](const Host& me) {
      Ints &x = me.array(kLarge), &y = me.array(kLarge);
      const auto call = call_of(me, sum_in_ring, kLarge);
      for (;;) {
        me.engine->submit(call, x.data(), y.data());
        me.engine->run(*call, x.data(), y.data());
      }
    });
  }
}

void deaths_of_batches() {
  for (const uint64_t limit : {100u, 50000u, 300000u, 1500000u}) {
    dies(limit, [](const Host& me) {
      // Calls that are under way at once have results of their own.
      Ints* const y[] = {&me.array(kLarge), &me.array(kLarge), &me.array(kLarge)};
      const Ints& x = me.array(kLarge);
      const auto call = call_of(me, sum_in_ring, kLarge);
      me.engine->start(*call, x.data(), y[0]->data(), 0, -1);
      for (int i = 1;; ++i) {
        me.engine->start(*call, x.data(), y[i % 3]->data(), 0, -1);
        me.engine->progress_batch();
        me.engine->finish();
      }
    });
  }
}

void deaths_in_messages() {
  for (const uint64_t limit : {0u, 20u, 100u, 50000u}) {
    for (const bool posted : {false, true}) {
      const std::shared_ptr<char[]> data(new char[1 << 20]());
      dies(limit, [=](const Host& me) {
        if (posted) {
          MessagePostbox box(me.engine);
          const auto into = std::make_unique<char[]>(1 << 20);
          const auto got = box.recv(into.get(), 1 << 20, 1, -1, 0);
          if (me.rank == 1) box.wait(box.send(data.get(), 1 << 20, 1, 0, 0), 20);
          box.wait(got, 20);
        }
        MessagePostbox mail(me.engine);
        const auto into = std::make_unique<char[]>(1 << 20);
        if (me.rank == 1) mail.send(data.get(), 1 << 20, 1, 0, 0, 20);
        mail.recv(into.get(), 1 << 20, 1, int32_t(1 - me.rank), 0, 20);
      });
    }
  }
}

// The connection halts in the middle; both give up, and let go of everything.
void halts() {
  for (const auto& [limit, plan] : std::vector<std::pair<uint64_t, MessagePlan>>{
           {0, sum_in_ring}, {4000, sum_at_once}, {500, from_first}, {300000, sum_in_ring}}) {
    const Relay relay(limit, Then::kHalts);
    const auto use = [plan = plan](const Host& me) {
      for (;;) sum_ones(me, kLarge, plan);
    };
    run_all(
        {.n = 2, .timeout_s = 0.2},
        [&](const Host& me) {
          expect_kind("CollTimeout", [&] { use(me); }, "halted");
          expect(me.engine->failed(), "the arrays are to be kept");
        },
        "halts", relay.sockets());
  }
}

// Small calls are copied: their arrays are the caller's again as soon as they have failed.
void small_arrays_are_free() {
  for (const uint64_t limit : {0u, 1000u}) {
    for (const Then then : {Then::kEnds, Then::kHalts}) {
      const Relay relay(limit, then);
      run_all(
          {.n = 2, .timeout_s = 0.3},
          [&](const Host& me) {
            const auto call = call_of(me, sum_at_once, 100);
            const std::string kind = kind_thrown([&] {
              for (;;) {
                Ints x(100), y(100);
                const auto ticket = me.engine->submit(call, x.data(), y.data());
                me.engine->wait(ticket);
                me.engine->run(*call, x.data(), y.data());
              }
            });
            expect(kind == (then == Then::kEnds ? "PeerLost" : "CollTimeout"), "got ", kind);
          },
          "small arrays", relay.sockets());
    }
  }
}

void mail_gives_up() {
  const Relay relay(3000, Then::kHalts);
  const std::shared_ptr<char[]> data(new char[1 << 20]());
  run_all(
      {.n = 2, .timeout_s = 1},
      [&](const Host& me) {
        MessagePostbox mail(me.engine);
        auto into = std::make_unique<char[]>(1 << 20);
        if (me.rank == 0) {
          expect_kind(
              "CollTimeout", [&] { mail.recv(into.get(), 1 << 20, 1, 1, 0, 0.3); }, "nothing yet");
          into.reset();
          const std::string kind = kind_thrown([&] {
            char byte;
            mail.recv(&byte, 1, 1, -1, 1, 1);
          });
          expect(kind == "CollTimeout", "got ", kind);
        } else {
          expect_kind(
              "CollTimeout", [&] { mail.send(data.get(), 1 << 20, 1, 0, 0, 0.3); }, "not taken");
          expect(mail.given_up() == 1 && me.engine->failed(), "a send that was given up");
        }
      },
      "mail", relay.sockets());
}

// Postboxes and mail that go while large messages are half here.
void mail_left_behind() {
  for (const bool posted : {false, true}) {
    const Relay relay(100000, Then::kHalts);
    const std::shared_ptr<char[]> data(new char[1 << 20]());
    run_all(
        {.n = 2, .timeout_s = 1},
        [&](const Host& me) {
          char byte;
          if (posted) {
            MessagePostbox box(me.engine);
            if (me.rank == 1) box.send(data.get(), 1 << 20, 1, 0, 0);
            const auto never = box.recv(&byte, 1, 1, -1, 1);
            expect_kind("CollTimeout", [&] { box.wait(never, 0.3); }, "nothing else comes");
          } else {
            MessagePostbox mail(me.engine);
            const auto use = [&] {
              if (me.rank == 1) mail.send(data.get(), 1 << 20, 1, 0, 0, 0.3);
              mail.recv(&byte, 1, 1, -1, 1, 0.3);
            };
            expect_kind("CollTimeout", use, "nothing else comes");
          }
        },
        "left behind", relay.sockets());
  }
}

// What comes after a wait that has failed goes to no array: whoever heard of it may have freed
// them.
void nothing_comes_after_a_failure(const Host& me) {
  constexpr int kPosted = 2 * kLanes + int(Lane::kPayload), kFailed = kPosted + 1,
                kBehind = kPosted + 2;
  struct Packet {
    EagerHeader head{0, uint64_t{2} << 32 | 1, 8, 0, 8};
    char data[8] = "too la";
  } packet;
  const auto send = [&](const void* data, uint64_t nbytes, int tag) {
    Request sent = 0;
    me.api->isend(data, nbytes, int(1 - me.rank), tag, sent);
    while (!me.api->test(sent)) usleep(100);
  };
  const auto hear = [&](int tag) {
    const uint64_t end = now_ns() + 20'000'000'000;
    while (!me.api->probe(int(1 - me.rank), tag)) {
      expect(now_ns() < end, "the other rank has not come so far: ", tag);
      usleep(100);
    }
  };
  if (me.rank == 1) {
    hear(kPosted);  // a receive after the abort would be refused
    me.engine->abort("on purpose");
    hear(kFailed);
    send(&packet, sizeof(packet), int(Lane::kMail));
    return send(nullptr, 0, kBehind);
  }
  MessagePostbox box(me.engine);
  char first[8], second[8] = "free";
  const auto one = box.recv(first, 8, 1, 1, 1), two = box.recv(second, 8, 1, 1, 2);
  send(nullptr, 0, kPosted);
  expect_kind("Revoked", [&] { box.wait(one, 20); }, "aborted");
  send(nullptr, 0, kFailed);
  hear(kBehind);
  expect(!box.done(two) && std::string(second) == "free", "a message came: ", second);
}

// Sends to rank 2 never leave, and are lost when it dies.
class Mortal : public OneThread {
 public:
  using OneThread::OneThread;
  void isend(const void* data, uint64_t nbytes, int dst, int tag, Request& req) override {
    OneThread::isend(data, nbytes, dst, tag, req);
    if (dst == 2) lost_.push_back(req);
  }
  bool test(Request& req) override {
    if (std::find(lost_.begin(), lost_.end(), req) == lost_.end()) return OneThread::test(req);
    if (dead_) throw_error("PeerLost", "rank 2 is dead");
    return false;
  }
  void die() { dead_ = true; }

 private:
  std::vector<Request> lost_;
  bool dead_ = false;
};

// What was on its way to the dead keeps no notice from those who live.
void notice_beside_a_death(const Host& me) {
  const auto api = std::make_shared<Mortal>(me.api);
  const auto engine = make_engine(api, {.n = 3, .timeout_s = 5}, me.rank, 1);
  if (me.rank == 0) {
    MessagePostbox mail(engine);
    const char byte = 0;
    mail.send(&byte, 1, 1, 2, 0, 5);
    api->die();
    engine->abort("enough");
  }
  if (me.rank == 1) {
    const Host there{engine, me.api, nullptr, me.rank, 3, me.kept};
    expect_kind("Revoked", [&] { sum_ones(there); }, "a call of the living");
  }
  sum_ones(me);  // nobody leaves before
  engine->leave("over");
}

// Rank 1 has no memory to make the communicator, and ends its connections in order: nobody waits
// for it until the time limit.
void leaves_before_it_joins(bool in_recv) {
  const Sockets sockets = connect(2);
  std::jthread other([&] { join(sockets[1])->close(); });
  const auto api = join(sockets[0]);
  {
    const auto engine = make_engine(api, {.n = 2, .timeout_s = 20}, 0);
    std::deque<Ints> kept;
    const Host me{engine, api, nullptr, 0, 2, kept};
    const uint64_t start = now_ns();
    const auto wait = [&] {
      char byte;
      if (in_recv) MessagePostbox(engine).recv(&byte, 1, 1, 1, 0, 20);
      if (!in_recv) sum_ones(me, 500, sum_in_ring);
    };
    expect_kind("PeerLeft", wait, "the other rank has gone");
    expect(now_ns() - start < 5'000'000'000, "late: ", now_ns() - start, " ns");
    engine->close();
  }
  api->close();
}

// Rank 1 dies while rank 0 waits for rank 2, which is busy elsewhere and dies later: rank 0 names
// rank 1, soon, and so does a rank that comes back when both are dead.
void names_who_died(bool in_recv) {
  const Sockets sockets = connect(4);
  const auto die = [&](uint32_t rank) {
    for (const int fd : sockets[rank]) shutdown(fd, SHUT_RDWR);
  };
  run_all(
      {.n = 4, .timeout_s = 20},
      [&](const Host& me) {
        sum_ones(me);
        const auto names_rank_1 = [&](const std::function<void()>& body) {
          std::string text;
          const uint64_t start = now_ns();
          const std::string kind = kind_thrown(body, &text);
          expect(kind == "PeerLost", kind, ": ", text);
          expect(text.find("rank 1 ") != std::string::npos, "another rank is named: ", text);
          expect(now_ns() - start < 1'000'000'000, "late: ", now_ns() - start, " ns");
        };
        if (me.rank == 1) {
          usleep(200'000);  // others may still be in the first call
          return die(1);
        }
        if (me.rank == 0 && in_recv) {
          MessagePostbox mailbox(me.engine);
          char byte;
          names_rank_1([&] { mailbox.recv(&byte, 1, 1, 2, 0, 20); });
        } else if (me.rank == 0) {
          names_rank_1([&] { sum_ones(me, 500, sum_in_ring); });
        }
        if (me.rank != 0) usleep(me.rank == 2 ? 1'500'000 : 2'000'000);
        if (me.rank == 2) return die(2);
        if (me.rank == 3) names_rank_1([&] { sum_ones(me, 500, sum_in_ring); });
      },
      "names who died", sockets);
}

// The transport fails while ranks tell each other what they were doing.
void failures_in_a_mismatch() {
  for (int after = 0; after < 12; ++after) {
    run_all(
        {.n = 2, .timeout_s = 10, .multiple = false},
        [=](const Host& me) {
          sum_ones(me);
          if (me.rank == 1) me.one_thread->fail_after(after);
          std::string first, second;
          const auto differs = [&] {
            sum_ones(me, 100 + me.rank, sum_at_once, MessageEngine::kDefaultTimeout, 2 + me.rank);
          };
          const std::string kind = kind_thrown(differs, &first);
          const bool known = kind == "MismatchError" || kind == "TransportError";
          expect(known, "after ", after, ": ", kind, ": ", first);
          expect_kind(kind.c_str(), differs, "the next call");
        },
        "fails in a mismatch");
  }
}

}  // namespace

int main() {
  return main_of({{"deaths", deaths},
                  {"deaths behind the queue", deaths_behind_the_queue},
                  {"deaths of batches", deaths_of_batches},
                  {"deaths in messages", deaths_in_messages},
                  {"names who died", [] { names_who_died(false); }},
                  {"names who died, in recv", [] { names_who_died(true); }},
                  {"leaves before it joins", [] { leaves_before_it_joins(false); }},
                  {"leaves before it joins, in recv", [] { leaves_before_it_joins(true); }},
                  {"halts", halts},
                  {"small arrays are free", small_arrays_are_free},
                  {"mail gives up", mail_gives_up},
                  {"mail left behind", mail_left_behind},
                  {"nothing comes after a failure",
                   [] { run_all({.n = 2}, nothing_comes_after_a_failure, "two ranks"); }},
                  {"failures in a mismatch", failures_in_a_mismatch},
                  {"a notice beside a death",
                   [] { run_all({.n = 3}, notice_beside_a_death, "three ranks"); }}});
}
