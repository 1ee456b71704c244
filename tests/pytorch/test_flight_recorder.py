"""PyTorch's analyzer of flight recorders reads the dumps of failures, and names the rank."""

import gc
import os
import re
import signal
import time

import numpy as np
import pytest

import pycoll
from pycoll.cli import main
from pycoll.config import Config
from pycoll.observe.report.failure import read_dumps
from pycoll.testing import run_processes

fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
ODD = 2


def each_kind(comm):
    x = np.ones(12, np.float32)
    for call in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather"):
        getattr(comm, call)(x)
    for call in ("scatter", "all_to_all", "scan", "exscan", "all_gather_v"):
        getattr(comm, call)(x)
    comm.barrier()


def another_call(comm):
    each_kind(comm)
    comm.broadcast(np.ones(4)) if comm.rank == ODD else comm.all_reduce(np.ones(4))


def another_size(comm):
    comm.split(comm.rank % 2).barrier()
    comm.all_reduce(np.ones(5 if comm.rank == ODD else 4))


def dead(comm):
    each_kind(comm)
    if comm.rank == ODD:
        time.sleep(1)  # the others have entered
        os.kill(os.getpid(), signal.SIGKILL)
    comm.all_reduce(np.ones(4))


def raised(comm):
    each_kind(comm)
    if comm.rank == ODD:
        time.sleep(1)
        raise OSError("the disk is full")
    comm.all_reduce(np.ones(4))


def late(comm):
    each_kind(comm)
    if comm.rank == ODD:
        time.sleep(2)
    comm.all_reduce(np.ones(4), timeout=0.5)


MISSING = rf"Not all ranks.*collective: gloo:all_reduce\nmissing ranks: \{{{ODD}\}}"
STORIES = {
    another_call: "COLLECTIVE_TYPE_MISMATCH",
    another_size: "SIZE_OR_SYNTAX_MISMATCH",
    dead: MISSING,
    raised: MISSING,
    late: MISSING,
}


@pytest.mark.parametrize("story", STORIES)
def test_the_analyzer_names_the_rank(tmp_path, caplog, story):
    dumps, folder = tmp_path / "dumps", tmp_path / "torch"
    config = Config(timeout_s=8, heap_bytes=1 << 26, dump_dir=str(dumps))

    def rank(comm):
        try:
            story(comm)
        except pycoll.CollError:
            pass
        except OSError as error:
            comm.__exit__(type(error), error, None)

    run_processes(3, rank, config=config, may_die=(ODD,))
    assert main(["report", str(dumps), "--torch", str(folder)]) == 0
    caplog.set_level("INFO")
    try:
        fr_trace.main([str(folder)])
    finally:
        gc.enable()  # the analyzer disables it
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "at test_flight_recorder.py:" in said, said
    if STORIES[story] == MISSING:
        assert re.search(MISSING, said, re.DOTALL), said
        return
    # It takes the first file that the folder lists to be right.
    first = os.listdir(folder)[0] == f"rank_{ODD}"
    found = set(re.findall(rf"Culprit rank (\d); Error type: {STORIES[story]}", said))
    assert found == ({"0", "1"} if first else {str(ODD)}), said
    assert said.count("error msg") == 1, said


def test_a_folder_with_files_is_refused(tmp_path, capsys):
    (tmp_path / "other").write_text("")
    assert read_dumps(tmp_path) == []
    assert main(["report", str(tmp_path), "--torch", str(tmp_path)]) == 2
    assert "holds none" in capsys.readouterr().err
