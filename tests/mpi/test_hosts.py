"""Several hosts: results, bits and failures do not depend on where ranks are."""

import os

import pytest

CHECKS = ["collectives", "roots", "types", "orders", "variants"]
FAILURES = ["mismatches", "refusals", "timeouts", "absences", "leaving", "interrupts"]
FAILURES += ["long_reasons", "late_mates"]


LIMIT = {"PYCOLL_TIMEOUT": "30"}


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 0, 1]])
def test_results(mpi, hosts):
    n = len(hosts)
    found = mpi(n, "transport", *CHECKS, hosts=hosts, timeout=110, **LIMIT)
    assert found.pop("transport") == ["TwoLevelSession"] * n
    assert found == {name: [[]] * n for name in CHECKS}


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 1, 1]])
def test_calls_of_other_kinds_and_failures(mpi, hosts):
    n = len(hosts)
    others = ["background", "groups", "plans"]
    found = mpi(n, *others, *FAILURES, hosts=hosts, timeout=110, **LIMIT)
    assert found == {
        "background": [[True] * 2] * n,
        "groups": [[True] * 3] * n,
        "plans": [["", ""]] * n,
        **{name: [[]] * n for name in FAILURES},
    }


@pytest.mark.parametrize("hosts", [[0, 0, 0, 1, 1, 1], [0, 1, 1, 2, 2, 2], [0, 1, 0, 1]])
def test_hosts_that_do_not_nest_give_the_bits_of_the_tree(mpi, hosts):
    found = mpi(len(hosts), "subtrees", hosts=hosts, timeout=110, **LIMIT)
    assert found == {"subtrees": [[False, []]] * len(hosts)}


def test_ranks_on_one_host_share_memory(mpi):
    found = mpi(3, "transport", "wrapped")
    assert found["transport"] == ["Session"] * 3
    sums = [sum(r % 2 == rank % 2 for r in range(3)) for rank in range(3)]
    assert found["wrapped"] == [[[total, 3.0], True, "Session"] for total in sums]


def test_one_rank_and_ranks_that_cannot_share(mpi):
    assert mpi(1, "transport", "collectives") == {"transport": ["Session"], "collectives": [[]]}
    found = mpi(2, "transport", "collectives", hosts=[0, 1])
    assert found == {"transport": ["MpiSession"] * 2, "collectives": [[], []]}


def test_a_group_on_one_host_knows_the_cores_of_all_its_ranks(mpi):
    """The same number on every rank, or they would not choose the same algorithm."""
    cores = min(2, len(os.sched_getaffinity(0)))
    found = mpi(3, "cores", **LIMIT)["cores"]
    assert found == [[3, cores, cores < 3, total] for total in (2.0, 2.0, 1.0)]


def test_one_communicator_is_wrapped_again_and_again(mpi):
    """MPICH has some two thousand communicators to give."""
    assert mpi(2, "wrapped_again") == {"wrapped_again": [[[], 1]] * 2}


@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_messages_of_the_user_are_not_touched(mpi, transport):
    found = mpi(3, "own_messages", PYCOLL_TRANSPORT=transport)
    assert found == {"own_messages": [[3.0, True]] * 3}


def test_one_rank_cannot_join(mpi):
    found = mpi(3, "one_cannot_join", timeout=60, PYCOLL_TRANSPORT="mpi")["one_cannot_join"]
    why = "MemoryError: none left"
    told = f"TransportError: rank 1 cannot join: {why}"
    for rank, (first, freed, after, *again) in enumerate(found):
        expected = why if rank == 1 else told
        assert (first, freed, after) == (expected, [True], 3.0)  # no communicator of MPI is left
        assert again == [expected, [True, True, False], 3.0]  # but for one that will serve again


def test_one_rank_has_no_way_to_send(mpi):
    found = mpi(3, "one_has_no_way", timeout=60, PYCOLL_TRANSPORT="mpi")["one_has_no_way"]
    why = "MemoryError: none left"
    told = f"TransportError: rank 1 cannot join: {why}"
    for rank, (*failed, after, freed) in enumerate(found):
        assert failed == [why if rank == 1 else told] * 2
        assert (after, freed) == (3.0, [True, True, False])


def test_one_rank_has_no_descriptors(mpi):
    found = mpi(3, "one_has_no_descriptors", timeout=60)["one_has_no_descriptors"]
    steps = ("cannot tell which host", "cannot make shared memory", "cannot keep the heap open")
    for rank, (*failed, after, none_is_lost) in enumerate(found):
        assert (after, none_is_lost) == (3.0, True)
        for text, step in zip(failed, steps, strict=True):
            assert step in text
            assert rank == 0 or text.startswith("rank 0 cannot join: ")
            assert text.endswith("Too many open files")
