"""``pycoll simulate``: what it prints, draws, and refuses."""

import json
import re

import pytest

from pycoll import cli


def run(capsys, words):
    assert cli.main(["simulate", *words.split()]) == 0
    return capsys.readouterr().out


def test_all_algorithms_side_by_side(capsys):
    out = run(capsys, "all_reduce -n 64 --bytes 4M --network fat-tree:leaf=8,over=4")
    lines = out.splitlines()
    assert lines[0] == "all_reduce of 4 MiB on 64 ranks, fat-tree:leaf=8,over=4"
    names = [line.split()[0] for line in lines[2:]]
    assert {"ring", "halving_doubling", "hierarchical(local=8)", "circulant"} <= set(names)
    assert not any(name.endswith("_rank") for name in names)
    ratios = [float(re.split(r"\s{2,}", line)[2]) for line in lines[2:]]
    assert ratios == sorted(ratios)
    assert ratios[0] == 1


def test_one_algorithm_at_65536_ranks(capsys, tmp_path):
    path = tmp_path / "x.json"
    words = f"all_reduce --algorithm halving_doubling -n 65536 --bytes 1G --json {path}"
    out = run(capsys, f"{words} --network dragonfly:group=256,over=2")
    assert "global" in out.split("\n\n")[1]
    (facts,) = json.loads(path.read_text())
    assert facts["rounds"] == 32
    assert facts["seconds"] > 2 * (1 << 30) / 25e9
    assert facts["busiest_link"].startswith(("out", "in", "global"))


def test_late_and_dead_ranks(capsys, tmp_path):
    path = tmp_path / "start.json"
    path.write_text(json.dumps([0.0] * 7 + [0.25]))
    out = run(capsys, f"broadcast --algorithm binomial -n 8 --late 1=10ms --start {path} --dead 4")
    assert "the last rank enters at 250 ms; dead ranks: 1" in out
    assert out.splitlines()[1].endswith("never finish")
    assert "250 ms" in out.splitlines()[2]


def test_noise_comes_from_a_seed(capsys):
    words = "all_reduce --algorithm ring -n 16 --noise 10us --seed"
    first, again, other = (run(capsys, f"{words} {seed}") for seed in (1, 1, 2))
    assert first == again != other


def test_a_picture(capsys, tmp_path):
    path = tmp_path / "x.png"
    words = f"all_gather -n 16 --bytes 64K --network torus:4x4 --link +0[3]=0.5 --plot {path}"
    assert "+0[3] at 0.5 of its speed" in run(capsys, words)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("all_reduce -n 70000", "at most 65536 ranks"),
        ("all_reduce -n 0", "expected at least 1"),
        ("all_reduce --bytes 0", "--bytes is 0"),
        ("all_reduce --network cube", "no network 'cube'"),
        ("all_reduce --algorithm rong", "did you mean 'ring'"),
        ("all_reduce --late 99=1s", "there is no rank 99"),
        ("all_reduce --late 3", "expected NAME=VALUE"),
        ("all_reduce --late 3=1", "'1' is no time"),
        ("all_reduce --noise 1us --seed -1", "--seed is -1, expected at least 0"),
        ("all_reduce --most nan", "--most is nan, expected seconds"),
        ("all_reduce --dead 64", "there is no rank 64"),
        ("all_reduce --link up[0]=0.5", "switch has no link"),
        ("all_reduce --link out[0]=x", "'x' is no number"),
        ("all_reduce --start /nowhere.json", "No such file"),
        ("broadcast --param root=64", "no rank 64 to be the root"),
        ("all_reduce --algorithm ring --most 0 --network torus:8x8", "takes more than 0 s"),
    ],
)
def test_what_is_refused(capsys, words, error):
    assert cli.main(["simulate", *words.split()]) == 2
    assert error in capsys.readouterr().err


def test_a_start_of_another_size(capsys, tmp_path):
    path = tmp_path / "start.json"
    path.write_text("[1, 2]")
    assert cli.main(["simulate", "all_reduce", "-n", "4", "--start", str(path)]) == 2
    assert "shape (2,), expected (4,)" in capsys.readouterr().err
