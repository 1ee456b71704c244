// Ranges of NVTX. Its headers load what a profiler has put in their place, at the first use.
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "cuda/host/pycoll_cuda_ranges.h"

namespace {

constexpr int kKinds = 256;

nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t made = nvtxDomainCreateA("pycoll");
  return made;
}

std::array<std::atomic<nvtxStringHandle_t>, kKinds> g_names;

nvtxEventAttributes_t attributes() {
  nvtxEventAttributes_t made{};
  made.version = NVTX_VERSION;
  made.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  return made;
}

}  // namespace

extern "C" {

void pycoll_cuda_range_begin(const char* name) {
  nvtxEventAttributes_t range = attributes();
  range.messageType = NVTX_MESSAGE_TYPE_ASCII;
  range.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &range);
}

void pycoll_cuda_range_end() { nvtxDomainRangePop(domain()); }

void pycoll_cuda_range_names(const char* const* names, int count) {
  for (int kind = 0; kind < std::min(count, kKinds); ++kind) {
    g_names[kind].store(nvtxDomainRegisterStringA(domain(), names[kind]));
  }
}

void pycoll_cuda_range_begin_call(uint64_t descriptor, uint64_t count) {
  nvtxEventAttributes_t range = attributes();
  range.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
  range.message.registered = g_names[descriptor % kKinds].load(std::memory_order_relaxed);
  range.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
  range.payload.ullValue = count;
  nvtxDomainRangePushEx(domain(), &range);
}

}  // extern "C"
