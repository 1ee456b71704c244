// Device memory by the virtual memory functions of the driver: physical memory that is made, a
// range of addresses that is reserved, and the one mapped in the other. What is mapped needs no
// handle to live on, so none is kept: an export asks for that of an address.
#include <cstring>
#include <utility>

#include "cuda/host/cuda_calls.h"

namespace pycoll::cuda::machine {
namespace {

// The functions of the driver that are called here; see cuda.h.
struct Driver {
#define PYCOLL_DRIVER(name, version) \
  decltype(&cu##name) name = driver_function<decltype(&cu##name)>("cu" #name, version)
  PYCOLL_DRIVER(GetErrorName, 6000);
  PYCOLL_DRIVER(DeviceGet, 2000);
  PYCOLL_DRIVER(DeviceGetAttribute, 2000);
  PYCOLL_DRIVER(MemGetAllocationGranularity, 10020);
  PYCOLL_DRIVER(MemCreate, 10020);
  PYCOLL_DRIVER(MemRelease, 10020);
  PYCOLL_DRIVER(MemAddressReserve, 10020);
  PYCOLL_DRIVER(MemAddressFree, 10020);
  PYCOLL_DRIVER(MemMap, 10020);
  PYCOLL_DRIVER(MemUnmap, 10020);
  PYCOLL_DRIVER(MemSetAccess, 10020);
  PYCOLL_DRIVER(MemExportToShareableHandle, 10020);
  PYCOLL_DRIVER(MemImportFromShareableHandle, 10020);
  PYCOLL_DRIVER(MemRetainAllocationHandle, 11000);
};

// Likewise for multicast, which older drivers lack.
struct MulticastDriver {
  PYCOLL_DRIVER(MulticastCreate, 12010);
  PYCOLL_DRIVER(MulticastAddDevice, 12010);
  PYCOLL_DRIVER(MulticastBindMem, 12010);
  PYCOLL_DRIVER(MulticastUnbind, 12010);
  PYCOLL_DRIVER(MulticastGetGranularity, 12010);
#undef PYCOLL_DRIVER
};

const Driver& driver() {
  static const Driver found;  // made again with the next call if something is missing
  return found;
}

const MulticastDriver& multicast_driver() {
  static const MulticastDriver found;
  return found;
}

void require(CUresult status, const char* what) {
  if (status == CUDA_SUCCESS) return;
  const char* name = nullptr;
  const bool known = driver().GetErrorName(status, &name) == CUDA_SUCCESS && name != nullptr;
  throw_error("CudaError", what, ": ", known ? name : "an error without a name");
}

bool has(int device, CUdevice_attribute attribute) {
  CUdevice handle = 0;
  int value = 0;  // a driver that does not know an attribute has not what it stands for
  return driver().DeviceGet(&handle, device) == CUDA_SUCCESS &&
         driver().DeviceGetAttribute(&value, attribute, handle) == CUDA_SUCCESS && value != 0;
}

CUdeviceptr address_of(const PycollCudaMapping& mapping) {
  return reinterpret_cast<CUdeviceptr>(mapping.pointer);
}

// A reference to physical memory.
class Memory {
 public:
  Memory() = default;
  ~Memory() {
    if (held_) driver().MemRelease(handle_);
  }
  Memory(const Memory&) = delete;

