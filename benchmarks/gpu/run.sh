#!/usr/bin/env bash
# Build, test and measure pycoll on one CUDA device, in at most nine minutes. Needs no network.
#   benchmarks/gpu/run.sh [folder for the results, by default benchmarks/results/gpu] [--stage NAME ...]
# Environment: PYTHON (interpreter with NumPy and CuPy; by default python3),
#   PYCOLL_WHEELS (folder with wheels of pybind11 and setuptools, where they are not installed).
set -u
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
OUT=${1:-benchmarks/results/gpu}
mkdir -p "$OUT"
if ! "$PYTHON" -c 'import pybind11, setuptools' 2>/dev/null; then
  "$PYTHON" -m pip install -q --no-index --find-links "${PYCOLL_WHEELS:-wheels}" \
    pybind11 setuptools || echo "pybind11 and setuptools are needed to build: see PYCOLL_WHEELS" >&2
fi
# Load kernels when a library is loaded, not at the first launch, which may wait for a spinning one.
export CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32 PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"  # packages may lie in a folder of the caller's
exec "$PYTHON" benchmarks/gpu/suite.py "$OUT" "${@:2}"
