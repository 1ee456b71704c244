"""Process groups on several hosts whose ranks an MPI launcher has started."""

import socket
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import mpirun

PROGRAM = Path(__file__).resolve().parents[2] / "support/torch_mpi_program.py"
TCP = "TCP, messages between all ranks"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def outcomes(n, folder, words, options=()):
    """Start n processes by the MPI launcher; return what each rank has found."""
    if reason := mpirun.missing():
        pytest.skip(reason)
    process = mpirun.launch(n, PROGRAM, words, options, OMP_NUM_THREADS="1")
    output = mpirun.finish(process, 45)
    found = mpirun.results(n, folder)
    assert None not in found, output
    return found


def run(n, folder, name):
    return outcomes(n, folder, [str(folder), name])


def test_a_part_of_the_ranks_when_nobody_has_used_mpi(tmp_path):
    """The others would not come to MPI_Init."""
    assert run(3, tmp_path, "beside_gloo") == [TCP, TCP, ""]


def test_launchers_that_the_mpi_launcher_has_started(tmp_path):
    """MPI knows the launchers, and not their ranks, as many as there may be."""
    variables = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")
    node = f"${{{variables[0]}:-${variables[1]}}}"
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes=2"]
    torchrun += ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    program = [str(PROGRAM), str(tmp_path), "all_ranks"]
    script = tmp_path / "node.sh"
    script.write_text(f"exec {' '.join(torchrun)} --node-rank={node} {' '.join(program)}\n")
    assert outcomes(2, tmp_path, [], ("sh", str(script))) == [TCP, TCP]


def test_groups_of_the_same_ranks_share_a_communicator(tmp_path):
    assert run(3, tmp_path, "again") == [1, 1, 1]


def test_a_rank_that_does_not_come_to_make_a_communicator(tmp_path):
    found = run(3, tmp_path, "late")
    assert found.pop(1)[0] != "made"
    for text, seconds in found:
        assert "not made a communicator within 2 s" in text
        assert seconds < 12


def test_no_communicator_is_left(tmp_path):
    for text in run(2, tmp_path, "refused"):
        assert "gives no communicator for ranks [0, 1]" in text
