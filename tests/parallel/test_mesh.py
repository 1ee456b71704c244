"""Ranks on a grid."""

import numpy as np
import pytest

from parallel.models import CrossEntropy
from pycoll.errors import ArgumentError, MismatchError
from pycoll.parallel import DataParallel, Mesh, ParameterSpec, Sequential
from pycoll.testing import run_processes, run_threads


def test_axes_and_groups(run):
    def rank(comm):
        with Mesh(comm, replica=2, dp=-1, tp=2) as mesh:
            assert mesh.axes == {"replica": 2, "dp": 2, "tp": 2}
            assert list(mesh.coordinates.values()) == [
                comm.rank // 4,
                comm.rank // 2 % 2,
                comm.rank % 2,
            ]
            me = np.array([comm.rank])
            found = [mesh.tp, mesh.dp, mesh.replica, mesh.group("replica", "dp"), mesh.group()]
            assert mesh.group("dp") is mesh.dp
            assert mesh.size("pp") == 1
            assert mesh.coordinate("pp") == 0
            assert mesh.group("pp") is mesh.group()
            return [group.all_gather(me).tolist() for group in found]

    for r, groups in enumerate(run(8, rank)):
        high, mid, low = r // 4, r // 2 % 2, r % 2
        assert groups[0] == [4 * high + 2 * mid + x for x in range(2)]
        assert groups[1] == [4 * high + 2 * x + low for x in range(2)]
        assert groups[2] == [4 * x + 2 * mid + low for x in range(2)]
        assert groups[3] == [4 * x + 2 * y + low for x in range(2) for y in range(2)]
        assert groups[4] == [r]


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"dp": 3}, "a mesh of dp=3 does not hold 4 ranks"),
        ({"dp": -1, "tp": 3}, "does not hold 4 ranks"),
        ({"dp": -1, "tp": -1}, "axes dp, tp are all -1"),
        ({"dp": 0}, "axis dp=0"),
        ({"dp": 2.0, "tp": 2}, "axis dp=2.0"),
        ({"size": 4}, "an axis cannot be named 'size'"),
    ],
)
def test_sizes_that_do_not_fit(axes, text):
    def rank(comm):
        with pytest.raises(ArgumentError) as caught:
            Mesh(comm, **axes)
        return str(caught.value)

    assert all(text in message for message in run_threads(4, rank))


def test_without_axes_all_ranks_are_data_parallel():
    assert run_threads(3, lambda comm: Mesh(comm).axes) == [{"dp": 3}] * 3


@pytest.mark.parametrize(
    "pair", [({"dp": 4}, {"dp": 2, "tp": 2}), ({"dp": 2, "tp": 2}, {"tp": 2, "dp": 2})]
)
def test_different_meshes(pair):
    def rank(comm):
        with pytest.raises(MismatchError, match=r"different meshes: rank 0 has dp=.*; rank 3 has"):
            Mesh(comm, **pair[comm.rank >= 2])
        return comm.all_reduce(np.ones(1))[0]

    assert run_threads(4, rank) == [4] * 4


def test_axes_that_do_not_fit_on_one_rank():
    def rank(comm):
        kind = ArgumentError if comm.rank == 1 else MismatchError
        with pytest.raises(kind, match="dp=3 does not hold 2 ranks"):
            Mesh(comm, dp=2 + comm.rank)
        return comm.all_reduce(np.ones(1))[0]

    assert run_threads(2, rank) == [2, 2]


def test_unknown_axes_and_closing():
    def rank(comm):
        mesh = Mesh(comm, dp=2)
        with pytest.raises(AttributeError, match="no axis 'tp'; it has dp"):
            _ = mesh.tp
        assert repr(mesh) == f"<pycoll.parallel.Mesh dp=2, rank {comm.rank}>"
        mesh.close()
        return int(comm.all_reduce(np.ones(1, np.int64))[0])

    assert run_processes(2, rank) == [2, 2]


def test_parameters_that_differ_in_one_column_of_a_mesh():
    class Split:
        def __init__(self, value):
            self.value = value

        def parameters(self):
            return {"weight": ParameterSpec((2, 2), init=self.init, tensor_axis=0)}

        def init(self, shape):
            return np.full(shape, self.value)

    def rank(comm):
        mesh = Mesh(comm, dp=2, tp=2)
        model = Sequential([("a", Split(float(comm.rank == 2)))])
        with pytest.raises(MismatchError, match=r"parameter a.weight differs at the start: rank"):
            DataParallel(model, CrossEntropy(), mesh)
        return comm.all_reduce(np.ones(1))[0]

    assert run_threads(4, rank) == [4] * 4
