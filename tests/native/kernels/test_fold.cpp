// Checks fold, copy and scale (csrc/kernels/fold/fold.h) on every instruction set of this CPU
// against the scalar oracle of fold_oracle.h. Results are compared bit for bit, any NaN being equal
// to any other but for those of bfloat16 and of 8-bit floats, of which there is one.
//
//   g++ -O2 -std=c++20 -ffp-contract=off -Wall -Wextra -Icsrc tests/native/kernels/test_fold.cpp
//       csrc/kernels/*.cpp csrc/kernels/fold/fold.cpp csrc/base/types.cpp -o /tmp/test_fold &&
//       /tmp/test_fold  (one line; prints "ok")
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "fold_oracle.h"
#include "kernels/fold/fold.h"

namespace {

using oracle::BFloat16;
using oracle::Bool;
using oracle::Float16;
using oracle::Float8E4M3;
using oracle::Float8E5M2;
using oracle::Plain;
using oracle::same;
using pycoll::DType;
using pycoll::FoldSpec;
using pycoll::ReduceOp;

constexpr size_t kMaxCount = 4097;
constexpr int kSourceCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33, 64};
constexpr int kVariantsPerCount = 6;

// ---- inputs and comparison -------------------------------------------------------------------

template <typename E>
using Vectors = std::vector<std::vector<typename E::Bits>>;

template <typename E>
std::vector<typename E::Bits> expected_result(const FoldSpec& spec, const Vectors<E>& sources,
                                              int nsrc) {
  const bool scaled = spec.op == ReduceOp::kAvg && spec.scale_n > 0;
  if (nsrc == 1 && !scaled) return sources[0];
  std::vector<typename E::Bits> result;
  std::vector<typename E::Value> values(nsrc);
  for (size_t i = 0; i < kMaxCount; ++i) {
    for (int k = 0; k < nsrc; ++k) values[k] = E::decode(sources[k][i]);
    auto value =
        spec.tree ? oracle::reduce_tree(spec.op, values) : oracle::reduce_serial(spec.op, values);
    if (scaled) value = oracle::divide(value, spec.scale_n);
    result.push_back(E::encode(value));
  }
  return result;
}

using Random = std::mt19937_64;

// Random bits, values near one, and the special values of floats, one third each.
template <typename E>
typename E::Bits random_element(Random& random) {
  using Bits = typename E::Bits;
  using V = typename E::Value;
  const uint64_t draw = random();
  Bits bits;
  const auto raw = random();
  std::memcpy(&bits, &raw, sizeof bits);
  if constexpr (std::is_floating_point_v<V>) {
    using L = std::numeric_limits<V>;
    const V specials[] = {V(0),
                          -V(0),
                          V(1),
                          L::infinity(),
                          -L::infinity(),
                          L::quiet_NaN(),
                          L::denorm_min(),
                          -L::denorm_min(),
                          L::min(),
                          -L::min(),
                          L::max(),
                          L::lowest(),
                          E::decode(1),
                          E::decode(3),
                          V(65504),
                          V(65520),
                          V(1e-5)};
    if (draw % 3 == 0) return E::encode(specials[raw % std::size(specials)]);
    if (draw % 3 == 1) return E::encode(static_cast<V>(static_cast<double>(raw % 4096) / 1024 - 2));
  }
  if constexpr (std::is_same_v<E, Bool>) return draw % 2 == 0 ? 0 : draw % 3 == 0 ? 1 : bits;
  return bits;
}

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "test_fold: %s (instruction set %s)\n", what.c_str(), pycoll::isa_name());
  std::exit(1);
}

void check(bool condition, const std::string& what) {
  if (!condition) fail(what);
}

// Memory for kMaxCount elements at any misalignment, with a pattern on both sides that must stay.
class Arena {
 public:
  static constexpr size_t kGuard = 128;
  Arena() : bytes_(kMaxCount * 8 + 3 * kGuard) {}

  char* place(size_t misalignment, size_t nbytes) {
    const size_t to_line = -reinterpret_cast<uintptr_t>(bytes_.data()) % 64;
    begin_ = kGuard / 2 + to_line % 64 + misalignment;
    end_ = begin_ + nbytes;
    std::memset(bytes_.data() + begin_ - kGuard / 2, kPattern, nbytes + kGuard);
    return bytes_.data() + begin_;
  }
  bool guards_intact() const {
    for (size_t i = 0; i < kGuard / 2; ++i) {
      if (bytes_[begin_ - 1 - i] != kPattern || bytes_[end_ + i] != kPattern) return false;
    }
    return true;
  }

