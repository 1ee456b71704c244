#include "bindings/calls/registered_calls.h"

#include <memory>
#include <utility>

namespace pycoll {
namespace {

// Leads a direct call to the heap's own addresses of a registered array, and adds the copies of
// what of it shares its pages with strangers.
void lead_to_heap(const Registration& part, ArrayMemory& memory, bool written, Detours& detours) {
  part.edges(memory.data, memory.nbytes, [&](char* user, char* heap, size_t nbytes) {
    detours.before.push_back({heap, user, nbytes});
    if (written) detours.after.push_back({user, heap, nbytes});
  });
  memory.data = part.heap_address_of(memory.data);
}

}  // namespace

void HoldOf::hold(const Heap& heap, const void* data, uint64_t nbytes) {
  const auto part = heap.registration_of(data, nbytes);
  if (part != nullptr && part->is_in()) hold_.emplace(part);
}

PyObject* run_registered(FastcallState& state, const RememberedCall& like, CallArrays& arrays,
                         uint32_t site, double limit_s) {
  const bool reached = like.call->plan->direct && !like.call->input_only;
  auto detours = std::make_shared<Detours>();
  std::optional<Hold> holds[2];
  for (const bool written : {false, true}) {
    if ((written ? like.key.out : like.key.x).place != Place::kRegistered) continue;
    ArrayMemory& memory = written ? arrays.out : arrays.in;
    const auto part = state.heap->registration_of(memory.data, memory.nbytes);
    if (part == nullptr || !part->is_in()) return nullptr;
    holds[written].emplace(part);
    if (reached) lead_to_heap(*part, memory, written, *detours);
  }
  if (detours->before.empty()) detours = nullptr;
  return run(state, like, arrays, site, limit_s, std::move(detours));
}

}  // namespace pycoll
