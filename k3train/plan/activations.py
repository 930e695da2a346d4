"""Bytes that a forward pass keeps for the backward pass, part by part, as the modules of k3train/model keep them.

Every formula lists what the operation's autograd function saves. On the CPU they are compared with what saved-tensor
hooks count (`tests/unit/test_plan_activations.py`). The forms that run only on CUDA (fla's KDA, flash attention) are
read from their source and have not been measured. A tensor that two parts keep is counted once.

T tokens of a micro-batch on this rank (sequence / CP x batch); between sublayers each tensor-parallel rank has T / TP.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3train.config.model import ModelConfig
from k3train.config.schema import RecipeConfig
from k3train.model.model import padded_vocab_size
from k3train.parallel.expert_plan import most_redundant
from k3train.plan import adapters

_LOSS_OF_ITS_OWN = ("distill",)  # stages that keep the logits and compute their loss in PyTorch
CHUNK_CPU = 16  # tokens of a chunk of k3kernels' KDA
CHUNK_FLA = 64  # of fla's
KINDS = ("mixers", "KDA states", "experts", "feed-forwards", "residual stream", "block summaries", "logits")


@dataclass(frozen=True)
class Kept:
    """Bytes by kind (see `KINDS`)."""

    bytes: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.bytes.values())

    def __add__(self, other: Kept) -> Kept:
        return Kept({kind: self.bytes.get(kind, 0.0) + other.bytes.get(kind, 0.0) for kind in KINDS})


NOTHING = Kept({})


def fused_kernels(config: RecipeConfig, kind: str) -> bool:
    """Whether k3kernels' Triton forms run on devices of this kind (cuda or cpu), wherever the plan is made."""
    return kind == "cuda" and config.model.kernels in ("auto", "triton")


def fused_loss(config: RecipeConfig, kind: str) -> bool:
    """Whether the cross-entropy is k3kernels' Triton form (`K3Model._loss`), which writes no logits in fp32."""
    return fused_kernels(config, kind) and config.stage.name not in _LOSS_OF_ITS_OWN


