#!/usr/bin/env bash
# Build what to take along to a device's machine that has another Python: libraries and wheels.
#   benchmarks/gpu/carry.sh [interpreter like that of the machine, by default python3.12]
# Needs nvcc and packages from an index; leaves pycoll/_C*.so, pycoll/libpycoll_cuda.so and wheels/.
set -eu
cd "$(dirname "$0")/../.."
python=${1:-python3.12}
venv=build/venv$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip -q --disable-pip-version-check "$@"; }
pip install numpy "setuptools>=77" "pybind11>=2.13"
pip download --no-deps -d wheels setuptools pybind11 array-api-compat ml_dtypes
PYCOLL_CUDA=1 "$venv/bin/python" setup.py -q build_ext --inplace
"$venv/bin/python" -c "import pycoll._C; from pycoll.cuda.device.library import library; library()"
suffix=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
du -ch "pycoll/_C$suffix" pycoll/libpycoll_cuda.so wheels/*
