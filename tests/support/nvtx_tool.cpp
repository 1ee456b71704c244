// A profiler as NVTX sees one: loaded by NVTX_INJECTION64_PATH, it appends what ranges begin and
// end to the file that NVTX_TOOL_OUT names.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

void say(const char* text, unsigned long long payload) {  // NOLINT: as nvtx has it
  if (FILE* out = std::fopen(std::getenv("NVTX_TOOL_OUT"), "a")) {
    std::fprintf(out, "%s %llu\n", text, payload);
    std::fclose(out);
  }
}

nvtxDomainHandle_t make_domain(const char* name) {
  say(name, 0);
  return reinterpret_cast<nvtxDomainHandle_t>(strdup(name));
}

nvtxStringHandle_t keep(nvtxDomainHandle_t, const char* text) {
  return reinterpret_cast<nvtxStringHandle_t>(strdup(text));
}

int push(nvtxDomainHandle_t, const nvtxEventAttributes_t* range) {
  const bool kept = range->messageType == NVTX_MESSAGE_TYPE_REGISTERED;
  say(kept ? reinterpret_cast<const char*>(range->message.registered) : range->message.ascii,
      range->payloadType == NVTX_PAYLOAD_TYPE_UNSIGNED_INT64 ? range->payload.ullValue : 0);
  return 0;
}

int pop(nvtxDomainHandle_t) {
  say("end", 0);
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t tables) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(tables(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0) return 0;
  const auto set = [&](int place, auto* function) {
    *table[place] = reinterpret_cast<NvtxFunctionPointer>(function);
  };
  set(NVTX_CBID_CORE2_DomainCreateA, make_domain);
  set(NVTX_CBID_CORE2_DomainRegisterStringA, keep);
  set(NVTX_CBID_CORE2_DomainRangePushEx, push);
  set(NVTX_CBID_CORE2_DomainRangePop, pop);
  return 1;
}
