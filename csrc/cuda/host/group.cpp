#include "cuda/host/group.h"

#include <algorithm>
#include <cstring>

#include "cuda/messages/messages.h"

using namespace pycoll;        // NOLINT: the types of the C interface live outside
using namespace pycoll::cuda;  // NOLINT

void GiveBack::operator()(void* memory) const {
  try {
    machine::release(memory);
  } catch (const Error&) {  // the device is lost, and its memory with it
  }
}
void GiveBack::operator()(Record* records) const {
  try {
    machine::release_records(records);
  } catch (const Error&) {
  }
}

PycollCudaGroup::PycollCudaGroup(int device, int rank, int world_size, int max_blocks, uint64_t key)
    : device_(device), rank_(rank), key_(key) {
  COLL_CHECK(world_size >= 1 && world_size <= kMaxRanks, "ArgumentError", "a world of ", world_size,
             " ranks; 1 to ", kMaxRanks, " are possible");
  COLL_CHECK(rank < world_size, "ArgumentError", "rank ", rank, " of ", world_size);
  COLL_CHECK(max_blocks >= 1 && max_blocks <= int(kMaxBlocks), "ArgumentError", max_blocks,
             " blocks per rank; 1 to ", kMaxBlocks, " are possible");
  world_size_ = static_cast<uint32_t>(world_size);
  max_blocks_ = static_cast<uint32_t>(max_blocks);
  machine::preload(device);
  records_.reset(machine::allocate_records(device, ranks()));
  const size_t size = is_virtual() ? control_bytes(world_size_, max_blocks_)
                                   : message_bytes(world_size_, max_blocks_);
  for (uint32_t r = 0; r < ranks(); ++r) {
    own_controls_.emplace_back(
        machine::allocate(device, is_virtual() ? size : machine::exportable(size)));
    controls_[first_rank() + r] = static_cast<char*>(own_controls_.back().get());
  }
  connected_ = is_virtual() || world_size_ == 1;
}

PycollCudaGroup::~PycollCudaGroup() {
  try {
    machine::wait_idle(device_);
  } catch (const Error&) {  // the device is lost
  }
}

void* PycollCudaGroup::control() const {
  COLL_CHECK(!is_virtual(), "ArgumentError", "virtual ranks need no exchange of control memory");
  return own_controls_[0].get();
}

void PycollCudaGroup::set_share(int ranks) {
  COLL_CHECK(!is_virtual(), "ArgumentError", "virtual ranks always share their device");
  COLL_CHECK(ranks >= 1 && ranks <= int(world_size_), "ArgumentError", ranks,
             " ranks on one device, of ", world_size_);
  share_ = static_cast<uint32_t>(ranks);
}

void PycollCudaGroup::set_multicast(void* address) {
  COLL_CHECK(!is_virtual(), "ArgumentError", "virtual ranks share a device: there is no multicast");
  multicast_ = static_cast<char*>(address);
}

void PycollCudaGroup::connect(void* const* controls, void* const* heaps, uint64_t heap_bytes,
                              void* const* cells, uint64_t cell_bytes) {
  COLL_CHECK(is_virtual() || controls != nullptr, "ArgumentError",
             "the control memory of peers is missing");
  COLL_CHECK(cell_bytes % 16 == 0, "ArgumentError", "cells of ", cell_bytes,
             " bytes are not multiples of 16");
  for (uint32_t r = 0; r < world_size_; ++r) {
    char* const control = is_virtual() ? controls_[r] : static_cast<char*>(controls[r]);
    char* const cell = cells == nullptr ? nullptr : static_cast<char*>(cells[r]);
    COLL_CHECK(control != nullptr, "ArgumentError", "rank ", r, " has no control memory");
    COLL_CHECK(reinterpret_cast<uintptr_t>(cell) % 16 == 0, "ArgumentError", "the cells of rank ",
               r, " are not aligned to 16 bytes");
    COLL_CHECK(cell_bytes == 0 || cell != nullptr, "ArgumentError", "rank ", r, " has no cells");
    COLL_CHECK(is_virtual() || r != first_rank() || control == own_controls_[0].get(),
               "ArgumentError", "the control memory of rank ", r, " is this process's own");
    controls_[r] = control;
    cells_[r] = cell;
    heaps_[r] = is_virtual() || heaps == nullptr ? nullptr : static_cast<char*>(heaps[r]);
  }
  heap_bytes_ = heaps == nullptr ? 0 : heap_bytes;
  cell_bytes_ = cell_bytes;
  connected_ = true;
}

