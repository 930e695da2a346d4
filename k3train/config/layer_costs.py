"""What each part of a K3-style model costs to train, to spread it evenly over pipeline stages.

The unit is FLOPs per token as model FLOPs count them: a weight that a token is multiplied with costs a multiply and
an add forward and twice that backward. What is bound by memory rather than arithmetic (norms, convolutions, the mixture
over depth, the look-up of the embedding) weighs next to nothing here; a kernel that is far from its peak weighs more
than it counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3train.config.layout import balanced_counts, layout_string
from k3train.config.model import ModelConfig
from k3train.config.parameters import kda_parameters, mla_parameters, moe_parameters
from k3train.config.schema import RecipeConfig


@dataclass(frozen=True)
class LayerCosts:
    """FLOPs per token of forward and backward (and of the second forward, where layers are recomputed)."""

    layers: tuple[float, ...]
    embedding: float
    head: float
    mtp: float  # everything that multi-token prediction adds to the last stage; 0 without

    def of_stage(self, layers: range, kinds: str) -> float:
        """The cost of a stage that holds these decoder layers and these parts (E, m, L)."""
        parts = {"E": self.embedding, "m": self.mtp, "L": self.head}
        return sum(self.layers[i] for i in layers) + sum(parts.get(kind, 0.0) for kind in kinds)


def mixer_flops(model: ModelConfig, full_attention: bool, seq_length: int) -> float:
    """Forward FLOPs per token of a token mixer.

    MLA sees (seq_length + 1) / 2 positions on average; KDA in its recurrent form does three products with the state a
    head (report section 2.1.1).
    """
    if full_attention:
        mla = model.mla
        width = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
        attention = 2 * mla.num_heads * width * (seq_length + 1) / 2
        return 2 * mla_parameters(mla, model.hidden_size) + attention
    kda = model.kda
    return 2 * kda_parameters(kda, model.hidden_size) + 6 * kda.num_heads * kda.head_dim**2


def feed_forward_flops(model: ModelConfig, moe: bool) -> float:
    """Forward FLOPs per token of a dense FFN, or of a mixture of experts with the experts that a token visits."""
    return 2.0 * (moe_parameters(model)[1] if moe else 3 * model.hidden_size * model.ffn_hidden_size)


def layer_costs(config: RecipeConfig) -> LayerCosts:
    """The costs at the recipe's sequence length, with its recomputation."""
    model, length = config.model, config.train.seq_length
    passes = 4.0 if config.parallel.recompute == "full" else 3.0
    layers = tuple(
        passes * (mixer_flops(model, model.is_full_attention(i), length) + feed_forward_flops(model, model.is_moe(i)))
        for i in range(model.num_layers)
    )
    h = model.hidden_size
    head = 6.0 * model.vocab_size * h
    mtp = 0.0
    if model.mtp.num_layers:
        layer = mixer_flops(model, model.mtp.mixer == "mla", length)
        layer += feed_forward_flops(model, model.moe.num_experts > 0)
        mtp = 3.0 * (layer + 2 * 2 * h * h) + head  # never recomputed; the fusion, and the head once more
    return LayerCosts(layers, embedding=3.0 * h, head=head, mtp=mtp)


def balanced_layout(config: RecipeConfig) -> str:
    """The layout whose most expensive stage is cheapest, for `parallel.pipeline_layout=auto`."""
    costs = layer_costs(config)
    stages = config.parallel.pipeline * config.parallel.virtual_pipeline
    counts = balanced_counts(costs.layers, stages, first=costs.embedding, last=costs.head + costs.mtp)
    return layout_string(counts, config.model.mtp.num_layers)
