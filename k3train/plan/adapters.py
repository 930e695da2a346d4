"""What low-rank adapters add to a frozen model's layers (`k3train/model/lora.py`): shapes, products, kept bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from k3train.config.schema import RecipeConfig

COLUMN, ROW, WHOLE = "column", "row", "whole"
PASSES = 5  # over a layer's output: the adapter's product is scaled, and added


@dataclass(frozen=True)
class Linear:
    """A linear layer that carries an adapter, before tensor parallelism cuts it."""

    inputs: int
    outputs: int
    kind: str  # what tensor parallelism cuts: column (outputs) | row (inputs) | whole (neither; it has a part of rows)


def adapted(config: RecipeConfig, full_attention: bool, moe: bool) -> list[Linear]:
    """The layers of a decoder layer that carry adapters; none without `lora.enabled`."""
    return of_mixer(config, full_attention) + of_feed_forward(config, moe)


def of_mixer(config: RecipeConfig, full_attention: bool) -> list[Linear]:
    """Of the token mixer."""
    if not config.lora.enabled or "attention" not in config.lora.targets:
        return []
    return _mla(config) if full_attention else _kda(config)


def of_feed_forward(config: RecipeConfig, moe: bool) -> list[Linear]:
    """Of a dense FFN, or of what surrounds the routed experts."""
    if not config.lora.enabled:
        return []
    targets, model, h = config.lora.targets, config.model, config.model.hidden_size
    found: list[Linear] = []
    if moe and "latent" in targets and model.moe.latent_size:
        found += [Linear(h, model.moe.latent_size, WHOLE), Linear(model.moe.latent_size, h, WHOLE)]
    if moe and "shared_experts" in targets and model.moe.num_shared_experts:
        found += _gated(h, model.moe.num_shared_experts * model.moe.expert_hidden_size)
    if not moe and "dense_ffn" in targets:
        found += _gated(h, model.ffn_hidden_size)
    return found


def _gated(hidden: int, width: int) -> list[Linear]:
    return [Linear(hidden, width, COLUMN), Linear(hidden, width, COLUMN), Linear(width, hidden, ROW)]


def _kda(config: RecipeConfig) -> list[Linear]:
    kda, h = config.model.kda, config.model.hidden_size
    width = kda.num_heads * kda.head_dim
    low = [(h, kda.head_dim, WHOLE), (kda.head_dim, width, COLUMN)]
    gate = [(h, width, COLUMN)] if kda.output_gate == "full" else low
    shapes = [*3 * [(h, width, COLUMN)], *low, (h, kda.num_heads, COLUMN), *gate, (width, h, ROW)]
    return [Linear(*shape) for shape in shapes]


def _mla(config: RecipeConfig) -> list[Linear]:
    mla, h = config.model.mla, config.model.hidden_size
    queries, width = mla.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), mla.num_heads * mla.v_head_dim
    if mla.q_lora_rank is None:
        shapes = [(h, queries, COLUMN)]
    else:
        shapes = [(h, mla.q_lora_rank, WHOLE), (mla.q_lora_rank, queries, COLUMN)]
    shapes.append((h, mla.kv_lora_rank + mla.qk_rope_head_dim, WHOLE))
    shapes.append((mla.kv_lora_rank, mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), COLUMN))
    shapes += [(h, width, COLUMN)] if mla.output_gate else []
    return [Linear(*shape) for shape in [*shapes, (width, h, ROW)]]


def _rows(linear: Linear, tokens: float, tensor: int) -> tuple[float, float]:
    """Of one rank: rows that `a` reads times its share of their width, and rows that `b` reads."""
    if linear.kind == COLUMN:
        return tokens, tokens
    return tokens / tensor, tokens / tensor


def flops(config: RecipeConfig, layers: list[Linear], tokens: float) -> float:
    """Forward, of one rank; `tokens` of a micro-batch before tensor parallelism shares them out."""
    total = 0.0
    for linear in layers:
        into, onward = _rows(linear, tokens, config.parallel.tensor)
        share = config.parallel.tensor if linear.kind == COLUMN else 1
        total += 2 * config.lora.rank * (into * linear.inputs + onward * linear.outputs / share)
    return total


def moved(config: RecipeConfig, layers: list[Linear], tokens: float) -> float:
    """Numbers that their elementwise kernels read and write forward."""
    return PASSES * tokens / config.parallel.tensor * sum(linear.outputs for linear in layers)


def kept(config: RecipeConfig, layers: list[Linear], tokens: float, element: int, cuda: bool) -> Iterator[float]:
    """Bytes that each keeps beside the layer's input: what `a` made, and with dropout what it left and its mask.

    The mask is a byte a number on CUDA; on the CPU it has the input's dtype.
    """
    for linear in layers:
        into, onward = _rows(linear, tokens, config.parallel.tensor)
        dropped = into * linear.inputs * (element + (1 if cuda else element)) if config.lora.dropout else 0.0
        yield onward * config.lora.rank * element + dropped
