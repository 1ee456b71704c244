"""What is made on every rank or on none."""

import gc
import weakref

import pytest

from pycoll.errors import CollTimeout, PeerLost, TransportError
from pycoll.runtime.startup.rendezvous import Rendezvous, make_everywhere


def fails():
    raise MemoryError("none left")


def nobody_comes(text):
    raise CollTimeout("rank 1 has not come")


@pytest.mark.parametrize("exchange", [lambda text: [text, ""], nobody_comes])
def test_what_failed_here_is_raised_here(exchange):
    with pytest.raises(MemoryError, match="none left"):
        make_everywhere(fails, exchange)


def test_a_death_says_more_than_what_a_rank_could_not_reach():
    def open_memory():
        raise TransportError("no such process")

    def one_died(text):
        raise PeerLost("rank 1 died while it joined")

    with pytest.raises(PeerLost, match="rank 1 died") as caught:
        make_everywhere(open_memory, one_died)
    assert "no such process" in str(caught.value.__cause__)
    with pytest.raises(MemoryError, match="none left"):
        make_everywhere(fails, one_died)


def test_what_failed_elsewhere_undoes_it_here():
    undone = []
    with pytest.raises(TransportError, match="rank 1 cannot join: MemoryError: none left"):
        make_everywhere(lambda: 5, lambda text: [text, "MemoryError: none left"], undone.append)
    assert undone == [5]
    with pytest.raises(CollTimeout, match="rank 1 has not come"):
        make_everywhere(lambda: 5, nobody_comes)


def test_an_interrupt_as_a_collective_begins():
    """MPI may still write to what it was given."""

    class Memory:
        pass

    def begin():
        raise KeyboardInterrupt

    memory, roll = Memory(), Rendezvous(None, None, 1.0)
    with pytest.raises(KeyboardInterrupt):
        roll.finish(begin, memory)
    kept = weakref.ref(memory)
    del memory
    gc.collect()
    assert kept() is not None
    assert roll.broken
