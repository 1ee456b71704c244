"""Training that loses ranks and gets them back: the same bits as without."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pycoll.errors import ArgumentError
from pycoll.parallel import SGD, AdamW, DataParallel, Elastic, Mesh, Sequential
from pycoll.parallel.checkpoint import writer
from pycoll.parallel.elastic.copies import Copies
from pycoll.parallel.elastic.share import Share
from pycoll.parallel.elastic.transfer import bring, choose
from pycoll.parallel.nn import CrossEntropy, Linear, Tanh
from pycoll.parallel.random import Key, integers, normal
from pycoll.testing import run_processes
from samples import sample

ROOT = Path(__file__).resolve().parents[3]
KEY, FEATURES, CLASSES = Key(3), 5, 7
SIZES = {"steps": 6, "batch": 12, "micro_batches": 4}


def build(comm, zero=0, **options):
    model = Sequential(
        [
            ("one", Linear(FEATURES, 9, key=KEY.fold("one"))),
            ("tanh", Tanh()),
            ("two", Linear(9, CLASSES, key=KEY.fold("two"))),
        ]
    )
    options = {"optimizer": AdamW(lr=0.01), "bucket_bytes": 200, **options}
    return DataParallel(model, CrossEntropy(), Mesh(comm, dp=-1), zero=zero, **options)


def replicated(comm):
    mesh = Mesh(comm, replica=1, dp=-1)
    model = Sequential([("one", Linear(FEATURES, CLASSES, key=KEY))])
    return DataParallel(model, CrossEntropy(), mesh, sync_every=2)


def data(step, samples):
    shape, part = (samples.stop, FEATURES), (slice(samples.start, samples.stop),)
    y = integers(KEY.fold("y"), CLASSES, (samples.stop,))[samples.start :]
    return normal(KEY.fold("x"), shape, part).astype(np.float32), y


def test_every_sample_of_a_step_belongs_to_one_rank():
    for n in range(1, 7):
        shares = [Share(lambda *given: given, 3, (10, 4), (rank, n)) for rank in range(n)]
        ranges = [micro[1] for share in shares for micro in share]
        assert [number for part in ranges for number in part] == list(range(30, 40))
        assert [len(part) for part in ranges] == [2, 3, 2, 3]


def uninterrupted(zero):
    def rank(comm):
        run = Elastic(comm, lambda c: build(c, zero), data, **SIZES)
        losses = [report.loss for report in run]
        return losses, run.engine.gather()

    return run_processes(4, rank)[0]


@pytest.mark.parametrize(("zero", "victim"), [(0, 0), (1, 2), (3, 0)])
def test_survivors_that_shrink_go_on_with_every_state(zero, victim):
    """Without a launcher: 3 of 4 ranks go on, and lose neither a shard nor a step."""

    def rank(comm):
        own, losses = comm.rank, {}

        def dying(step, samples):
            if step == 3 and own == victim and samples.start % 12 != 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return data(step, samples)

        feed = dying if victim else lambda s, r: (s == 3 and own == 0 and os._exit(9)) or data(s, r)
        run = Elastic(comm, lambda c: build(c, zero), feed, **SIZES)
        for report in run:
            losses[run.step] = report.loss
        (change,) = run.changes
        return losses, run.engine.gather(), (change.left, change.came, change.ranks, change.step)

    results = run_processes(4, rank, may_die=[victim])
    losses, parameters = uninterrupted(zero)
    for place, result in enumerate(results):
        if place == victim:
            continue
        assert result[2] == ((victim,), (), 3, 3)
        np.testing.assert_allclose([result[0][s + 1] for s in range(6)], losses, rtol=1e-5)
        for name, value in parameters.items():
            np.testing.assert_allclose(result[1][name], value, rtol=2e-4, atol=1e-6)
            np.testing.assert_array_equal(result[1][name], results[(victim + 1) % 4][1][name])


def test_a_rank_that_fails_in_a_step_leaves():
    """Survivors go on without it, as after a death."""

    def rank(comm):
        own = comm.rank

        def failing(step, samples):
            if own == 1 and step == 2:
                raise MemoryError
            return data(step, samples)

        run = Elastic(comm, build, failing, **SIZES)
        try:
            ranks = [run.comm.world_size for _ in run]
        except MemoryError as error:
            comm.__exit__(MemoryError, error, None)
            return [own]
        return ranks

    assert run_processes(3, rank) == [[3, 3, 2, 2, 2, 2], [1], [3, 3, 2, 2, 2, 2]]


def test_what_comes_after_the_last_step_survives_a_death():
    """Two deaths while parameters are gathered: the rank that is left has all of them."""

    def rank(comm):
        run, own, calls = Elastic(comm, lambda c: build(c, 1), data, **SIZES), comm.rank, []
        for _ in run:
            pass

        def work():
            calls.append(run.comm.world_size)
            if own == len(calls):
                os.kill(os.getpid(), signal.SIGKILL)
            return run.engine.gather()

        found = run.finish(work)
        run.close()
        return calls, found

    results = run_processes(3, rank, may_die=[1, 2])
    assert results[0][0] == [3, 2, 1]
    for name, value in uninterrupted(1)[1].items():
        np.testing.assert_allclose(results[0][1][name], value, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("zero", "precision"), [(0, "fp32"), (1, "fp16"), (2, "fp32"), (3, "fp16")]
)
def test_states_move_to_another_number_of_ranks(zero, precision):
    """Four ranks' states, one of them lost, on the three others: all bits are there."""

    def rank(comm):
        engine, copies = build(comm, zero, precision=precision), Copies(1)
        for step in range(3):
            engine.step(Share(data, step, (12, 4), (comm.rank, 4)))
            copies.take(engine, 0, step + 1)
        before = engine.state_dict()
        part = comm.split(None if comm.rank == 1 else 0)
        if part is None:
            return True
        fresh = build(part, zero, precision=precision)
        chosen, _ = choose(fresh, copies.versions)
        assert (chosen.step, chosen.left, chosen.came) == (3, {1}, set())
        bring(fresh, chosen, copies.versions)
        after = fresh.state_dict()
        assert (before["steps"], before["loss_scale"]) == (after["steps"], after["loss_scale"])
        for kind in engine.buckets[0].states:
            for name, value in before[kind].items():
                np.testing.assert_array_equal(after[kind][name], value)
        return True

    assert run_processes(4, rank) == [True] * 4


