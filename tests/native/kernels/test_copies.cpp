// What goes to several places arrives in all of them, by every instruction set of this CPU.
#include <algorithm>
#include <vector>

#include "calls.h"
#include "kernels/fold/fold.h"

namespace {

using namespace calls;

// Copies, and sums, to more places than a hint has bits for; one of them is the source itself.
void to_many_places() {
  for (const char* isa : {"base", "avx2", "avx512"}) {
    if (!force_isa(isa)) continue;
    for (const int ndst : {1, 2, 33, 40}) {
      for (const size_t count : {1, 1023, 1024, 1025, 5000}) {
        for (const bool past : {false, true}) {
          std::vector<std::vector<float>> to(size_t(ndst), std::vector<float>(count + 2, -1));
          std::vector<float> from(count), twice(count);
          for (size_t i = 0; i < count; ++i) from[i] = float(i) + 0.5F;
          for (size_t i = 0; i < count; ++i) twice[i] = 2 * from[i];
          std::vector<void*> dsts;
          for (auto& array : to) dsts.push_back(array.data() + 1);
          dsts.push_back(from.data());
          const auto arrived = [&](const std::vector<float>& wanted) {
            for (const auto& array : to) {
              if (array.front() != -1 || array.back() != -1) return false;
              if (!std::equal(wanted.begin(), wanted.end(), array.begin() + 1)) return false;
            }
            return true;
          };
          copy_to_all(dsts.data(), ndst + 1, from.data(), count * 4, past);
          expect(arrived(from), isa, ": copy to ", ndst);
          const void* srcs[] = {from.data(), from.data()};
          const FoldSpec spec{DType::kFloat32, ReduceOp::kSum, true, 0, past ? kAll : 0};
          fold(spec, srcs, 2, dsts.data(), ndst, count);
          expect(arrived(twice), isa, ": sum to ", ndst);
        }
      }
    }
  }
}

}  // namespace

int main() { return main_of({{"to many places", to_many_places}}); }
