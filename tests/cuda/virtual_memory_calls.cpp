// virtual_memory.cu over a driver that only notes what is asked of it, and refuses the call that
// it is told to refuse. Prints a line for each case: the calls, how it ended, and what is left.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#include "cuda/host/virtual_memory.cu"  // NOLINT: its own functions are called below

using namespace pycoll::cuda;  // NOLINT

namespace {

int g_attributes = 0;      // PycollCudaSupport of every device
std::string g_refused;     // function that fails
bool g_no_fabric = false;  // a fabric handle is refused
bool g_old_driver = false;
std::string g_calls;
int g_context = -1;
std::multiset<std::string> g_left;  // handles, addresses and mappings that are there

CUresult note(const std::string& name, const std::string& more = "") {
  g_calls += " " + name + more;
  if (g_context < 0) std::abort();  // the driver wants a current context
  return name == g_refused ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult make(const std::string& name, const char* what, const std::string& more = "") {
  const CUresult status = note(name, more);
  if (status == CUDA_SUCCESS) g_left.insert(what);
  return status;
}

CUresult drop(const std::string& name, const char* what) {
  const auto found = g_left.find(what);
  if (found == g_left.end()) std::abort();  // it is dropped twice
  g_left.erase(found);
  return note(name);
}

CUresult error_name(CUresult, const char** name) {
  *name = "REFUSED";
  return CUDA_SUCCESS;
}
CUresult device_get(CUdevice* handle, int device) {
  *handle = device;
  return CUDA_SUCCESS;
}
CUresult attribute(int* value, CUdevice_attribute which, CUdevice) {
  const int bit = which == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED ? PYCOLL_CUDA_FABRIC
                  : which == CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED        ? PYCOLL_CUDA_MULTICAST
                                                                            : PYCOLL_CUDA_VMM;
  *value = (g_attributes & bit) != 0;
  return CUDA_SUCCESS;
}
CUresult granularity(size_t* unit, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *unit = 1000;
  return note("granularity");
}
CUresult create(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                unsigned long long) {  // NOLINT: the driver's own
  const bool fabric = (prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) != 0;
  *handle = 7;
  const std::string more = ":" + std::to_string(size) + (fabric ? "+fabric" : "");
  if (fabric && g_no_fabric) {
    g_calls += " create" + more;
    return CUDA_ERROR_NOT_PERMITTED;
  }
  return make("create", "handle", more);
}
CUresult release(CUmemGenericAllocationHandle) { return drop("release", "handle"); }
CUresult reserve(CUdeviceptr* at, size_t, size_t, CUdeviceptr,
                 unsigned long long) {  // NOLINT
  *at = 4096;
  return make("reserve", "addresses");
}
CUresult address_free(CUdeviceptr, size_t) { return drop("free", "addresses"); }
CUresult mem_map(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle,
                 unsigned long long) {  // NOLINT
  return make("map", "mapping");
}
CUresult mem_unmap(CUdeviceptr, size_t) { return drop("unmap", "mapping"); }
CUresult access(CUdeviceptr, size_t, const CUmemAccessDesc* to, size_t count) {
  if (count != 1 || to->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) std::abort();
  return note("access", ":" + std::to_string(to->location.id));
}
CUresult export_handle(void* out, CUmemGenericAllocationHandle, CUmemAllocationHandleType type,
                       unsigned long long) {  // NOLINT
  if (type == CU_MEM_HANDLE_TYPE_FABRIC) return note("fabric");
  *static_cast<int*>(out) = 33;
  return note("export");
}
CUresult import_handle(CUmemGenericAllocationHandle*, void* from, CUmemAllocationHandleType type) {
  const bool fabric = type == CU_MEM_HANDLE_TYPE_FABRIC;
  return make("import", "handle",
              fabric ? ":fabric" : ":" + std::to_string(reinterpret_cast<intptr_t>(from)));
}
CUresult retain(CUmemGenericAllocationHandle*, void*) { return make("retain", "handle"); }

CUresult multicast_unit(size_t* unit, const CUmulticastObjectProp* prop,
                        CUmulticastGranularity_flags) {
  *unit = 500;
  return note("unit", ":" + std::to_string(prop->numDevices));
}
CUresult multicast_create(CUmemGenericAllocationHandle*, const CUmulticastObjectProp*) {
  return make("create", "handle");
}
CUresult multicast_add(CUmemGenericAllocationHandle, CUdevice device) {
  return note("add", ":" + std::to_string(device));
}
CUresult multicast_bind(CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t,
                        size_t size, unsigned long long) {  // NOLINT
  return make("bind", "binding", ":" + std::to_string(size));
}
CUresult multicast_unbind(CUmemGenericAllocationHandle, CUdevice, size_t, size_t) {
  return drop("unbind", "binding");
}

struct Function {
  const char* name;
  void* function;
};
const Function kFunctions[] = {
    {"cuGetErrorName", reinterpret_cast<void*>(&error_name)},
    {"cuDeviceGet", reinterpret_cast<void*>(&device_get)},
    {"cuDeviceGetAttribute", reinterpret_cast<void*>(&attribute)},
    {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&granularity)},
    {"cuMemCreate", reinterpret_cast<void*>(&create)},
    {"cuMemRelease", reinterpret_cast<void*>(&release)},
    {"cuMemAddressReserve", reinterpret_cast<void*>(&reserve)},
    {"cuMemAddressFree", reinterpret_cast<void*>(&address_free)},
    {"cuMemMap", reinterpret_cast<void*>(&mem_map)},
    {"cuMemUnmap", reinterpret_cast<void*>(&mem_unmap)},
    {"cuMemSetAccess", reinterpret_cast<void*>(&access)},
    {"cuMemExportToShareableHandle", reinterpret_cast<void*>(&export_handle)},
    {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(&import_handle)},
    {"cuMemRetainAllocationHandle", reinterpret_cast<void*>(&retain)},
    {"cuMulticastGetGranularity", reinterpret_cast<void*>(&multicast_unit)},
    {"cuMulticastCreate", reinterpret_cast<void*>(&multicast_create)},
    {"cuMulticastAddDevice", reinterpret_cast<void*>(&multicast_add)},
    {"cuMulticastBindMem", reinterpret_cast<void*>(&multicast_bind)},
    {"cuMulticastUnbind", reinterpret_cast<void*>(&multicast_unbind)},
};

template <typename Body>
void trace(const std::string& name, const std::string& refused, Body body) {
  g_calls.clear();
  g_left.clear();
  g_refused = refused;
  try {
    body();
  } catch (const pycoll::Error& error) {
    g_calls += std::string(" !") + error.kind();
  }
  for (const std::string& what : g_left) g_calls += " +" + what;
  std::printf("%s%s%s:%s\n", name.c_str(), refused.empty() ? "" : " without ", refused.c_str(),
              g_calls.c_str());
}

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  g_context = device;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,  // NOLINT: the runtime's own
                                             cudaDriverEntryPointQueryResult* found) {
  *function = nullptr;
  *found = cudaDriverEntryPointSymbolNotFound;
  if (g_old_driver) return cudaSuccess;
  for (const Function& known : kFunctions) {
    if (std::string(known.name) == name) *function = known.function;
  }
  if (*function != nullptr) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return ""; }
