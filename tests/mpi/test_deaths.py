"""A rank that is killed: the others hear of it, or the launcher ends the job and says why."""

import json
import time

import pytest

import mpirun

DEADLINE_S = 20.0


def killed(folder, hosts, size, *options, words=()):
    """Run deaths.py; return output, seconds, and what each survivor has written, by rank."""
    start = time.monotonic()
    program = mpirun.PROGRAMS.with_name("deaths.py")
    arguments = [str(folder), json.dumps(hosts), str(size), *words]
    process = mpirun.launch(len(hosts), program, arguments, options)
    output = mpirun.finish(process, 45)
    found = mpirun.results(len(hosts) - 1, folder)
    return output, time.monotonic() - start, found


@pytest.mark.parametrize("size", [3, 400_000])
@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 0, 1, 1]])
def test_the_launcher_ends_the_job_and_says_why(mpi, tmp_path, hosts, size):
    output, seconds, found = killed(tmp_path, hosts, size)
    assert seconds < DEADLINE_S
    assert "signal 9" in output or "signal: Killed" in output or "EXIT CODE: 9" in output, output
    for result in found:  # whoever was faster than the launcher
        assert result is None or result["kind"] in ("PeerLost", "TransportError"), result


@pytest.mark.parametrize("size", [3, 400_000])
@pytest.mark.parametrize("hosts", [[0, 1, 2], [0, 0, 1, 1]])
def test_with_ulfm_the_others_hear_of_it_and_go_on(mpi, tmp_path, hosts, size):
    options = ["--with-ft", "ulfm"]
    if mpirun.lacks(*options):
        pytest.skip("the launcher of this MPI has no --with-ft ulfm")
    output, seconds, found = killed(tmp_path, hosts, size, *options, words=["shrink"])
    assert seconds < DEADLINE_S, output
    n = len(hosts)
    for rank, result in enumerate(found):
        assert result is not None, (rank, output)
        assert result["kind"] == "PeerLost", (result, output)
        assert f"rank {n - 1}" in result["text"], result
        assert result["seconds"] < 10
        assert result["sum"] == n - 1
