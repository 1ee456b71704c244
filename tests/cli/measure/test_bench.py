"""`pycoll bench`: what it calls, that it finds wrong results, and what it prints and writes."""

import argparse
import json
from dataclasses import replace

import numpy as np
import pytest

import oracle
from pycoll.cli import bench
from pycoll.cli.common.text import sized
from pycoll.cli.measure import bench_data
from pycoll.cli.measure.bench_data import (
    IN_PLACE,
    NAMES,
    POISON,
    V_VARIANTS,
    Problem,
    Slots,
    element_type,
)
from pycoll.cli.measure.bench_report import Table, microseconds
from pycoll.cli.measure.bench_time import Row, Setup, measure, slot_count
from pycoll.errors import ArgumentError
from pycoll.schedule.language.collectives import COLLECTIVES
from pycoll.testing import run_processes, run_threads

QUICK = Setup(iters=3)
FLOAT = np.dtype(np.float32)


def parse(*argv):
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", *argv])


def problem(name, nbytes=1000, n=2, dtype="float32", op="sum"):
    return Problem.of_size(name, element_type(dtype), op, nbytes, n)


# --- what is called, and what must come out -------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in NAMES if n not in V_VARIANTS and n != "barrier"])
@pytest.mark.parametrize(
    "dtype", ["int8", "uint16", "bfloat16", "float16", "float64", "float8_e4m3fn"]
)
def test_expectations_are_those_of_numpy(name, dtype):
    for op in oracle.ops(dtype):
        made = problem(name, n=3, dtype=dtype, op=op)
        if made.promise.prefix is not None and op == "avg":
            continue  # there is no such call
        want = oracle.expected(name, [made.input(rank) for rank in range(3)], op)
        for rank in range(3):
            got = made.expected(rank)
            if not made.promise.sources(rank, 3):
                want[rank] = None  # whatever is neutral, and not looked at
            assert (got is None) == (want[rank] is None)
            assert got is None or not oracle.differences(got, want[rank])
        if not made.promise.reduces:
            break


