"""What a process says that no launcher of its MPI has started, and another launcher has."""

import os
import subprocess
import sys

import pytest

import mpirun

OURS = ("PMI_", "PMIX_", "OMPI_", "MPI_LOCALNRANKS", "PRTE_")
SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"MV2_COMM_WORLD_SIZE": "2"}, "with the mpiexec of the MPI that mpi4py uses"),
        (SLURM, "with `srun --mpi=pmi2` or `--mpi=pmix`"),
    ],
)
def test_the_error_says_how_to_start_it(mpi, variables, told):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(OURS)}
    done = subprocess.run(
        [sys.executable, "-c", "import pycoll; pycoll.init()"],
        env={**clean, **variables},
        cwd=mpirun.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "TransportError: an MPI launcher has started 2 processes, but in this" in done.stderr
    assert f"which knows of one: start it {told}" in done.stderr
