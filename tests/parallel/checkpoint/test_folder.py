"""The folder of checkpoints: who may read it, what is left in it, who saves there at one time."""

import os
import threading

import pytest

from parallel.models import CrossEntropy, batches, mlp
from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel import DataParallel, Mesh, load, save
from pycoll.parallel.checkpoint import folder, writer
from pycoll.parallel.checkpoint.manifest import Damaged, Manifest
from pycoll.parallel.checkpoint.reader import Reader
from pycoll.testing import run_threads


def small(comm, **options):
    return DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1), **options)


@pytest.mark.parametrize("where", ["write_file", "finish"])
def test_what_was_not_saved_is_removed(tmp_path, monkeypatch, where):
    """So that a full disk gets no fuller, by what nobody can read."""

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, where, full)

    def rank(comm):
        with small(comm) as engine:
            for background in (False, True):
                with pytest.raises(ArgumentError, match="No space left on device"):
                    save(tmp_path, engine, background=background).wait()
            with pytest.raises(MismatchError):
                save(tmp_path, engine, extra=comm.rank)

    run_threads(2, rank)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("waits", [(), (0,), (0, 1)])
def test_a_save_that_failed_is_told_once_and_the_next_can_be_made(tmp_path, monkeypatch, waits):
    """On every rank or on none, whoever has waited for it; and before the engine is closed."""
    write = writer.write_file

    def full(*args):
        raise OSError(28, "No space left on device")

    def rank(comm):
        with small(comm) as engine:
            comm.barrier()
            monkeypatch.setattr(writer, "write_file", full)
            saving = save(tmp_path, engine, background=True)
            if comm.rank in waits:
                with pytest.raises(ArgumentError, match="No space left on device"):
                    saving.wait()
            saving._thread.join()
            comm.barrier()
            monkeypatch.setattr(writer, "write_file", write)
            if len(waits) < 2:
                with pytest.raises(ArgumentError, match="No space left on device"):
                    save(tmp_path, engine)
            path = save(tmp_path, engine, background=True).wait()
            assert load(tmp_path, engine).path == path
            comm.barrier()
            monkeypatch.setattr(writer, "write_file", full)
            save(tmp_path, engine, background=True)
            with pytest.raises(ArgumentError, match="No space left on device"):
                engine.close()

    run_threads(2, rank)
    assert os.listdir(tmp_path) == ["000001.step-0"]


@pytest.mark.parametrize("where", ["verify", "part"])
def test_an_older_checkpoint_is_not_loaded_for_want_of_memory(tmp_path, monkeypatch, where):
    """Which one rank may lack, or all, and which says nothing about the newest."""
    real, small_rank = getattr(Reader, where), threading.local()

    def full(*args):
        if getattr(small_rank, "yes", False):
            raise MemoryError
        return real(*args)

    monkeypatch.setattr(Reader, where, full)

    def rank(comm):
        with small(comm, zero=1) as engine:
            save(tmp_path, engine)
            engine.step([batches(2)[comm.rank]])
            save(tmp_path, engine)
            small_rank.yes = comm.rank == 1
            with pytest.raises(ArgumentError, match=r"step-1 was not loaded: rank 1 has MemoryErr"):
                load(tmp_path, engine)
            small_rank.yes = False
            return load(tmp_path, engine).steps

    assert run_threads(2, rank) == [1, 1]


def test_two_engines_save_in_one_folder(tmp_path):
    """Which nobody should do, but a job that is started twice does: each checkpoint is whole."""

    def rank(comm):
        with small(comm, zero=1) as one, small(comm.dup(), zero=1) as two:
            for _ in range(3):
                for engine in (one, two):
                    save(tmp_path, engine, background=True)
            for engine in (one, two):
                engine.saving.wait()

    run_threads(2, rank)
    names = os.listdir(tmp_path)
    assert len(names) == 6
    for name in names:
        Reader(str(tmp_path / name)).verify()


def test_a_folder_in_which_another_save_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE_S", 0.1)

    def rank(comm):
        with (
            small(comm) as engine,
            pytest.raises(ArgumentError, match="another save in"),
        ):
            save(tmp_path, engine)

    with folder.alone(str(tmp_path)):
        run_threads(2, rank)
    assert os.listdir(tmp_path) == []


