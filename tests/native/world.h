// Ranks for the native tests: as threads or as forked processes, on fresh memory without a name.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace world {

using namespace pycoll;

enum class Mode { kThreads, kForks };

inline const char* name(Mode mode) { return mode == Mode::kThreads ? "threads" : "forks"; }

template <typename... Parts>
void expect(bool condition, const Parts&... parts) {
  if (!condition) throw_error("TestFailure", parts...);
}

struct Config {
  uint32_t n = 2;
  uint64_t cell_bytes = 4096;
  uint64_t start_iteration = 2;
  double timeout_s = 60;
  uint64_t region_bytes = 1 << 24;
  bool (*check_signals)(void*) = nullptr;
  uint64_t mailbox_bytes = 0;
};

// What a rank's body works with.
struct Rank {
  Engine& engine;
  std::shared_ptr<Heap> heap;
  uint32_t rank, n;
  Mode mode;

  template <typename T>
  T* symmetric(size_t count) const {
    return reinterpret_cast<T*>(heap->at(heap->alloc(rank, count * sizeof(T))));
  }
};

// How a rank ended: kind of the error it threw ("" for none, "killed" for a signal).
struct Outcome {
  char kind[32];
  char text[4096];
};

using Body = std::function<void(const Rank&)>;

inline int memory_file() {
  const int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) std::abort();
  return fd;
}

inline void run_rank(const Config& config, Mode mode, std::shared_ptr<ControlSegment> control,
                     std::shared_ptr<Heap> heap, uint32_t rank, const Body& body, Outcome& shared) {
  Outcome outcome = {};
  try {
    EngineOptions options;
    options.timeout_s = config.timeout_s;
    options.threads_as_ranks = mode == Mode::kThreads;
    options.check_signals = config.check_signals;
    Engine engine(control, heap, rank, options);
    body({engine, heap, rank, config.n, mode});
    engine.close();
  } catch (const Error& error) {
    store_text(outcome.kind, sizeof(outcome.kind), error.kind());
    store_text(outcome.text, sizeof(outcome.text), error.what());
  }
  shared = outcome;
}

// Runs `body` on every rank. `parent` (forks only) runs meanwhile and gets the process ids.
inline std::vector<Outcome> run(
    Mode mode, const Config& config, const Body& body,
    const std::function<void(const std::vector<pid_t>&)>& parent = nullptr) {
  const int control_fd = memory_file(), heap_fd = memory_file();
  const Geometry geometry{config.n, config.cell_bytes, config.mailbox_bytes,
                          config.start_iteration};
  const auto open = [&] { return ControlSegment::open(control_fd, geometry); };
  const auto map = [&] { return std::make_shared<Heap>(heap_fd, config.n, config.region_bytes); };
  const size_t nbytes = config.n * sizeof(Outcome);
  void* shared = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* outcomes = static_cast<Outcome*>(shared);
  if (mode == Mode::kThreads) {
    const auto control = open();
    const auto heap = map();
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < config.n; ++r) {
      threads.emplace_back([&, r] { run_rank(config, mode, control, heap, r, body, outcomes[r]); });
    }
    for (std::thread& thread : threads) thread.join();
  } else {
    std::vector<pid_t> pids;
    for (uint32_t r = 0; r < config.n; ++r) {
      std::strcpy(outcomes[r].kind, "killed");
      std::fflush(nullptr);  // or the child prints it again
      const pid_t pid = fork();
      if (pid == 0) {
        run_rank(config, mode, open(), map(), r, body, outcomes[r]);
        std::fflush(nullptr);
        _exit(0);
      }
      pids.push_back(pid);
    }
    if (parent) parent(pids);
    for (const pid_t pid : pids) waitpid(pid, nullptr, 0);
  }
  std::vector<Outcome> result(outcomes, outcomes + config.n);
  munmap(shared, nbytes);
  close(control_fd);
  close(heap_fd);
  return result;
}

inline void expect_all_fine(const std::vector<Outcome>& outcomes, const std::string& what) {
  for (size_t r = 0; r < outcomes.size(); ++r) {
    expect(outcomes[r].kind[0] == '\0', what, ", rank ", r, ": ", outcomes[r].kind, ": ",
           outcomes[r].text);
  }
}

// Runs the named tests and reports; returns the exit code.
struct Test {
  const char* name;
  std::function<void()> body;
};

inline int main_of(const std::vector<Test>& tests) {
  alarm(600);  // a hang is a failure
  int failed = 0;
  for (const Test& test : tests) {
    const uint64_t start = now_ns();
    try {
      test.body();
      std::printf("ok    %s (%.2f s)\n", test.name, double(now_ns() - start) * 1e-9);
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAIL  %s: %s\n", test.name, error.what());
    }
    std::fflush(stdout);
  }
  return failed != 0;
}

#if defined(__SANITIZE_THREAD__)
inline const std::vector<Mode> kModes = {Mode::kThreads};  // it does not see other processes
#else
inline const std::vector<Mode> kModes = {Mode::kThreads, Mode::kForks};
#endif

}  // namespace world
