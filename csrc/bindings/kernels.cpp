// The part of pycoll._C that steps optimizers, and moves rows between the ranks of a mixture of
// experts. Vectors, rows and results are addresses; callers keep them alive. What ranks show is
// named by its offset in the heap.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/bindings.h"
#include "kernels/fold/fold.h"
#include "kernels/optim/optim.h"
#include "kernels/routes/routes.h"
#include "memory/heap.h"

namespace py = pybind11;
namespace pycoll {
namespace {

void step(int kind, int state, int grad, int copy, uintptr_t param, uintptr_t gradient,
          uintptr_t first, uintptr_t second, uintptr_t target, size_t count,
          const std::array<double, 8>& scalars) {
  COLL_CHECK(kind >= 0 && kind < kOptimKindCount, "ArgumentError", "no optimizer ", kind);
  const OptimTypes types{static_cast<DType>(state), static_cast<DType>(grad),
                         static_cast<DType>(copy)};
  const auto& [scale, keep, rate, beta1, beta2, root, eps, decay] = scalars;
  const OptimArgs args{pointer(param),
                       pointer(gradient),
                       {pointer(first), pointer(second)},
                       pointer(target),
                       count,
                       scale,
                       keep,
                       rate,
                       beta1,
                       beta2,
                       root,
                       eps,
                       decay};
  py::gil_scoped_release release;
  optim_step(static_cast<OptimKind>(kind), types, args);
}

size_t unscale(int type, uintptr_t in, uintptr_t out, size_t count, double scale) {
  py::gil_scoped_release release;
  return optim_unscale(static_cast<DType>(type), pointer(in), pointer(out), count, scale);
}

size_t nonfinite(int type, uintptr_t data, size_t count) {
  py::gil_scoped_release release;
  return optim_nonfinite(static_cast<DType>(type), pointer(data), count);
}

size_t add_squares(int type, uintptr_t data, size_t count, py::array_t<int64_t>& limbs) {
  COLL_CHECK(limbs.ndim() == 1 && limbs.shape(0) == kExactLimbs && limbs.writeable(),
             "ArgumentError", "the accumulator has ", kExactLimbs, " limbs");
  int64_t* const out = limbs.mutable_data();
  py::gil_scoped_release release;
  return optim_add_squares(static_cast<DType>(type), pointer(data), count, out);
}

void add_optimizers(py::module_& m) {
  using namespace pybind11::literals;
  m.attr("EXACT_LIMBS") = kExactLimbs;
  m.attr("EXACT_BIAS") = kExactBias;
  m.def("optim_step", &step, "kind"_a, "state"_a, "grad"_a, "copy"_a, "param"_a, "gradient"_a,
        "first"_a, "second"_a, "target"_a, "count"_a, "scalars"_a);
  m.def("optim_unscale", &unscale, "type"_a, "input"_a, "output"_a, "count"_a, "scale"_a);
  m.def("optim_nonfinite", &nonfinite, "type"_a, "data"_a, "count"_a);
  m.def("optim_add_squares", &add_squares, "type"_a, "data"_a, "count"_a, "limbs"_a.noconvert());
  m.def("optim_isa", &isa_name);
  m.def("optim_force_isa", &force_isa, "name"_a);
}

// --- Rows of experts ---

using Numbers = py::array_t<int64_t, py::array::c_style>;

// Of a row of the table of what ranks show; the counts of experts follow.
enum Column : py::ssize_t { kOffset, kRows, kPerRow, kRowBytes, kType, kColumns };

const char* at(const Heap& heap, int64_t offset, size_t nbytes) {
  const auto first = static_cast<uint64_t>(offset);
  COLL_CHECK(first <= heap.bytes() && nbytes <= heap.bytes() - first, "CollError",
             "a rank shows rows that do not lie in the heap");
  return heap.at(first);
}

std::vector<ShownRoutes> all_shown(const Heap& heap, const Numbers& table) {
  std::vector<ShownRoutes> found;
  for (py::ssize_t rank = 0; rank < table.shape(0); ++rank) {
    const int64_t* const row = table.data(rank);
    const auto rows = static_cast<size_t>(row[kRows]), per_row = static_cast<size_t>(row[kPerRow]);
    const ShownBytes bytes = shown_bytes(rows, per_row, static_cast<size_t>(row[kRowBytes]));
    const char* const first = at(heap, row[kOffset], bytes.total);
    const auto* const experts = reinterpret_cast<const int32_t*>(first + bytes.experts_at);
    found.push_back({first, experts, rows * per_row, per_row, row + kColumns});
  }
  return found;
}

// The first row of each rank.
std::vector<const char*> all_rows(const Heap& heap, const Numbers& table) {
  std::vector<const char*> found;
  for (py::ssize_t rank = 0; rank < table.shape(0); ++rank) {
    const int64_t* const row = table.data(rank);
    found.push_back(at(heap, row[kOffset], static_cast<size_t>(row[kRows] * row[kRowBytes])));
  }
  return found;
}

// Copies rows, and experts of their routes if there are any, into a block of the heap, and fills in
// this rank's row of the table. False if there is no such expert.
bool show(const Heap& heap, uintptr_t block, uintptr_t rows, uintptr_t ids, Numbers& own) {
  int64_t* const row = own.mutable_data();
  const auto offset = heap.offset_of(pointer(block), 1);
  COLL_CHECK(own.size() >= kColumns && offset, "ArgumentError", "no block of the heap");
  row[kOffset] = static_cast<int64_t>(*offset);
  const auto count = static_cast<size_t>(row[kRows]), per_row = static_cast<size_t>(row[kPerRow]);
  const auto row_bytes = static_cast<size_t>(row[kRowBytes]);
  char* const to = pointer<char>(block);
  const auto experts = static_cast<uint32_t>(own.size() - kColumns);
  const Unlocked unlocked;
  if (experts > 0) {
    auto* const narrow =
        reinterpret_cast<int32_t*>(to + shown_bytes(count, per_row, row_bytes).experts_at);
    const auto* const chosen = pointer<const int64_t>(ids);
    if (!count_routes(chosen, count * per_row, experts, narrow, row + kColumns)) return false;
  }
  copy(to, pointer(rows), count * row_bytes);
  return true;
}

void gather(const Heap& heap, const Numbers& table, uint32_t rank, uintptr_t out,
            uintptr_t places) {
  const auto shown = all_shown(heap, table);
  const RouteShape shape{static_cast<uint32_t>(table.shape(0)),
                         static_cast<uint32_t>(table.shape(1) - kColumns),
                         static_cast<size_t>(*table.data(0, kRowBytes))};
  const Unlocked unlocked;
  gather_routes(shape, shown.data(), rank, pointer<char>(out));
  if (places != 0) place_routes(shape, shown.data(), rank, pointer<RoutePlace>(places));
}

void fetch(const Heap& heap, const Numbers& table, uintptr_t places, size_t count, uintptr_t out) {
  const auto shown = all_rows(heap, table);
  const auto row_bytes = static_cast<size_t>(*table.data(0, kRowBytes));
  const Unlocked unlocked;
  fetch_routes(shown.data(), pointer<const RoutePlace>(places), count, row_bytes,
               pointer<char>(out));
}

void sum(const Heap& heap, const Numbers& table, int dtype, uintptr_t places, uintptr_t weights,
         size_t tokens, size_t k, size_t width, uintptr_t out) {
  const auto shown = all_rows(heap, table);
  const RouteSums sums{static_cast<DType>(dtype), tokens, k, width};
  const Unlocked unlocked;
  sum_routes(sums, shown.data(), pointer<const RoutePlace>(places), pointer(weights),
             pointer<char>(out));
}

void add_routes(py::module_& m) {
  using namespace pybind11::literals;
  m.attr("ROUTE_COLUMNS") = static_cast<int>(kColumns);
  m.def("shown_bytes", [](size_t rows, size_t per_row, size_t row_bytes) {
    return shown_bytes(rows, per_row, row_bytes).total;
  });
  m.def("show_routes", &show, "heap"_a, "block"_a, "rows"_a, "ids"_a, "own"_a.noconvert());
  m.def("gather_routes", &gather, "heap"_a, "table"_a.noconvert(), "rank"_a, "out"_a,
        "places"_a = 0);
  m.def("fetch_routes", &fetch, "heap"_a, "table"_a.noconvert(), "places"_a, "count"_a, "out"_a);
  m.def("sum_routes", &sum, "heap"_a, "table"_a.noconvert(), "dtype"_a, "places"_a, "weights"_a,
        "tokens"_a, "k"_a, "width"_a, "out"_a);
}

}  // namespace

void bind_kernels(py::module_& m) {
  add_optimizers(m);
  add_routes(m);
}

}  // namespace pycoll
