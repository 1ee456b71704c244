#!/usr/bin/env bash
# Build, test and measure pycoll on one CUDA device, in at most nine minutes. Needs no network.
#   benchmarks/gpu/run.sh [smoke|measure] [folder for the results, by default benchmarks/results/gpu]
#     [--stage NAME ...] [--skip NAME ...]
# smoke: is it right? (four minutes); measure: how fast is it? (five minutes).
# Environment: PYTHON (interpreter with NumPy and CuPy; by default python3),
#   PYCOLL_WHEELS (folder with wheels of pybind11, setuptools, array-api-compat and ml_dtypes, where
#   they are missing or old).
set -u
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
part=()
case ${1:-} in smoke | measure) part=(--part "$1"); shift ;; esac
OUT=${1:-benchmarks/results/gpu}
mkdir -p "$OUT"
# What pyproject.toml asks for; older ones cannot read it.
have_tools() {
  "$PYTHON" - 2>/dev/null <<'EOF'
import pybind11, setuptools
release = lambda module: tuple(map(int, module.__version__.split(".")[:2]))
raise SystemExit(release(setuptools) < (77, 0) or release(pybind11) < (2, 13))
EOF
}
have() { "$PYTHON" - 2>/dev/null <<<"import $1"; }
install() {  # not into an environment of the system's
  "$PYTHON" -m pip install -q --upgrade --no-index --target build/tools \
    --find-links "${PYCOLL_WHEELS:-wheels}" "$@"
}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"  # packages may lie in a folder of the caller's
if ! have_tools || ! have array_api_compat || ! have ml_dtypes; then
  export PYTHONPATH="$PWD/build/tools:$PYTHONPATH"
  have_tools || install pybind11 setuptools ||
    echo "pybind11 2.13 and setuptools 77 are needed to build: see PYCOLL_WHEELS" >&2
  have array_api_compat || install array-api-compat ||
    echo "without array-api-compat, train2 uses the copy in scikit-learn or SciPy" >&2
  have ml_dtypes || install --no-deps ml_dtypes ||
    echo "without ml_dtypes there are no floats of 8 bits, and float8 fails" >&2
fi
# pycoll loads its own kernels when a group is made; those of other libraries need not be there before
# they are launched: what a load waits for ends by itself.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-32}
export PYTHONUNBUFFERED=1 NCCL_DEBUG=${NCCL_DEBUG:-WARN}
exec "$PYTHON" benchmarks/gpu/suite.py "$OUT" "${part[@]}" "${@:2}"
