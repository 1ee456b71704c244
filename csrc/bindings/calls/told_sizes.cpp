#include "bindings/calls/told_sizes.h"

#include <pybind11/numpy.h>

#include <cstring>
#include <utility>
#include <vector>

namespace py = pybind11;
namespace pycoll {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 48;  // as in ragged_blocks.py

uint64_t itemsize(const ArrayKey& x) {
  if (x.element != 0) return (x.element & 0xff) / 8;
  return uint64_t(py::reinterpret_borrow<py::dtype>(x.type).itemsize());
}

}  // namespace

bool may_vary(const FastcallState& state, const SizedCall& call) {
  const BoundCall* const move = call.move.call.get();
  return state.engine != nullptr && move != nullptr && move->in_layout == Layout::kTable &&
         move->out_layout == Layout::kTable && !move->across && move->alternative == nullptr &&
         call.key.out == ArrayKey{};
}

py::object row_of(const SizedCall& like, const SizedKey& key) {
  const bool of_each = like.told == ToldSizes::kOfEach;
  const std::vector<int64_t> sizes = of_each ? std::vector<int64_t>{key.x.dims[0]} : key.sizes;
  const auto nbytes = PyBytes_GET_SIZE(like.row.ptr());
  const auto head = nbytes - Py_ssize_t(sizes.size() * sizeof(uint64_t));
  int64_t rows = 0;
  for (const int64_t size : sizes) {
    if (size < 0 || size > kMostRows) return {};
    rows += size;
  }
  if (head != 2 * Py_ssize_t(sizeof(uint64_t)) || rows != key.x.dims[0]) return {};
  PyObject* const made = PyBytes_FromStringAndSize(nullptr, nbytes);
  if (made == nullptr) throw py::error_already_set();
  char* const at = PyBytes_AS_STRING(made);
  std::memcpy(at, PyBytes_AS_STRING(like.row.ptr()), size_t(head));
  std::memcpy(at + head, sizes.data(), sizes.size() * sizeof(uint64_t));
  return py::reinterpret_steal<py::object>(made);
}

std::shared_ptr<const BoundCall> bound_to(const Engine& engine, const SizedCall& like,
                                          const SizesTable& sizes) {
  Binding binding = *like.move.call;
  const size_t n = sizes.ranks;
  const uint64_t scale = sizes.words[1] * itemsize(like.key.x) / binding.elem_bytes;
  PieceTable &in = binding.in_table, &out = binding.out_table;
  for (size_t rank = 0; rank < n; ++rank) {
    uint64_t sent = 0, received = 0;
    for (size_t peer = 0; peer < n; ++peer) {
      const size_t i = rank * n + peer;
      const bool of_each = like.told == ToldSizes::kOfEach;
      in.offset[i] = of_each ? 0 : sent;
      in.length[i] = scale * sizes.rows(of_each ? peer : rank, peer);
      out.offset[i] = received;
      out.length[i] = scale * sizes.rows(peer, rank);
      sent += in.length[i];
      received += out.length[i];
    }
    if (rank == 0) binding.count = received;
  }
  const uint64_t chunks = std::max<uint64_t>(1, binding.plan->chunks);
  binding.chunk = (binding.count + chunks - 1) / chunks;
  return engine.bind(std::move(binding));
}

PyObject* with_counts(PyObject* result, const SizedCall& like, const py::object& table) {
  if (result == nullptr) return nullptr;
  const auto found = py::reinterpret_steal<py::object>(result);
  const SizesTable sizes(table, PyBytes_GET_SIZE(like.row.ptr()));
  py::array_t<int64_t> counts(py::ssize_t(sizes.ranks));
  for (size_t from = 0; from < sizes.ranks; ++from) {
    counts.mutable_at(from) = int64_t(sizes.rows(from, like.rank));
  }
  return py::make_tuple(found, counts).release().ptr();
}

}  // namespace pycoll
