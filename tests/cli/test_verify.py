"""``pycoll verify``: which world sizes are meant."""

import pytest

from pycoll.cli import main
from pycoll.cli.verify import parse_worlds


@pytest.mark.parametrize(
    ("text", "worlds"),
    [
        ("8", [8]),
        ("1..4", [1, 2, 3, 4]),
        ("2..3,8,3", [2, 3, 8]),
        ("5..5", [5]),
        (" 1 .. 2 ", [1, 2]),
    ],
)
def test_world_sizes(text, worlds):
    assert parse_worlds(text) == worlds


@pytest.mark.parametrize(
    "text", ["1..", "..4", "..", "1..2..3", "8..1", "4,8..1", "0..2", "x", "1,"]
)
def test_what_is_no_list_of_world_sizes(capsys, text):
    assert main(["verify", "ring", "-n", text]) == 2
    assert f"{text!r} is no list of world sizes; write" in capsys.readouterr().err


def test_proofs_are_written_where_they_can_be(capsys, tmp_path):
    path = tmp_path / "new" / "proofs.json"
    assert main(["verify", "all_reduce/ring", "-n", "2", "--json", str(path)]) == 0
    assert main(["verify", "all_reduce/ring", "-n", "2", "--json", str(path / "x")]) == 2
    assert "proofs.json is no directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["rinng"], "pycoll has no algorithm 'rinng'; did you mean 'ring'? known: ring, halving"),
        (["all_reduce/rng"], "no algorithm 'all_reduce/rng'; did you mean 'all_reduce/ring'?"),
        (["rinng", "--collective", "gather"], "gather has no algorithm 'rinng'; known: direct, "),
        (["ring", "-n", "4097"], "-n 4097: expected at most 4096 ranks"),
        (["ring", "-n", "1..99999999999"], "expected at most 4096 ranks"),
        (["ring", "-n", "2", "--mutate", "--count", "-1"], "--count is -1, expected at least 1"),
        (["ring", "-n", "2", "--json", "/dev/full/x"], "--json '/dev/full/x': /dev/full is no"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_the_work(capsys, args, told):
    assert main(["verify", *args]) == 2
    shown = capsys.readouterr()
    assert told in shown.err
    assert not shown.out
