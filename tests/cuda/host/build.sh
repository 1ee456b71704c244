#!/usr/bin/env bash
# Builds the device library for the host: build.sh [plain|tsan]; prints the path of the library.
set -euo pipefail

cd "$(dirname "$0")/../../.."
mode=${1:-plain}
case $mode in
  plain) flags=(-O1) ;;
  tsan) flags=(-O1 -g1 -fsanitize=thread) ;;
  *) echo "build.sh [plain|tsan], got '$mode'" >&2; exit 2 ;;
esac
build=tests/native/build/cuda-$mode
library=$build/libpycoll_cuda_host.so
mkdir -p "$build"
exec 9>"$build/lock" && flock 9  # test processes that run beside each other may all ask for it
sources=(csrc/engine/plan.cpp csrc/engine/bind.cpp csrc/base/types.cpp csrc/cuda/*/*.cpp tests/cuda/host/*.cpp)
headers=(csrc/*/*.h csrc/*/*/*.h csrc/*/*/*.inl tests/cuda/host/*.h tests/cuda/host/*.inl)
headers+=(tests/cuda/host/build.sh)
compile() {
  local object=$build/$(basename "$(dirname "$1")")-$(basename "$1" .cpp).o
  if [[ ! -e $object || -n $(find "$1" "${headers[@]}" -newer "$object") ]]; then
    ${CXX:-g++} -std=c++20 -Wall -Wextra -fPIC -fvisibility=hidden -ffp-contract=off -pthread \
      "${flags[@]}" -Icsrc -Itests/cuda/host -c "$1" -o "$object"
    touch "$build/changed"
  fi
}
pids=()
for source in "${sources[@]}"; do
  compile "$source" & pids+=($!)
  if (( ${#pids[@]} == 2 )); then wait "${pids[0]}"; pids=("${pids[@]:1}"); fi
done
for pid in "${pids[@]}"; do wait "$pid"; done
if [[ ! -e $library || $build/changed -nt $library ]]; then
  ${CXX:-g++} -shared -pthread "${flags[@]}" "$build"/*.o -o "$library.new"
  mv "$library.new" "$library"
fi
echo "$library"
