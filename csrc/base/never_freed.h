// What is kept for good, because somebody may still use it whom nobody can stop.
#pragma once

#include <utility>

namespace pycoll {

// Keeps a value without a destructor ever running, and without memory for it: what a vector or a
// pointer refers to stays where it is.
template <typename T>
void never_free(T&& value) noexcept {
  union Kept {
    explicit Kept(T&& from) noexcept : value(std::move(from)) {}
    ~Kept() {}  // not that of the value
    T value;
  };
  const Kept kept(std::move(value));
}

}  // namespace pycoll
