"""Calls of a communicator on tensors: like earlier ones, they need no Python code."""

import gc
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from communicator.calls.test_fast_path import twice  # noqa: E402
from pycoll.errors import ArgumentError, MismatchError  # noqa: E402
from pycoll.testing import run_processes, run_threads  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="this PyTorch does not have DLPack's C exchange API, which came with 2.10",
)
DTYPES = "float16 bfloat16 float32 float64 int8 uint8 int16 int32 int64".split()


@pytest.fixture(params=["threads", "processes"])
def run(request):
    return run_threads if request.param == "threads" else run_processes


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(run, name):
    dtype = getattr(torch, name)

    def rank(comm):
        x = torch.arange(30).reshape(5, 6).to(dtype)
        out, place = torch.empty(5, 6, dtype=dtype), x.clone()
        results = [
            twice(comm, lambda: comm.all_reduce(x)),
            twice(comm, lambda: comm.all_reduce(x, out=out)),
            twice(comm, lambda: comm.all_reduce(x, out=out, async_op=True).wait()),
            twice(comm, lambda: comm.all_reduce(x.T)).T,
            twice(comm, lambda: comm.all_reduce(x[:, :], order="rank")),
        ]
        comm.all_reduce(place, out=place)
        want = 2 * x
        gathered = twice(comm, lambda: comm.all_gather(x))
        assert torch.equal(gathered, torch.cat([x, x])), gathered
        return [torch.equal(result, want) for result in (*results, place)]

    assert run(2, rank) == [[True] * 6] * 2


def test_truth_values_and_complex_numbers(run):
    def rank(comm):
        truth = torch.tensor([True, False, comm.rank == 0])
        waves = torch.tensor([1 + 2j, 3j]) * (comm.rank + 1)
        both = twice(comm, lambda: comm.all_reduce(truth, "or"))
        sums = [comm.all_reduce(waves) for _ in range(3)][-1]
        return both.tolist(), sums.tolist()

    assert run(2, rank) == [([True, False, True], [3 + 6j, 9j])] * 2


def test_tensors_and_arrays_together(run):
    """The result may be of the other kind, and of either kind are calls of their own."""

    def rank(comm):
        array, tensor = np.arange(6.0), torch.arange(6.0, dtype=torch.float64)
        for _ in range(3):
            for x in (array, tensor):
                for out in (np.empty(6), torch.empty(6, dtype=torch.float64), None):
                    result = comm.all_reduce(x, out=out)
                    assert type(result) is type(x if out is None else out)
                    assert np.array_equal(np.asarray(result), 2 * array)
        return True

    assert run(2, rank) == [True] * 2


def freed(x, behind=0, left=0):
    """Return a copy of a tensor behind other elements, whose memory has `left` of them all."""
    x = torch.cat([x.new_ones(behind), x])[behind:]
    x.untyped_storage().resize_(left * x.element_size())
    return x


BAD = {
    "a gradient is wanted": (lambda x: x.clone().requires_grad_(), "gradient"),
    "the sign is kept apart": (torch._neg_view, "resolve_neg"),
    "sparse": (lambda x: x.to_sparse(), "x"),
    "on no device": (lambda x: x.to("meta"), "meta"),
    "memory that was freed": (freed, "has been freed"),
    "memory that was freed, and an offset": (lambda x: freed(x, 8), "has been freed"),
    "half of the memory was freed": (lambda x: freed(x, 8, 12), "has been freed"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("warm", [False, True])
def test_what_the_memory_does_not_tell(what, warm):
    change, text = BAD[what]

    def rank(comm):
        x = torch.ones(8)
        for _ in range(3 * warm):
            comm.all_reduce(x)
            comm.all_reduce(x, out=x)
        bad = change(x)
        with pytest.raises(ArgumentError, match=text):
            comm.all_reduce(bad)
        with pytest.raises(ArgumentError):
            comm.all_reduce(x, out=bad)
        return float(comm.all_reduce(torch.ones(8)).sum())

    assert run_threads(2, rank) == [16.0] * 2


def test_signs_that_are_kept_apart_with_gaps():
    """The imaginary part of a conjugate is such a view, which PyTorch exports without its sign."""

    def rank(comm):
        waves = torch.tensor([1 + 2j, 3 + 4j])
        with pytest.raises(ArgumentError, match="resolve_neg"):
            comm.all_reduce(waves.conj().imag)
        return comm.all_reduce(waves.conj().imag.resolve_neg()).tolist()

    assert run_threads(2, rank) == [[-4.0, -8.0]] * 2


def test_a_tensor_of_another_type_or_shape_is_prepared_anew(run):
    class Mine(torch.Tensor):
        pass

    def rank(comm):
        x = torch.ones(8)
        for _ in range(3):
            comm.all_reduce(x)
        results = [
            comm.all_reduce(x.as_subclass(Mine)).as_subclass(torch.Tensor),
            comm.all_reduce(torch.nn.Parameter(x, requires_grad=False)),
            comm.all_reduce(x.reshape(2, 4)),
            comm.all_reduce(x.double()),
            comm.all_reduce(x.reshape(1, 1, 1, 1, 1, 1, 8)),
            comm.all_reduce(torch.ones(8, 2)[:, :1]),
        ]
        return [(str(r.dtype), float(r.sum())) for r in results]

    want = [(f"torch.{'float64' if i == 3 else 'float32'}", 16.0) for i in range(6)]
    assert run(2, rank) == [want] * 2


def test_mismatches_are_found(run):
    def rank(comm):
        x = torch.ones(8)
        for _ in range(3):
            comm.all_reduce(x)
            comm.all_reduce(x[:4])
        with pytest.raises(MismatchError):
            comm.all_reduce(x if comm.rank else x[:4])
        return True

    assert run(2, rank) == [True] * 2


def test_symmetric_memory(run):
    def rank(comm):
        x, out = (torch.from_numpy(comm.empty(1000, np.float32)) for _ in range(2))
        x.fill_(comm.rank + 1)
        twice(comm, lambda: comm.all_reduce(x, out=out))
        comm.all_reduce(x, out=x)
        return float(out.sum()), float(x.sum()), float(comm.all_reduce(torch.ones(1000)).sum())

    assert run(2, rank) == [(3000.0, 3000.0, 2000.0)] * 2


def test_nothing_is_kept_alive():
    def rank(comm):
        x, out = torch.ones(8), torch.empty(8)
        for _ in range(3):
            comm.all_reduce(x)
            comm.all_reduce(x[::2], out=out[:4])
            comm.all_reduce(x, out=out, async_op=True).wait()
        seen = [weakref.ref(x), weakref.ref(out)]
        comm.barrier()
        del x, out
        gc.collect()
        return [ref() is None for ref in seen]

    assert run_threads(2, rank) == [[True, True]] * 2
