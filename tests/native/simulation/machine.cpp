#include "machine.h"

#include <cxxabi.h>
#include <link.h>

#include "state.h"

#undef memcpy

namespace simulation {

World* world = nullptr;

namespace {

bool acquires(Order order) {
  return order == Order::acquire || order == Order::acq_rel || order == Order::seq_cst ||
         order == Order::consume;
}
bool releases(Order order) {
  return order == Order::release || order == Order::acq_rel || order == Order::seq_cst;
}

std::vector<char*> stacks;  // free ones

// A line of the source with an access that orders others.
struct Line {
  bool shared = false;  // threads have met there
  bool strict = false;  // seq_cst
  std::optional<Order> becomes;
};
std::map<std::pair<std::string_view, uint32_t>, Line> lines;
std::string weakened;

std::string name_of(const Where& where) {
  std::string path = where.file_name();
  const size_t from = path.find("csrc/");
  return path.substr(from == std::string::npos ? 0 : from + 5) + ":" + std::to_string(where.line());
}

// The order that an access has, be it weakened.
Order actual(Order order, const Where& where, const Place& place) {
  if (order == Order::relaxed) return order;
  const auto [found, added] = lines.try_emplace({where.file_name(), where.line()});
  Line& line = found->second;
  if (added && !weakened.empty()) {
    const std::string name = name_of(where);
    if (weakened == name) line.becomes = Order::relaxed;
    if (weakened == name + " acq_rel") line.becomes = Order::acq_rel;
  }
  line.shared |= (place.threads & (place.threads - 1)) != 0;
  line.strict |= order == Order::seq_cst;
  return line.becomes.value_or(order);
}

}  // namespace

bool inside() { return world != nullptr && world->running != kMost; }

Fiber& me() { return world->fibers[world->running]; }

namespace {

double chance() { return double(world->random() >> 11) * 0x1p-53; }

}  // namespace

uint64_t raw(const void* at, unsigned bytes) {
  uint64_t value = 0;
  std::memcpy(&value, at, bytes);
  return value;
}

namespace {

void swap_exceptions(uint64_t (&kept)[2]) {
  auto* now = reinterpret_cast<uint64_t*>(abi::__cxa_get_globals());
  std::swap(now[0], kept[0]);
  std::swap(now[1], kept[1]);
}

// The thread_local variables of this program, as they are now.
std::span<char> locals() {
  static const std::span<char> found = [] {
    std::span<char> place;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* to) {
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& part = info->dlpi_phdr[i];
            if (part.p_type != PT_TLS) continue;
            *static_cast<std::span<char>*>(to) = {static_cast<char*>(info->dlpi_tls_data),
                                                  part.p_memsz};
          }
          return 1;  // the first is the program itself
        },
        &place);
    return place;
  }();
  return found;
}

void swap_in(Fiber& fiber) {
  swap_exceptions(fiber.eh);
  std::swap_ranges(fiber.locals.begin(), fiber.locals.end(), locals().begin());
}

}  // namespace

void to_home() {
  Fiber& fiber = me();
  swap_in(fiber);
  swapcontext(&fiber.context, &world->home);
}

namespace {

// All threads of its process end, at once: the kernel interrupts those that run before it looks at
// what any of them holds.
void die(Fiber& dying, bool frozen) {
  dying.thread->dead = !frozen;
  dying.thread->died_ns = world->now_ns;
  Clock last{};
  for (uint32_t t = 0; t < world->fibers.size(); ++t) {
    Fiber& fiber = world->fibers[t];
    if (fiber.process != dying.process) continue;
    fiber.over = true;
    ++fiber.clock[t];
    join(last, fiber.clock);
  }
  for (auto& [address, lock] : world->locks) {
    if (frozen || lock.owner == kMost) continue;
    if (world->fibers[lock.owner].process != dying.process) continue;
    lock.owner = kMost;
    lock.owner_died = true;
    lock.released = last;
    unblock(address);
  }
  if (!frozen) end_connections(dying.process);
  to_home();  // and never back
}

}  // namespace

// Where another thread may go on.
void point() {
  Fiber& fiber = me();
  world->now_ns += kAccessNs;
  const uint64_t nth = fiber.thread->accesses++;
  if (nth == fiber.thread->kill_at) die(fiber, false);
  if (nth == fiber.thread->freeze_at) die(fiber, true);
  if (++world->accesses > world->options.most_accesses) {
    world->wrong = "it does not end";
    to_home();
  }
  if (chance() < world->pauses) {  // another process has the core
    fiber.wake_ns = world->now_ns + world->random() % kPauseNs;
    to_home();
    fiber.wake_ns = 0;
  } else if (chance() < world->switches) {
    to_home();
  }
}

