"""Saves that die, files that were changed, checkpoints that do not fit: never half a state."""

import json
import os
import re
import signal
import threading

import numpy as np
import pytest

import pycoll
from parallel.checkpoint.checkpoints import digest, engine_on, train
from parallel.models import CrossEntropy, batches, mlp
from pycoll.errors import ArgumentError, MismatchError, PeerLost
from pycoll.parallel import SGD, AdamW, DataParallel, Mesh, TopK, load, save
from pycoll.parallel.checkpoint import folder, writer
from pycoll.parallel.checkpoint.manifest import Damaged, Manifest
from pycoll.parallel.checkpoint.reader import Reader
from pycoll.testing import run_processes, run_threads
from syscalls import killed_at


def small(comm, **options):
    return DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1), **options)


def test_a_save_killed_at_every_system_call_leaves_the_one_before(tmp_path):
    """Also when it deletes older ones. The first save that lives clears up."""

    def dying(begin):
        with pycoll.init() as comm, small(comm) as engine:
            begin()
            save(tmp_path, engine, keep=2)

    with pycoll.init() as comm, small(comm) as engine:
        engine.step(batches(1))
        save(tmp_path, engine)
    calls = 0
    while killed_at(calls, dying):
        whole = folder.checkpoints(tmp_path)
        assert whole
        for name in whole:
            Reader(str(tmp_path / name)).verify()
        calls += 1
    assert len(os.listdir(tmp_path)) == 2
    assert calls > 50


@pytest.mark.parametrize(
    ("victim", "where"),
    [(0, "begin"), (0, "write_file"), (1, "write_file"), (0, "finish"), (0, "commit")],
)
def test_a_rank_dies_while_all_save(tmp_path, victim, where):
    def rank(comm):
        engine = small(comm, zero=1)
        engine.step([batches(2)[comm.rank]])
        save(tmp_path, engine)
        if comm.rank == victim:
            setattr(writer, where, lambda *args: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(PeerLost):
            save(tmp_path, engine)

    assert run_processes(2, rank, may_die=[victim])[victim] == -signal.SIGKILL
    (name,) = folder.checkpoints(tmp_path)
    (loaded,) = run_threads(1, lambda comm: load(tmp_path, small(comm)).path)
    assert loaded == str(tmp_path / name)


def changed(path, change):
    """Change one byte of a file, or cut it off."""
    data = bytearray(path.read_bytes())
    if change == "cut":
        data = data[: len(data) // 2]
    elif change == "flip":
        data[-5] ^= 1
    elif change == "head":
        data[40] ^= 1
    path.write_bytes(data)
    if change == "gone":
        path.unlink()


@pytest.mark.parametrize("file", ["rank-00001-of-00002.safetensors", "manifest.json"])
@pytest.mark.parametrize("change", ["cut", "flip", "head", "gone"])
def test_damage_is_seen_and_the_one_before_is_loaded(tmp_path, file, change):
    def write(comm):
        with small(comm, zero=1) as engine:
            for _ in range(2):
                engine.step([batches(2)[comm.rank]])
                save(tmp_path, engine)

    def read(comm):
        with small(comm) as engine:
            engine.step(batches(1))
            with pytest.raises(ArgumentError, match=r"(has|have) .*" + re.escape(file)):
                load(tmp_path / "000002.step-2", engine)
            assert engine.steps == 1
            with pytest.warns(RuntimeWarning, match="tried next"):
                return load(tmp_path, engine).steps

    run_threads(2, write)
    changed(tmp_path / "000002.step-2" / file, change)
    if (file, change) == ("manifest.json", "gone"):
        return  # then it has no name that anybody looks for
    assert run_processes(2, read) == [1, 1]


def test_nothing_whole(tmp_path):
    def rank(comm, path):
        with small(comm) as engine, pytest.raises(ArgumentError, match="there is no checkpoint in"):
            load(path, engine)

    run_threads(2, rank, tmp_path)
    run_threads(2, rank, tmp_path / "other")


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"optimizer": SGD(0.1, momentum=0.9)}, "no momentum of parameter"),
        ({"model": (7, 20, 11, 5)}, r"linear1.weight of shape \(20, 11\), saved is \(19, 11\)"),
        ({"model": (7, 19, 11)}, "no parameters linear2.bias, linear2.weight, which were saved"),
        ({"model": (7, 19, 11, 5, 5)}, "no parameters of parameter linear3"),
    ],
)
def test_another_model_or_optimizer(tmp_path, other, told):
    def rank(comm):
        with small(comm) as engine:
            engine.step([batches(2)[comm.rank]])
            save(tmp_path, engine)
        options = {"optimizer": other.get("optimizer", AdamW())}
        model = mlp(other.get("model", (7, 19, 11, 5)))
        with DataParallel(model, CrossEntropy(), Mesh(comm, dp=-1), **options) as engine:
            before = engine.gather()
            with pytest.raises(ArgumentError, match=told):
                load(tmp_path, engine)
            after = engine.gather()
            assert all((before[name] == after[name]).all() for name in before)

    run_threads(2, rank)