def test_two_neighbours_and_no_redundancy_lose_a_shard():
    def rank(comm):
        found = []
        for redundancy, gone in ((1, (1,)), (1, (1, 3)), (1, (1, 2)), (0, (1,))):
            engine, copies = build(comm, 1), Copies(redundancy)
            copies.take(engine, 0, 0)
            part = comm.split(None if comm.rank in gone else 0)
            if part is not None:
                chosen, newest = choose(build(part, 1), copies.versions)
                found.append((chosen.whole, newest))
        return found

    assert run_processes(4, rank)[0] == [(True, 0), (True, 0), (False, 0), (False, 0)]


def test_the_newest_version_that_ranks_have_together_counts():
    """A rank that was not able to finish its copy of a step takes the others with it, or not."""

    def rank(comm):
        engine, copies = build(comm, 1, optimizer=SGD(lr=0.1)), Copies(1)
        for step in range(3):
            copies.take(engine, 0, step)
        lost = {2: {2}, 3: {2, 3}}  # ranks without the newest version
        steps = []
        for ranks in lost.values():
            kept = copies.versions[:1] if comm.rank in ranks else copies.versions
            steps.append(choose(engine, kept)[0].step)
        return steps

    assert run_processes(4, rank)[0] == [2, 1]


@pytest.mark.parametrize("zero", sample([0, 2], [2]))
def test_ranks_that_come_back_lead_to_the_same_bits(zero, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import hashlib, os, signal, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests/support")!r}]
import pycoll
from tests.parallel.elastic.test_run import SIZES, Elastic, build, data

comm = pycoll.init(timeout=100)
first, rank = comm.epoch == 0, comm.rank
run = Elastic(comm, lambda c: build(c, {zero}), data, **SIZES)

def may_die(where):
    if first and f"{{rank}}:{{where}}" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)

def parameters():
    may_die("end")
    return run.engine.gather()

for report in run:
    may_die(str(run.step))
whole = b"".join(value.tobytes() for _, value in sorted(run.finish(parameters).items()))
for change in run.changes:
    print(change.left, change.came, change.ranks)
