"""``pycoll run --elastic``: ranks that die are started again and join the others."""

import signal
import textwrap

import pytest

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import pycoll

comm = pycoll.init(timeout=30)
here, first = Path(__file__).parent, comm.epoch == 0

def total(x):
    return int(comm.all_reduce(np.array([x]))[0])

def grown(comm):
    with comm:
        return comm.grow()
"""


def script(jobs, body):
    path = jobs.folder / "script.py"
    path.write_text(PRELUDE + textwrap.dedent(body))
    return path


@pytest.mark.parametrize("death", ["os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError"])
def test_a_rank_that_dies_comes_back_into_its_place(jobs, death):
    path = script(
        jobs,
        f"""
        pid = os.getpid()
        if first:
            if comm.rank == 1:
                {death}
            try:
                total(1)
                sys.exit("nobody died")
            except pycoll.PeerLost as error:
                assert "call its grow()" in str(error)
                comm = grown(comm)
        old = comm.all_gather(np.array([not first]))
        print(comm.rank, comm.epoch, total(1), *old.astype(int), pid == os.getpid(), flush=True)
        """,
    )
    done = jobs.run("-n", 3, "--elastic", path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 1 3 0 1 0 True" for rank in range(3)]
    assert "started again (1/10)" in done.stderr
    assert "pycoll run: communicator 1 has 3 ranks, new: 1, " in done.stderr


def test_the_others_go_on_and_take_it_in_later(jobs):
    path = script(
        jobs,
        """
        if first:
            if comm.rank == 2:
                while not (here / "smaller").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            (here / "smaller").touch()
            try:
                total(1)
            except pycoll.PeerLost:
                comm = grown(comm)
            assert (comm.world_size, comm.epoch, total(1)) == (2, 1, 2)
            while not comm.all_reduce(np.array([comm.newcomers]), "min")[0]:
                time.sleep(0.01)
            comm = grown(comm)
        print(comm.rank, comm.epoch, comm.newcomers, total(1), flush=True)
        """,
    )
    done = jobs.run("-n", "2..3", "--elastic", path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 2 0 3" for rank in range(3)]
    assert "communicator 1 has 2 ranks, " in done.stderr
    assert "communicator 2 has 3 ranks, new: 2" in done.stderr


def test_who_comes_when_the_others_end_is_ended_and_the_job_has_succeeded(jobs):
    path = script(
        jobs,
        """
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            total(1)
        except pycoll.PeerLost:
            comm = grown(comm)
        while not comm.all_reduce(np.array([comm.newcomers]), "min")[0]:
            time.sleep(0.01)
        print(comm.rank, comm.epoch, flush=True)
        """,
    )
    done = jobs.run("-n", "2..3", "--elastic", path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 1", "1 1"]


def test_restarts_are_bounded(jobs):
    path = script(
        jobs,
        """
        if comm.rank == 1:
            sys.exit(7)
        while True:
            try:
                total(1)
            except pycoll.PeerLost:
                comm = grown(comm)
        """,
    )
    done = jobs.run("-n", 2, "--elastic", "--restarts", 1, path)
    assert done.returncode == 7
    assert "it is not started again: 1 restarts have been used" in done.stderr
    assert "only 1 ranks are left, the job needs 2, and no more are started" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("pycoll run: rank 1 exited with code 7")


def test_the_death_of_all_ranks_ends_the_job(jobs):
    done = jobs.run("-n", 2, "--elastic", script(jobs, "comm.barrier(); sys.exit(3)"))
    assert done.returncode == 3
    assert "no rank is left whose state a new one could get" in done.stderr
    assert "communicator 1" not in done.stderr


def test_a_failure_before_the_first_communicator_ends_the_job(jobs):
    path = jobs.folder / "script.py"
    path.write_text("raise ValueError('a mistake')")
    done = jobs.run("-n", 2, "--elastic", path)
    assert done.returncode == 1
    assert "started again" not in done.stderr
    assert "ValueError: a mistake" in done.stderr


def test_a_signal_ends_the_job(jobs):
    path = script(
        jobs,
        """
        (here / f"up.{comm.rank}").write_text(str(os.getpid()))
        time.sleep(1000)
        """,
    )
    with jobs.started(path, 2, "--elastic") as (job, pids):
        job.send_signal(signal.SIGTERM)
        assert job.wait(30) == 128 + signal.SIGTERM
        assert jobs.all_gone(pids)
        assert "started again" not in job.stderr.read()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-n", "2..3"], "-n from..to and --restarts are for --elastic"),
        (["-n", "3", "--restarts", "1"], "-n from..to and --restarts are for --elastic"),
        (["-n", "3..2", "--elastic"], "-n is 3..2, expected the fewest ranks first"),
        (["-n", "0..2", "--elastic"], "-n is 0..2, expected at least 1 rank"),
        (["-n", "2..", "--elastic"], "invalid number of ranks value: '2..'"),
        (["-n", "2", "--elastic", "--keep-going"], "leave --keep-going out"),
        (["-n", "2", "--elastic", "--restarts", "-1"], "--restarts is -1"),
    ],
)
def test_what_cannot_be_is_refused(jobs, words, text):
    done = jobs.run(*words, jobs.script(""))
    assert done.returncode == 2
    assert text in done.stderr


def test_only_the_whole_job_grows(jobs):
    path = script(
        jobs,
        """
        part = comm.split(0)
        assert comm.can_grow and not part.can_grow
        try:
            part.grow()
        except pycoll.ArgumentError as error:
            print(error, flush=True)
        """,
    )
    done = jobs.run("-n", 1, "--elastic", path)
    assert done.returncode == 0, done.stderr
    assert "ranks can be added to the communicator of a whole job" in done.stdout
    done = jobs.run("-n", 1, script(jobs, "comm.grow()"))
    assert done.returncode == 1
    assert "`pycoll run --elastic`" in done.stderr


def test_ranks_that_waited_in_vain_for_one_call_init_again(jobs):
    """What it says when it gives up; a rank that takes itself for a world of one is worse."""
    path = jobs.folder / "script.py"
    late, gave_up = jobs.folder / "late", jobs.folder / "gave_up"
    gave_up.mkdir()
    path.write_text(
        f"""
import os, time, pycoll
try:
    os.close(os.open({str(late)!r}, os.O_CREAT | os.O_EXCL))
    while len(os.listdir({str(gave_up)!r})) < 2:
        time.sleep(0.01)
except FileExistsError:
    pass
for attempt in range(100):
    try:
        comm = pycoll.init(timeout=1)
        break
    except pycoll.CollTimeout as error:
        assert "pycoll.init: place " in str(error), str(error)
        open(os.path.join({str(gave_up)!r}, str(os.getpid())), "w").close()
comm.barrier(timeout=30)
print(comm.rank, comm.world_size, attempt > 0, flush=True)
comm.close()
try:
    pycoll.init()
except pycoll.TransportError as error:
    assert "has already joined its job, and closed" in str(error)
    print("refused", flush=True)
"""
    )
    done = jobs.run("-n", "2..3", "--elastic", path)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line[:3] for line in lines] == ["0 3", "1 3", "2 3", *["ref"] * 3]
    assert sum("True" in line for line in lines) == 2, lines
