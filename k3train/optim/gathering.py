"""Megatron-Core's distributed optimizer, gathering its state for a checkpoint into memory that is kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


class GatheringOptimizer(DistributedOptimizer):
    """The same state in the same form, on the rank that writes it only, and always at the same addresses.

    Megatron-Core 0.19 allocates the whole state anew for every checkpoint, three times over, and gathers it on all
    data-parallel ranks, of which the first writes it. Fresh memory costs more time here than the copying.
    """

    def get_parameter_state_dp_zero(
        self, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> dict | None:
        """Flat fp32 main parameters and moments of every buffer. On data-parallel ranks other than the first, zeros.

        What is returned is overwritten by the next call.
        """
        if empty_data or use_gloo_comm or not return_on_all_ranks:
            empty = super().get_parameter_state_dp_zero(use_gloo_comm, empty_data, return_on_all_ranks)
            if empty_data and empty is not None:
                self._leave_room_for_padding(empty)
            return empty
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for index, ranges in enumerate(self.gbuf_ranges):
            ((dtype, buckets),) = ranges.items()
            state[index] = {dtype: self._gather(index, buckets)}
        return state

    def sharded_param_state_fully_reshardable(self, *args: Any, **kwargs: Any) -> dict[int, dict] | None:
        """The stored tensors of every parameter of the buffers, in their order."""
        stored = super().sharded_param_state_fully_reshardable(*args, **kwargs)
        if self.data_parallel_group.rank() > 0:  # has zeros
            assert not any(is_main_replica(tensor.replica_id) for tensor in nested_values(stored or {}))
        return stored

    def kept_tensors(self) -> list[torch.Tensor]:
        """The memory that every call of `get_parameter_state_dp_zero` writes to."""
        return [tensor for (key, _), tensor in self._kept.items() if key != "scratch"]

    @property
    def _kept(self) -> dict[tuple[str, int], torch.Tensor]:
        return self.__dict__.setdefault("_kept_tensors", {})  # made by a change of class: it has no __init__ of its own

    def _keep(self, key: str, index: int, size: int, device: Any, pinned: bool = False) -> torch.Tensor:
        kept = self._kept.get((key, index))
        if kept is None or kept.numel() < size:
            kept = torch.zeros(size, dtype=torch.float32, device=device, pin_memory=pinned)
            self._kept[key, index] = kept
        return kept[:size]

    def _leave_room_for_padding(self, empty: dict) -> None:
        """What a checkpoint is loaded into, as large as `param_index_map` takes it to be (see `_gather`)."""
        for index, buffer in enumerate(self.buffers):
            (tensors,) = empty[index].values()
            for key, tensor in tensors.items():
                if isinstance(tensor, torch.Tensor) and tensor.numel() < buffer.numel:
                    tensors[key] = torch.zeros(buffer.numel, dtype=tensor.dtype, device=tensor.device)

    @torch.no_grad()
    def _gather(self, index: int, buckets: list[dict]) -> dict[str, Any]:
        """One buffer's tensors by kind, where `param_index_map` says.

        Megatron-Core 0.19 leaves out the padding at the end of each bucket, and then takes parameters out by that map,
        which counts it: those of every bucket after a padded one would be stored shifted.
        """
        buffer, keys = self.buffers[index], ("param", *self.optimizer_state_keys)
        size, ranks = buffer.numel, self.data_parallel_group.size()
        device = buffer.grad_data.device
        whole = dict.fromkeys(keys, torch.zeros(()).expand(size))
        if self.data_parallel_group.rank() == 0:
            whole = {key: self._keep(key, index, size, "cpu", pinned=device.type == "cuda") for key in keys}
        for bucket, ranges in zip(buffer.buckets, buckets, strict=True):
            start, end = bucket.offset, bucket.offset + bucket.grad_data.numel()
            shards = [
                (span["gbuf_local"], self._get_main_param_and_optimizer_states(parameter))
                for parameter, span in ranges["param_map"].items()
            ]
            share = (end - start) // ranks  # a bucket is padded to whole shares
            for key in keys:
                target = whole[key][start:end]
                own = self._own_place(target, share, ranks, device)
                places = [own[local.start : local.end] for local, _ in shards]
                if places:
                    torch._foreach_copy_(places, [tensors[key] for _, tensors in shards])
                if ranks > 1:
                    self._collect(own, target, ranks)
        return {**whole, "numel_unpadded": buffer.numel_unpadded}

    def _own_place(self, target: torch.Tensor, share: int, ranks: int, device: torch.device) -> torch.Tensor:
        """Where this rank's share of a bucket is put together: on the host, the first rank's in its place at once."""
        if ranks == 1:
            return target
        is_here = device.type == "cpu" and self.data_parallel_group.rank() == 0
        return target[:share] if is_here else self._scratch(0, share, device)

    def _collect(self, own: torch.Tensor, target: torch.Tensor, ranks: int) -> None:
        """Every rank's share of a bucket to the first one's `target`."""
        group, size = self.data_parallel_group, own.numel()
        is_first = group.rank() == 0
        if own.is_cuda:
            collected = self._scratch(1, ranks * size, own.device) if is_first else None
            dist.gather(own, None if collected is None else list(collected.view(ranks, -1)), group=group, group_dst=0)
            if collected is not None:
                target.copy_(collected)
        elif not is_first:
            dist.send(own, group=group, group_dst=0)
        else:  # Gloo's gather would copy everything twice more; the first rank's own lies there already
            for peer in range(1, ranks):
                dist.recv(target[peer * size : (peer + 1) * size], group=group, group_src=peer)

    def _scratch(self, number: int, size: int, device: torch.device) -> torch.Tensor:
        """Memory for the moment; on CUDA the allocator keeps it."""
        if device.type == "cuda":
            return torch.zeros(size, dtype=torch.float32, device=device)
        return self._keep("scratch", number, size, device)