Record& PycollCudaGroup::record(int rank) const {
  const int64_t entry = int64_t{rank} - first_rank();
  COLL_CHECK(entry >= 0 && entry < ranks(), "ArgumentError", "rank ", rank,
             " is not run by this process");
  return records_.get()[entry];
}

PycollCudaError PycollCudaGroup::error(int rank) const {
  static_assert(sizeof(PycollCudaError) <= sizeof(Record));
  Record& record = this->record(rank);
  PycollCudaError error{};
  const uint32_t kind = __atomic_load_n(&record.kind, __ATOMIC_ACQUIRE);
  if (kind != 0) std::memcpy(&error, &record, sizeof(error));
  error.kind = kind;
  return error;
}

bool PycollCudaGroup::failed() const {
  bool failed = aborted();
  for (uint32_t r = 0; r < ranks(); ++r) {
    failed |= __atomic_load_n(&records_.get()[r].kind, __ATOMIC_ACQUIRE) != 0;
  }
  return failed;
}

void PycollCudaGroup::abort() {
  aborted_.store(true);
  for (uint32_t r = 0; r < ranks(); ++r) {
    __atomic_store_n(&records_.get()[r].abort, 1u, __ATOMIC_RELEASE);
  }
}

void PycollCudaGroup::reset() {
  machine::wait_idle(device_);
  std::memset(static_cast<void*>(records_.get()), 0, ranks() * sizeof(Record));
  aborted_.store(false);
  set_epoch(0);
}

void PycollCudaGroup::set_epoch(uint32_t epoch) {
  COLL_CHECK(epoch < 1u << 16, "ArgumentError", "epoch ", epoch, " has more than 16 bits");
  machine::wait_idle(device_);
  std::vector<char> image(control_bytes(world_size_, max_blocks_), 0);
  Control control{};
  control.epoch = epoch;
  // As far from the wrap-around of flags; what lies in slots is of the call before.
  const auto calls = static_cast<uint64_t>(int64_t{static_cast<int16_t>(epoch)});
  control.packet_calls = calls * kMaxBlocks;
  auto* packets =
      reinterpret_cast<uint32_t*>(image.data() + packets_offset(world_size_, max_blocks_));
  std::fill(packets, reinterpret_cast<uint32_t*>(image.data() + image.size()),
            static_cast<uint32_t>(calls));
  for (uint32_t& finished : control.finished) finished = position_of(epoch, 0);
  std::memcpy(image.data(), &control, sizeof(control));
  auto* flags = reinterpret_cast<uint32_t*>(image.data() + flags_offset());
  for (size_t i = 0; i < size_t{world_size_} * max_blocks_; ++i) flags[i] = position_of(epoch, 0);
  for (const DeviceMemory& own : own_controls_) {
    machine::copy_now(device_, own.get(), image.data(), image.size());
  }
}

void PycollCudaGroup::place(Launch& launch) const {
  COLL_CHECK(connected_, "ArgumentError", "the group is not connected to its peers");
  launch.world_size = world_size_;
  launch.max_blocks = max_blocks_;
  launch.first_rank = first_rank();
  launch.exchange = !is_virtual() && world_size_ > 1;
  launch.cell_bytes = cell_bytes_;
  launch.multicast = multicast_;
  launch.packets = packets_offset(world_size_, max_blocks_);
  launch.slot = packet_slot(world_size_);
  for (uint32_t r = 0; r < world_size_; ++r) {
    launch.control[r] = controls_[r];
    launch.cells[r] = cells_[r];
    launch.heaps[r] = heaps_[r];
  }
  Record* const records = machine::device_address(records_.get());
  for (uint32_t r = 0; r < ranks(); ++r) launch.records[r] = records + r;
}

void PycollCudaGroup::check_in_heap(const void* array, uint64_t nbytes, const char* name) const {
  if (is_virtual() || array == nullptr || nbytes == 0) return;
  const auto heap = reinterpret_cast<uintptr_t>(heaps_[first_rank()]);
  const auto at = reinterpret_cast<uintptr_t>(array);
  COLL_CHECK(
      heap != 0 && at >= heap && at - heap <= heap_bytes_ && nbytes <= heap_bytes_ - (at - heap),
      "ArgumentError", "the ", name, " array of ", nbytes,
      " bytes does not lie in the symmetric heap, where peers could reach it");
}

const char* PycollCudaGroup::in_heap_of(int rank, uint64_t offset, uint64_t nbytes) const {
  COLL_CHECK(heaps_[rank] != nullptr && offset <= heap_bytes_ && nbytes <= heap_bytes_ - offset,
             "ArgumentError", "byte ", offset, " and the ", nbytes,
             " from there on are no part of ", "the heap of rank ", rank, " that is mapped here");
  return heaps_[rank] + offset;
}
