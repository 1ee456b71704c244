"""What bytes are known by: both kinds, with the package that one of them needs and without."""

import hashlib
import json
import sys

import numpy as np
import pytest

from parallel.models import CrossEntropy, batches, mlp
from pycoll.errors import ArgumentError
from pycoll.parallel import DataParallel, Mesh, load, save
from pycoll.parallel.checkpoint.hashes import fastest, hash_of, kind_of
from pycoll.parallel.checkpoint.manifest import FIRST_FORMAT, Manifest, _digest
from pycoll.testing import RankFailed, run_threads


def saved(folder):
    """Save an engine; return its parameters."""

    def rank(comm):
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm)) as engine:
            engine.step(batches(1))
            save(folder, engine)
            return engine.gather()

    return run_threads(1, rank)[0]


def loaded(folder):
    def rank(comm):
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm)) as engine:
            load(folder, engine)
            return engine.gather()

    return run_threads(1, rank)[0]


def same(found, wanted):
    return all(np.array_equal(found[name], wanted[name]) for name in wanted | found)


def kinds(folder):
    (path,) = folder.iterdir()
    return {kind_of(piece.hash) for _, _, piece in Manifest.read(path).pieces()}


def test_the_digits_are_those_of_others():
    blake3 = pytest.importorskip("blake3")
    for count in (0, 1, 1025, 70001):
        data = np.arange(count, dtype=np.float32)
        raw = data.tobytes()
        assert hash_of(data, "sha256") == "sha256:" + hashlib.sha256(raw).hexdigest()
        assert hash_of(data, "blake3") == "blake3:" + blake3.blake3(raw).hexdigest()
    columns = np.arange(12.0).reshape(3, 4).T
    assert hash_of(columns, "sha256") == hash_of(columns.copy(), "sha256")


def test_without_the_package_for_blake3(tmp_path, monkeypatch):
    """What is saved is hashed by SHA-256; what others have saved is refused, and says why."""
    pytest.importorskip("blake3")
    saved(tmp_path / "with")
    assert (fastest(), kinds(tmp_path / "with")) == ("blake3", {"blake3"})
    monkeypatch.setitem(sys.modules, "blake3", None)
    parameters = saved(tmp_path / "without")
    assert (fastest(), kinds(tmp_path / "without")) == ("sha256", {"sha256"})
    assert same(loaded(tmp_path / "without"), parameters)
    with pytest.raises(RankFailed, match="pip install blake3"):
        loaded(tmp_path / "with")
    monkeypatch.undo()
    assert same(loaded(tmp_path / "without"), parameters)


def test_an_older_checkpoint_is_not_loaded_for_want_of_a_package(tmp_path, monkeypatch):
    """The newest is not damaged: training would go back without need."""
    pytest.importorskip("blake3")
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "blake3", None)
        saved(tmp_path)
    saved(tmp_path)
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(RankFailed, match=r"000002.step-1 was not loaded: .*pip install blake3"):
        loaded(tmp_path)


def test_a_checkpoint_of_the_first_format(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "blake3", None)
    parameters = saved(tmp_path)
    (path,) = tmp_path.iterdir()
    body = json.loads((path / "manifest.json").read_text()) | {"format": FIRST_FORMAT}
    del body["digest"]
    for tensors in body["tensors"].values():
        for tensor in tensors.values():
            for piece in tensor["pieces"]:
                piece["sha256"] = piece.pop("hash").removeprefix("sha256:")
    (path / "manifest.json").write_text(json.dumps({"digest": _digest(body), **body}))
    assert same(loaded(tmp_path), parameters)
    piece["sha256"] = "0" * 64
    (path / "manifest.json").write_text(json.dumps({"digest": _digest(body), **body}))
    with pytest.raises(RankFailed, match="its hash is another"):
        loaded(tmp_path)


def test_nothing_is_loaded_where_there_is_none(tmp_path):
    """With `if_any` a first start is no failure; a damaged checkpoint still is one."""

    def rank(comm):
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm)) as engine:
            engine.step(batches(1))
            found = load(tmp_path / "none", engine, if_any=True)
            assert (found.path, found.steps, engine.steps) == ("", 0, 1)
            with pytest.raises(ArgumentError, match="there is no checkpoint in"):
                load(tmp_path / "none", engine)
            (tmp_path / "000001.step-1").mkdir(exist_ok=True)
            with pytest.raises(ArgumentError, match="no checkpoint was loaded"):
                load(tmp_path, engine, if_any=True)

    run_threads(2, rank)
