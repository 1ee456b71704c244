"""Settings that differ between ranks, optimizers of users, and numbers that are refused."""

import hashlib
import re
from dataclasses import replace

import numpy as np
import pytest

from parallel.engine.test_data_parallel import digest
from parallel.models import CrossEntropy, batches, mlp
from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel import (
    SGD,
    AdamW,
    Compress,
    DataParallel,
    Hook,
    LossScale,
    Mesh,
    Options,
    PowerSGD,
    Precision,
    TopK,
    WarmupCosine,
    WarmupLinear,
    estimate,
)
from pycoll.testing import run_processes, run_threads

INF, NAN = float("inf"), float("nan")
FORMATS = ("float32", "float32")


class Descent:
    """An optimizer as a user writes it: no base class, no text of its own."""

    slots = ("seen",)

    def __init__(self, lr=0.1, **more):
        self.lr, self._cache = lr, object()
        self.__dict__.update(more)

    def update(self, args, fused=True):
        args.slots["seen"] += args.grad
        gradient, kind = args.scaled()
        args.param -= kind(args.lr) * gradient


class Doubling(Hook):
    """A hook as a user writes it."""

    def __init__(self, factor=2.0):
        self.factor = factor

    def all_reduce(self, key, data, layout, channel, order):
        data *= self.factor
        return super().all_reduce(key, data, layout, channel, order)


def engine(comm, **options):
    return DataParallel(mlp(), CrossEntropy(), Mesh(comm, dp=-1), **options)


@pytest.mark.parametrize(
    ("name", "first", "second", "told"),
    [
        ("loss_scale", LossScale(1024), LossScale(1), "LossScale("),
        ("loss_scale", None, LossScale(1, growth=1, backoff=1), "None"),
        ("nonfinite", "skip", "error", "'skip'"),
        ("unused", "zero", "error", "'zero'"),
        ("start", "trust", "check", "'trust'"),
        ("clip_norm", 1.0, INF, "1"),
        ("order", "tree", "rank", "'tree'"),
        ("precision", Precision("own", *FORMATS), Precision("own", *FORMATS, master=True), "Prec"),
        ("optimizer", SGD(0.1), SGD(0.1, momentum=0.9), "SGD(lr=0.1, momentum=0, "),
        ("optimizer", Descent(0.1), Descent(0.2), "Descent(lr=0.1, slots=('seen',))"),
        ("optimizer", Descent(rates=np.ones(3)), Descent(rates=np.zeros(3)), "Descent(lr=0.1, "),
        ("hook", None, Compress("float16"), "None"),
        (
            "hook",
            Compress("float16"),
            Compress("bfloat16"),
            "Compress(devices=('cpu', 'cuda'), dtype=f",
        ),
        ("hook", TopK(0.1), TopK(0.2), "TopK(devices=('cpu',), ratio=0.1"),
        ("hook", PowerSGD(1), PowerSGD(2), "PowerSGD(devices=('cpu',), rank=1"),
        ("hook", Doubling(2), Doubling(3), "Doubling(devices=('cpu', 'cuda'), factor=2"),
    ],
)
def test_every_setting_that_matters_is_compared(name, first, second, told):
    def rank(comm):
        with pytest.raises(MismatchError) as caught:
            engine(comm, **{name: second if comm.rank == 1 else first})
        comm.barrier()  # still usable
        return str(caught.value)

    (text,) = set(run_threads(3, rank))
    head = "ranks have different models or settings: ranks 0, 2: "
    assert text.startswith(f"{head}{name}={told}")
    assert f"; rank 1: {name}=" in text


def test_optimizers_and_hooks_of_users_train():
    """In processes, whose objects lie at other addresses."""

    def rank(comm):
        padding = [object() for _ in range(100 * comm.rank)]
        with engine(comm, optimizer=Descent(), hook=Doubling(2), order="rank") as trainer:
            for step in range(3):
                trainer.step([batches(2, seed=step)[comm.rank]])
            return len(padding), [value.tobytes() for value in trainer.gather().values()]

    def reference(comm):
        with engine(comm, optimizer=SGD(0.2), order="rank") as trainer:
            for step in range(3):
                trainer.step([batches(2, seed=step)[comm.rank]])
            return [value.tobytes() for value in trainer.gather().values()]

    def digests(found):
        return {hashlib.sha256(b"".join(values)).hexdigest() for values in found}

    found = run_processes(2, rank)
    expected = run_threads(2, reference)
    assert digests(values for _, values in found) == digests(expected)


