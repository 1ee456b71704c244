// Ranges on the host: begun and ended ones are kept as text, for the tests to read.
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/host/pycoll_cuda_ranges.h"
#include "host_machine.h"

namespace {

std::mutex g_mutex;
std::string g_text;
std::vector<std::string> g_names;

void add(const std::string& text) {
  const std::lock_guard lock(g_mutex);
  g_text += text + "\n";
}

}  // namespace

void pycoll_cuda_range_begin(const char* name) { add(name); }
void pycoll_cuda_range_end() { add("end"); }
void pycoll_cuda_range_names(const char* const* names, int count) {
  const std::lock_guard lock(g_mutex);
  g_names.assign(names, names + count);
}
void pycoll_cuda_range_begin_call(uint64_t descriptor, uint64_t count) {
  add(g_names[descriptor % 256] + " " + std::to_string(count));
}

size_t pycoll_host_ranges(char* to, size_t nbytes) {
  const std::lock_guard lock(g_mutex);
  const std::string text = std::exchange(g_text, {});
  if (text.size() < nbytes) std::memcpy(to, text.c_str(), text.size() + 1);
  return text.size();
}
