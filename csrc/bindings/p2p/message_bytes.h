// Messages whose number of bytes the receiver learns from the message.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <utility>

#include "bindings/bindings.h"
#include "p2p/postbox.h"

namespace pycoll {

// The bytes of the message that a probe has found, which must be of this type; nothing if another
// thread has received it meanwhile. Throws what the postbox does.
template <typename Box>
std::optional<pybind11::bytes> take_found(Box& box, const typename Box::Envelope& found,
                                          uint32_t type, double timeout_s) {
  PyObject* const made = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(found.nbytes));
  if (made == nullptr) throw pybind11::error_already_set();
  auto data = pybind11::reinterpret_steal<pybind11::bytes>(made);
  const Unlocked unlocked;
  char* const bytes = PyBytes_AS_STRING(made);
  const auto sender = box.take_found(found, bytes, found.nbytes, type, timeout_s);
  return sender ? std::optional(std::move(data)) : std::nullopt;
}

// Receives the next message, of whatever size, likewise: its bytes, and the rank that sent them.
// Nothing if none has come in time.
template <typename Box>
std::optional<std::pair<pybind11::bytes, int32_t>> take_bytes(Box& box, uint32_t type, int32_t src,
                                                              int64_t tag, double timeout_s) {
  Deadline deadline(timeout_s);
  while (true) {
    const auto found = [&] {
      const Unlocked unlocked;
      return box.probe(src, tag, deadline.left_s());
    }();
    if (!found) return std::nullopt;
    if (auto data = take_found(box, *found, type, timeout_s)) {
      return std::pair(std::move(*data), static_cast<int32_t>(found->src));
    }
  }
}

}  // namespace pycoll
