"""Log-probabilities of given tokens under a model: of a teacher, a reference, or a prompt that a server echoes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from k3train.model.model import K3Model
from k3train.model.packing import Packing
from k3train.rollout.forward import ForwardPass, ForwardPipeline


@torch.inference_mode()
def token_logprobs(
    model: K3Model | Sequence[K3Model], rows: Sequence[Sequence[int]], tokens_at_a_time: int = 8192
) -> list[list[float]]:
    """For each row, the log-probability in nats of its tokens 1.. given those before: one number less than tokens.

    Rows are packed as documents of one long row, so that no filler is computed beyond what the layout needs. `model`
    may be the chunks of one on this rank. Every rank of a tensor-, pipeline- or expert-parallel group calls this alike,
    and gets the same. The model's mode is left as it was.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    training = [chunk.training for chunk in chunks]
    pipeline = ForwardPipeline(chunks)
    for chunk in chunks:
        chunk.eval()
    try:
        batches, out = list(_batches(rows, tokens_at_a_time)), []
        for start in range(0, len(batches), pipeline.size):
            out += _score(pipeline, batches[start : start + pipeline.size])
        return out
    finally:
        for chunk, before in zip(chunks, training):
            chunk.train(before)


def _batches(rows: Sequence[Sequence[int]], tokens_at_a_time: int) -> Iterator[list[Sequence[int]]]:
    batch: list[Sequence[int]] = []
    for row in rows:
        if batch and sum(map(len, batch)) + len(row) > tokens_at_a_time:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _score(pipeline: ForwardPipeline, batches: Sequence[Sequence[Sequence[int]]]) -> list[list[float]]:
    """The rows of at most as many batches as the pipeline has ranks."""
    passes = [_pass(pipeline.chunks[0], rows) for rows in batches]
    counts = [len(row) - 1 for rows in batches for row in rows]
    device = passes[0].tokens.device
    scores = torch.empty(sum(counts), dtype=torch.float64, device=device)
    made, at = pipeline(passes), 0
    for batch, rows, logits in zip(passes, batches, made):
        start = 0
        for row in rows:
            count = len(row) - 1
            wide = logits[0, start : start + count].float()
            target = batch.tokens[0, start + 1 : start + 1 + count].unsqueeze(1)
            scores[at : at + count] = wide.gather(1, target).squeeze(1) - wide.logsumexp(dim=-1)
            start, at = start + len(row), at + count
    if pipeline.size > 1:
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(scores, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return [piece.tolist() for piece in scores.split(counts)]


def _pass(model: K3Model, rows: Sequence[Sequence[int]]) -> ForwardPass:
    """The rows as documents of one, and filler that makes its length divisible."""
    device = next(model.parameters()).device
    flat = [token for row in rows for token in row]
    filler = -len(flat) % model.config.tensor_model_parallel_size
    ids = torch.tensor([flat + [0] * filler], device=device)
    numbers = torch.tensor([*range(len(rows))] + [len(rows)] * bool(filler), dtype=torch.int32, device=device)
    counts = torch.tensor([*map(len, rows)] + [filler] * bool(filler), device=device)
    packing = Packing(torch.repeat_interleave(numbers, counts).unsqueeze(0))
    if filler:
        packing.padding = torch.arange(ids.shape[1], device=device).unsqueeze(0) >= len(flat)
    return ForwardPass(ids, packing)
