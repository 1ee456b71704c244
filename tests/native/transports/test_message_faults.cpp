// How the engine over messages fails: the right error on every rank, soon.
#include <unistd.h>

#include "given_up.h"
#include "hosts.h"
#include "transports/messages/message_postbox.h"

namespace {

using namespace hosts;

constexpr uint64_t kLarge = 100000;  // elements of many segments
constexpr MessagePlan kPlans[] = {sum_at_once, sum_in_ring, from_first};

// The odd rank makes another call than the others; all raise, know who did what, and raise again.
void mismatch(uint32_t n, uint64_t count, uint64_t odd_count, uint64_t odd_descriptor) {
  run_all(
      {.n = n},
      [=](const Host& me) {
        sum_ones(me);
        const bool odd = me.rank == n - 1;
        const uint64_t mine = odd ? odd_count : count, descriptor = odd ? odd_descriptor : 1;
        const uint32_t site = me.engine->site(odd ? "odd.py:2 f" : "main.py:1 g");
        {
          const auto call = call_of(me, sum_in_ring, mine, descriptor);
          Ints x(mine), y(mine);  // nothing has been sent that refers to them
          expect_kind(
              "MismatchError", [&] { me.engine->run(*call, x.data(), y.data(), site); }, "odd");
        }
        const MessageReport report = me.engine->report();
        expect(report.cause == Cause::kMismatch && report.ranks.size() == n, "no report");
        for (uint32_t r = 0; r < n; ++r) {
          const Notice& other = report.ranks[r];
          expect(other.kind != 0 && other.count == (r == n - 1 ? odd_count : count), "rank ", r,
                 " has count ", other.count);
          expect(std::string(other.site) == (r == n - 1 ? "odd.py:2 f" : "main.py:1 g"), "site");
        }
        expect_kind("MismatchError", [&] { sum_ones(me); }, "the next call");
      },
      "mismatch");
}

void mismatches() {
  for (const uint32_t n : {2u, 3u, 4u}) {
    mismatch(n, 50, 50, 2);
    mismatch(n, 50, 49, 1);
    mismatch(n, kLarge, kLarge + 1, 1);
    mismatch(n, 50, kLarge, 1);
  }
}

// A refused call costs all ranks this call and no more. Its arrays are free at once.
void refusals() {
  for (const bool multiple : {true, false}) {
    for (const uint32_t refuser : {0u, 2u}) {
      run_all(
          {.n = 3, .multiple = multiple},
          [=](const Host& me) {
            for (const MessagePlan plan : kPlans) {
              for (const uint64_t count : {uint64_t{20}, kLarge}) {
                if (me.rank == refuser) {
                  me.engine->refuse("x has 3 dimensions");
                } else {
                  Ints x(count), y(count);
                  const auto call = call_of(me, plan, count);
                  const auto refused = [&] {
                    if (count == 20) return me.engine->run(*call, x.data(), y.data());
                    me.engine->wait(me.engine->submit(call, x.data(), y.data()));
                  };
                  expect_kind("PeerRejected", refused, "refused");
                }
                sum_ones(me, 7);
                sum_ones(me, kLarge, sum_in_ring);
              }
            }
          },
          "refusal");
    }
  }
}

void aborts() {
  for (const uint64_t count : {uint64_t{20}, kLarge}) {
    for (const bool queued : {false, true}) {
      run_all(
          {.n = 3},
          [=](const Host& me) {
            sum_ones(me);
            if (me.rank == 2) {
              usleep(50000);
              me.engine->abort("enough");
            }
            std::string text;
            Ints &x = me.array(count), &y = me.array(count);
            const auto call = call_of(me, sum_in_ring, count);
            const std::string kind = kind_thrown(
                [&] {
                  if (!queued) return me.engine->run(*call, x.data(), y.data());
                  me.engine->wait(me.engine->submit(call, x.data(), y.data()));
                },
                &text);
            expect(kind == "Revoked" && text.find("enough") != text.npos, kind, ": ", text);
          },
          "abort");
    }
  }
}

// From another thread, while the call is in the middle of its data.
void abort_half_way() {
  for (const uint64_t pause_us : {0u, 300u, 1000u, 3000u}) {
    run_all(
        {.n = 2},
        [=](const Host& me) {
          std::jthread other([&] {
            if (me.rank == 1) usleep(uint32_t(pause_us));
            if (me.rank == 1) me.engine->abort("enough");
          });
          const std::string kind = kind_thrown([&] {
            for (int i = 0; i < 1000; ++i) sum_ones(me, kLarge, sum_in_ring);
          });
          other.join();
          expect(kind == "Revoked", "got ", kind);
          expect(me.engine->report().cause == Cause::kAbort, "report");
        },
        "abort half way");
  }
}

// report() on one thread while the communicator fails on another.
void report_beside_failure() {
  for (int round = 0; round < 5; ++round) {
    run_all(
        {.n = 2},
        [=](const Host& me) {
          Ints &x = me.array(100), &y = me.array(100);
          const auto ticket =
              me.engine->submit(call_of(me, sum_at_once, 100, me.rank), x.data(), y.data());
          while (me.engine->report().cause == Cause::kNone) usleep(10);
          expect_kind("MismatchError", [&] { me.engine->wait(ticket); }, "queued");
        },
        "report");
  }
}

void leaving() {
  for (const bool closes : {false, true}) {
    run_all(
        {.n = 3},
        [=](const Host& me) {
          for (int i = 0; i < 20; ++i) sum_ones(me);
          if (me.rank == 1) {
            if (!closes) me.engine->leave("ValueError: bad loss");
            me.engine->close();
            me.engine->close();
            return expect_kind("CommClosed", [&] { sum_ones(me); }, "afterwards");
          }
          std::string text;
          const std::string kind =
              kind_thrown([&] { sum_ones(me, me.rank == 0 ? 100 : kLarge); }, &text);
          const bool told = closes || text.find("bad loss") != text.npos;
          expect((kind == "PeerLeft" && told) || (closes && kind == "MismatchError"), kind, ": ",
                 text);
        },
        "leave");
  }
}

void after_close(const Host& me) {
  MessagePostbox mail(me.engine);
  MessagePostbox box(me.engine);
  sum_ones(me);
  me.engine->close();
  const auto closed = [&](const char* what, const std::function<void()>& use) {
    expect_kind("CommClosed", use, what);
  };
  char byte = 0;
  const uint32_t other = 1 - me.rank;
  Ints x(10), y(10);
  const auto call = call_of(me, sum_at_once, 10);
  closed("run", [&] { me.engine->run(*call, x.data(), y.data()); });
  closed("submit", [&] { me.engine->submit(call, x.data(), y.data()); });
  closed("start", [&] { me.engine->start(*call, x.data(), y.data(), 0, -1); });
  closed("refuse", [&] { me.engine->refuse("no"); });
  closed("skip", [&] { me.engine->skip(); });
  closed("await_refusal", [&] { me.engine->await_refusal(); });
  closed("abort", [&] { me.engine->abort("no"); });
  closed("poll", [&] { me.engine->poll(); });
  closed("send", [&] { mail.send(&byte, 1, 1, other, 0, 1); });
  closed("recv", [&] { mail.recv(&byte, 1, 1, int32_t(other), 0, 1); });
  closed("post", [&] { box.send(&byte, 1, 1, other, 0); });
  closed("expect", [&] { box.recv(&byte, 1, 1, int32_t(other), 0); });
  me.engine->leave("late");
  me.engine->raise_on_all("PeerLost", "late");
  box.close();
}

thread_local std::atomic<bool>* signalled = nullptr;

// A signal handler raises on rank 0, in a call, in a call behind others, or in a wait for one.
void interrupts() {
  for (const bool multiple : {true, false}) {
    for (const uint64_t count : {uint64_t{20}, kLarge}) {
      for (const int queued : {0, 1, 2}) {
        const auto signals = [](void*) { return signalled != nullptr && signalled->load(); };
        run_all(
            {.n = 2, .check_signals = signals, .multiple = multiple},
            [=](const Host& me) {
              Ints &x = me.array(count), &y = me.array(count);
              const auto call = call_of(me, sum_in_ring, count);
              if (me.rank == 1) {
                usleep(100000);
                return expect_kind(
                    "Revoked", [&] { me.engine->run(*call, x.data(), y.data()); }, "peer");
              }
              std::atomic<bool> now{false};
              signalled = &now;
              std::jthread later([&] {
                usleep(20000);
                now = true;
              });
              auto own = std::make_unique<Ints>(count);  // of a call that is copied
              int64_t* in = count == 20 ? own->data() : x.data();
              const auto interrupted = [&] {
                MessageEngine::Ticket ticket = 0;
                if (queued > 0) ticket = me.engine->submit(call, x.data(), y.data());
                if (queued < 2) return me.engine->run(*call, in, in);
                me.engine->wait(ticket);
              };
              expect_kind("Interrupted", interrupted, "signal");
              own.reset();
              later.join();
              signalled = nullptr;
              expect_kind("Revoked", [&] { sum_ones(me); }, "afterwards");
            },
            "interrupt");
      }
    }
  }
}

// The transport itself fails at any of its calls; everybody hears of it.
void transport_fails() {
  for (int after = 0; after < 40; after += 3) {
    for (const uint64_t count : {uint64_t{20}, kLarge}) {
      run_all(
          {.n = 2, .timeout_s = 10, .multiple = false},
          [=](const Host& me) {
            sum_ones(me);
            if (me.rank == 1) me.one_thread->fail_after(after);
            std::string text;
            const std::string kind = kind_thrown(
                [&] {
                  for (;;) sum_ones(me, count, sum_in_ring);
                },
                &text);
            expect(kind == "TransportError" && text.find("on purpose") != text.npos, kind, ": ",
                   text);
          },
          "transport fails");
    }
  }
}

// An engine goes while its calls are under way: they come to their end first.
void destruction(const Host& me) {
  const uint32_t context = 1;
  for (const bool fails : {false, true}) {
    const Setup setup{.n = 2, .timeout_s = fails ? 0.2 : 20};
    Ints &x = me.array(kLarge, 1), &y = me.array(kLarge);
    {
      const auto engine = make_engine(me.api, setup, me.rank, context + fails);
      const Host there{engine, me.api, nullptr, me.rank, 2, me.kept};
      const auto call = call_of(there, sum_in_ring, kLarge);
      if (!fails || me.rank == 0) {
        for (int i = 0; i < 3; ++i) engine->submit(call, x.data(), y.data());
      }
      MessagePostbox mail(engine);
      try {
        if (me.rank == 0) mail.send(x.data(), 100, 1, 1, 5, 10);
      } catch (const Error& error) {  // rank 1 may have gone first
        expect(std::string(error.kind()) == "PeerLeft", error.what());
      }
    }
    expect(fails || y == Ints(kLarge, 2), "the calls have not ended");
  }
  const auto engine = make_engine(me.api, {.n = 2}, me.rank, context + 2);
  const Host there{engine, me.api, nullptr, me.rank, 2, me.kept};
  Ints &x = me.array(kLarge), &y = me.array(kLarge);
  const auto call = call_of(there, sum_in_ring, kLarge);
  engine->start(*call, x.data(), y.data(), 0, -1);  // a batch that nobody ends
  engine->cancel_batch();
}

// A wait may give up, the call goes on.
void waits_that_give_up(const Host& me) {
  Ints x(kLarge, 1), y(kLarge);
  if (me.rank == 1) usleep(200000);
  const auto ticket = me.engine->submit(call_of(me, sum_in_ring, kLarge), x.data(), y.data());
  if (me.rank == 0) {
    expect_kind("CollTimeout", [&] { me.engine->wait(ticket, 0.02); }, "too soon");
    expect(!me.engine->done(ticket), "done before its peer came");
  }
  me.engine->wait(ticket, 20);
  expect(y == Ints(kLarge, 2), "the sum is wrong");
}

void batches_disagree(const Host& me) {
  for (const bool started : {false, true}) {
    const auto engine = make_engine(me.api, {.n = 2}, me.rank, 1 + started);
    const Host there{engine, me.api, nullptr, me.rank, 2, me.kept};
    Ints &x = me.array(kLarge), &y = me.array(kLarge);
    const auto same = call_of(there, sum_in_ring, kLarge);
    const auto other = call_of(there, sum_in_ring, kLarge, 2 + me.rank);
    const auto use = [&] {
      if (started) engine->start(*same, x.data(), y.data(), 0, -1);
      if (started) engine->finish();
      engine->start(*other, x.data(), y.data(), 0, -1);
      while (engine->progress_batch()) usleep(10);
      engine->finish();
    };
    expect_kind("MismatchError", use, "a batch of other calls");
    expect(!engine->progress_batch(), "the batch is empty");
  }
}

// In a child made by fork nothing works, and nothing that is done there harms the parent.
void in_a_child(const Host& me) {
  MessagePostbox mail(me.engine);
  MessagePostbox box(me.engine);
  Ints x(10, 1), y(10);
  int64_t word = 0, sent = 7 + me.rank;
  const auto message = box.recv(&word, 8, 1, int32_t(1 - me.rank), 3);
  const auto call = call_of(me, sum_at_once, 10);
  me.engine->wait(me.engine->submit(call, x.data(), y.data()));
  box.send(&sent, 8, 1, 1 - me.rank, 3);
  usleep(50000);  // what the other rank has sent has come
  const pid_t pid = fork();
  if (pid == 0) {
    const bool parents =
        !box.done(message) && kind_thrown([&] { box.wait(message, 5); }) == "ForkedError";
    me.api->forget();
    const auto run = [&] { me.engine->run(*call, x.data(), y.data()); };
    const bool fine =
        parents && kind_thrown(run) == "ForkedError" && me.engine->report().cause == Cause::kNone;
    me.engine->close();
    me.engine->leave("late");
    me.api->close();
    _exit(fine ? 0 : 1);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  expect(status == 0, "the child ended with ", status);
  box.wait(message, 10);
  expect(word == int64_t(8 - me.rank), "the message has gone to the child");
  sum_ones(me, kLarge, sum_in_ring);
}

// Large messages that nobody receives, of other sizes, or from whoever has closed.
void mail_not_received(const Host& me) {
  MessagePostbox box(me.engine);
  std::vector<char> data(1 << 20), small(10);
  if (me.rank == 1) {
    std::vector<MessagePostbox::Ticket> sent;
    for (const uint32_t tag : {0, 1, 2}) sent.push_back(box.send(data.data(), 1 << 20, 1, 0, tag));
    for (const auto ticket : sent) box.wait(ticket, 20);
    usleep(300000);
    return;
  }
  const auto wrong = box.recv(small.data(), 10, 1, 1, 0);
  expect_kind("MismatchError", [&] { box.wait(wrong, 20); }, "another size");
  const auto right = box.recv(data.data(), 1 << 20, 1, 1, 1);
  expect(box.wait(right, 20) == 1, "sender");
  const auto never = box.recv(small.data(), 10, 1, 1, 7);
  expect_kind("CollTimeout", [&] { box.wait(never, 0.05); }, "never sent");
  expect_kind("PeerLeft", [&] { box.wait(never, 20); }, "never sent, and closed");
}

}  // namespace

int main() {
  const auto with = [](const HostBody& body) {
    return [body] { run_all({.n = 2}, body, "two ranks"); };
  };
  std::vector<Test> tests = {{"mismatch", mismatches},
                             {"refusal", refusals},
                             {"abort", aborts},
                             {"abort half way", abort_half_way},
                             {"report beside a failure", report_beside_failure},
                             {"leave and close", leaving},
                             {"after close", with(after_close)},
                             {"interrupt", interrupts},
                             {"the transport fails", transport_fails},
                             {"destruction", with(destruction)},
                             {"waits that give up", with(waits_that_give_up)},
                             {"batches disagree", with(batches_disagree)},
                             {"mail is not received", with(mail_not_received)}};
  if (kModes.size() > 1) tests.push_back({"in a child", with(in_a_child)});
  return main_of(tests);
}