  // Takes a handle that a function has written to `slot`, if it succeeded.
  CUmemGenericAllocationHandle* slot() { return &handle_; }
  CUresult take(CUresult status) {
    held_ = status == CUDA_SUCCESS;
    return status;
  }
  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  CUmemGenericAllocationHandle handle_ = 0;
  bool held_ = false;
};

CUmemLocation on_device(int device) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return location;
}

CUmemAllocationProp shareable(int device, bool fabric) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = on_device(device);
  const int types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR |
                    (fabric ? CU_MEM_HANDLE_TYPE_FABRIC : CU_MEM_HANDLE_TYPE_NONE);
  prop.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(types);
  return prop;
}

uint64_t rounded(uint64_t nbytes, int device) {
  const CUmemAllocationProp prop = shareable(device, false);
  size_t unit = 0;
  require(driver().MemGetAllocationGranularity(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
          "asking how much a device maps at once");
  const uint64_t whole = (nbytes + unit - 1) / unit * unit;
  return whole < nbytes ? nbytes : whole == 0 ? unit : whole;
}

// Maps memory at a place of its own, where its device reaches it.
void map(CUmemGenericAllocationHandle memory, int device, uint64_t nbytes,
         PycollCudaMapping& mapping) {
  CUdeviceptr at = 0;
  require(driver().MemAddressReserve(&at, nbytes, 0, 0, 0), "reserving addresses");
  CUresult status = driver().MemMap(at, nbytes, 0, memory, 0);
  const char* what = "mapping device memory";
  if (status == CUDA_SUCCESS) {
    CUmemAccessDesc access{};
    access.location = on_device(device);
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    status = driver().MemSetAccess(at, nbytes, &access, 1);
    what = "letting a device reach memory";
    if (status != CUDA_SUCCESS) driver().MemUnmap(at, nbytes);
  }
  if (status != CUDA_SUCCESS) driver().MemAddressFree(at, nbytes);
  require(status, what);
  mapping = {reinterpret_cast<void*>(at), nbytes, device, 0};
}

}  // namespace

int vmm_support(int device) {
  try {
    driver();
  } catch (const Error&) {  // an old driver, or none
    return 0;
  }
  const InContext on(device);  // starts the driver
  int bits = 0;
  if (has(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
      has(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)) {
    bits |= PYCOLL_CUDA_VMM;
    if (has(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)) bits |= PYCOLL_CUDA_FABRIC;
    if (has(device, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)) bits |= PYCOLL_CUDA_MULTICAST;
  }
  return bits;
}

void vmm_create(int device, size_t nbytes, PycollCudaMapping& mapping) {
  const int support = vmm_support(device);
  COLL_CHECK((support & PYCOLL_CUDA_VMM) != 0, "CudaUnavailable", "device ", device,
             " has no virtual memory that can be shared");
  const InContext on(device);
  const DuringCapture relaxed;
  const uint64_t size = rounded(nbytes, device);
  Memory memory;
  // A driver may refuse a fabric handle that its device supports: without a fabric's channels.
  bool fabric = (support & PYCOLL_CUDA_FABRIC) != 0;
  CUresult status = CUDA_SUCCESS;
  do {
    const CUmemAllocationProp prop = shareable(device, fabric);
    status = memory.take(driver().MemCreate(memory.slot(), size, &prop, 0));
  } while (status != CUDA_SUCCESS && std::exchange(fabric, false));
  require(status, "making device memory");
  map(memory.handle(), device, size, mapping);
  const cudaError_t cleared = clear(mapping.pointer, size);
  if (cleared == cudaSuccess) return;
  (void)cudaGetLastError();
  vmm_close(mapping);
  mapping = {};
  check(cleared, "clearing device memory");
}

void vmm_export(const PycollCudaMapping& mapping, PycollCudaShare& share, int* descriptor) {
  const InContext on(mapping.device);
  Memory memory;
  require(memory.take(driver().MemRetainAllocationHandle(memory.slot(), mapping.pointer)),
          "finding the memory behind an address");
  share.nbytes = mapping.nbytes;
  CUmemFabricHandle fabric{};
  static_assert(sizeof(share.fabric) == sizeof(fabric));
  if (driver().MemExportToShareableHandle(&fabric, memory.handle(), CU_MEM_HANDLE_TYPE_FABRIC, 0) ==
      CUDA_SUCCESS) {
    std::memcpy(share.fabric, &fabric, sizeof(fabric));
    share.has_fabric = 1;
  }
  require(driver().MemExportToShareableHandle(descriptor, memory.handle(),
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
          "exporting device memory");
}

void vmm_open(int device, const PycollCudaShare& share, int descriptor,
              PycollCudaMapping& mapping) {
  COLL_CHECK(descriptor >= 0 || share.has_fabric != 0, "ArgumentError",
             "there is neither a descriptor nor a fabric handle of this memory");
  const InContext on(device);
  CUmemFabricHandle fabric{};
  std::memcpy(&fabric, share.fabric, sizeof(fabric));
  const bool by_fabric = descriptor < 0;
  void* const handle =
      by_fabric ? &fabric : reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
  const auto type =
      by_fabric ? CU_MEM_HANDLE_TYPE_FABRIC : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  Memory memory;
  require(memory.take(driver().MemImportFromShareableHandle(memory.slot(), handle, type)),
          "importing memory of a peer");
  map(memory.handle(), device, share.nbytes, mapping);
}

void vmm_close(const PycollCudaMapping& mapping) {
  const InContext on(mapping.device);
  const DuringCapture relaxed;
  require(driver().MemUnmap(address_of(mapping), mapping.nbytes), "unmapping device memory");
  require(driver().MemAddressFree(address_of(mapping), mapping.nbytes), "freeing addresses");
}

void multicast_create(int devices, uint64_t nbytes, PycollCudaMulticast& multicast,
                      int* descriptor) {
  CUmulticastObjectProp prop{};
  prop.numDevices = static_cast<unsigned>(devices);
  prop.size = nbytes;
  prop.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  size_t unit = 0;
  require(
      multicast_driver().MulticastGetGranularity(&unit, &prop, CU_MULTICAST_GRANULARITY_MINIMUM),
      "asking how much multicast maps at once");
  COLL_CHECK(unit != 0 && nbytes % unit == 0, "ArgumentError", nbytes,
             " bytes are no multiple of the ", unit, " that multicast maps at once");
  CUmemGenericAllocationHandle handle = 0;
  require(multicast_driver().MulticastCreate(&handle, &prop), "making a multicast object");
  multicast = {handle, nbytes, nullptr, -1, 1};
  const CUresult status = driver().MemExportToShareableHandle(
      descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (status != CUDA_SUCCESS) multicast_close(multicast);
  require(status, "exporting a multicast object");
}

void multicast_open(int descriptor, uint64_t nbytes, PycollCudaMulticast& multicast) {
  CUmemGenericAllocationHandle handle = 0;
  void* const from = reinterpret_cast<void*>(static_cast<intptr_t>(descriptor));
  require(driver().MemImportFromShareableHandle(&handle, from,
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
          "importing a multicast object");
  multicast = {handle, nbytes, nullptr, -1, 1};
}

void multicast_add(int device, PycollCudaMulticast& multicast) {
  const InContext on(device);
  CUdevice handle = 0;
  require(driver().DeviceGet(&handle, device), "finding a device");
  require(multicast_driver().MulticastAddDevice(multicast.handle, handle),
          "adding a device to a multicast object");
  multicast.device = device;
}

void multicast_bind(const PycollCudaMapping& heap, PycollCudaMulticast& multicast) {
  const InContext on(multicast.device);
  const DuringCapture relaxed;
  Memory memory;
  require(memory.take(driver().MemRetainAllocationHandle(memory.slot(), heap.pointer)),
          "finding the memory behind an address");
  require(multicast_driver().MulticastBindMem(multicast.handle, 0, memory.handle(), 0,
                                              multicast.nbytes, 0),
          "binding memory to a multicast object");
  PycollCudaMapping mapping{};
  try {
    map(multicast.handle, multicast.device, multicast.nbytes, mapping);
  } catch (const Error&) {
    CUdevice device = 0;
    driver().DeviceGet(&device, multicast.device);
    multicast_driver().MulticastUnbind(multicast.handle, device, 0, multicast.nbytes);
    throw;
  }
  multicast.pointer = mapping.pointer;
}

void multicast_close(PycollCudaMulticast& multicast) {
  if (multicast.open == 0) return;
  PycollCudaMulticast old = std::exchange(multicast, {});
  CUresult status = CUDA_SUCCESS;
  if (old.pointer != nullptr) {
    const InContext on(old.device);
    CUdevice device = 0;
    vmm_close({old.pointer, old.nbytes, old.device, 0});
    status = driver().DeviceGet(&device, old.device);
    if (status == CUDA_SUCCESS) {
      status = multicast_driver().MulticastUnbind(old.handle, device, 0, old.nbytes);
    }
  }
  driver().MemRelease(old.handle);
  require(status, "unbinding memory from a multicast object");
}

}  // namespace pycoll::cuda::machine
