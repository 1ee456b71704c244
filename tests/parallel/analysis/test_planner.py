"""The planner: its layouts run as they are, and hold the bytes that it predicts."""

from dataclasses import replace

import numpy as np
import pytest

from pycoll.algorithms import find
from pycoll.errors import ArgumentError
from pycoll.parallel import DataParallel, Mesh, Pipeline, Workload, estimate, plan
from pycoll.parallel.analysis import layout_costs, layouts
from pycoll.parallel.analysis.layout_costs import LayoutCosts
from pycoll.parallel.analysis.workload import Speed, workload
from pycoll.parallel.context.split import Context
from pycoll.parallel.gpt import GPT, TransformerConfig
from pycoll.schedule.cost.described import fabric
from pycoll.schedule.cost.groups import Groups
from pycoll.schedule.cost.simulate import simulate
from pycoll.testing import run_threads

TIGHT = 2.5e9
SMALL = Workload(layers=4, hidden=16, heads=2, vocabulary=32, sequence=8)


def small_plan(**changes):
    return plan(SMALL, 4, **{"memory": 1e9, "batch": 32, "precision": "fp32", "top": 9} | changes)


def run(layout):
    """Train two steps as a layout says; return its ledger's bytes, the most of any rank."""
    sizes = (SMALL.hidden, SMALL.heads, SMALL.layers, SMALL.vocabulary, SMALL.sequence)

    def rank(comm):
        mesh = Mesh(comm, **layout.mesh) if layout.schedule else Mesh(comm, **without_pp(layout))
        split = mesh.tp if layout.mesh["tp"] > 1 else None
        context = Context(mesh.cp) if layout.size("cp") > 1 else None
        model = GPT(TransformerConfig(*sizes, comm=split, context=context), seed=0)
        tokens = np.ones((layout.micro_batch, SMALL.sequence // layout.size("cp")), int)
        batch = [(tokens, tokens)] * layout.micro_batches
        kind = Pipeline if layout.schedule else DataParallel
        engine = kind(model, model.loss(), mesh, precision="fp32", **layout.arguments)
        reports = [engine.step(batch) for _ in range(2)]
        rest = sum(engine.ledger.live[k] for k in ("parameter", "gradient", "optimizer"))
        return max(r.peak_bytes for r in reports), rest

    return run_threads(4, rank)


def without_pp(layout):
    return {axis: size for axis, size in layout.mesh.items() if axis != "pp"}


@pytest.mark.parametrize("place", range(5))
def test_a_layout_runs_and_holds_what_was_predicted(place):
    prediction = small_plan()[place]
    ledgers = run(prediction.layout)
    assert (prediction.states.peak, prediction.states.at_rest) in ledgers
    if not prediction.layout.schedule:
        assert ledgers == [(prediction.states.peak, prediction.states.at_rest)] * 4


def test_activations_are_offloaded_where_nothing_else_helps():
    """Layers are many and wide; running them again is ruled out."""
    big = Workload(layers=48, hidden=256, heads=4, sequence=1024)
    fixed = {"dp": 1, "tp": 1, "pp": 1, "micro_batch": 4, "recompute": "none"}
    given = {"batch": 4, "top": 1, "fixed": fixed, "network": "switch"}
    slow, fast = (Speed({1: 1e12}, host_bytes=rate) for rate in (1e9, 1e12))
    roomy = plan(big, 1, memory=1e12, flops=fast, **given)[0]
    tight = plan(big, 1, memory=0.5 * roomy.memory, flops=fast, **given)[0]
    assert (roomy.layout.offload, tight.layout.offload) == ("none", "activations")
    assert tight.activations < 0.25 * roomy.activations
    assert tight.parts["offload"] == 0  # hidden behind the layers
    waits = plan(big, 1, memory=0.5 * roomy.memory, flops=slow, **given)[0].parts["offload"]
    assert 0 < waits < 2 * roomy.activations / 1e9
    with pytest.raises(ArgumentError, match="no mesh"):
        plan(big, 1, memory=0.5 * roomy.memory, flops=1e12, **given)


class Counting:
    """A communicator that counts the bytes that it sends in messages of floating-point numbers."""

    def __init__(self, comm):
        self.comm, self.sent = comm, 0

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def isend(self, x, *args):
        self.sent += x.nbytes
        return self.comm.isend(x, *args)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("cp", [2, 4])
def test_bytes_along_the_context_are_those_that_the_ring_sends(cp, precision, recompute):
    work = replace(SMALL, sequence=16)
    fixed = {"cp": cp, "dp": 1, "tp": 1, "pp": 1, "recompute": recompute, "offload": "none"}
    given = {"memory": 1e9, "batch": 4, "precision": precision, "top": 1, "fixed": fixed}
    prediction = plan(work, cp, **given)[0]
    layout = prediction.layout
    sizes = (work.hidden, work.heads, work.layers, work.vocabulary, work.sequence)

    def rank(comm):
        mesh = Mesh(comm, **without_pp(layout))
        counting = Counting(mesh.cp)
        model = GPT(TransformerConfig(*sizes, context=Context(counting)), seed=0)
        tokens = np.ones((layout.micro_batch, work.sequence // cp), int)
        batch = [(tokens, tokens)] * layout.micro_batches
        options = {"precision": precision, **layout.arguments}
        with DataParallel(model, model.loss(), mesh, **options) as engine:
            engine.step(batch)
        return counting.sent

    assert run_threads(cp, rank) == [prediction.sent["cp"]] * cp


CONFIGURATIONS = [
    *({"dp": 4, "zero": zero} for zero in range(4)),
    {"tp": 2, "zero": 0},
    {"tp": 2, "zero": 1},
    {"tp": 2, "dp": 2, "zero": 2, "recompute": "full"},
    {"pp": 4, "schedule": "1f1b"},
    {"pp": 2, "dp": 2, "schedule": "interleaved:2", "zero": 1},
    {"pp": 2, "tp": 2, "schedule": "zb_h1"},
    {"pp": 2, "dp": 2, "schedule": "1f1b", "zero": 2},
    {"pp": 4, "schedule": "zb_h1", "recompute": "full"},
    {"replica": 2, "dp": 2, "zero": 1},
    {"replica": 2, "dp": 2, "zero": 3},
    {"replica": 2, "dp": 2, "zero": 2, "recompute": "selective"},
    {"cp": 2, "dp": 2, "zero": 0},
    {"cp": 2, "dp": 2, "zero": 3},
    {"cp": 2, "tp": 2, "zero": 1},
    {"cp": 2, "pp": 2, "schedule": "1f1b"},
    {"dp": 4, "zero": 0, "offload": "optimizer"},
    {"dp": 4, "zero": 1, "offload": "optimizer"},
]


@pytest.mark.parametrize("fixed", CONFIGURATIONS, ids=str)
def test_configurations_hold_what_was_predicted(fixed):
    flops = Speed({1: 1e9}, host_bytes=1e9)
    prediction = small_plan(fixed=fixed, top=1, flops=flops)[0]
    assert fixed.items() <= prediction.layout.choices.items()
    ledgers = run(prediction.layout)
    assert prediction.states.at_rest in [rest for _, rest in ledgers]
    assert prediction.states.peak == pytest.approx(max(peak for peak, _ in ledgers), rel=0.05)


def test_meshes_differ_and_the_fastest_is_first():
    found = small_plan()
    assert len({tuple(each.layout.mesh.values()) for each in found}) == len(found) >= 5
    seconds = [each.seconds for each in found]
    assert seconds == sorted(seconds)
    assert found[0].why == ""
    assert all("% slower: " in each.why for each in found[1:])
    for each in found:
        layout = each.layout
        dp = layout.mesh["dp"]
        assert dp * layout.micro_batch * layout.micro_batches == 32
        assert (layout.schedule is None) == (layout.mesh["pp"] == 1)


def test_less_memory_takes_more_sharding_or_recomputation():
    big = Workload(layers=6, hidden=1024, heads=8, sequence=512)
    roomy = plan(big, 2, memory=400e9, batch=8, top=1)[0]
    tight = plan(big, 2, memory=TIGHT, batch=8, top=1)[0]
    assert roomy.layout.zero == 0
    assert roomy.layout.recompute == "none"
    assert tight.memory <= TIGHT < roomy.memory
    assert tight.seconds > roomy.seconds
    with pytest.raises(ArgumentError, match=r"no mesh of 2 ranks with 0\.1 GB"):
        plan(big, 2, memory=1e8, batch=8)


def test_a_slower_network_costs_more():
    times = [small_plan(network=f"switch:bw={bw}")[0].seconds for bw in ("100G", "1M")]
    assert times[1] > 2 * times[0]


@pytest.mark.parametrize("zero", range(4))
def test_bytes_sent_are_those_of_the_estimate(zero):
    found = [each for each in small_plan(network="switch") if each.layout.mesh["dp"] == 4]
    layout = found[0].layout
    told = estimate(
        SMALL.model(), "fp32", {"dp": 4}, micro_batches=layout.micro_batches, zero=zero
    ).wire
    made = LayoutCosts(SMALL, fabric("switch", 4), Speed({1: 1e12}), "fp32")
    sent = made.sent(replace(layout, zero=zero))["dp"]
    assert np.isclose(sent, told.get("gradient", 0) + told.get("parameter", 0), rtol=0.03)


def test_sizes_of_published_models():
    """Narayanan et al., SC 2021, table 1: 1.7, 39.1 and 174.6 billion parameters."""
    for sizes, billions in (
        ((24, 2304, 24), 1.7),
        ((48, 8192, 64), 39.1),
        ((96, 12288, 96), 174.6),
    ):
        work = Workload(*sizes, vocabulary=51200, sequence=2048)
        per_step = 1536 * 3 * (work.layers * work.layer_flops() + work.logits_flops())
        layers, hidden, _ = sizes
        formula = 72 * 1536 * 2048 * layers * hidden**2
        formula *= 1 + 2048 / (6 * hidden) + 51200 / (12 * layers * hidden)
        assert np.isclose(per_step, formula)
        assert np.isclose(work.parameters / 1e9, billions, rtol=0.045)


@pytest.mark.parametrize(
    ("fixed", "text"),
    [
        ({"zero": 9}, "no layout has zero=9; accepted: 0, 1, 2, 3"),
        ({"schedule": "zb_v"}, "no layout has schedule='zb_v'; accepted: 1f1b, "),
        ({"micro_batch": 3}, "no layout has micro_batch=3; accepted: 1, 2, "),
        ({"offload": "all"}, "offload='all' needs the speed of the memory"),
    ],
)
def test_fixed_values_that_no_layout_has(fixed, text):
    with pytest.raises(ArgumentError, match=text):
        small_plan(fixed=fixed)


def test_what_is_fixed_is_kept():
    fixed = {"tp": 2, "zero": 1, "micro_batch": 4}
    found = small_plan(fixed=fixed)
    assert found
    assert all(fixed.items() <= each.layout.choices.items() for each in found)
    with pytest.raises(ArgumentError, match="no 'size' to fix"):
        small_plan(fixed={"size": 2})
    with pytest.raises(ArgumentError, match="'tp': 3"):
        small_plan(fixed={"tp": 3})


@pytest.mark.parametrize("schedule", layouts.SCHEDULES)
def test_long_pipelines_are_as_long_as_if_they_were_simulated_whole(schedule, monkeypatch):
    made = LayoutCosts(SMALL, fabric("switch", 4), Speed({1: 1e12}), "fp32")
    costs = (1.0, 1.5, 0.75, 0.1)
    whole = made._timing(schedule, 4, 48, costs)
    monkeypatch.setattr(layout_costs, "MOST_OPERATIONS", 64)
    assert made._timing(schedule, 4, 48, costs) == pytest.approx(whole)


def test_groups_that_do_not_fill_a_network():
    ring, network = find("all_reduce", "ring").schedule(2), fabric("switch", 12)
    found = simulate(ring, 1e6, Groups.of(network, 2, 8)).max()
    assert np.isclose(found, simulate(ring, 1e6, fabric("switch", 2)).max())


def test_groups_that_fill_a_network_share_its_links():
    ring, network = find("all_reduce", "ring").schedule(8), fabric("fat-tree:leaf=8,over=2", 64)
    near, far = (simulate(ring, 1e8, Groups.of(network, 8, s)).max() for s in (1, 8))
    plain = simulate(ring, 1e8, fabric("fat-tree:leaf=8,over=2", 8)).max()
    assert np.isclose(near, plain)
    assert 1.5 < far / near < 2.2  # every message of the other groups leaves its leaf


def test_workloads_from_texts_and_files(tmp_path):
    assert workload("gpt") == Workload()
    assert workload("gpt:layers=2,n_embd=96").hidden == 96
    path = tmp_path / "config.json"
    path.write_text('{"n_layer": 3, "n_embd": 24, "n_head": 2, "n_positions": 16, "other": "x"}')
    assert workload(str(path)) == Workload(3, 24, 2, sequence=16)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"batch": 0}, "batch=0"),
        ({"memory": -1.0}, "memory=-1.0"),
        ({"network": "cube"}, "no network 'cube'"),
    ],
)
def test_what_is_refused(change, error):
    with pytest.raises(ArgumentError, match=error):
        small_plan(**change)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("gpt:layers=x", "expected numbers"),
        ("gpt:leyers=3", "expected numbers"),
        ("/nowhere.json", "No such file"),
        ({"dim": 3}, "no size of a GPT"),
        ({"hidden": 10, "heads": 3}, "not divisible"),
        ({"layers": 0}, "layers=0"),
    ],
)
def test_workloads_that_are_none(given, error):
    with pytest.raises(ArgumentError, match=error):
        workload(given)