class Activations:
    """What one micro-batch keeps on one rank of a recipe."""

    def __init__(self, config: RecipeConfig, kind: str, skew: float = 1.0) -> None:
        """`kind`: cuda or cpu, which implementations run; `skew`: copies that arrive at a rank over the mean."""
        self.config, self.model, self.cuda, self.skew = config, config.model, kind == "cuda", skew
        p, train = config.parallel, config.train
        self.tp, self.etp = p.tensor, p.expert_tensor
        self.tokens = train.micro_batch_size * train.seq_length // p.context
        self.documents = train.micro_batch_size
        self.e = 2 if train.precision == "bf16" else 4
        self.shard = self.tokens / self.tp
        self.stream = self.shard * self.model.hidden_size * self.e  # one [s / TP, b, h]
        self.recompute = p.recompute == "full"
        self.beyond = False  # whether the layer looked at is that of multi-token prediction, which has no adapters
        self.lean, self.fused_loss = config.model.kernels != "reference", fused_loss(config, kind)

    def layer(self, index: int) -> Kept:
        """Of a decoder layer between forward and backward: everything, or with recomputation its input."""
        if self.recompute:
            return Kept({"residual stream": self.stream})
        return self.whole_layer(self.model.is_full_attention(index), self.model.is_moe(index))

    def _learns(self, target: str) -> bool:
        """Whether linear layers of this kind keep their inputs: their weights learn, or adapters beside them do.

        Adapters with dropout keep what it left of them instead (`adapters.kept`).
        """
        lora = self.config.lora
        return not lora.enabled or (target in lora.targets and not self.beyond and not lora.dropout)

    def whole_layer(self, full_attention: bool, moe: bool, residual: bool | None = None) -> Kept:
        """Of a decoder layer without recomputation (with it: while its backward runs)."""
        residual = self.model.attention_residual.enabled if residual is None else residual
        # Each of the two sublayers keeps the running sum that it reads, and without AttnRes the norm's reciprocals.
        kept = {"residual stream": 2 * self.stream + (0 if residual else 2 * 4 * self.shard)}
        kept["mixers"], kept["KDA states"] = (self._mla(), 0.0) if full_attention else self._kda()
        if moe:
            kept["feed-forwards"], kept["experts"] = self._shared_and_router(), self._experts()
        else:
            kept["feed-forwards"] = self._gated_ffn(self.model.ffn_hidden_size, self._learns("dense_ffn"))
        if not self.beyond:
            parts = {"mixers": adapters.of_mixer(self.config, full_attention)}
            parts["feed-forwards"] = adapters.of_feed_forward(self.config, moe)
            for kind, layers in parts.items():
                kept[kind] += sum(adapters.kept(self.config, layers, self.tokens, self.e, self.cuda))
        return Kept(kept)

    def _entered(self) -> float:
        """A sublayer's normed input: gathered over tensor-parallel ranks for its projections."""
        return self.tokens * self.model.hidden_size * self.e

    def _kda(self) -> tuple[float, float]:
        """(all but the states, the states)."""
        kda, t, e = self.model.kda, self.tokens, self.e
        heads, dim = kda.num_heads // self.tp, kda.head_dim
        width = heads * dim
        outside = self._entered() + (self.stream if self.tp > 1 else 0)
        low_rank = t * dim * e * (1 if kda.output_gate == "full" else 2)
        projected = t * width * e
        if not self._learns("attention"):
            outside = low_rank = projected = 0.0
        padded = 3 * (t + self.documents * (kda.conv_size - 1)) * width * e
        gated_norm = 2 * t * width * e + 4 * t * heads
        kept = outside + low_rank + padded + gated_norm + projected
        if self.cuda:
            # fla: normalised q and k, v and the gate's input; two [64 x 64] score tiles a chunk; reciprocals, beta.
            return kept + t * (4 * width * e + heads * (2 * CHUNK_FLA * e + 4 * 4)), 0.0
        inputs = t * (width * e + 2 * width * 4 + 3 * 4 * heads)  # the gate's input, q and k, reciprocals and beta
        floored = kda.gate == "floored"
        # q k v decay tail new, rows (2), [W | U] (2); P and the inverse; beta. Without a floor the gate in fp32 and
        # fp64 sums besides.
        chunks = t * 4 * (10 * width + 2 * CHUNK_CPU * heads + heads) + (0 if floored else t * width * (8 + 4))
        count = self.documents * -(-(t // self.documents) // CHUNK_CPU)
        return kept + inputs + chunks, count * heads * dim * dim * 4.0

    def _mla(self) -> float:
        mla, t, e = self.model.mla, self.tokens, self.e
        heads = mla.num_heads // self.tp
        qk, width = mla.qk_nope_head_dim + mla.qk_rope_head_dim, heads * mla.v_head_dim
        reach = t * self.config.parallel.context
        kept = self._entered() if mla.output_gate or mla.q_lora_rank is None else 0.0
        kept += self.stream if self.tp > 1 or not kept else 0.0
        kept += (t * (mla.q_lora_rank or 0) + reach * mla.kv_lora_rank + t * width) * e  # of the last projections
        if not self._learns("attention"):
            kept = 0.0
        kept += self.shard * (mla.kv_lora_rank * e + 4)  # the latent's norm
        if mla.q_lora_rank is not None:
            kept += self.shard * (mla.q_lora_rank * e + 4)
        inner = e if self.cuda else 4
        # Queries and output of the attention, keys and values; values padded to the width of keys.
        kept += heads * (2 * t + 2 * reach) * qk * inner + 4 * t * heads
        if mla.output_gate:
            kept += 2 * t * width * 4  # gate and output in fp32
        return kept

    def _gated_ffn(self, width: int, learns: bool) -> float:
        inputs = self._entered() if learns else 0.0
        return inputs + (self._activation() + learns) * self.tokens * width / self.tp * self.e

    def _activation(self) -> int:
        """Numbers of the activation's width that it keeps: gate and up, or what SiTU in fp32 on a CPU makes of them."""
        made = not self.cuda and self.lean and self.model.activation == "situ" and self.e == 4
        return 3 if made else 2

    def _shared_and_router(self) -> float:
        """Shared experts, router, latent projections and norm."""
        moe, h = self.model.moe, self.model.hidden_size
        latent = moe.latent_size or h
        shared = moe.num_shared_experts * moe.expert_hidden_size
        learns, frozen = self._learns("shared_experts"), self.config.lora.enabled
        kept = self._gated_ffn(shared, learns) if shared else 0.0
        if (self.tp > 1 or not shared or not learns) and (not frozen or self._learns("latent")):
            kept += self.stream
        if self.e == 2:  # the router's input and weight in fp32
            kept += (0 if frozen else self.shard * h * 4) + moe.num_experts * h * 4
        kept += self.shard * (moe.num_experts * 4 + moe.top_k * 12 + 4)  # scores, choices and their sum
        if moe.latent_norm:
            kept += self.shard * (latent * self.e + 4)
        if moe.latent_size and self._learns("latent"):
            kept += self.shard * latent * self.e
        return kept

    def dispatched_tokens(self) -> float:
        """Token copies that a rank's experts receive."""
        return self.shard * self.model.moe.top_k * self.etp * self.skew

    def _experts(self) -> float:
        """The permutation, and what the expert products and their activation keep."""
        moe, n = self.model.moe, self.dispatched_tokens()
        latent = moe.latent_size or self.model.hidden_size
        width = moe.expert_hidden_size / self.etp
        index = self.shard * (8 * moe.num_experts + 8 * moe.top_k)  # Megatron-Core's unfused permutation
        # A grouped product keeps no input beside weights that do not learn; the CPU's keeps it in any case.
        inputs = 0 if self.cuda and self.config.lora.enabled else latent + width
        kept = n * ((inputs + self._activation() * width) * self.e + 4)
        # What the weights multiply: as it is, or in plain PyTorch in fp32. The activation that weighs as well keeps its
        # input and the weights alone.
        if moe.weight_placement == "after_w2":
            kept += n * latent * (self.e if self.lean else 4)
        elif not self.lean:
            kept += n * width * 4
        return index + kept

    def stage(self, layers: tuple[int, ...], embedding: bool, head: bool, mtp: bool) -> Kept:
        """Of one stage for one micro-batch; block summaries that arrive are counted by `summaries`."""
        kept = NOTHING
        for index in layers:
            kept += self.layer(index)
        if embedding and not self.config.lora.enabled:
            kept += Kept({"residual stream": 8 * self.tokens})
        if head:
            sources = self._sources()
            kept += Kept({"residual stream": 8 * self.shard * sources + (self.stream if sources else 0)})
            kept += self._head()
        if mtp:
            self.beyond = True
            kept += self.whole_layer(self.model.mtp.mixer == "mla", self.model.moe.num_experts > 0, residual=False)
            self.beyond = False
            kept += self._head()
            # Both normed inputs, and the two joined; with frozen weights the features alone, which have a gradient.
            whole = 4 * self.stream + 2 * 4 * self.shard + 8 * self.tokens
            kept += Kept({"residual stream": self.stream + 4 * self.shard if self.config.lora.enabled else whole})
        return kept

    def _sources(self) -> int:
        residual = self.model.attention_residual
        return -(-self.model.num_layers // residual.block_size) + 1 if residual.enabled else 0

    def _head(self) -> Kept:
        """The final norm and the cross-entropy over this rank's part of the vocabulary."""
        rows, padded = self._vocabulary_rows()
        norm = self.stream + 4 * self.shard + (0 if self.config.lora.enabled else self._entered())
        # Triton: the logits as they are, labels, the log of their sum. Else Megatron-Core's: exponentials in fp32.
        kept = self.tokens * (rows * self.e + 8 + 4) if self.fused_loss else self.tokens * (rows * 4 + 1 + 8)
        return Kept({"residual stream": norm, "logits": kept + (self.tokens * rows if padded else 0.0)})

    def _vocabulary_rows(self) -> tuple[float, bool]:
        """Rows of this rank's part of the vocabulary, and whether some are padding (whose mask is kept)."""
        model = self.model
        whole = padded_vocab_size(model.vocab_size, model.vocab_padding_multiple, self.tp)
        return whole / self.tp, whole > model.vocab_size

    def summaries(self, received: int, first: bool) -> float:
        """What arrives at a stage: block summaries and the running sum, as one payload that its layers point into."""
        return 0.0 if first else received * self.stream

    def workspace(self, layers: tuple[int, ...], head: bool) -> dict[str, float]:
        """Bytes that come and go: buffers of the token exchange, logits as they are made, a layer run again."""
        moe = self.model.moe
        found: dict[str, float] = {}
        if any(self.model.is_moe(i) for i in layers):
            latent = moe.latent_size or self.model.hidden_size
            # What is sent, what arrives, and the same of their gradients.
            sent = self.shard * moe.top_k * latent * self.e
            found["dispatch buffers"] = 2 * (sent + self.dispatched_tokens() * latent * self.e)
            if (p := self.config.parallel).balanced_experts:
                # Room for the weights of as many as there may be, and for their gradients, if they learn.
                slots = most_redundant(moe.num_experts, p.expert)
                sets = 1 if self.config.lora.enabled else 2
                found["redundant experts"] = sets * slots * 3 * latent * moe.expert_hidden_size * self.e
        if head:
            rows, padded = self._vocabulary_rows()
            low = self.e if self.e == 2 else 0
            # Triton: the gradient, in the logits' dtype, and once more where padding is masked. Else the logits as
            # computed, and a gradient in fp32.
            each = self.e * (2 if padded else 1) if self.fused_loss else low + 4
            found["logits in the making"] = self.tokens * rows * each
        if self.cuda and any(not self.model.is_full_attention(i) for i in layers):
            kda = self.model.kda
            # fla's backward makes the state before every chunk again, and its gradient.
            states = self.tokens / CHUNK_FLA * kda.num_heads / self.tp * kda.head_dim**2
            found["KDA states, made again"] = 2 * states * self.e
        if self.recompute and layers:
            kinds = {(self.model.is_full_attention(i), self.model.is_moe(i)) for i in layers}
            found["recomputed layer"] = max(self.whole_layer(*kind).total for kind in kinds)
            found["recomputed layer"] += 2 * self.stream if self.model.attention_residual.enabled else 0
        return found


def one_rank_total(config: RecipeConfig, kind: str = "cpu") -> float:
    """All that one rank without pipeline keeps of one micro-batch."""
    model: ModelConfig = config.model
    made = Activations(config, kind).stage(tuple(range(model.num_layers)), True, True, model.mtp.num_layers > 0)
    return made.total
