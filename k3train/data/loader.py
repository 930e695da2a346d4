"""Batches for one rank: which samples, in which order, from which position."""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from k3train.errors import UserError

Batch = dict[str, torch.Tensor]


class PretrainLoader:
    """Yields the micro-batches of one global step at a time, for one data-parallel rank.

    Step k trains on the samples [consumed_samples, consumed_samples + global_batch_size) of the data set,
    whatever the data-parallel size and the micro-batch size: micro-batch m of rank r takes the
    `micro_batch_size` samples from `consumed_samples + (m * data_parallel_size + r) * micro_batch_size` on.
    The order itself is the data set's. The position is the one number `consumed_samples`; it counts what has
    been handed out, not what a worker process has read ahead.

    Neither building nor iterating draws from the global random number generators.

    Args:
        dataset: of dicts of tensors; all samples have the same shapes.
        micro_batch_size: samples per micro-batch, b.
        global_batch_size: samples per step, over all ranks.
        data_parallel_rank: rank in the data-parallel group.
        data_parallel_size: size of the data-parallel group.
        consumed_samples: samples trained on before, by all ranks together.
        seed: of the worker processes' generators; without effect on which samples are read.
        num_workers: processes that read ahead; 0 reads in this one.

    Raises:
        UserError: a size is not positive, the global batch does not divide, or the position lies past the
            end.
    """

    def __init__(
        self,
        dataset: Dataset,
        micro_batch_size: int,
        global_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        consumed_samples: int = 0,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        _check_sizes(micro_batch_size, global_batch_size, data_parallel_rank, data_parallel_size)
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.num_microbatches = global_batch_size // (micro_batch_size * data_parallel_size)
        self._dataset = dataset
        self._seed = seed
        self._num_workers = num_workers
        self._micro_batches: Iterator[Batch] | None = None
        self.consumed_samples = consumed_samples

    @property
    def consumed_samples(self) -> int:
        """Samples handed out by all ranks together; set it to move to another position."""
        return self._consumed_samples

    @consumed_samples.setter
    def consumed_samples(self, value: int) -> None:
        if not 0 <= value <= len(self._dataset):
            raise UserError(
                f"consumed_samples={value} is outside the data set of {len(self._dataset)} samples; "
                "a run that continues needs a train_samples at least as large as what it has consumed."
            )
        self._consumed_samples = value
        self._micro_batches = None

    def __len__(self) -> int:
        """Whole steps that are left."""
        return (len(self._dataset) - self._consumed_samples) // self.global_batch_size

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The `num_microbatches` batches of the next step; each tensor is [b, ...].

        Raises:
            StopIteration: fewer samples are left than a step takes.
        """
        if len(self) == 0:
            raise StopIteration
        if self._micro_batches is None:
            self._micro_batches = self._read()
        batches = [next(self._micro_batches) for _ in range(self.num_microbatches)]
        self._consumed_samples += self.global_batch_size
        return batches

    def sample_indices(self, consumed_samples: int) -> list[list[int]]:
        """The samples of each micro-batch of this rank for the step that starts at `consumed_samples`."""
        starts = (
            consumed_samples + (index * self.data_parallel_size + self.data_parallel_rank) * self.micro_batch_size
            for index in range(self.num_microbatches)
        )
        return [list(range(start, start + self.micro_batch_size)) for start in starts]

    def _read(self) -> Iterator[Batch]:
        """All micro-batches from the present position to the end."""
        first = self._consumed_samples
        steps = range(first, first + len(self) * self.global_batch_size, self.global_batch_size)
        order = (indices for consumed in steps for indices in self.sample_indices(consumed))
        if self._num_workers == 0:
            return (default_collate([self._dataset[index] for index in indices]) for indices in order)
        # A DataLoader without a generator of its own draws its workers' seed from the global one.
        generator = torch.Generator().manual_seed(self._seed)
        loader = DataLoader(
            self._dataset, batch_sampler=_Once(order), num_workers=self._num_workers, generator=generator
        )
        return iter(loader)


class _Once:
    """A batch sampler over an iterator that is read a single time."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches


def _check_sizes(micro_batch_size: int, global_batch_size: int, rank: int, size: int) -> None:
    for name, value in (
        ("micro_batch_size", micro_batch_size),
        ("global_batch_size", global_batch_size),
        ("data_parallel_size", size),
    ):
        if value < 1:
            raise UserError(f"{name}={value} must be at least 1.")
    if not 0 <= rank < size:
        raise UserError(f"data_parallel_rank={rank} must lie in 0 to {size - 1}.")
    if global_batch_size % (micro_batch_size * size):
        raise UserError(
            f"global_batch_size={global_batch_size} must be a multiple of micro_batch_size x "
            "data_parallel_size = "
            f"{micro_batch_size} x {size}; nearest above is "
            f"{-(-global_batch_size // (micro_batch_size * size)) * micro_batch_size * size}."
        )
