// Messages whose number of bytes the receiver learns from the message.
#pragma once

#include <pybind11/pybind11.h>

#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

#include "bindings/bindings.h"
#include "p2p/postbox.h"

namespace pycoll {

// Receives the next message, of whatever size, which must be of this type: its bytes, and the rank
// that sent them. Nothing if none has come in time. Throws what the postbox does.
template <typename Box>
std::optional<std::pair<pybind11::bytes, int32_t>> take_bytes(Box& box, uint32_t type, int32_t src,
                                                              int64_t tag, double timeout_s) {
  while (true) {
    const auto found = [&] {
      const Unlocked unlocked;
      return box.probe(src, tag, timeout_s);
    }();
    if (!found) return std::nullopt;
    PyObject* const made = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(found->nbytes));
    if (made == nullptr) throw pybind11::error_already_set();
    const auto data = pybind11::reinterpret_steal<pybind11::bytes>(made);
    const auto sender = static_cast<int32_t>(found->src);
    try {
      const Unlocked unlocked;
      if constexpr (std::is_same_v<Box, Postbox>) {
        box.take(PyBytes_AS_STRING(made), found->nbytes, type, sender, found->tag, timeout_s);
      } else {
        box.recv(PyBytes_AS_STRING(made), found->nbytes, type, sender, found->tag, timeout_s);
      }
    } catch (const Error& error) {
      // Where the type is right another thread has taken that message, and the next is of another
      // size: it is kept.
      if (found->type != type || std::strcmp(error.kind(), "MismatchError") != 0) throw;
      continue;
    }
    return std::pair(data, sender);
  }
}

}  // namespace pycoll
