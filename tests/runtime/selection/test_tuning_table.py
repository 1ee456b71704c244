"""Tables of measured times: what they say, what is refused, and that all ranks use the same."""

import dataclasses
import json
import warnings

import numpy as np
import pytest

from pycoll.cli.measure.bench_data import Problem
from pycoll.cli.measure.bench_time import Setup, schedule_name
from pycoll.config import Config, tuning_path
from pycoll.errors import ArgumentError
from pycoll.runtime.selection.candidates import candidates
from pycoll.runtime.selection.measured_choices import agree
from pycoll.runtime.selection.select import select
from pycoll.runtime.selection.tuning_table import (
    Time,
    TunedRule,
    Tuning,
    World,
    caches,
    fingerprint,
)
from pycoll.schedule.cost.cost import Machine
from pycoll.schedule.cost.network import Network
from pycoll.testing import run_processes
from pycoll.types import DType, ReduceOp

RULE = TunedRule("all_reduce", "tree", False, 100, 5000, "halving_doubling", 1e-6, "one_shot", 2e-6)
TIMES = (
    Time("all_reduce", 1024, False, "halving_doubling", "", 1e-6, 0.9e-6, 1.1e-6),
    Time("all_reduce", 1024, False, "one_shot", "", 2e-6, 1.9e-6, 2.2e-6),
    Time("all_reduce", 1024, False, "", "rank", 3e-6, 2.9e-6, 3.2e-6),
)


def table(*rules, n=4, **about):
    world = World("shared memory", (n,), Machine(alpha=1e-7), TIMES, rules, "today")
    return Tuning({**fingerprint(), **about}, (world,))


def test_a_table_reads_what_it_has_written():
    network = Network(ranks_per_host=(2, 1))
    world = World("messages of X 1.0", (2, 1), network, (), (), "now")
    whole = table(RULE).with_world(world)
    assert Tuning.parse(whole.to_json()) == whole
    assert whole.world(("messages of X 1.0", (2, 1))) == world
    assert whole.world(("messages of X 1.0", (1, 2))) is None
    assert whole.with_world(dataclasses.replace(world, taken="later")).worlds[1].taken == "later"


def test_the_digest_is_that_of_the_choices():
    same = Tuning.parse(table(RULE).to_json())
    assert same.digest == table(RULE).digest
    assert table().digest != same.digest
    assert table(dataclasses.replace(RULE, algorithm="ring")).digest != same.digest


def changed(change):
    document = json.loads(table(RULE).to_json())
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d.update(schema="other"), "schema and version"),
        (lambda d: d.update(version=2), "run `pycoll tune` again"),
        (lambda d: d.pop("fingerprint"), "fingerprint is 'None'"),
        (lambda d: d.update(worlds={}), "worlds is '{}', expected a list"),
        (lambda d: d["worlds"].append(3), "worlds[1] is '3'"),
        (lambda d: d["worlds"][0].update(ranks_per_host=[0]), "worlds[0].ranks_per_host"),
        (lambda d: d["worlds"][0].update(transport=1), "worlds[0].transport"),
        (lambda d: d["worlds"][0]["machine"].update(model="car"), "machine or network"),
        (lambda d: d["worlds"][0]["machine"].update(alpha=-1), "worlds[0].machine.alpha is '-1'"),
        (lambda d: d["worlds"][0]["machine"].pop("beta"), "expected the fields"),
        (lambda d: d["worlds"][0]["machine"].update(beta=0), "beta is '0', expected a number > 0"),
        (lambda d: d["worlds"][0]["machine"].update(bus=10**400), "machine.bus is '1000"),
        (lambda d: d["worlds"][0]["rules"][0].update(min_bytes=10**400), "expected int"),
        (lambda d: d["worlds"][0]["times"][0].update(seconds="1"), "times[0].seconds"),
        (lambda d: d["worlds"][0]["rules"][0].update(algorithm="rang"), "rules[0].algorithm"),
        (lambda d: d["worlds"][0]["rules"][0].update(collective="x"), "expected a collective"),
        (lambda d: d["worlds"][0]["rules"][0].update(order="left"), "expected a reduction order"),
        (lambda d: d["worlds"][0]["rules"][0].update(min_bytes=True), "rules[0].min_bytes"),
        (lambda d: d["worlds"][0]["rules"][0].update(more=1), "expected the fields"),
    ],
)
def test_a_wrong_table_is_refused(change, told):
    with pytest.raises(ArgumentError) as caught:
        Tuning.parse(changed(change))
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "[" * 5000])
def test_what_is_no_table_is_refused(text):
    with pytest.raises(ArgumentError, match=r"expected an object|not JSON"):
        Tuning.parse(text)


def test_a_fingerprint_of_another_machine_is_named():
    assert table().differences(fingerprint()) == ""
    other = table(cpu="Z80", cores=1).differences(fingerprint())
    assert "cpu 'Z80' (here " in other
    assert "cores 1 (here " in other
    assert "pycoll" not in other
    assert all(size > 0 for size in caches().values())


def test_measured_lines_come_before_the_built_in_ones():
    (world,) = table(RULE).worlds
    chosen = select("all_reduce", 1024, 4, dtype=DType.FLOAT32, world=world)
    assert (chosen.name, chosen.order, chosen.measured) == ("halving_doubling", "tree", RULE)
    assert "1 us where one_shot took 2 us" in chosen.reason
    for options in (
        {"order": "rank"},
        {"order": "any"},
        {"direct": True},
        {"dtype": DType.FLOAT16},  # it rounds at every hop
        {"algorithm": "one_shot"},
    ):
        wish = {"dtype": DType.FLOAT32, **options}
        plain = select("all_reduce", 1024, 4, **wish)
        tuned = select("all_reduce", 1024, 4, world=world, **wish)
        assert (tuned.name, tuned.measured) == (plain.name, None)
    for nbytes, measured in ((99, None), (100, RULE), (5000, RULE), (5001, None)):
        assert select("all_reduce", nbytes, 4, world=world).measured == measured
    minimum = select("all_reduce", 1024, 4, dtype=DType.FLOAT16, op=ReduceOp.MIN, world=world)
    assert minimum.measured == RULE