def test_infinite_bound_only_measures():
    def rank(comm, bound):
        with engine(comm, optimizer=SGD(0.1), clip_norm=bound) as trainer:
            norms = [trainer.step(batches(1)).grad_norm for _ in range(3)]
            return norms, [value.tobytes() for value in trainer.gather().values()]

    assert run_threads(1, rank, INF) == run_threads(1, rank, None)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Options(clip_norm=-1.0), r"clip_norm=-1.0; accepted are numbers in \(0, inf\]"),
        (lambda: Options(clip_norm=0), "clip_norm=0;"),
        (lambda: Options(clip_norm=NAN), "clip_norm=nan;"),
        (lambda: Options(clip_norm="1"), "clip_norm='1';"),
        (lambda: Options(bucket_bytes=0), r"bucket_bytes=0; accepted are numbers in \[1, inf\)"),
        (lambda: Options(bucket_bytes=NAN), "bucket_bytes=nan"),
        (lambda: Options(bucket_bytes=INF), "bucket_bytes=inf"),
        (lambda: Options(optimizer=AdamW), "optimizer=.*; expected an optimizer, such as"),
        (lambda: Options(optimizer="adamw"), "optimizer='adamw'; expected an optimizer"),
        (lambda: Options(loss_scale=1024.0), "loss_scale=1024.0; expected a LossScale, or None"),
        (lambda: Options(hook=TopK), "hook=.*; expected a Hook, or None"),
        (lambda: Options(wrap=None), "wrap=None; expected a function"),
        (lambda: Options(prefetch=-1), r"prefetch=-1; accepted are integers in \[0, inf\)"),
        (lambda: Options(prefetch=1.5), "prefetch=1.5"),
        (lambda: LossScale(0), r"value=0; accepted are numbers in \[1e-37, inf\)"),
        (lambda: LossScale(NAN), "value=nan"),
        (lambda: LossScale(growth=0.5), "growth=0.5"),
        (lambda: LossScale(backoff=2.0), "backoff=2.0"),
        (lambda: LossScale(backoff=0), "backoff=0"),
        (lambda: LossScale(interval=0), "interval=0"),
        (lambda: LossScale(good_steps=-1), "good_steps=-1"),
        (lambda: SGD(-0.1), "lr=-0.1"),
        (lambda: SGD(NAN), "lr=nan"),
        (lambda: SGD(momentum=NAN), "momentum=nan"),
        (lambda: SGD(momentum=1.5), "momentum=1.5"),
        (lambda: SGD(weight_decay=-1), "weight_decay=-1"),
        (lambda: AdamW(INF), "lr=inf"),
        (lambda: AdamW(betas=(1.0, 0.9)), r"betas\[0\]=1.0; accepted are numbers in \[0, 1\)"),
        (lambda: AdamW(betas=(0.9, NAN)), r"betas\[1\]=nan"),
        (lambda: AdamW(betas=(0.9, 0.99, 0.9)), "3 betas; expected 2"),
        (lambda: AdamW(eps=-1e-8), "eps=-1e-08"),
        (lambda: AdamW(weight_decay=NAN), "weight_decay=nan"),
        (lambda: WarmupCosine(-1, 1, 2), "peak=-1"),
        (lambda: WarmupCosine(1, -1, 2), "warmup=-1"),
        (lambda: WarmupCosine(1, 1, NAN), "total=nan"),
        (lambda: WarmupCosine(1, 1, 2, -1), "floor=-1"),
        (lambda: WarmupLinear(NAN, 1), "peak=nan"),
        (lambda: WarmupLinear(1, 1, start=-1), "start=-1"),
        (lambda: TopK(NAN), "ratio=nan"),
        (lambda: PowerSGD(NAN), "rank=nan"),
        (lambda: PowerSGD(1.5), r"rank=1.5; accepted are integers in \[1, inf\)"),
        (lambda: estimate(1000, micro_batches=0), "micro_batches=0"),
    ],
)
def test_numbers_that_cannot_be_used(make, told):
    with pytest.raises(ArgumentError, match=told):
        make()