def test_speed_goes_with_the_size_of_micro_batches():
    """Two ranks of tensor parallelism compute half of a micro-batch each."""
    speed = Speed({1: 1e9, 4: 3e9})
    found = small_plan(flops=speed, network="switch:bw=1000T,latency=0s", fixed={"pp": 1})
    assert found[0].layout.micro_batch == 4  # the smallest that is fastest
    assert found[0].parts["compute"] == pytest.approx(
        small_plan(flops=3e9, fixed={"pp": 1})[0].parts["compute"]
    )
    for tp, expected in ((1, 2e9), (2, 1e9)):
        fixed = {"tp": tp, "pp": 1, "micro_batch": 2}
        one = small_plan(flops=speed, fixed=fixed)[0].parts["compute"]
        assert one == pytest.approx(small_plan(flops=expected, fixed=fixed)[0].parts["compute"])


def test_updates_are_divided_as_the_optimizer_is():
    seconds = {
        zero: small_plan(flops=Speed({1: 1e9}, update_s=1e-6), fixed={"dp": 4, "zero": zero})[0]
        for zero in (0, 1)
    }
    assert seconds[0].parts["update"] == pytest.approx(1e-6 * SMALL.parameters)
    assert seconds[1].parts["update"] == pytest.approx(1e-6 * SMALL.parameters / 4)


