"""The order of samples through PyTorch's loader."""

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from pycoll.errors import ArgumentError  # noqa: E402
from pycoll.parallel import Sampler  # noqa: E402
from pycoll.torch.sampler import BatchSampler  # noqa: E402


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gets_the_micro_batches_of_its_rank(workers):
    data, sampler = TensorDataset(torch.arange(20)), Sampler(20, batch=8, micro_batch=2, seed=4)
    seen = []
    for rank in range(2):
        batches = BatchSampler(sampler, rank, 2)
        loader = DataLoader(data, batch_sampler=batches, num_workers=workers)
        seen.append([batch[0].tolist() for batch in loader])
        assert len(seen[-1]) == len(batches) == 3 * 2
    for step in range(3):
        ranks = [rows[2 * step : 2 * step + 2] for rows in seen]
        expected = [part.tolist() for part in sampler.part(8 * step)]
        assert ranks[0] + ranks[1] == expected


def test_a_data_set_in_place_of_a_sampler():
    with pytest.raises(ArgumentError, match="sampler is a TensorDataset; expected"):
        BatchSampler(TensorDataset(torch.arange(20)))


def test_an_iteration_begins_where_training_is():
    """Reading ahead moves nothing."""
    sampler = Sampler(20, batch=8, micro_batch=8)
    batches = BatchSampler(sampler)
    next(iter(batches))
    assert next(iter(batches)) == sampler.part(0)[0].tolist()
    sampler.position += sampler.batch
    assert next(iter(batches)) == sampler.part(8)[0].tolist()
    assert len(batches) == 2


def test_ranks_that_there_are_not():
    with pytest.raises(ArgumentError, match="rank=3"):
        BatchSampler(Sampler(20, batch=8), 3, 2)