def test_numbers_at_the_edge_are_accepted():
    SGD(0.0, momentum=1.0)
    AdamW(np.float32(0), betas=(0, 0.5), eps=0, weight_decay=0)
    LossScale(1, growth=1, backoff=1, interval=1)
    Options(clip_norm=INF, bucket_bytes=25e6, prefetch=np.int64(0))


@pytest.mark.parametrize("lr", [NAN, INF, -0.1])
def test_a_learning_rate_of_one_step_is_looked_at(lr):
    def rank(comm):
        trainer = engine(comm)
        with pytest.raises(ArgumentError, match="lr="):
            trainer.step(batches(1), lr=lr)
        return trainer.steps, trainer.step(batches(1), lr=0.0).skipped

    assert run_threads(2, rank) == [(0, False)] * 2


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lr": 0.1}, "there is no option lr; optimizers have it, as in optimizer=AdamW(lr=...)"),
        ({"momentum": 0.9}, "optimizer=SGD(momentum=...)"),
        ({"sync_evry": 2}, "there is no option sync_evry; did you mean sync_every?"),
        ({"gpus": 2}, "there is no option gpus; known: zero, optimizer, "),
        ({"options": SGD(0.1)}, "expected Options, or settings by name: optimizer=..."),
    ],
)
def test_settings_that_there_are_not(settings, told):
    def rank(comm):
        with pytest.raises(ArgumentError, match=re.escape(told)):
            engine(comm, **settings)

    run_threads(1, rank)


@pytest.mark.parametrize("lr", [NAN, -0.1, "high"])
@pytest.mark.parametrize("zero", [0, 3])
def test_peers_hear_of_a_learning_rate_that_one_rank_cannot_use(lr, zero):
    def rank(comm):
        trainer = engine(comm, zero=zero)
        with pytest.raises(ArgumentError) as caught:
            trainer.step(batches(1), lr=lr if comm.rank == 1 else 0.1)
        return str(caught.value), trainer.steps, trainer.step(batches(1)).skipped

    told = f"the step was not taken: rank 1 has lr={lr!r}; accepted are numbers in [0, inf)"
    assert run_threads(3, rank) == [(told, 0, False)] * 3


@pytest.mark.parametrize(
    ("wrong", "who"),
    [({0}, "rank 0 has"), ({0, 2}, "ranks 0, 2 have"), ({0, 1, 2}, "all ranks have")],
)
def test_what_several_ranks_do_wrong_is_said_once(wrong, who):
    def rank(comm):
        trainer = engine(comm)
        with pytest.raises(ArgumentError) as caught:
            trainer.step(batches(1), lr=-1 if comm.rank in wrong else 0.1)
        return str(caught.value)

    told = f"the step was not taken: {who} lr=-1; accepted are numbers in [0, inf)"
    assert run_threads(3, rank) == [told] * 3


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda e: vars(e.options.optimizer).update(decay=0.5), "optimizer=Descent(decay=0.5"),
        (lambda e: vars(e).update(options=replace(e.options, clip_norm=0.5)), "clip_norm=0.5"),
        (lambda e: vars(e).update(loss_scale=LossScale(2.0)), "loss_scale=LossScale("),
        (lambda e: vars(e).update(steps=7), "steps=7"),
    ],
)
def test_settings_that_one_rank_has_changed_between_steps(change, told, zero):
    def rank(comm):
        trainer = engine(comm, optimizer=Descent(decay=0.0), zero=zero)
        trainer.step(batches(1))
        before = digest(trainer.gather())
        if comm.rank == 1:
            change(trainer)
        with pytest.raises(MismatchError) as caught:
            trainer.step(batches(1))
        assert digest(trainer.gather()) == before
        return str(caught.value)

    (text,) = set(run_threads(3, rank))
    assert text.startswith("the step was not taken: ranks have different settings: ranks 0, 2: ")
    assert f"; rank 1: {told}" in text


def test_a_loss_scale_stays_a_number_for_ever():
    scale = LossScale(2.0**1023, interval=1)
    assert scale.after(False).value == 2.0**1023
    assert LossScale(2.0**1000, interval=1).after(False).value == 2.0**1001
    scale = LossScale(4.0)
    assert [scale.after(True).value, scale.after(True).after(True).value] == [2.0, 1.0]
    lowest = scale.after(True).after(True)
    assert lowest.exhausted
    assert lowest.after(True).value == 1.0
    assert not LossScale(2.0**-4, backoff=1.0).exhausted  # constant
