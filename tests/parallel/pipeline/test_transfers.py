"""Arrays go from stage to stage in the background, and an error leaves none on its way."""

import sys
import time

import numpy as np
import pytest

from pycoll.errors import ArgumentError, CollError, CommClosed
from pycoll.parallel import Ledger, Mesh, Pipeline
from pycoll.parallel.channels import Channel
from pycoll.parallel.nn import CrossEntropy, Linear, ReLU, Sequential
from pycoll.parallel.pipeline.transfers import MOST_SENDS, Transfers
from pycoll.parallel.random import Key
from pycoll.testing import run_threads

BIG = 1 << 21  # of them no mailbox has room
SHAPES = [(3,), (3,), (2, 5), (5, 2), (BIG,), (BIG,), (2, BIG // 2), (7,), (0, 4), (7,), (16,)]


def arrays():
    kinds = {len(SHAPES) - 4: "f8", len(SHAPES) - 1: "i8"}  # the last one could be a head
    return [np.full(shape, i, kinds.get(i, "f4")) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("early", [0, 3])
@pytest.mark.parametrize("kind", ["kind", None])
@pytest.mark.parametrize("change", [1, 4])
def test_a_guess_of_the_form_may_be_wrong(early, kind, change):
    """Type, shape or number are others than before, also while receives are posted ahead."""

    def rank(comm):
        transfers = Transfers(Channel(comm, "pp", Ledger()), Ledger())
        if comm.rank == 0:
            for i, x in enumerate(arrays()):
                transfers.post(x, 1, i, number=i // change, kind=kind)
            return transfers.finish()
        for i, x in enumerate(arrays()):
            for tag in range(i, min(i + early, len(SHAPES))):
                transfers.expect(0, tag, kind)
            found, number = transfers.receive(0, i, kind=kind)
            assert (number, found.dtype, found.shape) == (i // change, x.dtype, x.shape)
            np.testing.assert_array_equal(found, x)

    run_threads(2, rank)


def test_what_is_no_array_is_refused():
    """NumPy would stack a tuple of arrays, and give one without axes an axis."""

    def rank(comm):
        transfers = Transfers(Channel(comm, "pp", Ledger()), Ledger())
        x = np.ones((2, 3), "f4")
        for several in ((x, x), [x]):
            with pytest.raises(ArgumentError, match=r"a (tuple|list) cannot go from"):
                transfers.post(several, 1 - comm.rank, 0)
        if comm.rank == 0:
            transfers.send(np.float32(7), 1, 0)
        else:
            assert transfers.receive(0, 0)[0].shape == ()
        assert transfers.share(np.float32(7), 0).shape == ()

    run_threads(2, rank)


def test_a_head_comes_only_before_what_is_new():
    sent = []

    class Counted:
        def __init__(self, comm):
            self.world_size, self.rank, self.recv, self._comm = 2, comm.rank, comm.recv, comm

        def isend(self, x, *ends):
            sent.append(x.nbytes)
            return self._comm.isend(x, *ends)

    def rank(comm):
        transfers = Transfers(Channel(Counted(comm), "pp", Ledger()), Ledger())
        for i, shape in enumerate([(3,), (3,), (3,), (4,), (4,)]):
            if comm.rank == 0:
                transfers.post(np.zeros(shape), 1, i, kind="kind")
            else:
                assert transfers.receive(0, i, kind="kind")[0].shape == shape
        transfers.finish()

    run_threads(2, rank)
    assert sent == [128, 24, 24, 24, 128, 32, 32]


def test_so_many_are_on_their_way_and_no_more():
    def rank(comm):
        ledger = Ledger()
        transfers = Transfers(Channel(comm, "pp", ledger), ledger)
        if comm.rank == 0:
            start = time.monotonic()
            for i in range(MOST_SENDS):  # each is larger than a mailbox
                transfers.post(np.full(1 << 21, i, "f4"), 1, 2 * i)
            early = time.monotonic() - start
            transfers.post(np.zeros(1), 1, 2 * MOST_SENDS)
            transfers.finish()
            return early, ledger.waits["pipeline"]
        time.sleep(0.5)
        for i in range(MOST_SENDS + 1):
            assert (transfers.receive(0, 2 * i)[0] == i % MOST_SENDS).all()

    early, waited = run_threads(2, rank)[0]
    assert early < 0.4 < waited + early


def test_an_error_of_a_send_says_what_was_sent():
    def rank(comm):
        transfers = Transfers(Channel(comm, "pp", Ledger()), Ledger())
        if comm.rank == 0:
            transfers.post(np.zeros(1 << 21), 1, 0, place=lambda: "SEND of x of micro-batch 7")
            with pytest.raises(CollError) as caught:
                transfers.finish()
            assert sys.version_info < (3, 11) or "micro-batch 7" in caught.value.__notes__[0]
        else:
            time.sleep(0.1)

    run_threads(2, rank)


class Faulty(Linear):
    def backward_input(self, params, saved, dy):
        raise ValueError("no gradient today")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "pipedream"])
def test_an_error_leaves_nothing_on_its_way(schedule):
    """Even if the rank with the error keeps it to itself: the others do not wait for it."""

    def rank(comm):
        key, found = Key(0), []
        layers = [("in", Linear(8, 8, key)), ("relu", ReLU()), ("odd", Faulty(8, 8, key))]
        rng = np.random.default_rng(0)
        batch = [(rng.standard_normal((5, 8)).astype("f4"), rng.integers(0, 8, 5))] * 6
        with Mesh(comm, pp=2) as mesh:
            engine = Pipeline(Sequential(layers), CrossEntropy(), mesh, schedule, 6, ["odd"])
            session = engine.groups.pipeline.comm._session

            def train():
                for _ in range(2):
                    engine.step(batch)

            with pytest.raises((CollError, ValueError), match="no gradient today"):
                train()
            with pytest.raises(CollError) as caught:
                engine.step(batch)
            found = len(session.under_way), caught.type, mesh.world.all_reduce(np.ones(1))[0]
        return found

    for left, kind, ranks in run_threads(2, rank):
        assert left == 0
        assert schedule == "pipedream" or kind is CommClosed
        assert ranks == 2  # the communicators of the program go on