Place& place_of(const void* at, unsigned bytes) {
  Place& place = world->places[reinterpret_cast<uintptr_t>(at)];
  if (place.count == 0) {
    place.stores[0] = {.value = raw(at, bytes)};
    place.count = 1;
  }
  place.threads |= 1u << world->running;
  return place;
}

namespace {

Store& newest(Place& place) { return place.stores[(place.count - 1) % kOld]; }

// The oldest store that the running thread may see.
uint64_t oldest_visible(const Place& place, Order order) {
  const Fiber& fiber = me();
  uint64_t from = std::max(fiber.stale >= kMostStale ? place.count - 1 : 0,
                           place.count > kOld ? place.count - kOld : 0);
  from = std::max(from, place.seen[world->running]);
  if (order == Order::seq_cst && place.last_strict > 0)
    from = std::max(from, place.last_strict - 1);
  for (uint64_t i = place.count - 1; i > from; --i) {
    const Store& store = place.stores[i % kOld];
    if (store.thread == kMost || store.epoch <= fiber.clock[store.thread]) return i;
  }
  return from;
}

}  // namespace

uint64_t look(Place& place, Order order) {
  Fiber& fiber = me();
  const uint64_t from = oldest_visible(place, order), last = place.count - 1;
  uint64_t index = last;
  if (from < last && chance() < world->stales) index = from + world->random() % (last - from + 1);
  fiber.stale = index < last ? fiber.stale + 1 : 0;
  place.seen[world->running] = index;
  const Store& store = place.stores[index % kOld];
  join(acquires(order) ? fiber.clock : fiber.pending, store.released);
  return store.value;
}

namespace {

void append(Place& place, uint64_t value, Order order, const Clock* sequence) {
  Fiber& fiber = me();
  Store store{.value = value, .thread = world->running, .epoch = ++fiber.clock[world->running]};
  store.released = releases(order) ? fiber.clock : fiber.fenced;
  if (sequence != nullptr) join(store.released, *sequence);
  place.stores[place.count++ % kOld] = store;
  place.seen[world->running] = place.count - 1;
  if (order == Order::seq_cst) place.last_strict = place.count;
}

void put(void* at, unsigned bytes, uint64_t value) {
  std::memcpy(at, &value, bytes);
  world->changed_ns[at] = world->now_ns;
  if (bytes == 8) world->changed_ns[static_cast<char*>(at) + 4] = world->now_ns;
}

void start(unsigned low, unsigned high) {
  auto* fiber = reinterpret_cast<Fiber*>(uintptr_t{low} | uintptr_t{high} << 32);
  try {
    fiber->body();
  } catch (const std::exception& error) {
    world->wrong = error.what();
  }
  ++fiber->clock[world->running];
  unblock(fiber);
  fiber->over = true;
  if (world->running == fiber->process) {
    fiber->thread->finished = true;
    for (Fiber& other : world->fibers) other.over |= other.process == fiber->process;
    end_connections(fiber->process);
  }
  to_home();
}

// The fiber to go on with, or null if all are over.
Fiber* next_fiber() {
  std::array<uint32_t, kMost> ready;
  uint32_t count = 0;
  uint64_t soonest = UINT64_MAX;
  bool all_over = true;
  for (uint32_t t = 0; t < world->fibers.size(); ++t) {
    Fiber& fiber = world->fibers[t];
    if (fiber.over) continue;
    all_over = false;
    if (fiber.wake_ns <= world->now_ns) ready[count++] = t;
    soonest = std::min(soonest, fiber.wake_ns);
  }
  if (soonest == UINT64_MAX) {
    if (!all_over) world->wrong = "threads wait for each other";
    return nullptr;
  }
  if (count == 0) {
    world->now_ns = soonest;
    return next_fiber();
  }
  world->running = ready[world->random() % count];
  return &world->fibers[world->running];
}

}  // namespace

uint64_t load(const void* at, unsigned bytes, Order order, const Where& where) {
  if (!inside()) return raw(at, bytes);
  point();
  Place& place = place_of(at, bytes);
  return look(place, actual(order, where, place));
}

