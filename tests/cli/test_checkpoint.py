"""``pycoll checkpoint``: show, verify, reshard."""

import pytest
from safetensors import SafetensorError, numpy

from parallel.models import CrossEntropy, batches, mlp
from pycoll.cli import main
from pycoll.parallel import DataParallel, Mesh, load, save
from pycoll.testing import run_threads


@pytest.fixture
def path(tmp_path):
    def rank(comm):
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1), zero=1) as engine:
            for _ in range(2):
                engine.step([batches(2)[comm.rank]])
                save(tmp_path / "run", engine)

    run_threads(2, rank)
    return tmp_path / "run"


def test_show_the_newest(path, capsys):
    assert main(["checkpoint", "show", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{path}/000002.step-2\n")
    assert "2 steps, saved by dp=2; 5184 B in 2 files" in out
    assert "first_moment   linear0.weight  float32   7 x 19  532 B" in out


def test_verify(path, capsys):
    older = path / "000001.step-1"
    assert main(["checkpoint", "verify", str(older)]) == 0
    assert capsys.readouterr().out == f"{older}: 2 files, 5184 B, all as they were written\n"
    file = path / "000002.step-2" / "rank-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert capsys.readouterr().out.startswith(f"damaged: {file}: ")
    assert main(["checkpoint", "reshard", str(path)]) == 1


def test_reshard(path, tmp_path, capsys):
    assert main(["checkpoint", "reshard", str(path), "-o", str(tmp_path / "one")]) == 0
    made = tmp_path / "one" / "000001.step-2"
    assert capsys.readouterr().out == f"{made}\n"
    assert sorted(p.name for p in made.iterdir()) == ["manifest.json", "part-00000.safetensors"]

    def rank(comm):
        with DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1), zero=3) as engine:
            return load(tmp_path / "one", engine).steps

    assert run_threads(2, rank) == [2, 2]


def test_reshard_beside_a_folder(path, capsys):
    """Not within it, where nobody looks, however its name is written."""
    assert main(["checkpoint", "reshard", f"{path}/"]) == 0
    assert capsys.readouterr().out == f"{path}-resharded/000001.step-2\n"
    assert len(list(path.iterdir())) == 2


def test_nothing_there(tmp_path, capsys):
    assert main(["checkpoint", "show", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (f"pycoll checkpoint: there is no checkpoint in {tmp_path}\n")
    assert main(["checkpoint", "reshard", str(tmp_path), "--files", "0"]) == 2
    missing = tmp_path / "no"
    assert main(["checkpoint", "verify", str(missing)]) == 2
    assert f"there is no checkpoint in {missing}, which does not exist\n" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["show", "verify", "reshard"])
@pytest.mark.parametrize("inside", ["", "/run"])
def test_a_file_in_place_of_a_folder(tmp_path, capsys, action, inside):
    (tmp_path / "file").write_text("")
    assert main(["checkpoint", action, f"{tmp_path}/file{inside}"]) == 2
    assert f"{tmp_path}/file{inside} is no folder of checkpoints" in capsys.readouterr().err


def test_what_cannot_be_written(path, tmp_path, capsys, monkeypatch):
    """In one sentence, and without files that nobody can use."""
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "in"):
        assert main(["checkpoint", "reshard", str(path), "-o", str(output)]) == 2
        told = f"pycoll checkpoint: no checkpoint was written in {output}: "
        assert capsys.readouterr().err.startswith(told)
    monkeypatch.setattr(numpy, "save_file", full)
    assert main(["checkpoint", "reshard", str(path), "-o", str(tmp_path / "full")]) == 2
    assert capsys.readouterr().err.endswith("cannot be written: No space left on device\n")
    assert list((tmp_path / "full").iterdir()) == []


def full(arrays, path):
    raise SafetensorError("No space left on device")


def test_options_of_reshard(path, capsys):
    assert main(["checkpoint", "show", str(path), "--files", "2"]) == 2
    assert "--output and --files are for reshard, not for show" in capsys.readouterr().err
