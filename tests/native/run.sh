#!/usr/bin/env bash
# Builds and runs the C++ tests: run.sh [plain|asan|tsan|short|simulation|fuzz [ARGUMENTS]]. In the
# plain mode, what the build of the extension has compiled is used. `short` is a minute of both
# sanitizers: what reads bytes of others, and what threads share. `simulation` runs the engine on a
# simulated machine; its arguments stand in tests/native/simulation/simulation.cpp. `fuzz [INPUTS
# [SEED]]` gives every target so many inputs, under sanitizers where it is C++.
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
address=(-fsanitize=address,undefined -fno-sanitize-recover=undefined)
thread=(-fsanitize=thread -Wno-tsan)  # it knows no fences, and need not
pick=. skip='^$' watched=.  # tests that are run, or not; sources that the sanitizer watches
case $mode in
  plain) flags=(-O2) ;;
  asan) flags=(-O1 -g -fno-omit-frame-pointer "${address[@]}") ;;
  tsan)
    flags=(-O1 -g "${thread[@]}")
    # Those of kernels have one thread. It can follow 64 locks of a thread, and no fork.
    skip='/kernels/|test_liveness_hold' ;;
  short)
    bash tests/native/run.sh short-asan
    exec bash tests/native/run.sh short-tsan ;;
  short-asan)
    flags=(-O0 -g1 "${address[@]}")
    pick='test_(message_frames|socket_(api|ends)|plan_inputs)' watched='csrc/(transports/(messages|tcp)/|engine/plan)' ;;
  short-tsan)
    flags=(-O1 -g1 "${thread[@]}")
    pick='test_(faults|helper_thread|survivors|trace)' watched='csrc/(engine|base|memory|p2p)/' ;;
  fuzz)
    flags=(-O2 -g1 "${address[@]}")
    pick='test_(message_frames|plan_inputs)' watched='csrc/(transports/(messages|tcp)|engine)/' ;;
  simulation) flags=(-O1 -g1 -Itests/native/simulation) ;;
  *) echo "run.sh [plain|asan|tsan|short|simulation|fuzz], got '$mode'" >&2; exit 2 ;;
esac

build=tests/native/build/$mode
mkdir -p "$build"
base=(${CXX:-g++} -std=c++20 -MMD -Wall -Wextra -ffp-contract=off -pthread -Icsrc -Itests/native)
cxx=("${base[@]}" "${flags[@]}")

# Whether an object is missing, or older than what it was made of, as the compiler has listed it.
stale() {
  local object=$1 list=${1%.o}.d
  [[ ! -e $object || ! -e $list ]] && return
  # shellcheck disable=SC2046
  [[ -n $(find $(sed -e 's/^[^:]*://' -e 's/\\$//' "$list") -newer "$object" 2>&1) ]]
}

# What comes before every source of the simulation takes a compiler most of its time: read it once.
if [[ $mode == simulation ]]; then
  first=$build/simulated_std.h
  if stale "$first.gch" || [[ tests/native/run.sh -nt $first.gch ]]; then
    echo '#include "../../simulation/simulated_std.h"' >"$first"
    "${cxx[@]}" -MF "$first.gch.d" -x c++-header "$first" -o "$first.gch"
    rm -f "$build"/*.o
  fi
  cxx+=(-include "$first" -Winvalid-pch)
fi

compile() {
  local object=$build/$(basename "$1" .cpp).o made compiler=("${cxx[@]}")
  if [[ $mode == plain || $1 != tests/* && ! $1 =~ $watched ]]; then
    compiler=("${base[@]}" -O2)
    for made in build/objects-*/"${1%.cpp}.o"; do
      if [[ -e $made ]] && ! stale "$made"; then
        cp -p "$made" "${made%.o}.d" "$build"
        return
      fi
    done
  fi
  if stale "$object" || [[ tests/native/run.sh -nt $object ]]; then "${compiler[@]}" -c "$1" -o "$object"; fi
}

# The engine is everything that does not know Python.
mapfile -t engine < <(find csrc -name '*.cpp' -not -path 'csrc/cuda/*' -not -path 'csrc/bindings/*' | sort)
mapfile -t tests < <(find tests/native -name "test_*.cpp" | grep -E "$pick" | grep -vE "$skip" | sort)
if [[ $mode == simulation ]]; then  # of which the machine and its slow folds are a part
  simulated='csrc/(engine|memory|p2p|transports)/|base/(ticks|types)'
  mapfile -t engine < <(printf '%s\n' "${engine[@]}" | grep -E "$simulated" | grep -vE 'transports/mpi|liveness_hold')
  engine+=(tests/native/simulation/{fold,judge,machine,mpi,races,sockets,system,threads}.cpp)
  tests=(tests/native/simulation/simulation.cpp)
fi
for source in "${engine[@]}" "${tests[@]}"; do
  while (( $(jobs -pr | wc -l) >= 2 )); do wait -n; done
  compile "$source" &
done
for job in $(jobs -p); do wait "$job"; done
# Says how many inputs a target has taken in a second, since `start`.
rate() { echo "$(( $1 * 1000000000 / ($(date +%s%N) - start + 1) )) inputs a second"; }

objects=()
for source in "${engine[@]}"; do objects+=("$build/$(basename "$source" .cpp).o"); done
failed=0
for source in "${tests[@]}"; do
  name=$(basename "$source" .cpp)
  "${cxx[@]}" "$build/$name.o" "${objects[@]}" -o "$build/$name"
  echo "== $name ($mode)"
  start=$(date +%s%N)
  TSAN_OPTIONS="halt_on_error=1 ${TSAN_OPTIONS:-}" "$build/$name" "${@:2}" || failed=1
  if [[ $mode == fuzz ]]; then rate "${2:-1000}"; fi
done
if [[ $mode == fuzz ]]; then
  for target in $(grep -rl --include='*.py' 'from mutate import' tests | sort); do
    start=$(date +%s%N)
    FUZZ_INPUTS=${2:-1000} FUZZ_SEED=${3:-1} .venv/bin/python -m pytest -q -n 0 --timeout 0 "$target" || failed=1
    rate "${2:-1000}"
  done
fi
exit $failed
