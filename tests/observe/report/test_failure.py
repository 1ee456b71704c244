"""Failures whose dumps say, in the first line, which rank it was, and where."""

import os
import re
import signal
import time

import numpy as np
import pytest

import pycoll
from pycoll.config import Config
from pycoll.errors import ArgumentError, MismatchError
from pycoll.observe.report import torch_flight
from pycoll.observe.report.failure import explain, read_dumps
from pycoll.testing import run_processes


def branch(comm):
    for i in range(8):
        if comm.rank == 2 and i == 5:
            comm.broadcast(np.ones(4))
        else:
            comm.all_reduce(np.ones(4))


def raising(comm):
    comm.barrier()
    if comm.rank == 1:
        raise OSError("the disk is full")
    comm.barrier()


def dying(comm):
    comm.barrier()
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def stuck(comm):
    comm.barrier()
    if comm.rank == 2:
        time.sleep(3)
    comm.barrier(timeout=0.5)


STORIES = {
    branch: r"rank 2 left the common path at call 6: broadcast at test_failure.py:\d+ branch\(\), "
    r"where the others called all_reduce at test_failure.py:\d+ branch\(\)",
    raising: r"rank 1 left \(OSError: the disk is full\); its last call was call \d+, barrier at",
    dying: r"rank 0 died; its last call was call \d+, barrier at test_failure.py:\d+ dying\(\)",
    stuck: r"rank 2 did not do its part in time; its last call was call \d+, barrier at",
}


@pytest.mark.parametrize("story", STORIES)
def test_the_first_line_names_rank_and_place(tmp_path, story):
    config = Config(timeout_s=8, heap_bytes=1 << 26, dump_dir=str(tmp_path))

    def rank(comm):
        try:
            story(comm)
        except pycoll.CollError:
            return "heard"
        except OSError as error:
            comm.__exit__(type(error), error, None)

    outcomes = run_processes(3, rank, config=config, may_die=(0,))
    assert outcomes.count("heard") >= 2
    dumps = read_dumps(tmp_path)
    assert len(dumps) >= 2
    told = explain(dumps)
    assert re.match(STORIES[story], told[0]), told[0]
    dump = dumps[0]
    assert dump["pid"]
    assert dump["versions"]["pycoll"] == pycoll.__version__
    assert any(f["name"] == story.__name__ for s in dump["stacks"] for f in s["frames"])
    entry = torch_flight.ranks(dumps)[1]["entries"][0]
    assert entry["profiling_name"].startswith("gloo:")
    assert entry["frames"][0]["filename"] == "test_failure.py"


def test_other_files_are_refused(tmp_path):
    assert read_dumps(tmp_path) == []
    (tmp_path / "rank0.json").write_text("[]")
    with pytest.raises(ArgumentError, match="is no dump of pycoll"):
        read_dumps(tmp_path)


def test_a_dump_that_cannot_be_written_is_a_warning(tmp_path):
    """And leaves no part of a file; the error stays what it was."""
    (tmp_path / "file").write_text("")
    config = Config(timeout_s=8, heap_bytes=1 << 26, dump_dir=str(tmp_path / "file/dumps"))

    def rank(comm):
        with (
            pytest.raises(MismatchError),
            pytest.warns(RuntimeWarning, match="file/dumps: .*Not a"),
        ):
            comm.all_reduce(np.ones(1 + comm.rank))

    run_processes(2, rank, config=config)
