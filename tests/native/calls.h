// Calls that the tests of failures make, and what they expect to be thrown.
#pragma once

#include "plans.h"
#include "world.h"

namespace calls {

using namespace plans;
using namespace world;

using Ints = std::vector<int64_t>;

inline Binding sum_of(std::shared_ptr<const Plan> plan, uint64_t count, uint64_t descriptor = 1) {
  Binding binding;
  binding.plan = plan;
  binding.dtype = DType::kInt64;
  binding.elem_bytes = 8;
  binding.count = count;
  binding.chunk = (count + plan->chunks - 1) / plan->chunks;
  binding.descriptor = descriptor;
  return binding;
}

// A call in which all ranks add up `count` ones; checks the result.
inline void add_ones(const Rank& me, uint64_t count = 100, uint64_t descriptor = 1) {
  const auto call = me.engine.bind(sum_of(one_shot(me.n, me.rank), count, descriptor));
  Ints x(count, 1), y(count);
  me.engine.run(*call, x.data(), y.data());
  expect(y == Ints(count, me.n), "a sum of ones is wrong");
}

inline std::string kind_thrown(const std::function<void()>& body, std::string* text = nullptr) {
  try {
    body();
  } catch (const Error& error) {
    if (text != nullptr) *text = error.what();
    return error.kind();
  }
  return "";
}

inline void expect_kind(const char* kind, const std::function<void()>& body, const char* what) {
  std::string text;
  const std::string got = kind_thrown(body, &text);
  expect(got == kind, what, ": expected ", kind, ", got ", got.empty() ? "no error" : got, ": ",
         text);
}

}  // namespace calls
