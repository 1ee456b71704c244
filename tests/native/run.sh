#!/usr/bin/env bash
# Builds and runs the C++ tests: run.sh [plain|asan|tsan|simulation [ARGUMENTS]]. In the plain mode,
# what the build of the extension has compiled is used. The last runs the engine on a simulated
# machine; its arguments stand in tests/native/simulation/simulation.cpp.
set -euo pipefail

cd "$(dirname "$0")/../.."
mode=${1:-}
if [[ -z $mode ]]; then
  case ${SANITIZE:-} in
    "") mode=plain ;;
    thread) mode=tsan ;;
    *) mode=asan ;;
  esac
fi
case $mode in
  plain) flags=(-O2) ;;
  asan) flags=(-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined) ;;
  tsan) flags=(-O1 -g -fsanitize=thread -Wno-tsan) ;;  # it knows no fences, and need not
  simulation) flags=(-O1 -g1 -Itests/native/simulation -include tests/native/simulation/simulated_std.h) ;;
  *) echo "run.sh [plain|asan|tsan|simulation], got '$mode'" >&2; exit 2 ;;
esac

build=tests/native/build/$mode
mkdir -p "$build"
cxx=(${CXX:-g++} -std=c++20 -MMD -Wall -Wextra -ffp-contract=off -pthread "${flags[@]}" -Icsrc -Itests/native)

# Whether an object is missing, or older than what it was made of, as the compiler has listed it.
stale() {
  local object=$1 list=${1%.o}.d
  [[ ! -e $object || ! -e $list ]] && return
  # shellcheck disable=SC2046
  [[ -n $(find $(sed -e 's/^[^:]*://' -e 's/\\$//' "$list") -newer "$object" 2>&1) ]]
}

compile() {
  local object=$build/$(basename "$1" .cpp).o made
  if [[ $mode == plain ]]; then
    for made in build/objects-*/"${1%.cpp}.o"; do
      if [[ -e $made ]] && ! stale "$made"; then
        cp -p "$made" "${made%.o}.d" "$build"
        return
      fi
    done
  fi
  if stale "$object" || [[ tests/native/run.sh -nt $object ]]; then "${cxx[@]}" -c "$1" -o "$object"; fi
}

# The engine is everything that does not know Python.
mapfile -t engine < <(find csrc -name '*.cpp' -not -path 'csrc/cuda/*' -not -path 'csrc/bindings/*' | sort)
mapfile -t tests < <(find tests/native -name "test_*.cpp" | sort)
if [[ $mode == simulation ]]; then  # of which the machine and its slow folds are a part
  simulated='csrc/(engine|memory)/|base/types|p2p/mailbox'
  mapfile -t engine < <(printf '%s\n' "${engine[@]}" | grep -E "$simulated" | grep -v helper_thread)
  engine+=(tests/native/simulation/{fold,machine,races,system}.cpp)
  tests=(tests/native/simulation/simulation.cpp)
fi
for source in "${engine[@]}" "${tests[@]}"; do
  while (( $(jobs -pr | wc -l) >= 2 )); do wait -n; done
  compile "$source" &
done
for job in $(jobs -p); do wait "$job"; done
objects=()
for source in "${engine[@]}"; do objects+=("$build/$(basename "$source" .cpp).o"); done
failed=0
for source in "${tests[@]}"; do
  name=$(basename "$source" .cpp)
  "${cxx[@]}" "$build/$name.o" "${objects[@]}" -o "$build/$name"
  echo "== $name ($mode)"
  TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}" "$build/$name" "${@:2}" || failed=1
done
exit $failed
