// The machine of machine.h on the host: device memory is that of host_memory.cpp, a kernel is a
// function, the lanes of its blocks are threads or fibers. A launch on the null stream runs at
// once; others run when somebody waits, all streams side by side and each in its own order.
#include "host_machine.h"

#include <atomic>
#include <cstdlib>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <thread>

#include "cuda/host/machine.h"
#include "cuda/kernels/kernels.h"
#include "fibers.h"

namespace pycoll::cuda {
namespace host {
namespace {

constexpr int kResident = 64;  // blocks that fit

struct Kernel {
  HostKernel function;
  int blocks, lanes;
  std::vector<char> parameter;
};

std::atomic<int64_t> g_seed{-1};
std::atomic<uint64_t> g_turns{0};
std::mutex g_mutex;
std::map<void*, std::deque<Kernel>> g_streams;

using Blocks = std::vector<std::unique_ptr<Block>>;

void run_on_threads(const Kernel& kernel) {
  Blocks blocks;
  std::vector<std::thread> lanes;
  for (int b = 0; b < kernel.blocks; ++b) {
    blocks.push_back(std::make_unique<Block>(kernel.lanes));
    for (int lane = 0; lane < kernel.lanes; ++lane) {
      lanes.emplace_back([&kernel, block = blocks.back().get(), b, lane] {
        kernel.function({*block, uint32_t(lane), nullptr}, uint32_t(b), kernel.parameter.data());
      });
    }
  }
  for (std::thread& lane : lanes) lane.join();
}

// The kernels of one stream, as fibers: the next begins when all lanes of one have ended.
struct Stream {
  std::deque<Kernel> kernels{};
  Blocks blocks{};
  int running = 0;

  void begin(Fibers& fibers) {
    const Kernel& kernel = kernels.front();
    blocks.clear();
    for (int b = 0; b < kernel.blocks; ++b) {
      blocks.push_back(std::make_unique<Block>(kernel.lanes));
      for (int lane = 0; lane < kernel.lanes; ++lane) {
        ++running;
        fibers.add([this, &kernel, &fibers, block = blocks.back().get(), b, lane] {
          kernel.function({*block, uint32_t(lane), &fibers}, uint32_t(b), kernel.parameter.data());
          --running;
        });
      }
    }
  }
};

void run_as_fibers(std::list<Stream> streams, uint64_t seed) {
  Fibers fibers(seed);
  for (Stream& stream : streams) stream.begin(fibers);
  const bool fine = fibers.run([&] {
    for (Stream& stream : streams) {
      if (stream.running > 0 || stream.kernels.empty()) continue;
      stream.kernels.pop_front();
      if (!stream.kernels.empty()) stream.begin(fibers);
    }
  });
  g_turns += fibers.turns;
  COLL_CHECK(fine, "CudaError", "deadlock: all lanes wait, and not for a peer");
}

void run(std::list<Stream> streams) {
  std::erase_if(streams, [](const Stream& stream) { return stream.kernels.empty(); });
  const int64_t seed = g_seed.load();
  if (seed >= 0) return run_as_fibers(std::move(streams), static_cast<uint64_t>(seed));
  std::vector<std::thread> threads;
  for (const Stream& stream : streams) {
    threads.emplace_back([&stream] {
      for (const Kernel& kernel : stream.kernels) run_on_threads(kernel);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void run_streams() {
  std::list<Stream> streams;
  {
    const std::lock_guard lock(g_mutex);
    for (auto& [stream, kernels] : g_streams) streams.emplace_back().kernels = std::move(kernels);
    g_streams.clear();
  }
  run(std::move(streams));
}

}  // namespace
}  // namespace host

namespace machine {

using namespace host;  // NOLINT

int device_count() { return 1; }
void versions(int* driver, int* runtime) { *driver = *runtime = 0; }

void properties(int, PycollCudaDevice& out) {
  std::string("host").copy(out.name, sizeof(out.name) - 1);
  out.multiprocessors = kResident;
  out.cooperative = out.runnable = 1;
  out.max_threads_per_block = kMaxThreads;
}

void preload(int device) {
  COLL_CHECK(device == 0, "ArgumentError", "there is no device ", device);
}
void enable_peer_access(int, int) {}

namespace {

struct Copy {
  void* dst;
  const void* src;
  size_t nbytes;
};

void run_copy(const HostPolicy&, uint32_t, const void* parameter) {
  const Copy& copy = *static_cast<const Copy*>(parameter);
  std::memcpy(copy.dst, copy.src, copy.nbytes);
}

}  // namespace

void copy(void* dst, const void* src, size_t nbytes, void* stream) {
  if (stream == nullptr) {
    run_streams();
    std::memcpy(dst, src, nbytes);
    return;
  }
  const Copy copy{dst, src, nbytes};
  launch(0, reinterpret_cast<const void*>(&run_copy), 1, kThreadsPerLane, &copy, sizeof(copy),
         false, stream);
}
void synchronize(void*) { run_streams(); }
void copy_now(int, void* dst, const void* src, size_t nbytes) { std::memcpy(dst, src, nbytes); }
void wait_idle(int) { run_streams(); }

KernelInfo kernel_info(int, const void*, int) {
  return {0, 0, static_cast<int>(sizeof(Shared)), kResident};
}

void launch(int, const void* kernel, int blocks, int threads, const void* parameter, size_t nbytes,
            bool cooperative, void* stream) {
  COLL_CHECK(!cooperative || blocks <= kResident, "TooLarge", blocks, " blocks; ", kResident,
             " fit at once");
  const auto* bytes = static_cast<const char*>(parameter);
  Kernel launched{reinterpret_cast<HostKernel>(const_cast<void*>(kernel)), blocks,
                  std::max(1, threads / kThreadsPerLane), std::vector<char>(bytes, bytes + nbytes)};
  if (stream != nullptr) {
    const std::lock_guard lock(g_mutex);
    g_streams[stream].push_back(std::move(launched));
    return;
  }
  std::list<Stream> streams(1);
  streams.front().kernels.push_back(std::move(launched));
  run(std::move(streams));
}

}  // namespace machine
}  // namespace pycoll::cuda

void pycoll_host_schedule(int64_t seed) { pycoll::cuda::host::g_seed.store(seed); }
uint64_t pycoll_host_turns() { return pycoll::cuda::host::g_turns.load(); }
uint64_t pycoll_host_misaligned() { return pycoll::cuda::host::g_misaligned.load(); }