def test_ranks_that_differ_in_what_they_load(tmp_path):
    """One would go on with the states that it had, of which each has a shard."""

    def rank(comm):
        with small(comm, zero=1) as engine:
            engine.step([batches(2)[comm.rank]])
            save(tmp_path, engine)
            engine.step([batches(2)[comm.rank]])
            before = digest(engine)
            with pytest.raises(MismatchError, match="rank 0: states=False; rank 1: states=True"):
                load(tmp_path, engine, states=comm.rank == 1)
            assert digest(engine) == before

    run_threads(2, rank)


def test_parameters_only(tmp_path):
    def rank(comm):
        with small(comm) as engine:
            engine.step([batches(2)[comm.rank]])
            save(tmp_path, engine)
            expected = engine.gather()
        with small(comm, optimizer=SGD(0.1, momentum=0.9), zero=1) as engine:
            engine.step([batches(2)[comm.rank]])
            load(tmp_path, engine, states=False)
            found = engine.state_dict()
            assert found["steps"] == 0
            assert not any(array.any() for array in found["momentum"].values())
            assert all((found["parameters"][n] == expected[n]).all() for n in expected)

    run_threads(2, rank)


def test_extras_that_cannot_be_saved_or_differ(tmp_path):
    def rank(comm):
        with small(comm) as engine:
            with pytest.raises(ArgumentError, match="rank 1 has TypeError"):
                save(tmp_path, engine, extra={1} if comm.rank else 1)
            with pytest.raises(MismatchError, match="steps or extras to save"):
                save(tmp_path, engine, extra=comm.rank)
            save(tmp_path, engine, extra={2: "b", 10: [None, 0.5]})
            return load(tmp_path, engine).extra

    assert run_threads(2, rank) == [{"2": "b", "10": [None, 0.5]}] * 2


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")

    def rank(comm):
        with small(comm) as engine:
            with pytest.raises(ArgumentError, match="rank 0 has FileExistsError"):
                save(tmp_path / "file", engine)
            saving = save(tmp_path / "file", engine, background=True)
            with pytest.raises(ArgumentError, match="rank 0 has FileExistsError"):
                saving.wait()

    run_threads(2, rank)


@pytest.mark.parametrize("where", ["verify", "part"])
def test_another_job_replaces_a_checkpoint_that_is_being_loaded(tmp_path, monkeypatch, where):
    """The new one is loaded in its place."""
    real, replaced = getattr(Reader, where), []

    def rank(comm):
        with small(comm) as engine, small(comm) as other:
            save(tmp_path, engine, keep=1)
            other.step(batches(1))

            def late(reader, *args):
                if not replaced:
                    replaced.append(save(tmp_path, other, keep=1).wait())
                    reader.close()
                return real(reader, *args)

            monkeypatch.setattr(Reader, where, late)
            with pytest.warns(RuntimeWarning, match="step-1 is tried next"):
                found = load(tmp_path, engine)
            return [found.path] == replaced and digest(engine) == digest(other)

    assert run_threads(1, rank) == [True]


def test_a_list_of_a_folder_without_the_old_and_the_new_checkpoint(tmp_path, monkeypatch):
    lists, listdir = [[".partial-000002.step-1"]], os.listdir

    def rank(comm):
        with small(comm) as engine:
            save(tmp_path, engine)
            monkeypatch.setattr(os, "listdir", lambda path: lists.pop() if lists else listdir(path))
            return bool(load(tmp_path, engine, if_any=True))

    assert run_threads(1, rank) == [True]
    assert not lists


