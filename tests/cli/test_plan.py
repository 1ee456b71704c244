"""``pycoll plan``: what it prints and refuses."""

import json

from pycoll import cli

WORDS = "plan --model gpt:layers=4,hidden=64,heads=4 --ranks 4 --memory 8G --batch 16".split()


def test_meshes_side_by_side(capsys, tmp_path):
    path = tmp_path / "x.json"
    assert cli.main([*WORDS, "--top", "3", "--json", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("16 sequences of 1024 on 4 ranks, rails, bf16")
    assert len(out) == 6
    assert out[-1].startswith("the first: DataParallel(model, loss, Mesh(comm, dp=4), zero=0")
    facts = json.loads(path.read_text())
    assert [each["seconds"] for each in facts] == sorted(each["seconds"] for each in facts)
    assert all(each["memory"] < 8 << 30 for each in facts)


def test_what_is_refused(capsys):
    assert cli.main([*WORDS, "--network", "cube"]) == 2
    assert "no network 'cube'" in capsys.readouterr().err
    assert cli.main(["plan", *WORDS[1:6], "1M", *WORDS[7:]]) == 2
    assert "no mesh of 4 ranks" in capsys.readouterr().err


def test_layouts_are_measured_here(jobs):
    words = "plan --model gpt:layers=2,hidden=16,heads=2,sequence=8,vocabulary=32 --ranks 2".split()
    words += "--memory 1G --batch 4 --precision fp32 --top 2 --fix micro_batch=2 --measure".split()
    done = jobs.python("-m", "pycoll", *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    head, speeds, names, *rows = done.stdout.splitlines()
    assert "of each of 2 ranks" in head
    assert all(f"({size})" in speeds for size in (1, 2, 4))  # up to the whole batch
    assert "peak of the ledger" in names
    assert len(rows) == 2
