"""K2's weight clipping (QK-Clip, arXiv:2507.20534, Algorithm 1): heads whose logits grow too large are scaled down.

After the optimizer step, a head whose largest pre-softmax logit over the global batch was S > tau has its weights
multiplied, with gamma = tau / S: the query and key parts that are the head's own by sqrt(gamma) each, the query part
that meets the shared key by gamma. The shared key belongs to all heads and is left alone. Every logit of the head
thereby shrinks by gamma. KDA needs none of this: its queries and keys are normalised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer

from k3train.config.schema import QKClipConfig
from k3train.model.gated_mla import GatedMLA
from k3train.model.layer import K3Layer
from k3train.model.max_logit import MaxLogit
from k3train.optim.sharded import MainShard, main_shards, named_parts


@dataclass
class ClippedLayer:
    """One attention layer of this rank."""

    number: int  # 1-indexed
    mixer: GatedMLA
    query: list[MainShard]  # of q_b_proj, or of q_proj without a query latent
    key: list[MainShard]  # of kv_b_proj


class QKClip:
    """Watches the logits of every Gated MLA layer on this rank and clips the fp32 main weights.

    Clipping happens inside the optimizer step, after the update and before model weights are made from main ones and
    gathered: both are clipped, in every layout and precision.
    """

    def __init__(
        self,
        config: QKClipConfig,
        models: list[torch.nn.Module],
        optimizer: MegatronOptimizer,
        num_layers: int,
        device: torch.device,
    ) -> None:
        """Start watching; `num_layers` counts the layers of the whole model, those of multi-token prediction too."""
        self.config, self.num_layers, self.device = config, num_layers, device
        self.layers: list[ClippedLayer] = []
        if not config.enabled:
            return
        part = named_parts(optimizer)["dense"]
        held: dict[torch.nn.Parameter, list[MainShard]] = {}
        for shard in main_shards(part):
            held.setdefault(shard.parameter, []).append(shard)
        for layer in (m for model in models for m in model.modules() if isinstance(m, K3Layer)):
            mixer = layer.mixer
            if isinstance(mixer, GatedMLA):
                projection = mixer.q_proj if mixer.mla.q_lora_rank is None else mixer.q_b_proj
                query, key = projection.weight, mixer.kv_b_proj.weight
                mixer.max_logit = MaxLogit(mixer.local_heads, mixer.qk_dim**-0.5, device)
                self.layers.append(ClippedLayer(layer.layer_number, mixer, held.get(query, []), held.get(key, [])))
        self._factors: list[torch.Tensor] = []
        if part.optimizer is not None:
            part.optimizer.register_step_post_hook(lambda *_: self._clip())

    def begin_step(self, step: int) -> None:
        """Measure in the forward passes of `step` (from 1), if it is due."""
        for layer in self.layers:
            layer.mixer.max_logit.reset()
            layer.mixer.max_logit.active = step % self.config.interval == 0

    @torch.no_grad()
    def pool(self, step: int) -> dict[str, Any]:
        """Agree on the maxima over the global batch, and have the coming optimizer step clip.

        Every rank takes part. Returns metrics by 1-indexed layer number: the largest logit, and how many heads are
        above tau; nothing where the step was not measured.
        """
        if not self.config.enabled or step % self.config.interval:
            return {}
        table = torch.full((self.num_layers + 1, 2), -torch.inf, dtype=torch.float64, device=self.device)
        if self.layers:
            maxima = torch.stack([layer.mixer.max_logit.value for layer in self.layers])  # [layers, local heads]
            data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=data_group)
            self._factors = list((self.config.tau / maxima.clamp_min(self.config.tau)).unbind(0))
            above = (maxima > self.config.tau).sum(dim=1)
            largest = maxima.amax(dim=1)
            tensor_group = parallel_state.get_tensor_model_parallel_group()
            dist.all_reduce(above, group=tensor_group)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tensor_group)
            for layer, biggest, count in zip(self.layers, largest.tolist(), above.tolist(), strict=True):
                table[layer.number] = torch.tensor([biggest, count], device=self.device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX, group=parallel_state.get_pipeline_model_parallel_group())
        rows = {number: row for number, row in enumerate(table.tolist()) if row[1] >= 0}
        return {
            "qk_clip": {
                "max_logit": {number: row[0] for number, row in rows.items()},
                "clipped_heads": {number: int(row[1]) for number, row in rows.items()},
            }
        }

    @torch.no_grad()
    def _clip(self) -> None:
        factors, self._factors = self._factors, []
        for layer, gamma in zip(self.layers, factors):
            mla, root = layer.mixer.mla, gamma.sqrt()
            own, shared, value = mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim
            _scale_rows(layer.query, torch.cat([_rows(root, own), _rows(gamma, shared)], dim=1))
            _scale_rows(layer.key, torch.cat([_rows(root, own), torch.ones_like(_rows(root, value))], dim=1))


def _rows(factor: torch.Tensor, count: int) -> torch.Tensor:
    """[heads] to [heads, count]."""
    return factor[:, None].expand(-1, count)


def _scale_rows(shards: list[MainShard], factors: torch.Tensor) -> None:
    """Multiply the rows of a projection [heads * rows, columns] by factors [heads, rows], where this rank has them."""
    for shard in shards:
        columns = shard.parameter.shape[1]
        each = factors.flatten()[:, None].expand(-1, columns).flatten()
        shard.main.data.view(-1).mul_(each[shard.start : shard.end])
