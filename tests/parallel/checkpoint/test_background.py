"""Saves in the background copy while training goes on; what they write is of one moment."""

import os
import subprocess
import sys
import threading
import time

import pytest

from parallel.checkpoint.checkpoints import MESHES, digest, engine_on, train
from parallel.models import CrossEntropy, batches, mlp
from pycoll.errors import ArgumentError
from pycoll.parallel import DataParallel, Mesh, TopK, load, save
from pycoll.parallel.checkpoint import writer
from pycoll.testing import run_threads

CHANGES = {
    "step": lambda engine, old, state: train(engine, 1),
    "load_state_dict": lambda engine, old, state: engine.load_state_dict(state),
    "load": lambda engine, old, state: load(old, engine),
}


@pytest.fixture
def slow(monkeypatch):
    """Let threads begin to copy late; return a list with the number of parts that each copies."""
    begun, copy = [], writer._copy

    def late(pairs):
        if threading.current_thread().name == "pycoll checkpoint":
            begun.append(len(pairs))
            time.sleep(0.3)
        copy(pairs)

    monkeypatch.setattr(writer, "_copy", late)
    return begun


@pytest.mark.parametrize("mesh", ["dp4", "zero3 dp3", "tp2 pp2"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_saved_is_of_the_time_of_the_call(tmp_path, slow, mesh, change):
    ranks = MESHES[mesh][0]

    def rank(comm):
        with engine_on(comm, mesh) as engine:
            train(engine, 1)
            old, state = save(tmp_path / "old", engine).wait(), engine.state_dict()
            train(engine, 1)
            expected = digest(engine)
            saving = save(tmp_path / "new", engine, background=True)
            CHANGES[change](engine, old, state)
            assert saving.copied.is_set()
            assert digest(engine) != expected
            load(saving.wait(), engine)
            return digest(engine) == expected

    assert run_threads(ranks, rank) == [True] * ranks
    assert len(slow) == ranks
    assert min(slow) > 0


def test_copies_are_made_before_memory_goes(tmp_path, slow):
    def rank(comm):
        engine = DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1))
        engine.step([batches(2)[comm.rank]])
        saving = save(tmp_path, engine, background=True)
        expected = digest(engine)
        engine.close(ValueError("the program has failed"))
        assert saving.copied.is_set()
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1)) as engine:
            load(saving.wait(), engine)
            return digest(engine) == expected

    assert run_threads(2, rank) == [True, True]
    assert len(slow) == 2


@pytest.mark.parametrize("zero", [0, 1])
def test_what_a_hook_has_not_sent_is_copied_at_once(tmp_path, slow, zero):
    def rank(comm):
        with DataParallel(
            mlp(), CrossEntropy(), Mesh(comm, dp=-1), hook=TopK(0.1), zero=zero
        ) as engine:
            data = [[batches(2, seed=s)[comm.rank]] for s in range(5)]
            for batch in data[:3]:
                engine.step(batch)
            saving = save(tmp_path, engine, background=True)
            found = []
            for _ in range(2):
                for batch in data[3:]:
                    engine.step(batch)
                found.append(digest(engine))
                load(saving.wait(), engine)
            return found[0] == found[1]

    assert run_threads(2, rank) == [True, True]
    assert len(slow) == 2


def test_a_rank_without_memory_for_the_copy(tmp_path, monkeypatch):
    """All hear of it, none waits, and the next save can be made."""
    real, ranks = writer._places, threading.local()

    def full(*args):
        if ranks.full:
            raise MemoryError("no room")
        return real(*args)

    monkeypatch.setattr(writer, "_places", full)

    def rank(comm):
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1), zero=1) as engine:
            ranks.full = comm.rank == 1
            with pytest.raises(ArgumentError, match="not saved: rank 1 has MemoryError: no room"):
                save(tmp_path, engine, background=True)
            ranks.full = False
            return load(save(tmp_path, engine, background=True).wait(), engine).steps

    assert run_threads(2, rank) == [0, 0]


def test_a_program_that_goes_to_another_folder(tmp_path, slow, monkeypatch):
    """The path is one of the time of the call, as what is saved is."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def rank(comm):
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1)) as engine:
            saving = save("run", engine, background=True)
            comm.barrier()
            os.chdir(tmp_path / "there")
            return load(saving.wait(), engine).path

    assert run_threads(2, rank) == [str(tmp_path / "here" / "run" / "000001.step-0")] * 2
    assert os.listdir(tmp_path / "there") == []


PROGRAM = """
import sys
import pycoll
from parallel.models import CrossEntropy, batches, mlp
from pycoll.parallel import DataParallel, Mesh, save

engine = DataParallel(mlp(), CrossEntropy(), Mesh(pycoll.init(), dp=-1))
engine.step(batches(1))
save(sys.argv[1], engine, background=True)
"""


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "raise ValueError"])
def test_a_program_that_ends_has_saved(tmp_path, end):
    """The thread goes on while the interpreter ends, when no other can be started."""
    done = run_program(PROGRAM + end, tmp_path / "run")
    assert done.stderr == "" or end.startswith("raise")
    (name,) = (path.name for path in (tmp_path / "run").iterdir())
    assert name == "000001.step-1"


def test_a_program_that_ends_tells_what_was_not_saved(tmp_path):
    (tmp_path / "file").write_text("")
    told = "a save in the background failed: the checkpoint was not saved: rank 0 has "
    assert told in run_program(PROGRAM, tmp_path / "file").stderr
    caught = "try: engine.close()\nexcept pycoll.ArgumentError: pass"
    assert run_program(PROGRAM + caught, tmp_path / "file").stderr == ""


def run_program(text, path):
    """Run a program of one rank in a process of its own."""
    command, paths = [sys.executable, "-c", text, str(path)], os.pathsep.join(sys.path)
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60
    )
