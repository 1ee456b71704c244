// Messages in the background: many at once, in any order, moved by whoever waits or by nobody.
#include "calls.h"
#include "p2p/postbox.h"

namespace {

using namespace calls;

constexpr uint64_t kSizes[] = {0, 1, 1000, 5000, 100000};  // the mailbox holds about 4000
constexpr uint32_t kTags = std::size(kSizes);
constexpr double kLimitS = 60;

std::shared_ptr<Engine> borrow(const Rank& me) {
  return {&me.engine, [](Engine*) {}};
}

std::vector<char> text(uint32_t src, uint32_t dst, uint32_t tag) {
  std::vector<char> out(kSizes[tag]);
  for (size_t i = 0; i < out.size(); ++i) out[i] = char(i * 7 + src * 50 + dst * 11 + tag);
  return out;
}

// Every rank sends to every rank, itself too, everything at once.
void everybody_to_everybody(const Rank& me) {
  Postbox box(borrow(me));
  std::vector<std::vector<char>> sent, received;
  std::vector<Postbox::Ticket> tickets;
  sent.reserve(me.n * kTags);
  received.reserve(me.n * kTags);
  for (uint32_t tag = 0; tag < kTags; ++tag) {
    for (uint32_t peer = 0; peer < me.n; ++peer) {
      sent.push_back(text(me.rank, peer, tag));
      tickets.push_back(box.send(sent.back().data(), sent.back().size(), 1, peer, tag));
      received.emplace_back(kSizes[tag]);
    }
  }
  for (uint32_t i = me.n * kTags; i-- > 0;) {
    tickets.push_back(
        box.recv(received[i].data(), received[i].size(), 1, int32_t(i % me.n), i / me.n));
  }
  for (const Postbox::Ticket ticket : tickets) {
    if (ticket != 0) box.wait(ticket, kLimitS);
  }
  for (uint32_t i = 0; i < me.n * kTags; ++i) {
    expect(received[i] == text(i % me.n, me.rank, i / me.n), "message ", i, " is wrong");
  }
}

// Rank 0 posts and does not look again; the thread of its postbox moves the message.
void while_nobody_waits(const Rank& me) {
  Postbox box(borrow(me));
  for (int turn = 0; turn < 5; ++turn) {
    std::vector<char> message = text(0, 1, kTags - 1), got(message.size()), answer(1);
    if (me.rank == 0) {
      box.send(message.data(), message.size(), 1, 1, 0);
      const auto ticket = box.recv(answer.data(), 1, 1, 1, 1);
      while (!box.done(ticket)) usleep(2000);
      expect(box.wait(ticket, kLimitS) == 1, "wrong sender");
    } else {
      expect(box.wait(box.recv(got.data(), got.size(), 1, -1, 0), kLimitS) == 0, "wrong sender");
      expect(got == message, "the message is wrong");
      box.send(answer.data(), 1, 1, 0, 1);
    }
  }
}

// More small messages than there is room for, from one place in memory; the receiver comes late.
void left_behind(const Rank& me) {
  Postbox box(borrow(me));
  constexpr int kMessages = 200;
  int value = 0;
  for (int i = 0; i < kMessages; ++i) {
    if (me.rank == 0) {
      value = i;
      const auto ticket = box.send(&value, sizeof value, 1, 1, 0);
      if (ticket != 0) static_cast<void>(box.leave_behind(ticket, i % 3 == 0 ? 1e-5 : 0));
      value = -1;
      continue;
    }
    if (i == 0) usleep(20000);
    expect(box.take(&value, sizeof value, 1, 0, 0, kLimitS) == 0, "wrong sender");
    expect(value == i, "message ", i, " is ", value);
  }
  if (me.rank == 1) box.send(&value, sizeof value, 1, 0, 1);
  if (me.rank == 0) box.take(&value, sizeof value, 1, 1, 1, kLimitS);  // all have left
}

// Two threads of a rank wait for messages of their own.
void two_threads(const Rank& me) {
  Postbox box(borrow(me));
  const uint32_t other = 1 - me.rank;
  const auto talk = [&](uint32_t tag) {
    for (int turn = 0; turn < 50; ++turn) {
      std::vector<char> message = text(me.rank, other, 3), got(message.size());
      const auto ticket = box.recv(got.data(), got.size(), 1, int32_t(other), tag);
      const auto sent = box.send(message.data(), message.size(), 1, other, tag);
      if (sent != 0) box.wait(sent, kLimitS);
      box.wait(ticket, kLimitS);
      expect(got == text(other, me.rank, 3), "the message is wrong");
    }
  };
  std::thread second([&] { talk(1); });
  talk(2);
  second.join();
}

void failures(const Rank& me) {
  Postbox box(borrow(me));
  char data[8] = {};
  if (me.rank == 0) {
    const auto ticket = box.recv(data, 8, 1, 1, 0);
    expect_kind("CollTimeout", [&] { box.wait(ticket, 0.01); }, "nothing comes");
    box.wait(ticket, kLimitS);
    const auto wrong = box.recv(data, 4, 1, 1, 1);
    expect_kind("MismatchError", [&] { box.wait(wrong, kLimitS); }, "another size");
    box.wait(box.recv(data, 8, 1, 1, 1), kLimitS);
    expect_kind("ArgumentError", [&] { box.wait(wrong, kLimitS); }, "waited for twice");
    expect_kind("CollTimeout", [&] { box.take(data, 8, 1, 1, 3, 0.01); }, "nothing comes");
    expect_kind("MismatchError", [&] { box.take(data, 4, 1, -1, 4, kLimitS); }, "another size");
    expect(box.take(data, 8, 1, -1, 4, kLimitS) == 1, "wrong sender");
    box.recv(data, 8, 1, 1, 2);  // never comes: close() forgets it
  } else {
    usleep(50000);
    box.send(data, 8, 1, 0, 0);
    box.send(data, 8, 1, 0, 1);
    usleep(50000);
    box.send(data, 8, 1, 0, 4);
  }
  box.close();
  box.close();
}

}  // namespace

int main() {
  const auto with = [](uint32_t n, const Body& body) {
    return [n, body] {
      for (const Mode mode : kModes) {
        expect_all_fine(run(mode, {.n = n, .mailbox_bytes = 4096}, body), name(mode));
      }
    };
  };
  return main_of({{"everybody to everybody", with(3, everybody_to_everybody)},
                  {"left behind", with(2, left_behind)},
                  {"while nobody waits", with(2, while_nobody_waits)},
                  {"two threads", with(2, two_threads)},
                  {"failures", with(2, failures)}});
}