const char* cudaGetErrorString(cudaError_t) { return ""; }

}  // extern "C"

namespace pycoll::cuda::machine {
cudaError_t clear(void*, size_t) {
  return note("clear") == CUDA_SUCCESS ? cudaSuccess : cudaErrorUnknown;
}
}  // namespace pycoll::cuda::machine

int main() {
  PycollCudaMapping mapping{};
  PycollCudaShare share{};
  int descriptor = -1;
  const auto support = [] { g_calls = " " + std::to_string(machine::vmm_support(1)); };
  const auto create = [&] { machine::vmm_create(1, 1500, mapping); };
  const auto open = [&] { machine::vmm_open(1, share, descriptor, mapping); };
  g_old_driver = true;
  trace("an old driver", "", support);
  g_old_driver = false;
  trace("nothing", "", support);
  trace("create", "", create);
  g_attributes = PYCOLL_CUDA_VMM | PYCOLL_CUDA_FABRIC | PYCOLL_CUDA_MULTICAST;
  trace("everything", "", support);
  trace("create", "", create);
  g_no_fabric = true;
  trace("create, no fabric", "", create);
  g_attributes = PYCOLL_CUDA_VMM;
  for (const char* step : {"create", "reserve", "map", "access", "clear"}) {
    trace("create", step, create);
  }
  for (const char* step : {"", "retain", "fabric", "export"}) {
    trace("export", step, [&] {
      share = {};
      descriptor = -1;
      machine::vmm_export(mapping, share, &descriptor);
      g_calls += " " + std::to_string(descriptor) + (share.has_fabric ? " and fabric" : "");
    });
  }
  descriptor = 33;
  for (const char* step : {"", "import", "reserve", "map", "access"}) trace("open", step, open);
  descriptor = -1;
  share = {};
  trace("open nothing", "", open);
  share.has_fabric = 1;
  trace("open by fabric", "", open);
  trace("create and close", "", [&] {
    create();
    g_calls += " |";
    machine::vmm_close(mapping);
  });
  PycollCudaMulticast multicast{};
  const auto team = [&](int size) {
    machine::multicast_create(2, static_cast<uint64_t>(size), multicast, &descriptor);
    machine::multicast_add(1, multicast);
    machine::multicast_bind(mapping, multicast);
  };
  const auto whole = [&](bool by_descriptor) {
    try {
      if (by_descriptor) {
        machine::multicast_open(5, 1000, multicast);
      } else {
        team(1000);
      }
    } catch (const pycoll::Error&) {
      g_calls += " !";
    }
    g_calls += " |";
    machine::multicast_close(multicast);
    machine::multicast_close(multicast);
  };
  trace("a team of odd size", "", [&] { team(700); });
  for (const char* step : {"", "create", "export", "add", "retain", "bind", "map"}) {
    trace("a team", step, [&] { whole(false); });
  }
  for (const char* step : {"", "import"}) trace("in a team", step, [&] { whole(true); });
}
