// The arguments of messages as they usually are. Nothing is returned for any others.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>

namespace pycoll {

// pycoll.ANY, as a source or a tag. No number that an MPI has for its own: -1 and -2 are "any rank"
// and "no rank", or the other way round.
inline constexpr int64_t kAny = -(1 << 20);

// Python ints, not bools: a rank and a tag of a message that goes; of one that comes, -1 for any.
std::optional<int64_t> plain_rank(PyObject* x, uint32_t ranks);
std::optional<int64_t> plain_tag(PyObject* x);
std::optional<int64_t> plain_rank_or_any(PyObject* x, uint32_t ranks);
std::optional<int64_t> plain_tag_or_any(PyObject* x);

struct PlainMessage {
  char* data;
  uint64_t nbytes;
  uint32_t type;
  int32_t peer;  // -1: any
  uint32_t tag;
};

// A message of a plain array or tensor of a known type, see MessagePath::types.
std::optional<PlainMessage> plain_message(const pybind11::dict& types, PyObject* x, bool incoming,
                                          PyObject* peer, uint32_t ranks, PyObject* tag);

// What keeps the memory of a message where it is: the array, or the storage of the tensor, which
// may let go of it.
pybind11::object holder_of(PyObject* x);

// The array that is sent, or an array of the bytes of what else is.
pybind11::object array_of(PyObject* x, const PlainMessage& m);

}  // namespace pycoll
