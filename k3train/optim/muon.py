"""Muon over sharded optimizer state, with AdamW for the parameters that are no matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from k3kernels.newton_schulz import orthogonalize

from k3train.config.schema import MuonConfig
from k3train.optim.plan import Batch, Round, Span


@dataclass
class MuonWork:
    """What a rank needs to know to update its shards: which tensors they are, and its part of the plan."""

    shards: list[torch.Tensor]  # fp32 main parameters, in the plan's order
    rounds: list[Round]
    group: dist.ProcessGroup  # of the stage
    settings: MuonConfig
    dtype: torch.dtype  # of Newton-Schulz


class MuonAdamW(torch.optim.AdamW):
    """AdamW, except that groups with `optimizer` = "muon" are updated by Muon.

    Muon (arXiv:2502.16982): m <- momentum m + g; u = g + momentum m (Nesterov); then for every block
    w <- (1 - lr wd) w - lr * update_scale * sqrt(max(rows, columns)) * orthogonalize(u).

    Each rank holds m and w for its shards only. `work` says how blocks that lie on several ranks come together; it is
    set after construction, because the shards are.
    """

    work: MuonWork

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update from the `grad` of every parameter. The gradients of Muon's parameters are used up."""
        groups = [group for group in self.param_groups if group.get("optimizer") == "muon"]
        used = [group["params"] for group in groups]
        for parameters in used:
            self._directions(parameters)
        self._orthogonalize()
        for group, parameters in zip(groups, used):
            if not parameters:
                continue
            tensors = [p.data for p in parameters]
            torch._foreach_mul_(tensors, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(tensors, [p.grad for p in parameters], alpha=-group["lr"])
        everything = self.param_groups
        self.param_groups = [group for group in everything if group.get("optimizer") != "muon"]
        try:
            super().step()
        finally:
            self.param_groups = everything

    def _directions(self, parameters: list[torch.Tensor]) -> None:
        """Advance the momenta, and leave what is to be orthogonalized in the gradients."""
        if not parameters:
            return
        for parameter in parameters:
            self.allocate(parameter)
            self.state[parameter]["step"] += 1
        momentum = self.work.settings.momentum
        gradients = [p.grad for p in parameters]
        momenta = [self.state[p]["exp_avg"] for p in parameters]
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, gradients)
        if self.work.settings.nesterov:
            torch._foreach_add_(gradients, momenta, alpha=momentum)
        else:
            torch._foreach_copy_(gradients, momenta)

    def allocate(self, parameter: torch.Tensor) -> None:
        """Give a parameter under Muon its zero momentum. Named as AdamW's first moment, as Megatron-Core expects."""
        if parameter not in self.state:
            self.state[parameter] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter)}

    def _orthogonalize(self) -> None:
        """Replace the directions in the gradients by updates. While one round computes, the next is fetched."""
        gradients = [shard.grad for shard in self.work.shards]
        rounds = self.work.rounds
        fetched = self._fetch(rounds[0], gradients) if rounds else None
        returning: tuple[Round, _Messages] | None = None
        for number, entry in enumerate(rounds):
            messages = fetched
            fetched = self._fetch(rounds[number + 1], gradients) if number + 1 < len(rounds) else None
            messages.wait()
            outgoing = {rank: _room(self.work, length) for rank, length in entry.return_out.items()}
            for batch in entry.batches:
                _fill(batch, gradients, messages.received, outgoing, self.work)
            lengths = {rank: sum(s.length for s in spans) for rank, spans in entry.return_in.items()}
            before, returning = returning, (entry, _Messages(outgoing, lengths, self.work))
            if before is not None:
                _take_back(*before, gradients)
        if returning is not None:
            _take_back(*returning, gradients)

    def _fetch(self, entry: Round, gradients: list[torch.Tensor]) -> _Messages:
        outgoing = {rank: torch.cat([_at(gradients, s) for s in spans]) for rank, spans in entry.fetch_out.items()}
        return _Messages(outgoing, entry.fetch_in, self.work)


class _Messages:
    """Point-to-point messages under way: one to and one from each rank that has something for the other."""

    def __init__(self, outgoing: dict[int, torch.Tensor], lengths: dict[int, int], work: MuonWork) -> None:
        self.received = {rank: _room(work, length) for rank, length in lengths.items()}
        self._kept = outgoing  # alive until sent
        ranks = dist.get_process_group_ranks(work.group)
        calls = [dist.P2POp(dist.isend, t, ranks[rank], work.group) for rank, t in sorted(outgoing.items())]
        calls += [dist.P2POp(dist.irecv, t, ranks[rank], work.group) for rank, t in sorted(self.received.items())]
        self._requests: list[Any] = dist.batch_isend_irecv(calls) if calls else []

    def wait(self) -> None:
        for request in self._requests:
            request.wait()
        self._requests, self._kept = [], {}


def _take_back(entry: Round, messages: _Messages, gradients: list[torch.Tensor]) -> None:
    """Store the updates that the owners of a round's blocks sent."""
    messages.wait()
    for rank, spans in entry.return_in.items():
        pieces = messages.received[rank].split([s.length for s in spans])
        for span, piece in zip(spans, pieces):
            _at(gradients, span).copy_(piece)


def _room(work: MuonWork, length: int) -> torch.Tensor:
    """Room for a message."""
    return torch.empty(length, dtype=torch.float32, device=work.shards[0].device if work.shards else None)


def _at(gradients: list[torch.Tensor], span: Span) -> torch.Tensor:
    return gradients[span.where].view(-1)[span.start : span.start + span.length]


def _fill(
    batch: Batch,
    gradients: list[torch.Tensor],
    received: dict[int, torch.Tensor],
    outgoing: dict[int, torch.Tensor],
    work: MuonWork,
) -> None:
    """Collect the blocks of a batch, orthogonalize them, and hand their pieces to the shards and messages."""
    flat = _room(work, batch.count * batch.parts * batch.rows * batch.columns)
    for span, element in batch.local:
        flat[element : element + span.length] = _at(gradients, span)
    for span, element in batch.incoming:
        flat[element : element + span.length] = received[span.where][span.start : span.start + span.length]
    stacked = flat.view(batch.count, batch.parts, batch.rows, batch.columns)
    if batch.cut == 0:
        matrices = stacked.flatten(1, 2)
    else:
        matrices = stacked.transpose(1, 2).flatten(2)
    settings = work.settings
    update = orthogonalize(matrices, settings.steps, settings.coefficients, work.dtype)
    update.mul_(settings.update_scale * max(matrices.shape[-2:]) ** 0.5)
    if batch.cut == 1:
        update = update.unflatten(2, (batch.parts, batch.columns)).transpose(1, 2)
    flat = update.reshape(-1)
    for span, element in batch.local:
        _at(gradients, span).copy_(flat[element : element + span.length])
    for span, element in batch.outgoing:
        outgoing[span.where][span.start : span.start + span.length] = flat[element : element + span.length]


def newton_schulz_precision(muon: MuonConfig, device_kind: str) -> str:
    """`optim.muon.precision` as fp32 or bf16 on this kind of device.

    On CPUs auto is fp32, so that a run is the same on all of them: only some have products of bf16 (docs/speed.md).
    """
    if muon.precision == "auto":
        return "bf16" if device_kind == "cuda" else "fp32"
    return muon.precision
