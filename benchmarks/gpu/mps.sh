#!/usr/bin/env bash
# Run stages of processes while their kernels run side by side on the device: NCCL with 2 and 4 ranks
# beside ours, and messages. Starts a daemon of the Multi-Process Service, and ends it.
#   benchmarks/gpu/mps.sh [folder for the results] [--stage NAME ...]
# Environment: PYTHON; PYCOLL_NCCL (libnccl.so.2 of NCCL 2.30 or later: older ones refuse ranks that
#   share a device, and run through sockets).
set -u
cd "$(dirname "$0")/../.."
OUT=${1:-benchmarks/results/gpu}
stages=("${@:2}")
((${#stages[@]})) || stages=(--stage messages2 --stage vmm2 --stage nccl2 --stage nccl4)
export CUDA_MPS_PIPE_DIRECTORY=${CUDA_MPS_PIPE_DIRECTORY:-$(mktemp -d)}
export CUDA_MPS_LOG_DIRECTORY=${CUDA_MPS_LOG_DIRECTORY:-$CUDA_MPS_PIPE_DIRECTORY}
# The clients of a server share one pool of connections: four that ask for 32 each found no memory
# for a context on an H100. (MPS documentation, "CUDA_DEVICE_MAX_CONNECTIONS".)
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-8}
if ! command -v nvidia-cuda-mps-control > /dev/null; then
  echo "nvidia-cuda-mps-control is missing: it comes with the driver" >&2
  exit 1
fi
nvidia-cuda-mps-control -d || { echo "the MPS daemon did not start" >&2; exit 1; }
trap 'echo quit | timeout 20 nvidia-cuda-mps-control' EXIT
env ${PYCOLL_NCCL:+LD_PRELOAD="$PYCOLL_NCCL"} benchmarks/gpu/run.sh "$OUT" "${stages[@]}"
status=$?
tail -n 20 "$CUDA_MPS_LOG_DIRECTORY"/*.log
exit $status
