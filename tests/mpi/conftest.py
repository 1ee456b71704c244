"""Skips the tests of MPI where there is none; `make test-mpi` runs them under two MPIs."""

import pytest

import mpirun


@pytest.fixture
def mpi(tmp_path):
    """Return a function that runs programs of programs.py on n ranks."""
    reason = mpirun.missing()
    if reason:
        pytest.skip(reason)

    def run(n, *names, **options):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return mpirun.run(n, names, folder, **options)

    return run