@pytest.mark.parametrize("op", ["sum", "prod", "avg"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_results_do_not_depend_on_the_order(op, dtype):
    made = problem("all_reduce", n=8, nbytes=4096, dtype=dtype, op=op)
    parts = [made.input(rank) for rank in range(8)]
    both = [oracle.reduce(parts, op, order) for order in ("tree", "rank")]
    assert not oracle.differences(*both)
    assert not oracle.differences(both[0], made.expected(5))


def what_ran(comm, name):
    """Return the schedules of a collective that a communicator has bound."""
    bound = comm._session._caller.plans._bindings
    ours = [spec for spec in bound if spec.kind.name.lower() == name]
    return {s.algorithm.name + ("" if s.direct else ", staged") for s in ours}


@pytest.mark.parametrize("symmetric", [False, True])
def test_every_collective_is_measured_and_right(symmetric):
    def rank(comm):
        setup = Setup(symmetric=symmetric, iters=3)
        rows = []
        for name in NAMES:
            own = comm.dup()
            for in_place in {False, name in IN_PLACE}:
                made = problem(name, n=comm.world_size, nbytes=20000)
                rows.append(measure(own, made, setup, in_place, lambda text: None))
            said = {row.schedule for row in rows if row.collective == name}
            if name in ("all_reduce", "all_gather"):  # measuring uses these, too
                assert said <= what_ran(own, name)
            elif name not in (*V_VARIANTS, "barrier"):
                assert said == what_ran(own, name)
        return rows

    by_rank = run_processes(3, rank)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    rows = by_rank[0]
    assert {row.collective for row in rows} == set(NAMES)
    assert [row for row in rows if row.wrong] == []
    for row in rows:
        assert 0 < row.min_us <= row.time_us <= row.p99_us <= row.max_us
        assert row.iters == 3
        assert (row.busbw > 0) == (row.collective != "barrier")
    assert {row.collective for row in rows if row.in_place} == set(IN_PLACE)
    direct = {row.collective for row in rows if "staged" not in row.schedule}
    assert ("all_reduce" in direct) == symmetric


@pytest.mark.parametrize("name", [*COLLECTIVES, "all_gather_v"])
def test_inputs_alone_in_symmetric_memory(name):
    def rank(comm):
        own, setup = comm.dup(), Setup(symmetric_input=True, iters=3)
        made = problem(name, n=comm.world_size, nbytes=20000)
        row = measure(own, made, setup, False, lambda text: None)
        return row.wrong, row.schedule, what_ran(own, name)

    for wrong, said, ran in run_processes(2, rank):
        assert not wrong
        if name != "all_gather_v":
            assert said in ran
        reached = name in ("all_gather", "all_to_all", "reduce_scatter", "reduce")
        assert ("staged" not in said) == reached


def test_a_wrong_result_is_counted():
    def rank(comm):
        made = problem("all_reduce", n=2)
        slots = Slots.make(comm, made, 2, symmetric=False, in_place=False)
        untouched = slots.wrong()
        for x, out in slots.pairs:
            comm.all_reduce(x, out=out)
        right = slots.wrong()
        slots.pairs[1][1][7] += 1
        return untouched, right, slots.wrong()

    assert run_threads(2, rank) == [(500, 0, 1)] * 2


def test_outputs_are_poisoned_but_not_the_inputs_in_them():
    def rank(comm):
        made = problem("all_gather", n=2)
        slots = Slots.make(comm, made, 1, symmetric=True, in_place=True)
        x, out = slots.pairs[0]
        return int((out == POISON).sum()), bool(np.shares_memory(x, out)), slots.wrong()

    assert run_threads(2, rank) == [(125, True, 125)] * 2


def test_a_wrong_result_fails_the_command(monkeypatch):
    monkeypatch.setattr(Slots, "wrong", lambda slots: 1)
    args = parse("all_reduce", "--max", "64", "--factor", "8", "--iters", "1")
    assert bench.main(args) == 1


def test_arrays_fill_the_cache_unless_they_are_hot():
    large = problem("all_reduce", nbytes=1 << 20)
    assert slot_count(large, QUICK, in_place=True) >= slot_count(large, QUICK, in_place=False) > 1
    assert slot_count(large, Setup(hot=True), in_place=False) == 1


def test_sizes_of_problems():
    assert problem("all_gather", nbytes=8, n=3).blocks == (1, 1, 1)
    assert problem("reduce_scatter", nbytes=64, n=4).blocks == (4, 4, 4, 4)
    assert problem("all_reduce", nbytes=64, n=4).nbytes == 64
    assert len(set(problem("all_to_all_v", nbytes=1024, n=4).blocks)) == 4
    assert [sized(n) for n in (8, 1000, 1024, 3 << 19, 64 << 20)] == [
        "8", "1000", "1K", "1536K", "64M"
    ]  # fmt: skip
    assert [microseconds(t) for t in (0.7, 123.4, 12345.6)] == ["0.70", "123.4", "12346"]


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_and_writes(jobs):
    path = jobs.folder / "rows.json"
    command = ["all_reduce", "-n", "2", "--max", "4K", "--factor", "8", "--iters", "5"]
    done = jobs.python("-m", "pycoll", "bench", *command, "--json", path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"# pycoll bench {' '.join(command)}"
    assert "# Out of bounds values : 0 OK" in lines
    data = [line.split() for line in lines if not line.startswith("#")]
    assert [line[0] for line in data] == ["8", "64", "512", "4096"]
    assert [line[1] for line in data] == ["2", "16", "128", "1024"]
    assert {tuple(line[2:5]) for line in data} == {("float32", "sum", "-1")}
    titles = next(line for line in lines if "algbw" in line and "size" in line).split()
    result = ["time", "p99", "stream", "algbw", "busbw", "#wrong"]
    assert titles == ["#", "size", "count", "type", "redop", "root", *result, *result, "schedule"]
    document = json.loads(path.read_text())
    assert document["command"] == f"pycoll bench {' '.join(command)}"
    assert {"cpu", "cores", "machine", "commit", "numpy", "pycoll"} <= set(document["machine"])
    assert len(document["rows"]) == 8
    assert all(row["wrong"] == 0 and row["algbw"] == row["busbw"] for row in document["rows"])
    assert str(jobs.folder) not in path.read_text()


def test_columns_stay_apart_however_large_the_numbers(capsys):
    row = Row(
        **{"collective": "all_reduce", "dtype": "float8_e4m3fn", "op": "sum", "root": -1},
        **{"schedule": "ring", "nbytes": 64 << 20, "count": 64 << 20, "slots": 1, "iters": 1},
        **dict.fromkeys(("ranks", "wrong"), 1),
        **dict.fromkeys(("mean_us", "min_us", "max_us"), 1.0),
        **dict.fromkeys(("time_us", "p99_us", "stream_us", "algbw", "busbw"), 123456789.0),
        in_place=False,
    )
    Table(short=False).rows([row, replace(row, in_place=True)])
    assert len(capsys.readouterr().out.split()) == 5 + 6 + 6 + 1


def test_under_a_launcher_it_measures_the_ranks_there_are(jobs):
    arguments = ["barrier", "--iters", "5", "--short"]
    done = jobs.run("-n", 3, "-m", "pycoll", "bench", *arguments)
    assert done.returncode == 0, done.stderr
    assert "# 3 ranks" in done.stdout
    assert done.stdout.count("# Out of bounds values : 0 OK") == 1


@pytest.mark.parametrize("variable", ["PYCOLL_RANK", "PMI_SIZE"])
def test_under_a_launcher_it_starts_no_ranks(monkeypatch, variable):
    monkeypatch.setattr(bench.run, "main", lambda job: pytest.fail("ranks were started"))
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ArgumentError, match="-n is for a machine"):
        bench.main(parse("barrier", "-n", "2"))


def test_a_picture(jobs):
    pytest.importorskip("matplotlib")
    path = jobs.folder / "deep" / "plot.png"
    arguments = ["all_reduce", "-n", "2", "--max", "4K", "--iters", "3", "--plot", path]
    done = jobs.python("-m", "pycoll", "bench", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("collective", "first"), [("all_reduce", 64), ("all_gather", 32)])
def test_the_columns_of_osu(jobs, collective, first):
    arguments = [collective, "-n", "2", "--min", "64", "--max", "256", "--iters", "3"]
    done = jobs.python("-m", "pycoll", "bench", *arguments, "--format", "osu")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    heads = [line for line in lines if line.startswith("#")]
    assert heads[-2].split() == [
        *("#", "Size", "Avg", "Latency(us)", "Min", "Latency(us)", "Max", "Latency(us)"),
        "Iterations",
    ]
    assert not any("busbw" in head for head in heads)
    rows = [[float(word) for word in line.split()] for line in lines if line not in heads]
    assert [row[0] for row in rows] == [first, 2 * first, 4 * first]
    assert all(0 < least <= mean <= most and n == 3 for _, mean, least, most, n in rows)


def test_a_format_that_needs_what_is_not_there_is_refused_early(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ArgumentError, match=r"cannot draw to x.pgf: .*latex.* not found"):
        bench.main(parse("all_reduce", "-n", "2", "--plot", "x.pgf"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["all_reduce"],
        ["reduce_scatter", "--min", "64", "--order", "rank", "--symmetric", "--hot"],
        ["broadcast", "--algorithm", "ring", "--in-place", "--timeout", "2.5", "--json", "a b"],
    ],
)
def test_ranks_get_the_arguments_of_the_command(arguments):
    args = parse(*arguments)
    again = bench.arguments_of(args, bench.ALL_FLAGS)
    assert sorted(again) == sorted(arguments)
    assert parse(*again) == args


def test_what_lies_in_the_current_directory_is_not_taken(jobs):
    (jobs.folder / "pycoll").mkdir()
    for name in ("pycoll/__init__", "random", "types"):
        (jobs.folder / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    start = "import sys; sys.path.pop(0); from pycoll.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["all_reduce", "-n", "2", "--max", "64", "--iters", "3", "--short"]
    done = jobs.python("-c", start, "bench", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Out of bounds values : 0 OK" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["all_reduce", "--min", "0"], "--min 0 --max 64M: expected 0 < min <= max"),
        (["all_reduce", "--min", "2K", "--max", "1K"], "expected 0 < min <= max"),
        (["all_reduce", "--factor", "1"], "--factor is 1, expected at least 2"),
        (["all_reduce", "--iters", "0"], "--iters is 0, expected at least 1"),
        (["all_reduce", "--dtype", "float31"], "--dtype float31 is not known; accepted: int8"),
        (["all_reduce", "--max", "many"], "'many' is not a number of bytes"),
        (["gather", "--in-place"], "gather does not work in place"),
        (["barrier", "--plot", "x.png"], "a barrier has none"),
        (["all_reduce", "--plot", "x.foo"], "its suffix has to be one of"),
        (["all_reduce", "--max", "129T"], "'129T' is more than a process can address, 128T"),
        (["all_reduce", "--algorithm", "none"], "none"),
        (["all_reduce", "--op", "and"], "--op and is defined for integers; --dtype is float32"),
        (["all_gather", "--order", "tree"], "--order tree is for reductions; all_gather reduces"),
        (["all_gather", "--symmetric-input", "--in-place"], "--symmetric-input leaves results"),
        (["all_gather", "--op", "sum"], "--op sum is for reductions; all_gather reduces nothing"),
        (["barrier", "--order", "rank"], "--order rank is for reductions; barrier reduces"),
        (["barrier", "--algorithm", "ring"], "--algorithm ring: for barrier there is no choice"),
        (["gather_v", "--algorithm", "direct"], "for gather_v there is no choice"),
        (["all_reduce", "--algorithm", "ring", "--order", "tree"], "gives order any, not tree"),
        (["all_reduce", "--algorithm", "hierarchical"], "is not defined for 2 ranks"),
        (["all_reduce", "--algorithm", "no.py:x"], "No such file"),
        (["all_reduce", "--timeout", "nan"], "--timeout is nan, expected a number of seconds > 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(monkeypatch, arguments, message):
    monkeypatch.setattr(bench.run, "main", lambda job: pytest.fail("ranks were started"))
    with pytest.raises(ArgumentError, match=message.replace("[", r"\[")):
        bench.main(parse(*arguments, "-n", "2"))


def test_a_new_operation_or_type_that_cannot_be_checked_is_refused(monkeypatch):
    monkeypatch.delitem(bench_data._COMBINE, "xor")
    with pytest.raises(ArgumentError, match="--op xor cannot be checked with NumPy; accepted: sum"):
        bench_data.check_op("xor")
    monkeypatch.setattr(bench_data, "DTYPES", ["float8"])
    with pytest.raises(ArgumentError, match="--dtype float8: NumPy has no such type"):
        bench_data.element_type("float8")