@pytest.mark.parametrize("zero", range(4))
def test_without_overlap_sums_take_their_whole_time(zero):
    fixed, slow = {"dp": 4, "zero": zero}, "switch:bw=100M"
    hidden, whole = (
        small_plan(flops=Speed({1: 1e9}, overlap=overlap), network=slow, fixed=fixed)[0]
        for overlap in (True, False)
    )
    assert hidden.parts["data"] < whole.parts["data"]
    sent = whole.sent["dp"] / 100e6
    assert whole.parts["data"] == pytest.approx(sent, rel=0.05)


@pytest.mark.parametrize(
    "options",
    [{"flops": {}}, {"flops": {0: 1e9}}, {"flops": {1: 0.0}}, {"flops": {1: 1e9}, "update_s": -1}],
)
def test_what_is_no_speed_is_refused(options):
    with pytest.raises(ArgumentError):
        Speed(**options)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bytes_of_replicas_are_those_of_the_estimate(zero):
    mesh = {"replica": 2, "dp": 2, "pp": 1, "tp": 1}
    layout = layouts.Layout(mesh, 2, 4, zero, "none", None)
    sent = LayoutCosts(SMALL, fabric("switch", 4), Speed({1: 1e12}), "fp32").sent(layout)
    axes = {"replica": 2, "dp": 2}
    told = estimate(SMALL.model(), "fp32", axes, micro_batches=4, zero=zero).wire
    assert sent["replica"] == pytest.approx(told["replica gradient"], rel=0.01)
    assert sent["dp"] == pytest.approx(told["gradient"] + told["parameter"], rel=0.01)