 private:
  static constexpr char kPattern = 0x5a;
  std::vector<char> bytes_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

struct Variant {
  int ndst;
  uint32_t nontemporal;
  std::vector<int> in_place;             // by destination: the source it is identical to, or -1
  std::vector<size_t> src_misalignment;  // in bytes
  std::vector<size_t> dst_misalignment;
};

Variant random_variant(Random& random, int nsrc, size_t itemsize) {
  const int ndsts[] = {1, 1, 2, 5};
  Variant v;
  v.ndst = ndsts[random() % 4];
  v.nontemporal = random() % 2 == 0 ? random() % 8 : 0;
  const int mode = random() % 3;  // all aligned, by whole elements, by any byte
  auto misalignment = [&] {
    return mode == 0 ? 0 : mode == 1 ? random() % (64 / itemsize) * itemsize : random() % 64;
  };
  std::vector<int> free_sources;
  for (int k = 0; k < nsrc; ++k) free_sources.push_back(k);
  for (int k = 0; k < nsrc; ++k) v.src_misalignment.push_back(misalignment());
  for (int d = 0; d < v.ndst; ++d) {
    v.in_place.push_back(-1);
    v.dst_misalignment.push_back(misalignment());
    if (random() % 2 == 0 && !free_sources.empty()) {
      const size_t pick = random() % free_sources.size();
      v.in_place[d] = free_sources[pick];
      free_sources.erase(free_sources.begin() + static_cast<long>(pick));
    }
  }
  return v;
}

std::string describe(const FoldSpec& spec, int nsrc, size_t count, const Variant& v) {
  std::string text = "dtype " + std::to_string(static_cast<int>(spec.dtype)) + " op " +
                     std::to_string(static_cast<int>(spec.op)) + (spec.tree ? " tree" : " serial") +
                     " nsrc " + std::to_string(nsrc) + " ndst " + std::to_string(v.ndst) +
                     " count " + std::to_string(count) + " scale_n " +
                     std::to_string(spec.scale_n) + (v.nontemporal ? " nontemporal" : "") +
                     " in place";
  for (int source : v.in_place) text += " " + std::to_string(source);
  return text;
}

// ---- the checks ------------------------------------------------------------------------------

template <typename E>
void check_variant(FoldSpec spec, const Vectors<E>& sources, int nsrc, size_t count,
                   const std::vector<typename E::Bits>& expected, const Variant& v) {
  static std::vector<Arena> src_arenas(64);
  static std::vector<Arena> dst_arenas(5);
  const size_t nbytes = count * sizeof(typename E::Bits);
  spec.nontemporal = v.nontemporal;
  std::vector<const void*> srcs;
  std::vector<char*> places;
  for (int k = 0; k < nsrc; ++k) {
    places.push_back(src_arenas[k].place(v.src_misalignment[k], nbytes));
    std::memcpy(places[k], sources[k].data(), nbytes);
    srcs.push_back(places[k]);
  }
  std::vector<void*> dsts;
  std::vector<bool> overwritten(nsrc);
  for (int d = 0; d < v.ndst; ++d) {
    if (v.in_place[d] >= 0) overwritten[v.in_place[d]] = true;
    dsts.push_back(v.in_place[d] >= 0 ? places[v.in_place[d]]
                                      : dst_arenas[d].place(v.dst_misalignment[d], nbytes));
  }
  pycoll::fold(spec, srcs.data(), nsrc, dsts.data(), v.ndst, count);
  auto at = [&](const char* what, int index, size_t i) {
    return describe(spec, nsrc, count, v) + ": " + what + " " + std::to_string(index) +
           " element " + std::to_string(i);
  };
  for (int d = 0; d < v.ndst; ++d) {
    if (std::memcmp(dsts[d], expected.data(), nbytes) != 0) {
      for (size_t i = 0; i < count; ++i) {
        typename E::Bits bits;
        std::memcpy(&bits, static_cast<char*>(dsts[d]) + i * sizeof bits, sizeof bits);
        if (!same<E>(bits, expected[i])) fail(at("wrong destination", d, i));
      }
    }
    if (v.in_place[d] < 0 && !dst_arenas[d].guards_intact()) fail(at("wrote outside dst", d, 0));
  }
  for (int k = 0; k < nsrc; ++k) {
    if (!src_arenas[k].guards_intact()) fail(at("wrote outside source", k, 0));
    if (!overwritten[k] && std::memcmp(places[k], sources[k].data(), nbytes) != 0) {
      fail(at("changed source", k, 0));
    }
  }
}

const std::vector<std::string>& supported_isas() {
  static const std::vector<std::string> isas = [] {
    std::vector<std::string> names;
    for (const char* name : {"base", "avx2", "avx512"}) {
      if (pycoll::force_isa(name)) names.push_back(name);
    }
    return names;
  }();
  return isas;
}

const std::vector<size_t>& counts() {
  static const std::vector<size_t> list = [] {
    std::vector<size_t> values = {0, 1, 2, 3, 4, 7, 8, 16, 64, 1000, kMaxCount};
    for (size_t n = 15; n <= 65; n += 2) values.push_back(n);
    return values;
  }();
  return list;
}

template <typename E>
void check_dtype(DType dtype, Random& random) {
  constexpr bool kBool = std::is_same_v<E, Bool>;
  Vectors<E> sources(64);
  for (auto& source : sources) {
    for (size_t i = 0; i < kMaxCount; ++i) source.push_back(random_element<E>(random));
  }
  check(pycoll::itemsize(dtype) == sizeof(typename E::Bits), "itemsize");
  const uint32_t scales[] = {0, 1, 2, 3, 7, 64, 300, 70001, 4294967295u};
  for (int o = 0; o < pycoll::kReduceOpCount; ++o) {
    const auto op = static_cast<ReduceOp>(o);
    const bool bitwise = op >= ReduceOp::kAnd;
    const bool ordered = op == ReduceOp::kMin || op == ReduceOp::kMax;
    const bool supported = bitwise ? std::is_integral_v<typename E::Value> : !kBool || ordered;
    check(pycoll::fold_supports(dtype, op) == supported, "fold_supports");
    if (!supported) continue;
    for (int nsrc : kSourceCounts) {
      for (bool tree : {false, true}) {
        const uint32_t scale_n = op == ReduceOp::kAvg ? scales[random() % std::size(scales)] : 0;
        const FoldSpec spec{dtype, op, tree, scale_n, false};
        const auto expected = expected_result<E>(spec, sources, nsrc);
        for (const std::string& isa : supported_isas()) {
          pycoll::force_isa(isa.c_str());
          for (size_t count : counts()) {
            for (int r = 0; r < (count > 100 ? 2 : kVariantsPerCount); ++r) {
              const Variant v = random_variant(random, nsrc, sizeof(typename E::Bits));
              check_variant<E>(spec, sources, nsrc, count, expected, v);
            }
          }
        }
      }
    }
  }
}

// All 16-bit floats times, and plus, factors that reach every rounding, subnormal and overflow.
template <typename E>
void check_rounding(DType dtype) {
  for (float factor : {1.0f, 0.5f, 1.0f / 3, 1.0f / 1024, 3e-5f, 6e-8f, 1.5f, 700.0f, 65504.0f}) {
    std::vector<uint16_t> all(65536), other(65536, E::encode(factor)), result(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kProd}) {
      for (const std::string& isa : supported_isas()) {
        pycoll::force_isa(isa.c_str());
        const void* srcs[] = {all.data(), other.data()};
        void* dsts[] = {result.data()};
        pycoll::fold({dtype, op, false, 0, false}, srcs, 2, dsts, 1, all.size());
        for (size_t i = 0; i < all.size(); ++i) {
          const float exact = oracle::combine(op, E::decode(all[i]), E::decode(other[i]));
          check(same<E>(result[i], E::encode(exact)),
                "rounding of 16-bit element " + std::to_string(i));
        }
      }
    }
  }
}

