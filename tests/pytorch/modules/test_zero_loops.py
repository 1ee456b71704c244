"""Training loops written for an optimizer of PyTorch, with `ZeroOptimizer`: against PyTorch alone.

Schedulers, groups, scaled losses, closures and hooks.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the adapter is for PyTorch")

from pycoll.errors import ArgumentError  # noqa: E402
from pycoll.testing import run_threads  # noqa: E402
from pycoll.torch.zero_optimizer import ZeroOptimizer  # noqa: E402
from zero_cases import (  # noqa: E402
    PROTOTYPE,
    SETTINGS,
    STEPS,
    N,
    check,
    divided,
    loss,
    make,
    one_group,
    train,
    two_groups,
    values,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=STEPS + 1)


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.7**epoch)


@pytest.mark.parametrize("schedule", [one_cycle, falling])
def test_groups_and_schedulers(schedule):
    net = make()
    plain = torch.optim.AdamW(two_groups(net), **SETTINGS)
    train(net, plain, 0, STEPS, range(N), schedule(plain))

    def rank(comm):
        net = make()
        optimizer = divided(net, comm)
        train(net, optimizer, 0, STEPS, [comm.rank], schedule(optimizer))
        groups = optimizer.param_groups
        return values(net), [{k: v for k, v in g.items() if k != "params"} for g in groups]

    expected = [{k: v for k, v in g.items() if k != "params"} for g in plain.param_groups]
    for found, groups in run_threads(N, rank):
        check(found, values(net))
        assert groups == expected


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_scaler_skips_the_same_steps_on_all_ranks(unscaled):
    net = make()
    plain = torch.optim.AdamW(two_groups(net), **SETTINGS)
    train(net, plain, 0, 1, range(N))
    train(net, plain, 2, STEPS, range(N))

    def rank(comm):
        net, scaler = make(), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        optimizer, scales, norms = divided(net, comm), [], []
        for step in range(STEPS):
            optimizer.zero_grad()
            bad = float("inf") if step == 1 and comm.rank == 1 else 1.0
            scaler.scale(loss(net, step, comm.rank) * bad).backward()
            if unscaled:  # and what is infinite is clipped
                scaler.unscale_(optimizer)
                for p in net.parameters():
                    p.grad.nan_to_num_(0.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            norms.append(optimizer.grad_norm)
        return values(net), scales, norms

    for found, scales, norms in run_threads(N, rank):
        check(found, values(net))
        assert scales == [1024, 512, 512, 512, 1024, 1024]
        assert np.isnan(norms).tolist() == [step == 1 for step in range(STEPS)]


def test_scalers_that_set_attributes():
    net = make()
    train(net, torch.optim.AdamW(one_group(net), **SETTINGS), 0, 1, range(N))

    def rank(comm):
        net = make()
        optimizer = divided(net, comm, one_group)
        (loss(net, 0, comm.rank) * 8).backward()
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
        optimizer.step()
        stepped = values(net)
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(comm.rank))
        optimizer.step()
        return stepped, values(net)

    for stepped, skipped in run_threads(N, rank):
        check(stepped, values(net))
        check(skipped, stepped)


def test_stepping_the_inner_optimizer_does_nothing():
    def rank(comm):
        net, scaler = make(), torch.amp.GradScaler("cpu")
        optimizer = divided(net, comm)
        for _ in range(2):
            scaler.scale(loss(net, 0, comm.rank)).backward()
            before = values(net)
            optimizer.inner.step()
            with pytest.raises(AssertionError, match="No inf checks"):
                scaler.step(optimizer.inner)
            check(values(net), before)
            optimizer.step()
        return True

    assert run_threads(N, rank) == [True] * N


def test_a_closure_and_hooks():
    def rank(comm):
        net, seen = make(), []
        optimizer = divided(net, comm)
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))

        def closure():
            optimizer.zero_grad()
            value = loss(net, 0, comm.rank)
            value.backward()
            return value

        with torch.no_grad():
            value = optimizer.step(closure)
        norm = optimizer.grad_norm
        net.load_state_dict(PROTOTYPE.state_dict())
        assert closure().item() == value.item()
        assert optimizer.step() == norm > 0
        return seen

    assert run_threads(N, rank) == [["before", "after"] * 2] * N


def test_groups_that_cannot_be():
    def rank(comm):
        net, x = make(), torch.nn.Parameter(torch.zeros(3))
        for groups, message in [
            ([{"params": net[0].parameters()}], "gain, 2.weight, .* are in no group"),
            ([*one_group(net), {"params": x}], "1 parameters in groups are not of the module"),
            ([*one_group(net), {"params": net.gain}], "more than one parameter group"),
        ]:
            with pytest.raises(ValueError, match=message):
                ZeroOptimizer(torch.optim.SGD, net, comm, groups=groups)
        optimizer = divided(net, comm)
        with pytest.raises(ArgumentError, match="groups="):
            optimizer.add_param_group({"params": x})
        return True

    assert run_threads(N, rank) == [True] * N


def test_frozen_parameters():
    net = make()
    net[0].requires_grad_(False)
    plain = torch.optim.AdamW(net.parameters(), **SETTINGS)
    train(net, plain, 0, STEPS, range(N))

    def rank(comm):
        net = make()
        net[0].requires_grad_(False)
        optimizer = ZeroOptimizer(torch.optim.AdamW, net, comm, **SETTINGS)
        train(net, optimizer, 0, STEPS, [comm.rank])
        state = optimizer.state_dict()
        net[0].requires_grad_(True)
        with pytest.raises(ArgumentError, match=r"0.weight, 0.bias, frozen"):
            optimizer.step()
        return values(net), state

    for found, state in run_threads(N, rank):
        check(found, values(net))
        assert state["state"].keys() == plain.state_dict()["state"].keys()
        plain.load_state_dict(state)