def test_json_that_is_no_manifest(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(Damaged, match=r"cannot be used: it has no 'digest'$"):
        Manifest.read(str(tmp_path))


def test_files_have_the_permissions_of_others(tmp_path):
    """Who may read the manifest may read the arrays."""
    mask = os.umask(0o027)
    try:
        (path,) = run_threads(1, lambda comm: save(tmp_path, small(comm)).wait())
    finally:
        os.umask(mask)
    assert {os.stat(f"{path}/{name}").st_mode & 0o777 for name in os.listdir(path)} == {0o640}


@pytest.mark.parametrize("call", [save, load])
def test_arguments_of_other_libraries(tmp_path, call):
    def rank(comm):
        with small(comm) as engine:
            for given in ((engine, tmp_path), (tmp_path, engine.state_dict()), (None, engine)):
                with pytest.raises(ArgumentError, match=rf"{call.__name__}\(path, engine\)"):
                    call(*given)

    run_threads(1, rank)


def test_nothing_to_load(tmp_path):
    def rank(comm):
        with small(comm) as engine:
            with pytest.raises(ArgumentError, match=r"no checkpoint in .* if_any=True"):
                load(tmp_path, engine)
            assert not load(tmp_path, engine, if_any=True)
            save(tmp_path, engine)
            assert load(tmp_path, engine, if_any=True)

    run_threads(1, rank)


def saves(path, times, **options):
    def rank(comm):
        with small(comm) as engine:
            return [save(path, engine, **options).wait() for _ in range(times)][-1:]

    return run_threads(2, rank)


def test_a_checkpoint_that_was_moved_and_linked_goes_like_others(tmp_path):
    far, near = tmp_path / "far", tmp_path / "near"
    saves(near, 2)
    far.mkdir()
    (near / "000001.step-0").rename(far / "one")
    (near / "000001.step-0").symlink_to(far / "one")
    saves(near, 2, keep=2)
    assert sorted(os.listdir(near)) == ["000003.step-0", "000004.step-0"]
    Reader(str(far / "one")).verify()  # what it has led to is somebody else's


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_others_left_is_removed_whatever_it_is(tmp_path, kind):
    left = tmp_path / ".partial-000007.step-1"
    {"file": left.touch, "link": lambda: left.symlink_to("nowhere"), "folder": left.mkdir}[kind]()
    saves(tmp_path, 1)
    assert os.listdir(tmp_path) == ["000001.step-0"]


def test_who_still_writes_for_an_older_save_does_not_write_into_the_new_one(tmp_path):
    """A rank on another host may not know yet that its job has been given up."""
    place = str(tmp_path)
    older = folder.partial_path(place, folder.begin(place, 5))
    newer = folder.partial_path(place, folder.begin(place, 5))
    with pytest.raises(FileNotFoundError):
        open(os.path.join(older, "rank-00001-of-00002.safetensors"), "wb")
    assert os.listdir(newer) == []


def test_a_file_with_the_name_of_a_checkpoint_is_none(tmp_path):
    (tmp_path / "000009.step-9").touch()
    saves(tmp_path, 3, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["000009.step-9", "000011.step-0", "000012.step-0"]


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(1, "Operation not permitted")

    saves(tmp_path, 1)
    monkeypatch.setattr(folder.shutil, "rmtree", refuse)
    with pytest.warns(RuntimeWarning, match="000001.step-0 was not deleted: .*not permitted"):
        saves(tmp_path, 1, keep=1)
    monkeypatch.undo()
    saves(tmp_path, 1, keep=1)
    assert os.listdir(tmp_path) == ["000003.step-0"]


def test_what_others_left_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch):
    """It may be another user's, or still be written to by a job that was given up."""
    (tmp_path / ".partial-000007.step-1.0badcafe").mkdir()
    remove = folder._remove

    def refuse(path):
        if "0badcafe" in path:
            raise OSError(13, "Permission denied")
        remove(path)

    monkeypatch.setattr(folder, "_remove", refuse)
    with pytest.warns(RuntimeWarning, match="0badcafe was not deleted: .*Permission denied"):
        saves(tmp_path, 1)
    monkeypatch.undo()
    saves(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == ["000001.step-0", "000002.step-0"]


def test_any_name_of_a_folder(tmp_path):
    place = tmp_path / "two\nlines"

    def rank(comm):
        with small(comm) as engine:
            save(place, engine)
            return bool(load(place, engine))

    assert run_threads(2, rank) == [True, True]