// More sources than any kernel or tree level handles at once.
void check_many_sources() {
  std::vector<float> values(pycoll::kMaxFoldSources);
  std::vector<const void*> srcs;
  for (size_t k = 0; k < values.size(); ++k) values[k] = 1.0f / static_cast<float>(k + 1);
  for (float& value : values) srcs.push_back(&value);
  for (int nsrc : {100, 1023, 1025, 2049, 4095, 4096}) {
    const std::vector<float> used(values.begin(), values.begin() + nsrc);
    for (bool tree : {false, true}) {
      for (const std::string& isa : supported_isas()) {
        pycoll::force_isa(isa.c_str());
        float result = 0;
        void* dst = &result;
        const FoldSpec spec{DType::kFloat32, ReduceOp::kSum, tree, 0, false};
        pycoll::fold(spec, srcs.data(), nsrc, &dst, 1, 1);
        const float expected =
            tree ? oracle::reduce_tree(spec.op, used) : oracle::reduce_serial(spec.op, used);
        check(result == expected, "sum of " + std::to_string(nsrc) + " sources");
      }
    }
  }
}

void check_copy_and_scale() {
  for (const std::string& isa : supported_isas()) {
    pycoll::force_isa(isa.c_str());
    check(pycoll::isa_name() == isa, "isa_name after force_isa");
    std::vector<char> from(2200000), to(from.size());
    for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 7 + i / 251 + 1);
    for (size_t nbytes : {0, 1, 63, 64, 65, 200, 4096, 9001, 65535, 65536, 65601, 2100003}) {
      for (size_t offset : {0, 1, 17, 64}) {
        for (bool nontemporal : {false, true}) {
          std::fill(to.begin(), to.end(), 0);
          pycoll::copy(to.data() + offset, from.data() + 5, nbytes, nontemporal);
          check(std::memcmp(to.data() + offset, from.data() + 5, nbytes) == 0, "copy");
          check(to[offset + nbytes] == 0, "copy wrote past the end");
          if (offset > 0) check(to[offset - 1] == 0, "copy wrote before the beginning");
        }
      }
    }
    for (size_t behind : {0, 1, 16, 31, 32, 63, 64, 4095}) {  // of the source, but for whole pages
      for (size_t nbytes : {2047, 2048, 5001, 65537, 200000}) {
        std::fill(to.begin(), to.end(), 0);
        const size_t apart = static_cast<size_t>(to.data() - from.data()) % 4096;
        const size_t at = (behind + 4096 + 5 - apart) % 4096 + 1;
        pycoll::copy(to.data() + at, from.data() + 6, nbytes);
        check(std::memcmp(to.data() + at, from.data() + 6, nbytes) == 0, "copy to another page");
        check(to[at + nbytes] == 0 && to[at - 1] == 0, "copy wrote beside its destination");
      }
    }
    std::vector<double> doubles(100, 10.0);
    pycoll::scale(DType::kFloat64, doubles.data(), doubles.size(), 3);
    for (double value : doubles) check(value == 10.0 / 3, "scale of float64");
    std::vector<int8_t> small = {-7, 7, -128, 127};
    pycoll::scale(DType::kInt8, small.data(), small.size(), 2);
    check(small == std::vector<int8_t>{-3, 3, -64, 63}, "scale of int8 truncates toward zero");
  }
  check(!pycoll::force_isa("nonesuch"), "force_isa of an unknown name");
}

}  // namespace

