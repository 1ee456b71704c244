"""Saves in the background copy while training goes on; what they write is of one moment."""

import threading
import time

import pytest

from parallel.checkpoint.checkpoints import MESHES, digest, engine_on, train
from parallel.models import CrossEntropy, batches, mlp
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
