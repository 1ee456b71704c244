"""Calls in the background, second threads and forks, by messages and in two levels."""

import json

import pytest

import mpirun

WHEREVER = [
    "refused_behind",
    "forks",
    "forks_under_way",
    "forks_asking",
    "checks_behind",
    "works",
    "late",
    "leaves_behind",
]
WHEREVER += ["interrupted_receive", "interrupted_waits", "dropped"]
NAMES = [*WHEREVER, "second_threads", "refused_close"]
LIMIT = {"PYCOLL_TIMEOUT": "30"}


@pytest.mark.parametrize("hosts", [[0, 0, 1], [0, 1, 1, 0]])
def test_in_two_levels(mpi, hosts):
    found = mpi(len(hosts), *NAMES, hosts=hosts, timeout=110, **LIMIT)
    assert found == {name: [[]] * len(hosts) for name in NAMES}


def test_an_interrupted_close_in_two_levels(mpi):
    found = mpi(3, "interrupted_close", hosts=[0, 0, 1], **LIMIT)
    assert found == {"interrupted_close": [[]] * 3}


def test_by_messages(mpi):
    found = mpi(3, *NAMES, timeout=110, PYCOLL_TRANSPORT="mpi", **LIMIT)
    assert found == {name: [[]] * 3 for name in NAMES}


def test_an_exception_ends_a_program_with_a_call_in_the_background(mpi, tmp_path):
    program = mpirun.PROGRAMS.with_name("raises.py")
    output = mpirun.finish(mpirun.launch(3, program, [str(tmp_path)], **LIMIT), 25)
    found = mpirun.results(3, tmp_path)[1:]
    assert all("left: ValueError: no more data" in str(text) for text in found), (found, output)


@pytest.mark.parametrize("level", ["single", "serialized"])
def test_where_mpi_is_for_one_thread(mpi, level):
    options = {"MPI4PY_RC_THREAD_LEVEL": level, **LIMIT}
    found = mpi(3, *WHEREVER, hosts=[0, 0, 1], timeout=110, **options)
    assert found == {name: [[]] * 3 for name in WHEREVER}


@pytest.mark.parametrize("wrong", [{"timeout": -1}, {"transport": "x"}, {"tuning": 3}])
def test_a_setting_that_is_wrong_on_one_rank(mpi, tmp_path, wrong):
    program = mpirun.PROGRAMS.with_name("settings.py")
    arguments = [str(tmp_path), json.dumps(wrong)]
    output = mpirun.finish(mpirun.launch(3, program, arguments), 60)
    found = mpirun.results(3, tmp_path)
    name = next(iter(wrong))
    assert None not in found, output
    assert all(text.startswith("rank 2: ") and name in text for text in found), found


@pytest.mark.parametrize("state", ["never", "no longer"])
def test_where_mpi_cannot_be_used(mpi, tmp_path, state):
    program = mpirun.PROGRAMS.with_name("settings.py")
    output = mpirun.finish(mpirun.launch(2, program, [str(tmp_path), json.dumps(state)]), 60)
    what = "has not been initialised" if state == "never" else "has been finalized"
    found = mpirun.results(2, tmp_path)
    assert None not in found, output
    assert all(what in text for text in found), found


@pytest.mark.parametrize("level", ["serialized", "multiple"])
def test_a_communicator_that_outlives_mpi(mpi, tmp_path, level):
    """Whatever is called of MPI then ends the job, so nothing is."""
    process = mpirun.launch(2, mpirun.PROGRAMS.with_name("finalized.py"), [str(tmp_path), level])
    output = mpirun.finish(process, 60)
    found = mpirun.results(2, tmp_path)
    assert process.returncode == 0, output
    for rank, texts in enumerate(found):
        why = f"rank {rank} called MPI.Finalize() before this communicator was closed"
        count = 8 if level == "serialized" and rank == 0 else 7
        assert [why in text for text in texts] == [True] * count, texts


def test_a_communicator_of_several_hosts_that_outlives_mpi(mpi, tmp_path):
    """No rank looks for messages while it waits inside its host, either."""
    arguments = [str(tmp_path), "multiple", "[0, 0, 1, 1]"]
    process = mpirun.launch(4, mpirun.PROGRAMS.with_name("finalized.py"), arguments)
    output = mpirun.finish(process, 60)
    assert process.returncode == 0, output
    for rank, texts in enumerate(mpirun.results(4, tmp_path)):
        why = f"rank {rank} called MPI.Finalize() before this communicator was closed"
        assert [why in text for text in texts] == [True] * 7, texts


@pytest.mark.parametrize("hosts", ["shared", "[0, 1, 2]", "[0, 0, 1]"])
def test_exit_handlers_and_finalizers_communicate(mpi, tmp_path, hosts):
    program = mpirun.PROGRAMS.with_name("at_exit.py")
    process = mpirun.launch(3, program, [str(tmp_path), hosts])
    output = mpirun.finish(process, 60)
    assert process.returncode == 0, output
    for rank in range(3):
        assert (tmp_path / str(rank)).read_text() == "handler 6\nhandler 6\nfinalizer 6\n"
