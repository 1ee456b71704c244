"""A checkpoint of any mesh is one of every mesh, to the bit."""

import subprocess
import sys

import numpy as np
import pytest

from parallel.checkpoint.checkpoints import MESHES, digest, engine_on, train
from pycoll.parallel import SGD, DataParallel, Mesh, ParameterSpec, Sequential, load, save
from pycoll.parallel.checkpoint import reshard
from pycoll.parallel.checkpoint.reader import Reader
from pycoll.parallel.nn import CrossEntropy
from pycoll.testing import run_processes, run_threads


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a folder for each mesh, which all hold the state of one training, and its digest."""
    root = tmp_path_factory.mktemp("checkpoints")

    def start(comm):
        with engine_on(comm) as engine:
            train(engine, 3)
            save(root / "one", engine, extra={"samples": 24})
            return digest(engine)

    (expected,) = run_threads(1, start)

    def again(comm, name):
        with engine_on(comm, name) as engine:
            load(root / "one", engine)
            save(root / name, engine, background=True)

    for name, (ranks, _, _) in MESHES.items():
        if name != "one":
            run_threads(ranks, again, name)
    return root, expected


def test_saves_in_the_background_use_the_memory_of_those_before(tmp_path):
    """Each has what was there when it began, whatever training has done since."""

    def rank(comm):
        with engine_on(comm, "dp4") as engine:
            expected, places = [], []
            for _ in range(3):
                train(engine, 1)
                expected.append(digest(engine))
                save(tmp_path / "run", engine, background=True)
                places.append([part.data.ctypes.data for part in engine.saving.parts])
                train(engine, 1)
            engine.saving.wait()
            assert places[0] == places[1] == places[2]
            assert len(places[0]) > 0
            found = []
            for path in sorted((tmp_path / "run").iterdir()):
                load(path, engine)
                found.append(digest(engine))
        return expected, found

    for expected, found in run_threads(4, rank):
        assert found == expected
        assert len(set(found)) == 3


@pytest.mark.parametrize("target", MESHES)
def test_every_mesh_loads_every_other(saved, target):
    root, expected = saved

    def rank(comm):
        found = {}
        with engine_on(comm, target) as engine:
            for name in MESHES:
                train(engine, 1)
                assert load(root / name, engine).steps == 3
                found[name] = digest(engine)
        return found

    for found in run_threads(MESHES[target][0], rank):
        assert found == dict.fromkeys(MESHES, expected)


@pytest.mark.parametrize("name", MESHES)
def test_ranks_write_in_parallel_and_each_element_once(saved, name):
    root, _ = saved
    (path,) = (root / name).iterdir()
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    data = 3 * 4 * sum(t.size for t in Reader(str(path)).manifest.tensors["parameters"].values())
    assert data < sum(sizes) < data + 9000 * len(sizes)
    ranks, axes, _ = MESHES[name]
    if "tp" not in axes:
        assert len(sizes) == ranks
        assert max(sizes) < 1.3 * sum(sizes) / ranks + 4000


def test_a_training_goes_on_with_the_same_bits(tmp_path):
    def whole(comm):
        with engine_on(comm, "dp4") as engine:
            train(engine, 3)
            save(tmp_path, engine)
            train(engine, 4)
            return digest(engine)

    def rest(comm):
        with engine_on(comm, "one", zero=1) as engine:
            load(tmp_path, engine)
            train(engine, 4)
            return digest(engine)

    assert len({*run_processes(4, whole), *run_processes(1, rest)}) == 1


def test_other_precisions(saved):
    """What is saved is what the optimizer updates, in float32 for 16-bit recipes."""
    root, expected = saved

    def rank(comm):
        found = []
        for precision in ("bf16", "fp16", "fp64"):
            with engine_on(comm, "replica2 dp2", precision=precision) as engine:
                load(root / "dp4", engine)
                save(root / precision, engine)
            with engine_on(comm, "zero3 dp3" if comm.world_size == 3 else "dp4") as engine:
                load(root / precision, engine)
                found.append(digest(engine))
        return found

    assert {text for found in run_threads(4, rank) for text in found} == {expected}


WITHOUT_PYCOLL = """
import json, sys
import numpy as np
from pathlib import Path
from safetensors.numpy import load_file

path = max(p for p in Path(sys.argv[1]).iterdir() if not p.name.startswith("."))
manifest = json.loads((path / "manifest.json").read_text())
files = {}
arrays = {}
for name, tensor in manifest["tensors"]["parameters"].items():
    arrays[name] = np.empty(tensor["shape"], tensor["dtype"])
    for piece in tensor["pieces"]:
        data = files.setdefault(piece["file"], load_file(path / piece["file"]))[piece["key"]]
        box = arrays[name][tuple(slice(a, b) for a, b in piece["box"])]
        box.flat[piece["start"] : piece["stop"]] = data.ravel()
assert "pycoll" not in sys.modules
np.savez(sys.argv[2], **arrays)
"""


@pytest.mark.parametrize("name", ["dp2 tp2", "tp2 pp2", "zero3 dp3"])
def test_without_pycoll(saved, name, tmp_path):
    root, _ = saved
    out = tmp_path / "arrays.npz"
    command = [sys.executable, "-c", WITHOUT_PYCOLL, str(root / name), str(out)]
    subprocess.run(command, check=True, cwd=tmp_path)
    found = np.load(out)
    reader = Reader(str(next((root / "one").iterdir())))
    assert set(found) == set(reader.manifest.tensors["parameters"])
    for key in found:
        np.testing.assert_array_equal(found[key], reader.whole("parameters", key))


@pytest.mark.parametrize("files", [1, 3])
def test_reshard(saved, tmp_path, files):
    root, expected = saved
    path = reshard(root / "tp2 pp2", tmp_path, files)
    reader = Reader(path)
    assert len(reader.manifest.files) == files
    assert all(len(tensor.pieces) == 1 for _, tensor, _ in reader.manifest.pieces())

    def rank(comm):
        with engine_on(comm, "zero3 dp3") as engine:
            load(tmp_path, engine)
            return digest(engine)

    assert set(run_threads(3, rank)) == {expected}


def test_the_first_values_of_16_bit_parameters(tmp_path):
    """Initial values in float64 are rounded as those that are loaded: by way of master copies."""
    close = np.array([1 + 2.0**-11 + 2.0**-40], np.float64)  # float32 takes it for half-way

    class Scale:
        def parameters(self):
            return {"x": ParameterSpec((1,), init=lambda _: close)}

    def rank(comm):
        options = {"precision": "fp16", "optimizer": SGD(0.1)}
        with DataParallel(Sequential([("a", Scale())]), CrossEntropy(), Mesh(comm), **options) as e:
            save(tmp_path, e)
            before = e.buckets[0].parameter.data[0]
            load(tmp_path, e)
            return before == e.buckets[0].parameter.data[0]

    assert run_threads(1, rank) == [True]
