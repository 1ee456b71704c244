// Checks csrc/kernels/routes/routes.h: rows arrive in the stated order and find their way back, and
// sums equal the same formula in plain C++, bit for bit, on every instruction set of this CPU.
// Vectors end where their memory ends, so that the address sanitizer sees every element too many.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/fold/fold.h"
#include "kernels/routes/routes.h"

namespace {

using pycoll::RoutePlace;
using pycoll::ShownRoutes;

void check(bool condition, const char* what, size_t width) {
  if (condition) return;
  std::printf("%s with rows of %zu elements\n", what, width);
  std::exit(1);
}

// What one rank has: k experts for each token, and rows of `width` numbers.
struct Rank {
  std::vector<int64_t> ids;
  std::vector<float> rows;
  std::vector<int32_t> experts;
  std::vector<int64_t> counts;
  ShownRoutes shown;

  Rank(int seed, size_t tokens, size_t k, uint32_t all, size_t width)
      : ids(tokens * k), rows(tokens * width), experts(tokens * k), counts(all) {
    std::mt19937 random(seed);
    for (int64_t& id : ids) id = random() % all;
    for (float& x : rows) x = static_cast<float>(random() % 1000) / 7;
    const bool known =
        pycoll::count_routes(ids.data(), ids.size(), all, experts.data(), counts.data());
    check(known, "experts", width);
    shown = {reinterpret_cast<const char*>(rows.data()), experts.data(), ids.size(), k,
             counts.data()};
  }
};

// Every expert e multiplies by e + 1; returns what all ranks show of the results.
std::vector<std::vector<float>> results(const std::vector<Rank>& ranks,
                                        const pycoll::RouteShape& shape, size_t width) {
  std::vector<ShownRoutes> shown;
  for (const Rank& rank : ranks) shown.push_back(rank.shown);
  const uint32_t each = shape.experts / shape.ranks;
  std::vector<std::vector<float>> found;
  for (uint32_t r = 0; r < shape.ranks; ++r) {
    std::vector<float> want;
    for (uint32_t e = r * each; e < (r + 1) * each; ++e) {
      for (const Rank& sender : ranks) {
        for (size_t i = 0; i < sender.ids.size(); ++i) {
          if (sender.ids[i] != e) continue;
          const float* const row = sender.rows.data() + i / sender.shown.per_row * width;
          want.insert(want.end(), row, row + width);
        }
      }
    }
    std::vector<float> got(want.size());
    pycoll::gather_routes(shape, shown.data(), r, reinterpret_cast<char*>(got.data()));
    check(got == want, "the order", width);
    size_t row = 0;
    for (uint32_t e = r * each; e < (r + 1) * each; ++e) {
      for (const Rank& sender : ranks) {
        for (int64_t left = sender.counts[e]; left > 0; --left, ++row) {
          for (size_t j = 0; j < width; ++j) got[row * width + j] *= float(e + 1);
        }
      }
    }
    found.push_back(got);
  }
  return found;
}

void test_rank(const std::vector<Rank>& ranks, uint32_t r, const pycoll::RouteShape& shape,
               size_t k, size_t width) {
  const auto all = results(ranks, shape, width);
  std::vector<ShownRoutes> shown;
  std::vector<const char*> first;
  for (const Rank& rank : ranks) shown.push_back(rank.shown);
  for (const auto& rows : all) first.push_back(reinterpret_cast<const char*>(rows.data()));
  const Rank& own = ranks[r];
  const size_t tokens = own.ids.size() / k;
  std::vector<RoutePlace> places(own.ids.size());
  pycoll::place_routes(shape, shown.data(), r, places.data());
  std::vector<float> back(own.ids.size() * width), sums(tokens * width), weights(own.ids.size());
  pycoll::fetch_routes(first.data(), places.data(), places.size(), shape.row_bytes,
                       reinterpret_cast<char*>(back.data()));
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = 1 / float(i + 3);
  pycoll::sum_routes({pycoll::DType::kFloat32, tokens, k, width}, first.data(), places.data(),
                     weights.data(), reinterpret_cast<char*>(sums.data()));
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t j = 0; j < width; ++j) {
      float total = 0;
      for (size_t slot = 0; slot < k; ++slot) {
        const size_t i = t * k + slot;
        const float y = own.rows[t * width + j] * float(own.ids[i] + 1);
        check(back[i * width + j] == y, "the way back", width);
        total = slot == 0 ? weights[i] * y : total + weights[i] * y;
      }
      check(sums[t * width + j] == total, "the sum", width);
    }
  }
}

}  // namespace

int main() {
  for (const char* isa : {"base", "avx2", "avx512"}) {
    if (!pycoll::force_isa(isa)) continue;
    for (const size_t width : {1, 3, 16, 64, 130}) {
      for (const uint32_t n : {1u, 2u, 3u}) {
        const pycoll::RouteShape shape{n, 2 * n, width * sizeof(float)};
        std::vector<Rank> ranks;
        for (uint32_t r = 0; r < n; ++r) ranks.emplace_back(int(r), 5 * r, 3, 2 * n, width);
        for (uint32_t r = 0; r < n; ++r) test_rank(ranks, r, shape, 3, width);
      }
    }
  }
  int64_t counts[2];
  int32_t narrow[1];
  for (const int64_t odd : {int64_t{2}, int64_t{-1}, int64_t{1} << 32}) {
    check(!pycoll::count_routes(&odd, 1, 2, narrow, counts), "an expert that there is not", 0);
  }
  std::puts("ok");
}
