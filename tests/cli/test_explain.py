"""``pycoll explain``: the choice, its cost, and why not another."""

import math

import pytest

from pycoll.algorithms import ALGORITHMS
from pycoll.cli import main
from pycoll.cli.common.arguments import size
from pycoll.cli.common.text import show_size, show_time, table
from pycoll.runtime.selection.rules import RULES
from pycoll.runtime.selection.select import select
from pycoll.runtime.selection.tuning_table import Tuning, World, fingerprint
from pycoll.schedule.cost.cost import Machine


def explained(capsys, *args):
    assert main(["explain", *args]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_choice_comes_first(capsys):
    lines = explained(capsys, "all_reduce", "--bytes", "1M", "-n", "8")
    choice = select("all_reduce", 1 << 20, 8)
    assert lines[0].startswith("all_reduce, 1 MiB of float32 on 8 ranks, private arrays")
    assert choice.name in lines[2]
    assert show_time(choice.predicted_s) in lines[2]
    assert choice.reason in lines[3]
    starred = [line.split()[1] for line in lines if line.startswith("*")]
    assert starred == [choice.name]


def test_all_candidates_are_judged(capsys):
    lines = explained(capsys, "all_reduce", "--bytes", "64M", "-n", "8", "--order", "rank")
    rows = {line[1:].split()[0]: line for line in lines[6:-3]}
    known = {a.name: a.order for a in ALGORITHMS if a.collective == "all_reduce"}
    assert rows.keys() == known.keys()
    for name, order in known.items():
        assert (f"gives order {order}, not rank" in rows[name]) == (order != "rank")
    assert rows["two_shot_pull_rank"].endswith("chosen")


def test_memory_dtype_and_operation_matter(capsys):
    symmetric = "\n".join(explained(capsys, "all_reduce", "-n", "4", "--symmetric"))
    assert "two_shot_push, in place" in symmetric
    inputs = "\n".join(explained(capsys, "reduce_scatter", "-n", "4", "--symmetric-input"))
    assert "a symmetric input, private results" in inputs
    assert "  direct, in place: " in inputs
    inputs = "\n".join(explained(capsys, "all_reduce", "-n", "4", "--symmetric-input"))
    assert "two_shot_pull, staged" in inputs
    for name in ("gather", "scatter"):  # their arrays are staged wherever they lie
        lines = explained(capsys, name, "--symmetric")
        assert lines[0].endswith("any arrays")
        assert "in place" not in "".join(lines)
    half = explained(capsys, "all_reduce", "--bytes", "128", "-n", "99", "--dtype", "bfloat16")
    assert any("rounds bfloat16 at every hop" in line for line in half)
    options = ("--bytes", "128", "-n", "99", "--dtype", "bfloat16", "--op", "max")
    assert "recursive_doubling" in explained(capsys, "all_reduce", *options)[2]


def test_a_named_algorithm(capsys):
    lines = explained(capsys, "broadcast", "--algorithm", "ring", "-n", "4")
    assert "ring, staged, k = " in lines[2]


def test_ranks_that_share_cores(capsys):
    call = ("all_reduce", "--bytes", "8K", "-n", "8", "--cores")
    crowded, not_crowded = explained(capsys, *call, "7"), explained(capsys, *call, "8")
    assert "more ranks than cores" in crowded[0]
    assert "one_shot, staged" in crowded[2]
    assert "more ranks" not in not_crowded[0]
    assert "two_shot_pull, staged" in not_crowded[2]


def test_without_a_collective_the_table_is_printed(capsys):
    assert len(explained(capsys)) == 1 + len(RULES)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["all_reduce", "-n", "0"], "-n is 0"),
        (["--tuning", "table"], "--tuning is for a call: name a collective"),
        (["all_reduce", "--tuning", "~nosuch/x"], "tuning '~nosuch/x' cannot be used: "),
        (["all_reduce", "-n", "5000"], "-n is 5000, expected 1 to 4096 ranks"),
        (["all_reduce", "--hosts", "0,2"], "--hosts is '0,2', expected 1 to 4096 ranks"),
        (["all_reduce", "--cores", "0"], "--cores is 0, expected 1 or more"),
        (["all_reduce", "--op", "and"], "--op and is defined for integers; --dtype is float32"),
        (["all_gather", "--order", "tree"], "reduces nothing"),
        (["all_gather", "--op", "sum"], "--op sum is for reductions; all_gather reduces nothing"),
        (["all_reduce", "--algorithm", "ring", "--order", "tree"], "halving_doubling"),
    ],
)
def test_wrong_arguments(capsys, args, told):
    assert main(["explain", *args]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [["all_reduce", "--bytes", "many"], ["all_reduce", "--bytes", "9" * 21], ["sum"]],
)
def test_wrong_syntax(capsys, args):
    with pytest.raises(SystemExit) as caught:
        main(["explain", *args])
    assert caught.value.code == 2
    assert args[-1] in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "bench"])
