#include "kernels/routes/routes.h"

#include <cstring>
#include <vector>

#include "base/error.h"
#include "kernels/isa.h"

namespace pycoll {
namespace {

constexpr size_t kAlignment = 64;

// The row, among those of its rank, at which the routes of a rank to an expert begin: [experts] of
// `sender`, counted for each rank by itself.
std::vector<uint64_t> first_rows(const RouteShape& shape, const ShownRoutes* shown,
                                 uint32_t sender) {
  std::vector<uint64_t> first(shape.experts);
  const uint32_t each = shape.experts / shape.ranks;
  uint64_t row = 0;
  for (uint32_t expert = 0; expert < shape.experts; ++expert) {
    if (expert % each == 0) row = 0;
    for (uint32_t r = 0; r < shape.ranks; ++r) {
      if (r == sender) first[expert] = row;
      row += static_cast<uint64_t>(shown[r].counts[expert]);
    }
  }
  return first;
}

}  // namespace

ShownBytes shown_bytes(size_t rows, size_t per_row, size_t row_bytes) {
  const size_t at = (rows * row_bytes + kAlignment - 1) / kAlignment * kAlignment;
  return {at, at + rows * per_row * sizeof(int32_t)};
}

bool count_routes(const int64_t* ids, size_t count, uint32_t experts, int32_t* narrow,
                  int64_t* counts) {
  std::memset(counts, 0, experts * sizeof(*counts));
  for (size_t i = 0; i < count; ++i) {
    if (static_cast<uint64_t>(ids[i]) >= experts) return false;
    narrow[i] = static_cast<int32_t>(ids[i]);
    ++counts[ids[i]];
  }
  return true;
}

void gather_routes(const RouteShape& shape, const ShownRoutes* shown, uint32_t rank, char* out) {
  const uint32_t each = shape.experts / shape.ranks, mine = rank * each;
  for (uint32_t sender = 0; sender < shape.ranks; ++sender) {
    const ShownRoutes& from = shown[sender];
    std::vector<uint64_t> next = first_rows(shape, shown, sender);
    for (size_t i = 0; i < from.count; ++i) {
      const auto expert = static_cast<uint32_t>(from.experts[i]);
      if (expert - mine >= each) continue;
      std::memcpy(out + next[expert]++ * shape.row_bytes,
                  from.rows + i / from.per_row * shape.row_bytes, shape.row_bytes);
    }
  }
}

void place_routes(const RouteShape& shape, const ShownRoutes* shown, uint32_t rank,
                  RoutePlace* places) {
  const uint32_t each = shape.experts / shape.ranks;
  std::vector<uint64_t> next = first_rows(shape, shown, rank);
  for (size_t i = 0; i < shown[rank].count; ++i) {
    const auto expert = static_cast<uint32_t>(shown[rank].experts[i]);
    places[i] = {expert / each, static_cast<uint32_t>(next[expert]++)};
  }
}

void fetch_routes(const char* const* shown, const RoutePlace* places, size_t count,
                  size_t row_bytes, char* out) {
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(out + i * row_bytes, shown[places[i].rank] + places[i].row * row_bytes, row_bytes);
  }
}

void sum_routes(const RouteSums& sums, const char* const* shown, const RoutePlace* places,
                const void* weights, char* out) {
  const WeighKernel weigh = kernels().weigh[optim_float(sums.dtype)];
  const bool wide = sums.dtype == DType::kFloat64;
  const size_t size = wide ? 8 : sums.dtype == DType::kFloat32 ? 4 : 2;
  const size_t row_bytes = sums.width * size, weight_bytes = sums.k * (wide ? 8 : 4);
  if (sums.k == 0) {
    if (sums.tokens > 0) std::memset(out, 0, sums.tokens * row_bytes);
    return;
  }
  std::vector<const char*> rows(sums.k);
  for (size_t t = 0; t < sums.tokens; ++t) {
    for (size_t j = 0; j < sums.k; ++j) {
      const RoutePlace& place = places[t * sums.k + j];
      rows[j] = shown[place.rank] + place.row * row_bytes;
    }
    weigh(rows.data(), static_cast<const char*>(weights) + t * weight_bytes, sums.k,
          out + t * row_bytes, sums.width);
  }
}

}  // namespace pycoll