print("digest", hashlib.sha256(whole).hexdigest())
run.close()
"""
    )
    digests = []
    for words in ([], ["1:3", "0:end"]):
        done = subprocess.run(
            [sys.executable, "-m", "pycoll", "run", "-n", "2", "--elastic", str(script), *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        digests += [line for line in lines if line.startswith("digest")]
        if words:
            assert {"(1,) (1,) 2", "(0,) (0,) 2"} <= set(lines)
    assert len(digests) == 4
    assert len(set(digests)) == 1


def test_two_neighbours_that_die_at_once_cost_the_steps_since_the_checkpoint(tmp_path):
    """Both copies of a shard are gone, so the two that are left load what was saved."""
    saves = {"checkpoint": tmp_path / "saved", "save_every": 2}

    def rank(comm):
        own, losses = comm.rank, {}

        def dying(step, samples):
            if step == 5 and own in (1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            return data(step, samples)

        run = Elastic(comm, lambda c: build(c, 1), dying, **SIZES, **saves)
        for report in run:
            losses[run.step] = report.loss
        (change,) = run.changes
        assert str(change).count("loaded from a checkpoint") == change.loaded
        parameters = run.engine.gather()
        run.close()
        return losses, parameters, change

    results = run_processes(4, rank, may_die=[1, 2])
    losses, parameters = uninterrupted(1)
    for seen, found, change in (results[0], results[3]):
        assert (change.left, change.ranks, change.loaded) == ((1, 2), 2, True)
        assert change.step in (2, 4)  # whether the last save had ended
        assert change.repeated == 5 - change.step
        np.testing.assert_allclose([seen[s + 1] for s in range(6)], losses, rtol=1e-5)
        for name, value in parameters.items():
            np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=1e-6)


def test_a_save_that_fails_is_heard_of_at_the_end_and_when_ranks_change(tmp_path):
    """Each rank's file of the last checkpoint has no room."""
    saves = {"checkpoint": tmp_path / "saved", "save_every": 4}

    def rank(comm):
        own = comm.rank

        def dying(step, samples):
            if step == 5:
                while not run.engine.saving.done:
                    time.sleep(0.01)
            if step == 6 and own == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return data(step, samples)

        def write(*args):
            raise OSError(28, "No space left on device")

        writer.write_file = write
        run = Elastic(comm, lambda c: build(c, 1), dying, **{**SIZES, "steps": 8}, **saves)
        with pytest.warns(RuntimeWarning, match="a save in the background failed: .*No space"):
            for _ in run:
                pass
        with pytest.raises(ArgumentError, match="No space left on device"):
            run.close()
        run.close()
        return run.step

    assert run_processes(3, rank, may_die=[2])[:2] == [8, 8]


def test_a_job_that_starts_again_goes_on_from_its_newest_checkpoint(tmp_path):
    """Two jobs have the bits of one; no sample is taken twice."""

    def rank(comm, steps):
        taken = []

        def noting(step, samples):
            taken.append(step)
            return data(step, samples)

        saves = {"checkpoint": tmp_path / "saved", "save_every": 2, "keep": 1}
        with_saves = {**SIZES, "steps": steps, **saves}
        run = Elastic(comm, lambda c: build(c, 2), noting, **with_saves)
        for _ in run:
            pass
        parameters = run.engine.gather()
        run.close()
        return sorted(set(taken)), parameters

    assert run_processes(4, rank, 4)[0][0] == [0, 1, 2, 3]
    steps, parameters = run_processes(4, rank, 6)[0]
    assert steps == [4, 5]
    assert len(list((tmp_path / "saved").iterdir())) == 1
    for name, value in uninterrupted(2)[1].items():
        np.testing.assert_array_equal(parameters[name], value)


def test_what_cannot_be_is_refused(tmp_path):
    def rank(comm):
        folder = {"checkpoint": tmp_path}
        for wrong in (
            *({"batch": 3}, {"micro_batches": 0}, {"redundancy": 2}, {"save_every": 2}),
            *({"save_every": 0, **folder}, {"load": lambda engine: 0, **folder}),
        ):
            with pytest.raises(ArgumentError):
                Elastic(comm, build, data, **{**SIZES, **wrong})
        for name, given in (("lr", 0.1), ("data", None), ("build", 3), ("load", "run/")):
            arguments = {"build": build, "data": data, **SIZES, name: given}
            with pytest.raises(ArgumentError, match=f"{name}={given!r}; expected a function"):
                Elastic(comm, **arguments)
        with pytest.raises(ArgumentError, match="keep=0"):
            Elastic(comm, build, data, **SIZES, keep=0)
        with pytest.raises(ArgumentError, match="a NoneType as micro-batch 0"):
            next(iter(Elastic(comm.dup(), build, lambda step, samples: None, **SIZES)))
        with pytest.raises(ArgumentError, match="expected DataParallel"):
            next(iter(Elastic(comm, lambda c: None, data, **SIZES)))
        with pytest.raises(ArgumentError, match="each replica has a state of its own"):
            next(iter(Elastic(comm.dup(), replicated, data, **SIZES)))

    run_processes(2, rank)
