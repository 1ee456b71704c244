// Calls over messages for which one rank alone has no memory: every rank hears of it, soon.
#include <new>

#include "given_up.h"
#include "hosts.h"
#include "transports/messages/message_postbox.h"

namespace {

constexpr size_t kMostBytes = size_t{1} << 40;  // more than that nobody gets, on any machine
thread_local bool g_none = false;               // this thread gets nothing

}  // namespace

[[gnu::noinline]] void* operator new(size_t nbytes) {
  void* data = g_none || nbytes > kMostBytes ? nullptr : std::malloc(std::max<size_t>(1, nbytes));
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
[[gnu::noinline]] void operator delete(void* data) noexcept { std::free(data); }
[[gnu::noinline]] void operator delete(void* data, size_t) noexcept { std::free(data); }

namespace {

using namespace hosts;

enum class Way { kRun, kSubmit, kBatch };

// A ring whose cells take so many bytes that there is no memory for them.
std::shared_ptr<const Plan> too_large(uint32_t n, uint32_t r) {
  auto plan = std::make_shared<Plan>(*sum_in_ring(n, r));
  plan->slots = 1u << 31;
  return plan;
}

void make(const Host& me, Way way, MessagePlan plan, uint64_t count) {
  Ints &x = me.array(count, 1), &y = me.array(count);
  const auto call = call_of(me, plan, count);
  if (way == Way::kRun) return me.engine->run(*call, x.data(), y.data());
  if (way == Way::kSubmit) return me.engine->wait(me.engine->submit(call, x.data(), y.data()));
  me.engine->start(*call, x.data(), y.data(), 0, -1);
  me.engine->finish();
}

// The others would take the next call of rank 0 for the one that it could not make.
void no_memory_on_one_rank() {
  for (const bool multiple : {true, false}) {
    for (const Way way : {Way::kRun, Way::kSubmit, Way::kBatch}) {
      for (const uint64_t count : {uint64_t{1000}, uint64_t{100000}}) {
        run_all(
            {.n = 3, .timeout_s = 10, .multiple = multiple},
            [=](const Host& me) {
              sum_ones(me);
              std::string text;
              const auto plan = me.rank == 0 ? too_large : sum_in_ring;
              const std::string kind = kind_thrown([&] { make(me, way, plan, count); }, &text);
              const bool told = text.find("rank 0 has no memory") != text.npos;
              expect(kind == (me.rank == 0 ? "MemoryError" : "Revoked") && told, kind, ": ", text);
              expect_kind("Revoked", [&] { make(me, way, sum_in_ring, count); }, "the next call");
            },
            "no memory");
      }
    }
  }
}

// A rank that has no memory any more ends all the same, with receives posted and calls under way.
void ends_without_memory() {
  std::deque<Ints> kept{Ints(100000, 1), Ints(100000)};
  char byte;
  for (const MessagePlan plan : {sum_at_once, sum_in_ring}) {
    const Sockets sockets = connect(2);
    const auto peer = join(sockets[1]);
    auto api = join(sockets[0]);
    auto engine = make_engine(api, {.n = 2, .timeout_s = 1}, 0);
    auto box = std::make_unique<MessagePostbox>(engine);
    box->recv(&byte, 1, 1, 1, 0);
    const auto call = call_of({engine, api, nullptr, 0, 2, kept}, plan, kept[0].size());
    engine->start(*call, kept[0].data(), kept[1].data(), 0, -1);
    engine->progress_batch();
    g_none = true;
    box.reset();
    engine.reset();
    api.reset();
    g_none = false;
    peer->close();
  }
}

}  // namespace

int main() {
  return main_of({{"no memory on one rank", no_memory_on_one_rank},
                  {"ends without memory", ends_without_memory}});
}
