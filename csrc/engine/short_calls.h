// How a thread that holds Python's lock makes a call of an engine.
#pragma once

#include <optional>

#include "base/error.h"
#include "base/gil.h"
#include "engine/engine.h"

namespace pycoll {

// Whether an engine does all of it at once, and soon: then the lock is kept until it waits.
inline bool is_short(const Engine* engine, const BoundCall* call) {
  constexpr uint64_t kShortBytes = 16 << 10;
  return engine != nullptr && call->in_bytes + call->out_bytes <= kShortBytes && engine->prompt();
}

// Works without the lock; returns the error that ends it, if any.
template <typename Unlock, typename Work>
std::optional<Error> error_of(const Work& work) {
  const Unlock unlock;
  try {
    work();
  } catch (const Error& error) {
    return error;
  }
  return {};
}

// Works without the lock, all the time or once it waits; returns the error that ends it, if any.
template <typename Work>
std::optional<Error> error_of_call(const Engine* engine, const BoundCall* call, const Work& work) {
  return is_short(engine, call) ? error_of<UnlockedInWaits>(work) : error_of<Unlocked>(work);
}

}  // namespace pycoll