int main() {
  const std::string widest = pycoll::isa_name();
  check(widest == supported_isas().back(), "the default is not the widest");
  Random random(20240501);
  check_copy_and_scale();
  check_many_sources();
  check_rounding<Float16>(DType::kFloat16);
  check_rounding<BFloat16>(DType::kBFloat16);
  check_dtype<Plain<int8_t>>(DType::kInt8, random);
  check_dtype<Plain<int16_t>>(DType::kInt16, random);
  check_dtype<Plain<int32_t>>(DType::kInt32, random);
  check_dtype<Plain<int64_t>>(DType::kInt64, random);
  check_dtype<Plain<uint8_t>>(DType::kUInt8, random);
  check_dtype<Plain<uint16_t>>(DType::kUInt16, random);
  check_dtype<Plain<uint32_t>>(DType::kUInt32, random);
  check_dtype<Plain<uint64_t>>(DType::kUInt64, random);
  check_dtype<Float16>(DType::kFloat16, random);
  check_dtype<BFloat16>(DType::kBFloat16, random);
  check_dtype<Plain<float>>(DType::kFloat32, random);
  check_dtype<Plain<double>>(DType::kFloat64, random);
  check_dtype<Bool>(DType::kBool, random);
  check_dtype<Float8E4M3>(DType::kFloat8_E4M3FN, random);
  check_dtype<Float8E5M2>(DType::kFloat8_E5M2, random);
  std::string isas;
  for (const std::string& isa : supported_isas()) isas += " " + isa;
  std::printf("ok:%s\n", isas.c_str());
  return 0;
}