void store(void* at, unsigned bytes, uint64_t value, Order order, const Where& where) {
  if (!inside()) {
    std::memcpy(at, &value, bytes);
    return;
  }
  point();
  Place& place = place_of(at, bytes);
  append(place, value, actual(order, where, place), nullptr);
  put(at, bytes, value);
}

uint64_t modify(void* at, unsigned bytes, const std::function<uint64_t(uint64_t)>& change,
                const uint64_t* expected, Order order, const Where& where) {
  if (!inside()) {
    const uint64_t old = raw(at, bytes);
    const uint64_t value = expected == nullptr || *expected == old ? change(old) : old;
    std::memcpy(at, &value, bytes);
    return old;
  }
  point();
  Place& place = place_of(at, bytes);
  order = actual(order, where, place);
  place.seen[world->running] = place.count - 1;
  const Store before = newest(place);
  join(acquires(order) ? me().clock : me().pending, before.released);
  if (expected != nullptr && *expected != before.value) return before.value;
  const uint64_t value = change(before.value);
  append(place, value, order, &before.released);
  put(at, bytes, value);
  return before.value;
}

void fence(Order order, const Where& where) {
  if (!inside()) return;
  Place everywhere;
  everywhere.threads = 3;
  order = actual(order, where, everywhere);
  if (acquires(order)) join(me().clock, me().pending);
  if (releases(order)) me().fenced = me().clock;
}

void forget(const void* at) {
  if (world != nullptr) world->places.erase(reinterpret_cast<uintptr_t>(at));
}

uint64_t random() { return world->random(); }
uint64_t now() { return world->now_ns; }
uint32_t current() { return me().process; }

std::vector<std::string> ordered_places() {
  std::vector<std::string> names;
  for (const auto& [at, line] : lines) {
    const std::string path(at.first);
    const size_t from = path.find("csrc/");
    if (!line.shared || from == std::string::npos) continue;
    names.push_back(path.substr(from + 5) + ":" + std::to_string(at.second));
    if (line.strict) names.push_back(names.back() + " acq_rel");
  }
  return names;
}

void weaken(const std::string& place) {
  weakened = place;
  lines.clear();
}

Fiber& add_fiber(uint32_t process, std::function<void()> body) {
  if (world->fibers.size() == kMost) std::abort();
  Fiber& fiber = world->fibers.emplace_back();
  fiber.thread = &(*world->processes)[process];
  fiber.process = process;
  fiber.body = std::move(body);
  fiber.locals.assign(locals().begin(), locals().end());
  if (stacks.empty()) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    stacks.push_back(static_cast<char*>(stack));
  }
  fiber.stack = stacks.back();
  stacks.pop_back();
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStackBytes;
  const auto at = reinterpret_cast<uintptr_t>(&fiber);
  makecontext(&fiber.context, reinterpret_cast<void (*)()>(start), 2, unsigned(at),
              unsigned(at >> 32));
  return fiber;
}

void run(std::vector<Thread>& threads, const Options& options) {
  World own;
  world = &own;
  own.options = options;
  own.random.seed(options.seed * 0x9E3779B97F4A7C15 + 1);
  constexpr double kSwitches[] = {0.02, 0.1, 0.5};
  own.switches = kSwitches[own.random() % 3];
  own.stales = own.random() % 3 == 0 ? 0 : 0.3;
  own.pauses = own.random() % 2 == 0 ? 0 : 0.01;
  own.sleepy = own.random() % 2 == 0;
  own.long_sleeps = options.long_sleeps && own.random() % 2 == 0;
  own.processes = &threads;
  own.fibers.reserve(kMost);
  if (options.begin) options.begin();
  for (uint32_t t = 0; t < threads.size(); ++t) add_fiber(t, threads[t].body).clock[t] = 1;
  const uint64_t begin = own.now_ns;
  while (Fiber* fiber = next_fiber()) {
    swap_in(*fiber);
    swapcontext(&own.home, &fiber->context);
    if (own.now_ns - begin > options.limit_ns) own.wrong = "it takes too long";
    if (!own.wrong.empty()) break;
  }
  own.running = kMost;
  for (Fiber& fiber : own.fibers) stacks.push_back(fiber.stack);
  if (own.wrong.empty()) judge_races();
  world = nullptr;
  if (!own.wrong.empty()) throw Wrong(own.wrong);
}

}  // namespace simulation
