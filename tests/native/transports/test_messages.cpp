// The engine over messages: results, calls in the background, batches, tagged messages.
#include <unistd.h>

#include <numeric>

#include "hosts.h"
#include "transports/messages/message_postbox.h"

namespace {

using namespace hosts;

constexpr double kLimitS = 60;
// One element, eager messages, one segment, several, and more than the transport reads at a time.
constexpr uint64_t kCounts[] = {0, 1, 7, 1000, 5000, 50001, 700003};

Ints values(uint32_t rank, uint64_t count, int64_t seed = 0) {
  Ints x(count);
  for (size_t i = 0; i < count; ++i) x[i] = int64_t(i % 1000) * (rank + 1) + seed;
  return x;
}

Ints expected(MessagePlan plan, uint32_t n, uint64_t count, int64_t seed = 0) {
  Ints sum = values(0, count, seed);
  for (uint32_t q = 1; q < n && plan != from_first; ++q) {
    const Ints x = values(q, count, seed);
    for (size_t i = 0; i < count; ++i) sum[i] += x[i];
  }
  return sum;
}

void results() {
  for (const bool multiple : {true, false}) {
    for (const uint32_t n : {1u, 2u, 3u, 4u}) {
      run_all(
          {.n = n, .multiple = multiple},
          [](const Host& me) {
            for (const MessagePlan plan : {sum_at_once, sum_in_ring, from_first}) {
              if (me.n == 1 && plan == sum_in_ring) continue;
              for (const uint64_t count : kCounts) {
                const Ints x = values(me.rank, count);
                Ints y(count);
                me.engine->run(*call_of(me, plan, count), x.data(), y.data());
                expect(y == expected(plan, me.n, count), count, " elements");
              }
            }
          },
          "results");
    }
  }
}

void many_small_calls(const Host& me) {
  for (int i = 0; i < 2000; ++i) sum_ones(me, 1 + i % 50, i % 3 == 0 ? sum_in_ring : sum_at_once);
}

// Calls that nobody waits for, then some of them, then all, mixed with calls that block.
void background(const Host& me) {
  for (int round = 0; round < 10; ++round) {
    std::deque<Ints> in, out;
    std::vector<MessageEngine::Ticket> tickets;
    for (const uint64_t count : {50000u, 3u, 1000u, 20000u}) {
      in.push_back(values(me.rank, count, round));
      out.emplace_back(count);
      tickets.push_back(
          me.engine->submit(call_of(me, sum_in_ring, count), in.back().data(), out.back().data()));
    }
    if (round % 2 == 0) sum_ones(me, 5000);
    if (round % 3 == 0) me.engine->wait(tickets[1], kLimitS);
    while (round % 3 == 1 && !me.engine->done(tickets[2])) usleep(100);
    for (const MessageEngine::Ticket ticket : tickets) me.engine->wait(ticket);
    for (size_t i = 0; i < in.size(); ++i) {
      expect(out[i] == expected(sum_in_ring, me.n, in[i].size(), round), "call ", i);
    }
  }
}

// Several threads wait for calls that one has made.
void waiting_threads(const Host& me) {
  for (int round = 0; round < 20; ++round) {
    std::deque<Ints> in, out;
    std::vector<std::thread> threads;
    std::atomic<int> fine{0};
    for (int i = 0; i < 3; ++i) {
      in.push_back(values(me.rank, 20000, i));
      out.emplace_back(20000);
      const auto ticket =
          me.engine->submit(call_of(me, sum_at_once, 20000), in.back().data(), out.back().data());
      threads.emplace_back([&me, &fine, ticket, i] {
        if (i == 1) me.engine->wait(ticket, kLimitS);
        if (i == 2) me.engine->wait(ticket);
        while (!me.engine->done(ticket)) usleep(100);
        ++fine;
      });
    }
    for (std::thread& thread : threads) thread.join();
    expect(fine == 3, "not all threads came to an end");
    for (int i = 0; i < 3; ++i) {
      expect(out[size_t(i)] == expected(sum_at_once, me.n, 20000, i), "call ", i);
    }
  }
}

// A batch of calls, moved by start(), progress_batch() and finish().
void batches(const Host& me) {
  for (const uint64_t count : {10u, 3000u, 40000u, 200000u}) {
    std::deque<Ints> in, out;
    const auto call = call_of(me, sum_in_ring, count);
    for (int i = 0; i < 6; ++i) {
      in.push_back(values(me.rank, count, i));
      out.emplace_back(count);
      me.engine->start(*call, in.back().data(), out.back().data(), 0, -1);
      for (int k = 0; k < 10; ++k) me.engine->progress_batch();
      if (i > 0) me.engine->finish();
    }
    me.engine->finish();
    expect(!me.engine->progress_batch(), "the batch is empty");
    for (int i = 0; i < 6; ++i) {
      expect(out[size_t(i)] == expected(sum_in_ring, me.n, count, i), "wagon ", i);
    }
    sum_ones(me);
  }
}

// Two communicators on the same connections, their calls in another order on each rank.
void two_engines(const Host& me) {
  const auto other = make_engine(me.api, {.n = me.n}, me.rank, 1);
  const Host there{other, me.api, nullptr, me.rank, me.n, me.kept};
  for (int round = 0; round < 10; ++round) {
    const Ints x = values(me.rank, 30000);
    Ints y(x.size());
    const auto ticket =
        there.engine->submit(call_of(there, sum_in_ring, x.size()), x.data(), y.data());
    sum_ones(me, 30000, sum_in_ring);
    there.engine->wait(ticket);
    expect(y == expected(sum_in_ring, me.n, x.size()), "the other communicator");
  }
  other->close();
}

std::vector<char> text(uint32_t src, uint32_t dst, size_t size) {
  std::vector<char> out(size);
  for (size_t i = 0; i < size; ++i) out[i] = char(i * 7 + src * 50 + dst * 11);
  return out;
}

constexpr size_t kSizes[] = {0, 1, 1000, kEagerBytes, kEagerBytes + 1, 3000000};

// Everybody sends to everybody, itself too, while calls go on.
void mail(const Host& me) {
  MessagePostbox box(me.engine);
  for (uint32_t tag = 0; tag < std::size(kSizes); ++tag) {
    for (uint32_t shift = 0; shift < me.n; ++shift) {
      const uint32_t to = (me.rank + shift) % me.n, from = (me.rank + me.n - shift) % me.n;
      const std::vector<char> sent = text(me.rank, to, kSizes[tag]);
      std::vector<char> got(sent.size());
      box.send(sent.data(), sent.size(), 1, to, tag, kLimitS);
      expect(box.recv(got.data(), got.size(), 1, int32_t(from), tag, kLimitS) == from, "sender");
      expect(got == text(from, me.rank, kSizes[tag]), "message of ", kSizes[tag]);
    }
    sum_ones(me);
  }
}

void postbox(const Host& me) {
  MessagePostbox box(me.engine);
  std::deque<std::vector<char>> sent, received;
  std::vector<MessagePostbox::Ticket> tickets;
  for (uint32_t tag = 0; tag < std::size(kSizes); ++tag) {
    for (uint32_t peer = 0; peer < me.n; ++peer) {
      sent.push_back(text(me.rank, peer, kSizes[tag]));
      tickets.push_back(box.send(sent.back().data(), sent.back().size(), 1, peer, tag));
    }
  }
  for (uint32_t tag = std::size(kSizes); tag-- > 0;) {
    for (uint32_t peer = 0; peer < me.n; ++peer) {
      received.emplace_back(kSizes[tag]);
      tickets.push_back(box.recv(received.back().data(), kSizes[tag], 1, int32_t(peer), tag));
    }
  }
  for (const MessagePostbox::Ticket ticket : tickets) {
    if (ticket != 0) box.wait(ticket, kLimitS);
  }
  for (size_t i = 0; i < received.size(); ++i) {
    expect(received[i] == text(uint32_t(i % me.n), me.rank, received[i].size()), "message ", i);
  }
}

// Threads of a rank that wait for messages, while others make calls in the background and wait.
void everything_at_once(const Host& me) {
  MessagePostbox box(me.engine);
  const uint32_t other = 1 - me.rank;
  const auto talk = [&](uint32_t tag) {
    for (int turn = 0; turn < 60; ++turn) {
      const size_t size = turn % 2 == 0 ? 1000 : 200000;
      const std::vector<char> message = text(me.rank, other, size);
      std::vector<char> got(size);
      const auto ticket = box.recv(got.data(), size, 1, int32_t(other), tag);
      const auto sent = box.send(message.data(), size, 1, other, tag);
      if (sent != 0) box.wait(sent, kLimitS);
      box.wait(ticket, kLimitS);
      expect(got == text(other, me.rank, size), "the message is wrong");
    }
  };
  std::thread first([&] { talk(1); }), second([&] { talk(2); });
  for (int i = 0; i < 100; ++i) {
    const uint64_t count = i % 2 == 0 ? 100 : 30000;
    const Ints x = values(me.rank, count, i);
    Ints y(count);
    const auto ticket = me.engine->submit(call_of(me, sum_in_ring, count), x.data(), y.data());
    if (i % 5 == 0) sum_ones(me);
    me.engine->wait(ticket, kLimitS);
    expect(y == expected(sum_in_ring, me.n, count, i), "call ", i);
  }
  first.join();
  second.join();
}

}  // namespace

int main() {
  const auto with = [](uint32_t n, const HostBody& body, bool both = true) {
    return [n, body, both] {
      run_all({.n = n}, body, "threads");
      if (both) run_all({.n = n, .multiple = false}, body, "one thread at a time");
    };
  };
  return main_of({{"results", results},
                  {"many small calls", with(3, many_small_calls)},
                  {"background", with(3, background)},
                  {"several threads wait", with(2, waiting_threads, false)},
                  {"batches", with(3, batches)},
                  {"two communicators", with(3, two_engines, false)},
                  {"mail", with(3, mail)},
                  {"postbox", with(3, postbox)},
                  {"everything at once", with(2, everything_at_once, false)}});
}