def test_a_name_that_is_nearly_one(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "allreduce"])
    told = "there is no 'allreduce'; did you mean 'all_reduce'? known: "
    assert told in capsys.readouterr().err


def test_a_machine_that_takes_no_time(capsys, tmp_path):
    machine = Machine(alpha=0.0, sigma=0.0, call=0.0)
    path = tmp_path / "table.json"
    made = World("shared memory", (2,), machine, (), (), "now")
    path.write_text(Tuning(fingerprint(), (made,)).to_json())
    lines = explained(capsys, "all_reduce", "--bytes", "0", "--tuning", str(path))
    assert any(line.endswith("predicted to take as long") for line in lines)


@pytest.mark.parametrize("command", ["explain all_reduce", "doctor"])
def test_a_folder_that_cannot_be(capsys, monkeypatch, command):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/" + "a" * 300)
    monkeypatch.setenv("PYCOLL_TUNING", "auto")
    assert main(command.split()) == 0
    assert "nothing was measured here" in capsys.readouterr().out


def test_sizes():
    assert [size(t) for t in ("8", "1K", "1M", "64M")] == [8, 1 << 10, 1 << 20, 1 << 26]
    for nbytes in (0, 8, 1000, 1 << 10, 1536, 3 << 20, 1 << 40):
        text = show_size(nbytes)
        assert size(text.replace("i", "").replace(" B", "").replace(" ", "")) == nbytes
    assert [show_size(s) for s in (0, 1000, 1536, 64 << 20)] == [
        "0 B",
        "1000 B",
        "1536 B",
        "64 MiB",
    ]


def test_times():
    assert [show_time(s) for s in (1.5e-7, 2.345e-6, 4.2e-3, 2.0, 12345.0)] == [
        "150 ns",
        "2.35 us",
        "4.20 ms",
        "2.00 s",
        "12345 s",
    ]
    assert show_time(0) == "0 ns"
    assert show_time(math.inf) == "-"


def test_tables_align():
    assert table(("a", "b"), [("xx", "1"), ("y", "22")], right=(1,)) == "a    b\nxx   1\ny   22"


@pytest.mark.parametrize(
    ("words", "hosts_first"),
    [
        ("all_reduce --hosts 2,2", True),
        ("all_reduce --hosts 3,5", True),  # by subtrees: these trees do not nest
        ("reduce --hosts 3,5", False),
        ("all_reduce --hosts 3,5 --order any", True),
        ("all_reduce --hosts 3,5 --op max", True),
        ("all_reduce --hosts 2,2 --order rank", False),
        ("all_reduce --hosts 2,2 --dtype float16", False),
        ("all_reduce --hosts 1,1", False),
        ("all_reduce --hosts 4", False),
        ("all_reduce -n 4", False),
        ("broadcast --hosts 2,1", True),
        ("scatter --hosts 2,2 --bytes 4K", True),
        ("scatter --hosts 2,2 --bytes 1M", False),
    ],
)
def test_calls_that_go_through_hosts_first(capsys, words, hosts_first):
    assert main(["explain", *words.split(), "--tuning", "off"]) == 0
    assert ("the call goes through hosts first" in capsys.readouterr().out) == hosts_first
