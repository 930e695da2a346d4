"""Log-probabilities of given tokens under a model: of a teacher, a reference, or a prompt that a server echoes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from k3train.model.model import K3Model
from k3train.model.packing import Packing


@torch.inference_mode()
def token_logprobs(model: K3Model, rows: Sequence[Sequence[int]], tokens_at_a_time: int = 8192) -> list[list[float]]:
    """For each row, the log-probability in nats of its tokens 1.. given those before: one number less than tokens.

    Rows are packed as documents of one long row, so that no filler is computed beyond what the layout needs. Every rank
    of a tensor- or expert-parallel group calls this alike. The model's mode is left as it was.
    """
    training = model.training
    model.eval()
    try:
        out: list[list[float]] = []
        batch: list[Sequence[int]] = []
        for row in rows:
            if batch and sum(map(len, batch)) + len(row) > tokens_at_a_time:
                out += _score(model, batch)
                batch = []
            batch.append(row)
        return out + (_score(model, batch) if batch else [])
    finally:
        model.train(training)


def _score(model: K3Model, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    device = next(model.parameters()).device
    lengths = [len(row) for row in rows]
    flat = [token for row in rows for token in row]
    filler = -len(flat) % model.config.tensor_model_parallel_size
    ids = torch.tensor([flat + [0] * filler], device=device)
    numbers = torch.tensor([*range(len(rows))] + [len(rows)] * bool(filler), dtype=torch.int32, device=device)
    counts = torch.tensor(lengths + [filler] * bool(filler), device=device)
    packing = Packing(torch.repeat_interleave(numbers, counts).unsqueeze(0))
    if filler:
        packing.padding = torch.arange(ids.shape[1], device=device).unsqueeze(0) >= len(flat)
    logits = model(ids, packing)[0]
    out, start = [], 0
    for length in lengths:
        wide = logits[start : start + length - 1].float()
        target = ids[0, start + 1 : start + length].unsqueeze(1)
        out.append((wide.gather(1, target).squeeze(1) - wide.logsumexp(dim=-1)).tolist())
        start += length
    return out
