from collections import Counter

import numpy as np
import pytest
import torch

from k3train.data.loader import PretrainLoader
from k3train.errors import UserError


class Numbers(torch.utils.data.Dataset):
    """Sample i holds the number i."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.full((4,), index)}


def step_of_all_ranks(dataset, consumed: int, size: int, micro: int, global_batch: int) -> list[int]:
    """The samples of one step over all ranks, in the order of the micro-batches."""
    loaders = [PretrainLoader(dataset, micro, global_batch, rank, size, consumed) for rank in range(size)]
    steps = [next(loader) for loader in loaders]
    assert all(loader.consumed_samples == consumed + global_batch for loader in loaders)
    return [
        int(sample[0])
        for micro_batches in zip(*steps, strict=True)
        for batch in micro_batches
        for sample in batch["tokens"]
    ]


@pytest.mark.parametrize("consumed", [0, 8, 13])
@pytest.mark.parametrize(("size", "micro"), [(1, 1), (1, 8), (2, 1), (2, 4), (4, 1), (4, 2)])
def test_step_takes_the_same_samples_in_any_split(consumed: int, size: int, micro: int) -> None:
    assert step_of_all_ranks(Numbers(40), consumed, size, micro, 8) == list(range(consumed, consumed + 8))


def test_each_sample_once_while_the_layout_and_the_batch_change() -> None:
    dataset = Numbers(100)
    ledger: Counter[int] = Counter()
    consumed = 0
    for size, micro, global_batch, steps in [(2, 2, 8, 3), (1, 4, 8, 2), (4, 1, 8, 4), (2, 1, 4, 7)]:
        loaders = [PretrainLoader(dataset, micro, global_batch, rank, size, consumed) for rank in range(size)]
        for _ in range(steps):
            for loader in loaders:
                ledger.update(int(sample[0]) for batch in next(loader) for sample in batch["tokens"])
        consumed += steps * global_batch
        assert {loader.consumed_samples for loader in loaders} == {consumed}
    assert consumed == 100
    assert ledger == Counter(range(100))


def test_shapes_length_and_end() -> None:
    loader = PretrainLoader(Numbers(21), micro_batch_size=2, global_batch_size=8, data_parallel_rank=1,
                            data_parallel_size=2)  # fmt: skip
    assert (loader.num_microbatches, len(loader)) == (2, 2)
    steps = list(loader)
    assert [[batch["tokens"].shape for batch in step] for step in steps] == [[(2, 4)] * 2] * 2
    assert loader.consumed_samples == 16
    with pytest.raises(StopIteration):
        next(loader)


def test_position_can_be_set() -> None:
    loader = PretrainLoader(Numbers(40), 2, 4, 0, 1)
    first = next(loader)
    next(loader)
    loader.consumed_samples = 0
    again = next(loader)
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_global_generators_are_left_alone(num_workers: int) -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    loader = PretrainLoader(Numbers(40), 2, 8, 1, 2, consumed_samples=8, num_workers=num_workers)
    samples = [int(sample[0]) for batch in next(loader) for sample in batch["tokens"]]
    assert samples == [10, 11, 14, 15]
    assert loader.consumed_samples == 16  # though the workers have read ahead
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_wrong_sizes_are_refused_in_words() -> None:
    with pytest.raises(UserError, match=r"global_batch_size=6 must be a multiple of .* 2 x 2; nearest above is 8"):
        PretrainLoader(Numbers(8), 2, 6, 0, 2)
    with pytest.raises(UserError, match="data_parallel_rank=2 must lie in 0 to 1"):
        PretrainLoader(Numbers(8), 1, 2, 2, 2)
    with pytest.raises(UserError, match="micro_batch_size=0 must be at least 1"):
        PretrainLoader(Numbers(8), 0, 2, 0, 2)
    with pytest.raises(UserError, match="consumed_samples=9 is outside the data set of 8 samples"):
        PretrainLoader(Numbers(8), 1, 2, 0, 2, consumed_samples=9)
