// What has been sent and waits for its receiver delays nobody's calls.
#include "given_up.h"
#include "rendezvous.h"
#include "transports/messages/message_postbox.h"

namespace {

using namespace hosts;

constexpr uint64_t kSmall = 1000;    // elements whose eager message is above the eager limit
constexpr uint64_t kLarge = 100000;  // elements that need an agreement
constexpr uint32_t kContext = 1;

int tag_of(Lane lane) { return int(kContext) * kLanes + int(lane); }

// Runs `body` on ranks whose large messages wait for their receivers.
void with_rendezvous(Setup setup, const std::function<void(const Host&, Receipts&)>& body,
                     const std::string& what) {
  const auto receipts = std::make_shared<Receipts>();
  setup.timeout_s = 5;
  run_all(
      setup,
      [&](const Host& me) {
        const std::shared_ptr<Transport> below =
            me.one_thread == nullptr ? std::shared_ptr<Transport>(me.api) : me.one_thread;
        const auto api = std::make_shared<Rendezvous>(below, receipts, me.rank);
        const auto engine = make_engine(api, setup, me.rank, kContext);
        body({engine, me.api, me.one_thread, me.rank, me.n, me.kept}, *receipts);
        engine->close();
        sum_ones(me);  // the sockets stay until nobody has anything to read
      },
      what);
}

// A rank refuses a call for which others have sent it eager messages; then come calls that have
// none.
void refused_eager_messages() {
  for (const bool multiple : {true, false}) {
    with_rendezvous(
        {.n = 3, .multiple = multiple},
        [](const Host& me, Receipts&) {
          for (uint32_t refuser = 0; refuser < me.n; ++refuser) {
            if (me.rank == refuser) {
              me.engine->refuse("no array");
            } else {
              Ints x(kSmall), y(kSmall);
              const auto call = call_of(me, sum_at_once, kSmall);
              expect_kind("PeerRejected", [&] { me.engine->run(*call, x.data(), y.data()); }, "no");
            }
            for (int i = 0; i < 3; ++i) sum_ones(me, kLarge, sum_in_ring);
          }
        },
        "refused eager messages");
  }
}

// Large calls take the eager messages of a refused one, too: their senders would keep the buffers.
void stale_eager_messages(const Host& me, Receipts& receipts) {
  if (me.rank == 0) {
    me.engine->refuse("no array");
  } else {
    Ints x(kSmall), y(kSmall);
    const auto call = call_of(me, sum_at_once, kSmall);
    expect_kind("PeerRejected", [&] { me.engine->run(*call, x.data(), y.data()); }, "no");
  }
  for (int i = 0; i < 3; ++i) sum_ones(me, kLarge, sum_in_ring);
  expect(receipts.waiting(tag_of(Lane::kEager)) == 0, "eager messages of a refused call wait");
}

// A message of a user may be received when its sender has made other calls.
void late_receive(const Host& me, Receipts&) {
  MessagePostbox mail(me.engine);
  std::vector<char> data(8000, char(me.rank + 1));
  if (me.rank == 0) mail.send(data.data(), data.size(), 1, 1, 3, 5);
  for (const uint64_t count : {uint64_t{1}, kSmall, kLarge}) {
    for (int i = 0; i < 2; ++i) sum_ones(me, count, count == kLarge ? sum_in_ring : sum_at_once);
  }
  if (me.rank == 1) {
    expect(mail.recv(data.data(), data.size(), 1, 0, 3, 5) == 0, "sender");
    expect(data == std::vector<char>(8000, 1), "the message is another one");
  }
  sum_ones(me);
}

// A message that nobody has received when its sender closes is received all the same.
void close_behind_mail(const Host& me, Receipts&) {
  MessagePostbox mail(me.engine);
  std::vector<char> data(8000, char(me.rank + 1));
  if (me.rank == 0) return mail.send(data.data(), data.size(), 1, 1, 3, 5);
  usleep(100000);
  expect(mail.recv(data.data(), data.size(), 1, 0, 3, 5) == 0, "sender");
  expect(data == std::vector<char>(8000, 1), "the message is another one");
}

}  // namespace

int main() {
  const auto on = [](uint32_t n, void (*body)(const Host&, Receipts&)) {
    return [=] {
      for (const bool multiple : {true, false}) {
        with_rendezvous({.n = n, .multiple = multiple}, body, "large messages wait");
      }
    };
  };
  return main_of({{"eager messages of refused calls", refused_eager_messages},
                  {"eager messages are dropped", on(3, stale_eager_messages)},
                  {"a late receive", on(2, late_receive)},
                  {"close behind a message", on(2, close_behind_mail)}});
}
