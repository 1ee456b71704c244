// Rows that travel between the ranks of a mixture of experts, in memory that all of them reach.
//
// A route is one token's way to one of its experts. Of E experts on n ranks, rank r has E / n, in
// order. A rank shows its rows and the experts of its routes to the others; `per_row` routes share
// a row, so that route i is that of row i / per_row. Rows arrive by expert; of one expert by the
// rank that sent them, then by route.
//
// What a rank shows is in its own heap memory; who reads it sees to it that it stays there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace pycoll {

// What one rank shows.
struct ShownRoutes {
  const char* rows;
  const int32_t* experts;  // of each route, below E
  size_t count;            // of routes
  size_t per_row;
  const int64_t* counts;  // [E]: how many routes each expert gets
};

struct RouteShape {
  uint32_t ranks;
  uint32_t experts;  // a multiple of that
  size_t row_bytes;
};

// Where the result of a route is: a row of what a rank shows.
struct RoutePlace {
  uint32_t rank;
  uint32_t row;
};

// Bytes that rows and experts take one behind the other, and where the experts begin.
struct ShownBytes {
  size_t experts_at;
  size_t total;
};
ShownBytes shown_bytes(size_t rows, size_t per_row, size_t row_bytes);

// Narrows the experts of `count` routes, and counts those of each of `experts`. False if one is out
// of range.
bool count_routes(const int64_t* ids, size_t count, uint32_t experts, int32_t* narrow,
                  int64_t* counts);

// Stores the rows for the experts of `rank`, from what all ranks show, [ranks], in their order.
// Throws MemoryError.
void gather_routes(const RouteShape& shape, const ShownRoutes* shown, uint32_t rank, char* out);

// Stores where the results of the routes of `rank` will be, if every rank shows those of the rows
// that it has got, in their order. Throws MemoryError.
void place_routes(const RouteShape& shape, const ShownRoutes* shown, uint32_t rank,
                  RoutePlace* places);

// out[i] = the row at places[i]. shown[r]: the first row of rank r.
void fetch_routes(const char* const* shown, const RoutePlace* places, size_t count,
                  size_t row_bytes, char* out);

// What a token gets from its experts: with y[j] the row at places[t * k + j] and w its weights,
//   out[t] = ((w[0] * y[0] + w[1] * y[1]) + w[2] * y[2]) + ...
// in float32, rounded once; in float64 for kFloat64. Weights are of that type. No operation is
// fused or reordered, so the bits do not depend on the instruction set. Float types but those of 8
// bits; throws ArgumentError for others. `width` elements a row; of k = 0 the sum is 0.
struct RouteSums {
  DType dtype;
  size_t tokens, k, width;
};
void sum_routes(const RouteSums& sums, const char* const* shown, const RoutePlace* places,
                const void* weights, char* out);

}  // namespace pycoll
