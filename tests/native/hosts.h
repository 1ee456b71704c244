// Ranks of the engine over messages for the native tests: threads, joined by pairs of sockets.
#pragma once

#include <sys/socket.h>

#include <deque>

#include "calls.h"
#include "transports/messages/message_engine.h"
#include "transports/tcp/socket_api.h"

namespace hosts {

using namespace calls;

using Sockets = std::vector<std::vector<int>>;  // by rank, of its connection to each other

inline Sockets connect(uint32_t n) {
  Sockets all(n, std::vector<int>(n, -1));
  for (uint32_t a = 0; a < n; ++a) {
    for (uint32_t b = a + 1; b < n; ++b) {
      int ends[2];
      expect(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "socketpair");
      all[a][b] = ends[0];
      all[b][a] = ends[1];
    }
  }
  return all;
}

inline std::shared_ptr<SocketApi> join(const std::vector<int>& sockets) {
  std::vector<std::string> names;
  for (size_t r = 0; r < sockets.size(); ++r) names.push_back("rank " + std::to_string(r));
  return std::make_shared<SocketApi>(sockets, names);
}

// What only one thread may use at a time, as an MPI without MPI_THREAD_MULTIPLE; it can also fail.
class OneThread : public Transport {
 public:
  explicit OneThread(std::shared_ptr<Transport> other)
      : Transport(INT32_MAX, false), other_(std::move(other)) {}
  void isend(const void* data, uint64_t nbytes, int dst, int tag, Request& req) override {
    if (fails()) throw_error("TransportError", "on purpose");
    other_->isend(data, nbytes, dst, tag, req);
  }
  void irecv(void* data, uint64_t least, uint64_t most, int src, int tag, Request& req) override {
    if (fails()) throw_error("TransportError", "on purpose");
    other_->irecv(data, least, most, src, tag, req);
  }
  bool test(Request& req) override { return other_->test(req); }
  bool probe(int src, int tag) override { return other_->probe(src, tag); }
  void cancel(Request& req) override { other_->cancel(req); }

  // The next call after so many others fails, once.
  void fail_after(int calls) { left_ = calls; }

 private:
  bool fails() { return left_ >= 0 && left_-- == 0; }

  std::shared_ptr<Transport> other_;
  int left_ = -1;
};

// What a rank's body works with.
struct Host {
  std::shared_ptr<MessageEngine> engine;
  std::shared_ptr<SocketApi> api;
  std::shared_ptr<OneThread> one_thread;  // or null
  uint32_t rank, n;
  std::deque<Ints>& kept;

  // An array that stays until the connections are closed: what a call that fails half way leaves
  // behind may still be read or written.
  Ints& array(uint64_t count, int64_t value = 0) const { return kept.emplace_back(count, value); }
};

struct Setup {
  uint32_t n = 2;
  double timeout_s = 30;
  bool (*check_signals)(void*) = nullptr;
  bool multiple = true;
  uint32_t ranks_on_host = 8;  // sleep soon: the ranks share few cores
  bool early = false;
};

inline std::shared_ptr<MessageEngine> make_engine(std::shared_ptr<Transport> api,
                                                  const Setup& setup, uint32_t rank,
                                                  uint32_t context = 0) {
  std::vector<int> members;
  for (uint32_t r = 0; r < setup.n; ++r) members.push_back(int(r));
  MessageOptions options{.timeout_s = setup.timeout_s};
  options.check_signals = setup.check_signals;
  options.early = setup.early;
  auto engine = std::make_shared<MessageEngine>(std::move(api), members, rank, context, options);
  engine->share_cores(sharing_own_cores(setup.ranks_on_host));
  return engine;
}

using HostBody = std::function<void(const Host&)>;

inline Outcome run_host(const Setup& setup, uint32_t rank, const std::vector<int>& sockets,
                        const HostBody& body) {
  std::deque<Ints> kept;
  Outcome outcome = {};
  try {
    const auto api = join(sockets);
    const auto one = setup.multiple ? nullptr : std::make_shared<OneThread>(api);
    {
      const auto engine =
          make_engine(one == nullptr ? std::shared_ptr<Transport>(api) : one, setup, rank);
      body({engine, api, one, rank, setup.n, kept});
      engine->close();
    }
    api->close();
  } catch (const Error& error) {
    store_text(outcome.kind, sizeof(outcome.kind), error.kind());
    store_text(outcome.text, sizeof(outcome.text), error.what());
  }
  return outcome;
}

// Runs `body` on every rank, on these sockets or on new ones.
inline void run_all(const Setup& setup, const HostBody& body, const std::string& what,
                    Sockets sockets = {}) {
  if (sockets.empty()) sockets = connect(setup.n);
  std::vector<Outcome> outcomes(setup.n);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < setup.n; ++r) {
    threads.emplace_back([&, r] { outcomes[r] = run_host(setup, r, sockets[r], body); });
  }
  for (std::thread& thread : threads) thread.join();
  expect_all_fine(outcomes, what);
}

