"""Finished groups as rows of packed tokens with what the objective needs of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k3train.config.rl import ObjectiveConfig
from k3train.rl.objective import group_advantages, response_weights
from k3train.rl.trajectory import ENVIRONMENT, Group, Trajectory

# Per token of a row beside tokens, labels, loss_mask, document_ids and padding; all belong to the label.
VALUES = ("behaviour", "advantage", "weight", "fresh", "teacher")


def trainable(groups: Sequence[Group]) -> list[tuple[Group, list[Trajectory]]]:
    """The groups and their samples that can be trained on: without those that failed, in groups of at least 2."""
    kept = [(g, [s for s in g.samples if s.finish != "failed" and s.drawn]) for g in groups]
    return [(g, samples) for g, samples in kept if len(samples) > 1]


def with_signal(groups: Sequence[Group], config: ObjectiveConfig) -> list[Group]:
    """The groups to train on: all, or with `skip_uniform` those whose rewards differ, where there are any."""
    if not config.skip_uniform:
        return list(groups)
    mixed = [g for g, samples in trainable(groups) if len({s.reward for s in samples}) > 1]
    return mixed or list(groups)


def examples(
    groups: Sequence[Group],
    config: ObjectiveConfig,
    version: int,
    teacher: dict[tuple[int, int], list[float]] | None = None,
) -> list[dict[str, torch.Tensor]]:
    """One dict of 1-D tensors for each sample: inputs, and of each label whether it is trained and with what.

    `fresh` is 1 where the policy in training drew the label. `teacher` has log-probabilities of the tokens behind the
    prompt, by (uid, sample number), for the `mopd` signal.
    """
    chosen = trainable(groups)
    flat = [(group, sample) for group, samples in chosen for sample in samples]
    advantages = [a for _, samples in chosen for a in group_advantages([s.reward for s in samples], config.baseline)]
    lengths, uids = [sample.drawn for _, sample in flat], [group.uid for group, _ in flat]
    weights = response_weights(lengths, config.normalization, uids)
    out = []
    for (group, sample), advantage, weight in zip(flat, advantages, weights):
        text = torch.tensor([*group.prompt, *sample.tokens])
        before = len(group.prompt) - 1  # labels that are prompt
        own = torch.tensor([v != ENVIRONMENT for v in sample.versions])
        response = {
            "loss_mask": own.float(),
            "behaviour": torch.tensor(sample.logprobs),
            "advantage": torch.full((len(sample.tokens),), advantage),
            "weight": torch.full((len(sample.tokens),), weight),
            "fresh": torch.tensor([float(v == version) for v in sample.versions]),
            "teacher": torch.zeros(len(sample.tokens)),
        }
        if teacher is not None:
            number = next(i for i, other in enumerate(group.samples) if other is sample)
            response["teacher"] = torch.tensor(teacher[group.uid, number])
        values = {k: torch.cat([torch.zeros(before), v.float()]) * _spread(own, before) for k, v in response.items()}
        out.append({"tokens": text[:-1], "labels": text[1:], **values})
        if sample.experts is not None:
            out[-1]["routing"] = sample.experts[: len(text) - 1]
    return out


def _spread(own: torch.Tensor, before: int) -> torch.Tensor:
    """1 where a label is the model's own: nothing else carries a value."""
    return torch.cat([torch.zeros(before), own.float()])


def pack(
    samples: Sequence[dict[str, torch.Tensor]], length: int, multiple: int, pad_token: int
) -> dict[str, torch.Tensor]:
    """Rows [rows, length] of whole samples, first fit in their order; `rows` is a multiple of `multiple`.

    Each sample is a document of its own, and the filler behind them one more, with `padding` true.

    Raises:
        ValueError: a sample is longer than a row.
    """
    rows: list[list[dict[str, torch.Tensor]]] = []
    room: list[int] = []
    for sample in samples:
        size = len(sample["tokens"])
        if size > length:
            raise ValueError(f"a sample of {size} tokens does not fit into rows of {length}")
        place = next((i for i, left in enumerate(room) if left >= size), None)
        if place is None:
            rows.append([])
            room.append(length)
            place = len(rows) - 1
        rows[place].append(sample)
        room[place] -= size
    rows += [[] for _ in range(-len(rows) % multiple or (multiple if not rows else 0))]
    names = ("loss_mask", *VALUES)
    batch = {name: torch.zeros(len(rows), length) for name in names}
    batch["tokens"] = torch.full((len(rows), length), pad_token, dtype=torch.long)
    batch["labels"] = torch.full((len(rows), length), pad_token, dtype=torch.long)
    batch["document_ids"] = torch.zeros(len(rows), length, dtype=torch.int32)
    batch["padding"] = torch.ones(len(rows), length, dtype=torch.bool)
    routed = next((sample["routing"] for sample in samples if "routing" in sample), None)
    if routed is not None:
        batch["routing"] = torch.full((len(rows), length, *routed.shape[1:]), -1, dtype=torch.int16)
    for r, row in enumerate(rows):
        at = 0
        for number, sample in enumerate(row):
            stop = at + len(sample["tokens"])
            for name in ("tokens", "labels", *names):
                batch[name][r, at:stop] = sample[name]
            if "routing" in sample:
                batch["routing"][r, at : at + len(sample["routing"])] = sample["routing"]
            batch["document_ids"][r, at:stop] = number
            batch["padding"][r, at:stop] = False
            at = stop
        batch["document_ids"][r, at:] = len(row)
    return batch


def micro_batches(
    batch: dict[str, torch.Tensor], micro_batch_size: int, rank: int, ranks: int
) -> list[dict[str, torch.Tensor]]:
    """This data-parallel rank's micro-batches: number m takes the rows (m * ranks + rank) * micro_batch_size on."""
    rows = len(batch["tokens"])
    starts = range(rank * micro_batch_size, rows, ranks * micro_batch_size)
    return [{k: v[start : start + micro_batch_size] for k, v in batch.items()} for start in starts]