def test_a_line_never_changes_the_order():
    (world,) = table(dataclasses.replace(RULE, algorithm="ring")).worlds
    chosen = select("all_reduce", 1024, 4, dtype=DType.FLOAT32, world=world)
    assert (chosen.name, chosen.order, chosen.measured) == ("one_shot", "tree", None)


def test_candidates_show_what_was_measured():
    (world,) = table(RULE).worlds
    choice = select("all_reduce", 2048, 4, dtype=DType.FLOAT32, world=world, machine=world.machine)
    found = {c.name: c for c in candidates(choice, world)}
    assert [c.name for c in candidates(choice, world)][:2] == ["halving_doubling", "one_shot"]
    assert found["halving_doubling"].measured_s == 1e-6
    assert found["one_shot"].verdict == "2.00 times the measured time"
    assert found["two_shot_push"].measured_s is None
    assert "predicted time" in found["two_shot_push"].verdict
    assert world.measured("all_reduce", 2049, False) == {}
    assert set(world.measured("all_reduce", 512, False)) == {"halving_doubling", "one_shot"}
    assert world.measured("all_reduce", 1024, True) == {}


def test_where_the_table_lies():
    both = {"XDG_CONFIG_HOME": "/x", "HOME": "/h"}
    assert str(tuning_path(both)) == "/x/pycoll/tuning.json"
    assert str(tuning_path({"HOME": "/h"})) == "/h/.config/pycoll/tuning.json"
    assert str(tuning_path({"HOME": "/h", "XDG_CONFIG_HOME": "not/absolute"})).startswith("/h/")
    assert Config.from_env({}).tuning == "auto"
    assert Config.from_env({"PYCOLL_TUNING": "/a/b.json"}).tuning == "/a/b.json"
    with pytest.raises(ArgumentError, match="tuning is ''"):
        Config(tuning="")


def told(comm, setting):
    """Let this rank's settings name a table, and agree."""
    comm._session.config = dataclasses.replace(comm._session.config, tuning=str(setting))
    agree(comm._session)


def what_runs(comm, n, nbytes=1024):
    problem = Problem.of_size("all_reduce", np.dtype(np.float32), "sum", nbytes, n)
    return schedule_name(comm, problem, Setup())


def test_all_ranks_use_the_table_of_rank_0(tmp_path):
    mine, other = tmp_path / "mine.json", tmp_path / "other.json"
    mine.write_text(table(RULE).to_json())
    other.write_text(table(dataclasses.replace(RULE, algorithm="two_shot_pull")).to_json())

    def rank(comm):
        told(comm, [mine, other, "off", "/not/there"][comm.rank])
        x = np.random.default_rng(comm.rank).standard_normal(256).astype(np.float32)
        total = comm.all_reduce(x)
        named = comm.all_reduce(x, algorithm="one_shot")
        return comm.check().selection, what_runs(comm, 4), total.tobytes() == named.tobytes()

    found = run_processes(4, rank)
    assert found == [(table(RULE).digest, "halving_doubling, staged", True)] * 4


def test_groups_have_lines_of_their_own(tmp_path):
    path = tmp_path / "table.json"
    pair = World("shared memory", (2,), Machine(), (), (RULE,))
    path.write_text(Tuning(fingerprint(), (pair,)).to_json())

    def rank(comm):
        whole = table(n=4).with_world(pair)
        comm._session.use(whole, comm._session.sharing)
        with comm.split(comm.rank // 2) as half, comm.dup() as twin:
            assert half.all_reduce(np.full(256, 1.0, np.float32))[0] == 2
            return what_runs(half, 2), what_runs(twin, 4)

    assert run_processes(4, rank) == [("halving_doubling, staged", "one_shot, staged")] * 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "schema and version"),
        (table(RULE, cpu="Z80").to_json(), "another cpu 'Z80'"),
        (table(RULE, n=3).to_json(), "nothing about 2 ranks, shared memory"),
        (None, "cannot be read"),
    ],
)
def test_a_table_asked_for_has_to_fit(run, tmp_path, text, reason):
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)

    def rank(comm):
        with pytest.raises(ArgumentError) as caught:
            told(comm, path if comm.rank == 0 else "off")
        assert str(path) in str(caught.value)
        assert reason in str(caught.value)

    run(2, rank) if "nothing" not in reason else run_processes(2, rank)


@pytest.mark.parametrize("text", ["{}", table(RULE, cpu="Z80").to_json(), ""])
def test_the_users_table_is_left_alone_with_one_warning(tmp_path, monkeypatch, text):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "pycoll").mkdir()
    (tmp_path / "pycoll" / "tuning.json").write_text(text)

    def rank(comm):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            told(comm, "auto")
        assert comm._session.tuning is None
        return [str(w.message) for w in found]

    (first,), second = run_processes(2, rank)
    assert "tuning.json is not used" in first
    assert second == []


def test_the_users_table_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def rank(comm):
        told(comm, "auto")
        return what_runs(comm, 4)

    assert run_processes(4, rank) == ["one_shot, staged"] * 4
    (tmp_path / "pycoll").mkdir()
    (tmp_path / "pycoll" / "tuning.json").write_text(table(RULE).to_json())
    assert run_processes(4, rank) == ["halving_doubling, staged"] * 4