def test_long_sequences_are_divided():
    long = Workload(layers=4, hidden=1024, heads=8, sequence=1 << 16)
    found = plan(long, 8, memory=40e9, batch=1, top=1)[0]
    assert found.layout.size("cp") > 1
    assert found.sent["cp"] > 0
    short = plan(replace(long, sequence=2048), 8, memory=40e9, batch=32, top=9)
    assert all(each.layout.size("cp") == 1 for each in short)


def test_replicas_are_as_large_as_a_node():
    network = "rails:gpus=2,nodes=2,bw=1G"
    found = small_plan(network=network, fixed={"tp": 1, "pp": 1, "zero": 3})
    assert {each.layout.size("dp") for each in found} == {4, 2}
    sharded, copied = sorted(found, key=lambda each: -each.layout.size("dp"))
    assert copied.layout.mesh == {"replica": 2, "dp": 2, "pp": 1, "tp": 1}
    assert copied.memory > sharded.memory


def test_states_are_offloaded_where_nothing_else_helps():
    speed = Speed({1: 1e12}, host_bytes=1e10)
    fixed = {"dp": 1, "tp": 1, "pp": 1, "micro_batch": 1}
    big = Workload(layers=6, hidden=1024, heads=8, sequence=64)
    given = {"batch": 1, "precision": "fp32", "top": 1, "fixed": fixed}
    roomy = plan(big, 1, memory=1e12, flops=speed, **given)[0]
    tight = plan(big, 1, memory=0.7 * roomy.memory, flops=speed, **given)[0]
    assert (roomy.layout.offload, tight.layout.offload) == ("none", "optimizer")
    assert tight.parts["offload"] == pytest.approx(2 * tight.states.stored / 1e10, rel=0.01)
    with pytest.raises(ArgumentError, match="no mesh"):
        plan(big, 1, memory=0.7 * roomy.memory, flops=1e12, **given)