// Plans of messages.
class MessagePlanBuilder {
 public:
  MessagePlanBuilder(uint32_t n, uint32_t rank, uint32_t chunks, uint32_t slots)
      : plan_(std::make_shared<Plan>()) {
    plan_->world_size = n;
    plan_->rank = rank;
    plan_->chunks = chunks;
    plan_->slots = slots;
    plan_->messages = true;
  }
  MessagePlanBuilder& send(uint32_t peer, Operand piece, uint32_t count = 1) {
    return add(Opcode::kSend, peer, {piece}, 0, count);
  }
  MessagePlanBuilder& recv(uint32_t peer, Operand piece, uint32_t count = 1) {
    return add(Opcode::kRecv, peer, {piece}, 0, count);
  }
  MessagePlanBuilder& wait() {
    add(Opcode::kWait, kAllPeers, {}, 0, 0);
    ++plan_->rounds;
    return *this;
  }
  MessagePlanBuilder& fold(const std::vector<Operand>& srcs, Operand dst, uint32_t count = 1) {
    std::vector<Operand> all = srcs;
    all.push_back(dst);
    return add(Opcode::kFold, 0, all, uint32_t(srcs.size()), count);
  }
  std::shared_ptr<const Plan> done() {
    plan_->check();
    return plan_;
  }

 private:
  MessagePlanBuilder& add(Opcode op, uint32_t peer, const std::vector<Operand>& operands,
                          uint32_t sources, uint32_t count) {
    Instr instr{};
    instr.op = uint8_t(op);
    instr.peer = uint16_t(peer);
    instr.nsrc = uint16_t(sources);
    instr.ndst = sources > 0 ? 1 : 0;
    instr.arg = uint32_t(plan_->operands.size());
    instr.count = count;
    instr.round = plan_->rounds;
    plan_->operands.insert(plan_->operands.end(), operands.begin(), operands.end());
    plan_->code.push_back(instr);
    return *this;
  }
  std::shared_ptr<Plan> plan_;
};

// Everybody sends its vector to everybody.
inline std::shared_ptr<const Plan> sum_at_once(uint32_t n, uint32_t r) {
  MessagePlanBuilder plan(n, r, 1, n);
  std::vector<Operand> all;
  for (uint32_t q = 0; q < n; ++q) {
    all.push_back(q == r ? in(r, 0) : cell(r, q));
    if (q != r) plan.recv(q, cell(r, q)).send(q, in(r, 0));
  }
  return plan.wait().fold(all, out(r, 0)).done();
}

// Sums go around once, results a second time, straight from array to array.
inline std::shared_ptr<const Plan> sum_in_ring(uint32_t n, uint32_t r) {
  MessagePlanBuilder plan(n, r, n, n);
  const uint32_t left = (r + n - 1) % n, right = (r + 1) % n;
  for (uint32_t s = 0; s + 1 < n; ++s) {
    const uint32_t mine = (r + n - s) % n, next = (r + 2 * n - s - 1) % n;
    plan.recv(left, cell(r, next)).send(right, s == 0 ? in(r, mine) : cell(r, mine)).wait();
    plan.fold({cell(r, next), in(r, next)}, s + 2 == n ? out(r, next) : cell(r, next));
  }
  for (uint32_t s = 0; s + 1 < n; ++s) {
    const uint32_t mine = (r + 1 + n - s) % n, next = (r + n - s) % n;
    plan.recv(left, out(r, next)).send(right, out(r, mine)).wait();
  }
  return plan.done();
}

// Rank 0 sends all chunks of its vector to everybody, as one message where they fit one segment.
inline std::shared_ptr<const Plan> from_first(uint32_t n, uint32_t r) {
  MessagePlanBuilder plan(n, r, 3, 0);
  if (r != 0) return plan.recv(0, out(r, 0), 3).wait().done();
  for (uint32_t q = 1; q < n; ++q) plan.send(q, in(r, 0), 3);
  return plan.wait().fold({in(r, 0)}, out(r, 0), 3).done();
}

using MessagePlan = std::shared_ptr<const Plan> (*)(uint32_t n, uint32_t rank);

constexpr uint64_t kSegment = 64 << 10, kEager = 8 << 10;  // bytes

// Of a plan of n ranks, for whichever of them.
inline MessageLimits limits_of(MessagePlan plan, uint32_t n, uint64_t segment_bytes = kSegment,
                               uint64_t eager_bytes = kEager) {
  MessageLimits limits{n, 0, segment_bytes, eager_bytes};
  for (uint32_t r = 0; r < n; ++r) {
    const auto made = plan(n, r);
    limits.slots = std::max<uint64_t>(limits.slots, made->slots);
    for (const Instr& instr : made->code) {
      const bool message = Opcode(instr.op) == Opcode::kSend || Opcode(instr.op) == Opcode::kRecv;
      if (message) limits.message_chunks = std::max<uint64_t>(limits.message_chunks, instr.count);
    }
  }
  return limits;
}

inline std::shared_ptr<const BoundCall> call_of(const Host& me, MessagePlan plan, uint64_t count,
                                                uint64_t descriptor = 1) {
  return me.engine->bind(sum_of(plan(me.n, me.rank), count, descriptor), limits_of(plan, me.n),
                         plan == from_first, {});
}

// All ranks add up ones, and check the result; the arrays are kept in case it fails.
inline void sum_ones(const Host& me, uint64_t count = 100, MessagePlan plan = sum_at_once,
                     double timeout_s = MessageEngine::kDefaultTimeout, uint64_t descriptor = 1) {
  Ints &x = me.array(count, 1), &y = me.array(count);
  me.engine->run(*call_of(me, plan, count, descriptor), x.data(), y.data(), 0, timeout_s);
  expect(y == Ints(count, plan == from_first ? 1 : me.n), "a sum of ones is wrong");
  me.kept.pop_back();
  me.kept.pop_back();
}

}  // namespace hosts