def test_a_folder_whose_name_is_no_text(tmp_path):
    """Linux takes any bytes: what is wrong with it is told on every rank."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")

    def rank(comm):
        with small(comm) as engine:
            with pytest.raises(ArgumentError, match=r"no checkpoint in .*caf\\udce9"):
                load(path, engine)
            saved = save(path, engine).wait()
            return load(path, engine).path == saved

    assert run_threads(2, rank) == [True, True]


def test_training_goes_on_during_a_save_in_the_background(tmp_path, monkeypatch):
    """The save ends only when steps were taken; what it has is of its own time."""
    go, write_file = threading.Event(), writer.write_file

    def late(*args):
        assert go.wait(20)
        return write_file(*args)

    monkeypatch.setattr(writer, "write_file", late)

    def rank(comm):
        with engine_on(comm, "dp4") as engine:
            train(engine, 2)
            expected = digest(engine)
            saving = save(tmp_path, engine, background=True)
            train(engine, 3)
            assert not saving.done
            comm.barrier()
            go.set()
            saving.wait()
            load(tmp_path, engine)
            return digest(engine) == expected

    assert run_threads(4, rank) == [True] * 4


def test_the_newest_are_kept(tmp_path):
    def rank(comm):
        with small(comm) as engine:
            for _ in range(5):
                engine.step([batches(2)[comm.rank]])
                saving = save(tmp_path, engine, keep=2, background=True)
            path = saving.wait()
            assert load(tmp_path, engine).path == path
            load(tmp_path / "000004.step-4", engine)
            save(tmp_path, engine, keep=2)  # of an earlier step, and yet the newest

    run_threads(2, rank)
    assert sorted(os.listdir(tmp_path)) == ["000005.step-5", "000006.step-4"]


@pytest.mark.parametrize("zero", [0, 1])
def test_what_a_hook_has_not_sent_comes_back_on_the_same_mesh(tmp_path, zero):
    def rank(comm, again):
        with small(comm, hook=TopK(0.1), zero=zero) as engine:
            data = [batches(2, seed=s)[comm.rank] for s in range(6)]
            if again:
                load(tmp_path, engine)
            for step in range(engine.steps, 6):
                if step == 3 and not again:
                    save(tmp_path, engine)
                engine.step([data[step]])
            return [engine.gather()[name].tobytes() for name in sorted(engine.gather())]

    def elsewhere(comm):
        with small(comm, hook=TopK(0.1), zero=zero) as engine:
            load(tmp_path, engine)
            return engine.hook.state()

    assert run_threads(2, rank, False) == run_threads(2, rank, True)
    assert run_threads(1, elsewhere) == [{}]


BODY = Manifest(
    3,
    tensors={
        "parameters": {
            "a": {
                "dtype": "float32",
                "shape": [4, 2],
                "pieces": [
                    {"file": "f", "key": "a", "box": [[0, 4], [0, 1]], "start": 0, "stop": 4},
                    {"file": "f", "key": "b", "box": [[0, 4], [1, 2]], "start": 0, "stop": 1},
                    {"file": "g", "key": "b", "box": [[0, 4], [1, 2]], "start": 1, "stop": 4},
                ],
            }
        }
    },
)


@pytest.mark.parametrize(
    ("piece", "change", "told"),
    [
        (0, {}, None),
        (0, {"file": "../f"}, "no name of a file"),
        (0, {"file": ".f"}, "no name of a file"),
        (0, {"stop": 3}, "not the whole"),
        (0, {"stop": 5}, "not inside"),
        (0, {"box": [[0, 4], [0, 3]]}, "not inside"),
        (0, {"box": [[0, 4]]}, "cannot be used"),
        (0, {"box": [[0, 4], [1, 2]]}, "not the whole"),
        (1, {"stop": 2}, "not the whole"),
        (2, {"start": 2}, "not the whole"),
        (2, {"start": "1"}, "cannot be used"),
        (2, {"start": 1.0}, "cannot be used"),
        (2, {"box": [[0, 4], [1, float("inf")]]}, "cannot be used"),
        (2, {"other": 1}, "cannot be used"),
        (2, {"key": 1}, "is no text"),
        (2, {"hash": 1}, "is no text"),
        (2, {"hash": "crc:1"}, "begins with 'crc'; known: blake3, sha256"),
    ],
)
def test_a_manifest_is_checked(tmp_path, piece, change, told):
    body = json.loads(json.dumps(BODY.tensors))
    for found in body["parameters"]["a"]["pieces"]:
        found["hash"] = "sha256:"
    body["parameters"]["a"]["pieces"][piece] |= change
    (tmp_path / "manifest.json").write_text(Manifest(3, tensors=body).to_json())
    if told is None:
        assert Manifest.read(tmp_path).files == ["f", "g"]
        return
    with pytest.raises(Damaged, match=told):
        Manifest.read(tmp_path)


@pytest.mark.parametrize(
    "change", [{"dtype": "float31"}, {"dtype": None}, {"dtype": ["f4"]}, {"shape": [4.0, 2]}]
)
def test_types_and_shapes_of_a_manifest_are_checked(tmp_path, change):
    body = json.loads(json.dumps(BODY.tensors))
    for piece in body["parameters"]["a"]["pieces"]:
        piece["hash"] = "sha256:"
    body["parameters"]["a"] |= change
    (tmp_path / "manifest.json").write_text(Manifest(3, tensors=body).to_json())
    with pytest.raises(Damaged, match="cannot be used"):
        Manifest.read(tmp_path)


def test_any_other_text_is_no_manifest(tmp_path):
    rng = np.random.default_rng(0)
    text = Manifest(3).to_json().encode()
    for i in range(300):
        data = bytearray(text)
        data[rng.integers(len(data))] = rng.integers(256) if i % 2 else 32
        if bytes(data) != text:
            (tmp_path / "manifest.json").write_bytes(data)
            try:
                assert Manifest.read(tmp_path) == Manifest(3)  # a space more or less
            except Damaged:
                pass
