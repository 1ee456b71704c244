"""Levels of a machine, from folders that pretend to be the kernel's, and ranks bound to them."""

import os

import pytest

from pycoll.cli.job.topology import Place, bound, described, shares, topology


def pretend(folder, sockets, nodes, caches, cores, threads):
    """Write a machine: so many of each in the level above; threads are numbered as Linux does."""
    total = sockets * nodes * caches * cores

    def write(path, text):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"{text}\n")

    def spread(first, count):
        return ",".join(
            f"{first + t * total}-{first + count - 1 + t * total}" for t in range(threads)
        )

    for cpu in range(total * threads):
        core = cpu % total
        group = core // cores
        write(f"cpu/cpu{cpu}/topology/physical_package_id", group // caches // nodes)
        write(f"cpu/cpu{cpu}/topology/thread_siblings_list", spread(core, 1))
        write(f"cpu/cpu{cpu}/cache/index0/level", 1)
        write(f"cpu/cpu{cpu}/cache/index0/shared_cpu_list", spread(core, 1))
        write(f"cpu/cpu{cpu}/cache/index3/level", 3)
        write(f"cpu/cpu{cpu}/cache/index3/shared_cpu_list", spread(group * cores, cores))
    for node in range(sockets * nodes):
        write(f"node/node{node}/cpulist", spread(node * caches * cores, caches * cores))
    return topology(folder, range(total * threads))


def test_every_level_is_found(tmp_path):
    places = pretend(tmp_path, 2, 2, 2, 4, 2)
    assert described(places) == "2 sockets, 4 NUMA nodes, 8 last-level caches, 32 cores, 64 threads"
    assert [p.cpu for p in places[:4]] == [0, 32, 1, 33]
    assert places[-1] == Place(1, 3, 28, 31, 63)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16, 20, 64])
def test_ranks_have_whole_cores_next_to_each_other(tmp_path, ranks):
    places = pretend(tmp_path, 2, 1, 2, 4, 2)
    where = {p.cpu: p for p in places}
    found = shares(places, ranks)
    assert len(found) == ranks
    for cpus in found:
        cores = {where[cpu].core for cpu in cpus}
        assert len(cpus) == 2 * len(cores)  # both threads of each
        assert cores == set(range(min(cores), max(cores) + 1))
    firsts = [min(cpus) for cpus in found]
    assert firsts == sorted(firsts)
    if ranks <= 16:
        assert sum(map(len, found)) == len(set().union(*found)) == 32
    if ranks in (2, 8, 16):  # no rank is on two sockets, nor on two caches if it need not be
        assert all(len({where[cpu].socket for cpu in cpus}) == 1 for cpus in found)


def test_a_part_of_a_machine(tmp_path):
    pretend(tmp_path, 2, 1, 1, 2, 1)
    assert [p.socket for p in topology(tmp_path, [1, 2])] == [0, 1]
    assert shares(topology(tmp_path, [1, 2]), 2) == [{1}, {2}]


def test_where_the_kernel_tells_nothing(tmp_path):
    places = topology(tmp_path, [0, 1, 5])
    assert described(places) == "1 socket, 1 NUMA node, 1 last-level cache, 3 cores, 3 threads"
    assert shares(places, 3) == [{0}, {1}, {5}]


def test_processes_started_meanwhile_are_bound():
    usable = os.sched_getaffinity(0)
    one = {min(usable)}
    with bound(one):
        assert os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == usable
    with bound(None):
        assert os.sched_getaffinity(0) == usable
