"""Seconds of the parts of a layer on one rank, modelled: products by FLOPs, the rest by the bytes that it moves.

What is counted is what this code runs, so more than the model FLOPs that MFU counts: recomputation, the router in fp32,
elementwise kernels, the exchange of tokens. The shares of a device's peak that products reach are assumptions
(`EfficiencyConfig`); KDA's kernel is calibrated on two published timings (`KDA_PASSES`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from k3train.config.cluster import ClusterConfig
from k3train.config.layer_costs import mixer_flops
from k3train.config.parameters import kda_parameters, mla_parameters
from k3train.config.schema import RecipeConfig
from k3train.plan import adapters, balancing, extras
from k3train.plan.activations import fused_loss
from k3train.plan.links import Links

# What each figure below rests on (guessed, derived, calibrated) is tabled in docs/planner.md, "Assumed constants".
# fla's KDA forward moves this many times its inputs and output over the memory bus in the time it takes: from 2.327 ms
# (GB200, 8 TB/s) and 4.84 ms (H20, 4 TB/s) for 8,192 tokens of 96 heads of 128, both of FlashKDA's published table.
KDA_PASSES = 19.0
KDA_BACKWARD = 2.5  # times the forward; guessed: no published timing of a backward
ATTENTION_BACKWARD = 2.5  # derived: five products instead of two
# Times that one kernel of the residual mixture reads its sources; derived: logits, softmax and sum in one pass.
MIX_PASSES = 1.0
# Parts that a layer that is run again does not repeat: its backward mixes again in any case, and statistics are taken
# in one of the two passes.
_ONCE = ("residual mixture", "balancing", "QK-Clip")
KERNELS = {"kda": 60, "mla": 45, "dense": 12, "moe": 110, "mix": 20}  # launched forward by a layer's parts, roughly


@dataclass(frozen=True)
class Practice:
    """How the run computes, where programs differ; the defaults are this one's, published runs have theirs."""

    format: str = "bf16"  # of linear layers and experts: fp32 | bf16 | fp8
    router_fp32: bool = True
    # Whether a token travels once to each domain (DeepEP) rather than once for each of its experts.
    dedup_dispatch: bool = False
    overlapped_dispatch: bool = False  # the exchange runs beside another micro-batch's computation
    launch_free: bool = False  # CUDA graphs
    recompute_share: float | None = None  # of the forward that is run again; None: as the recipe says
    gradient_bytes: int = 4  # of an element while gradients are reduced
    permute_passes: int = 8  # times that token copies are read or written on their way to an expert and back

    @staticmethod
    def of(config: RecipeConfig) -> Practice:
        return Practice(format=config.train.precision)


@dataclass(frozen=True)
class Seconds:
    """Of one part, forward and backward."""

    forward: float
    backward: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.forward + other.forward, self.backward + other.backward)


ZERO = Seconds(0.0, 0.0)


class Work:
    """The parts of a recipe's layers on one rank of a cluster."""

    def __init__(self, config: RecipeConfig, cluster: ClusterConfig, links: Links, practice: Practice) -> None:
        self.config, self.model, self.cluster, self.links, self.practice = (
            config,
            config.model,
            cluster,
            links,
            practice,
        )
        p, train = config.parallel, config.train
        self.tp, self.etp = p.tensor, p.expert_tensor
        self.tokens = train.micro_batch_size * train.seq_length // p.context
        self.e = 4 if practice.format == "fp32" else 2
        self.skew = balancing.skew(config, cluster)
        peaks = cluster.peak_tflops
        self.peak = {"fp32": peaks.fp32 * 1e12, "bf16": peaks.bf16 * 1e12, "fp8": peaks.fp8 * 1e12}

    def _product(self, flops: float, how: str = "matmul", form: str | None = None) -> Seconds:
        """A product forward, and the two of its backward; of a frozen weight only that for its input."""
        once = flops / (self.peak[form or self.practice.format] * getattr(self.cluster.efficiency, how))
        return Seconds(once, once if self.config.lora.enabled else 2 * once)

    def _moved(self, size: float, backward: float = 2.0) -> Seconds:
        """Elementwise kernels that read and write `size` bytes forward, and backward (guessed) twice as many."""
        once = size / (self.cluster.memory_gbs * 1e9 * self.cluster.efficiency.memory)
        return Seconds(once, backward * once)

    def mixer(self, full_attention: bool) -> dict[str, Seconds]:
        """Of one token mixer: projections, the attention itself, the rest."""
        model, t, h = self.model, self.tokens / self.tp, self.model.hidden_size
        parameters = mla_parameters(model.mla, h) if full_attention else kda_parameters(model.kda, h)
        attention = mixer_flops(model, full_attention, self.config.train.seq_length) - 2 * parameters
        found = {"projections": self._product(2 * parameters * t)}
        if full_attention:
            form = "fp32" if self.practice.format == "fp32" else "bf16"
            if self.config.optim.qk_clip.enabled:
                found["QK-Clip"] = self.largest_logits(form)
            core = self._product(attention * t, "attention", form)
            found["attention"] = replace(core, backward=ATTENTION_BACKWARD * core.forward)
            width = model.mla.num_heads * model.mla.v_head_dim
            found["elementwise"] = self._moved(t * (6 * width + 4 * h) * self.e)
            return found
        width = model.kda.num_heads * model.kda.head_dim
        size = 5 * width * self.e * t * KDA_PASSES
        raw = size / (self.cluster.memory_gbs * 1e9)  # the calibration took the whole bandwidth
        if self.cluster.kind == "cpu":
            # Guessed: the chunked form does about four times the products of the recurrent one.
            raw = max(raw, self._product(4 * attention * t).forward)
        found["KDA"] = Seconds(raw, KDA_BACKWARD * raw)
        found["elementwise"] = self._moved(t * (12 * width + 4 * h) * self.e)  # convolutions, gate, norms
        return found

    def largest_logits(self, form: str) -> Seconds:
        """The queries and keys that weight clipping multiplies once more every `interval` steps, in the mean.

        In the pass that autograd records alone, so once with recomputation too.
        """
        logits = extras.measured_logits(self.config) / self.tp
        width = self.model.mla.qk_nope_head_dim + self.model.mla.qk_rope_head_dim
        once = self._product(2 * width * logits, "attention", form).forward
        once += self._moved(logits * extras.logit_bytes(self.e)).forward
        return Seconds(once / self.config.optim.qk_clip.interval, 0.0)

    def feed_forward(self, moe: bool) -> dict[str, Seconds]:
        """Of a dense FFN, or of a mixture of experts with its exchange of tokens."""
        model, t, h = self.model, self.tokens / self.tp, self.model.hidden_size
        if not moe:
            width = model.ffn_hidden_size
            return {
                "projections": self._product(6 * h * width * t),
                "elementwise": self._moved(t * (4 * width + 4 * h) * self.e),
            }
        m = model.moe
        latent = m.latent_size or h
        shared = m.num_shared_experts * m.expert_hidden_size
        copies = t * m.top_k
        received = copies * self.skew  # by the slowest rank; with expert TP more of them, on a part of the width
        local = 3 * latent * m.expert_hidden_size / self.etp * m.num_experts / self.config.parallel.expert
        grouped = self._product(6 * latent * m.expert_hidden_size * received, "grouped")
        # Few tokens an expert: reading its weights takes longer.
        weights = self._moved(local * self.e, 1.0 if self.config.lora.enabled else 2.0)
        found = {
            "experts": Seconds(max(grouped.forward, weights.forward), max(grouped.backward, weights.backward)),
            "projections": self._product(2 * (3 * h * shared + (2 * h * latent if m.latent_size else 0)) * t),
            "router": self._product(2 * h * m.num_experts * t, "matmul", "fp32" if self.practice.router_fp32 else None),
        }
        # Half of the permutation's passes are over copies that are sent, half over those that arrive.
        permuted = (copies + received) / 2 * self.practice.permute_passes * latent + received * 5 * m.expert_hidden_size
        found["elementwise"] = self._moved((permuted + t * (4 * shared + 6 * h)) * self.e + t * m.num_experts * 24)
        found["dispatch"] = self.dispatch(received * latent)
        if counted := balancing.counting_bytes(self.config, self.cluster.kind):
            found["balancing"] = self._moved(counted, 0.0)
        if rounded := extras.rounded_inputs(self.config, received):
            found["rounding inputs"] = self._moved(rounded * extras.round_bytes(self.config, self.cluster.kind), 0.0)
        if self.config.parallel.balanced_experts:
            found["redundant experts"] = self.redundant_expert()
        return found

    def expert_bytes(self) -> float:
        """The weights of one routed expert."""
        model, moe = self.model, self.model.moe
        return 3 * (moe.latent_size or model.hidden_size) * moe.expert_hidden_size * self.e

    def redundant_expert(self) -> Seconds:
        """Fetching one expert a rank, as many as plans take on average (docs/balanced_experts.md).

        The backward returns its gradients, and before that fetches it again, unless the layer is run again anyway.
        """
        ranks = self.config.parallel.expert
        once = self.links.all_to_all(self.expert_bytes() * ranks / (ranks - 1), 1, False)
        # `stage` adds the share of the forward that is run again.
        return Seconds(once, (1 - self.again() + self.returned) * once)

    @property
    def returned(self) -> int:
        """Gradients of a borrowed expert that go home: one set, of a frozen one none."""
        return 0 if self.config.lora.enabled else 1

    def dispatch(self, elements: float) -> Seconds:
        """Sending token copies to their experts and back; the backward does the same with gradients."""
        p, m = self.config.parallel, self.model.moe
        if p.expert * p.expert_tensor == 1 or self.practice.overlapped_dispatch:
            return ZERO
        one_byte = self.practice.format == "fp8"
        there = self.links.all_to_all(elements * (1 if one_byte else self.e), m.top_k, self.practice.dedup_dispatch)
        back = self.links.all_to_all(elements * self.e, m.top_k, self.practice.dedup_dispatch)
        extra = 0.0
        if self.etp > 1:  # copies are gathered over the expert's tensor group, and their sums scattered
            extra = 2 * self.links.gather(elements * self.e * self.etp, self.etp, 1)
        return Seconds(there + back + extra, there + back + extra)

    def mixture(self, layer: int) -> Seconds:
        """The two residual mixtures of a decoder layer.

        The backward mixes again, on its own or with its layer, and then moves the sources twice.
        """
        residual = self.model.attention_residual
        if not residual.enabled:
            return ZERO
        sources = layer // residual.block_size + 2
        one = self.tokens / self.tp * self.model.hidden_size * self.e * (MIX_PASSES * sources + 1)
        return self._moved(2 * one, 3.0)

    def tensor_parallel(self) -> Seconds:
        """Gathering the sequence before, and reduce-scattering it after, both sublayers of a layer."""
        if self.tp == 1:
            return ZERO
        size = self.tokens * self.model.hidden_size * self.e
        once = 4 * self.links.gather(size, self.tp, 1)
        return Seconds(once, once)

    def context_bytes(self, full_attention: bool) -> tuple[float, float]:
        """What one layer's exchange of a micro-batch makes whole on every rank, forward and backward.

        Keys and values of other parts (MLA); every row's transition and state of all segments, and back the gradient
        of the state (KDA, in fp32). The inputs of the short convolutions, a few tokens, are left out.
        """
        p, mla, kda = self.config.parallel, self.model.mla, self.model.kda
        if full_attention:
            latents = p.context * self.tokens * (mla.kv_lora_rank + mla.qk_rope_head_dim) * self.e
            return latents, latents
        states = p.context * self.config.train.micro_batch_size * kda.num_heads / self.tp * kda.head_dim**2 * 4
        return 2 * states, states

    def context_parallel(self, full_attention: bool) -> Seconds:
        """The exchange of `context_bytes`."""
        p = self.config.parallel
        if p.context == 1:
            return ZERO
        return Seconds(*(self.links.gather(size, p.context, self.tp) for size in self.context_bytes(full_attention)))

    def layer(self, index: int) -> dict[str, Seconds]:
        """All parts of a decoder layer, without recomputation."""
        full, moe = self.model.is_full_attention(index), self.model.is_moe(index)
        found = self._parts(full, moe)
        if layers := adapters.adapted(self.config, full, moe):
            once = self._product(adapters.flops(self.config, layers, self.tokens)).forward
            moved = self._moved(adapters.moved(self.config, layers, self.tokens) * self.e)
            found["adapters"] = Seconds(once, 2 * once) + moved
        if self.model.attention_residual.enabled:
            found["residual mixture"] = self.mixture(index)
        return self._waits_for_host(found, full, moe)

    def _parts(self, full: bool, moe: bool) -> dict[str, Seconds]:
        found = dict(self.mixer(full))
        for name, seconds in self.feed_forward(moe).items():
            found[name] = found.get(name, ZERO) + seconds
        if self.tp > 1:
            found["tensor parallel"] = self.tensor_parallel()
        if self.config.parallel.context > 1:
            found["context parallel"] = self.context_parallel(full)
        return found

    def _waits_for_host(self, found: dict[str, Seconds], full: bool, moe: bool) -> dict[str, Seconds]:
        """Kernels of tiny layers end before the host has launched the next ones."""
        if self.practice.launch_free:
            return found
        kernels = KERNELS["mla" if full else "kda"] + KERNELS["moe" if moe else "dense"]
        kernels += KERNELS["mix"] if "residual mixture" in found else 0
        host = kernels * self.cluster.launch_us * 1e-6
        total = sum(found.values(), ZERO)
        late = Seconds(max(0.0, host - total.forward), max(0.0, 2 * host - total.backward))
        return {**found, "waiting for the host": late} if late.forward + late.backward > 0 else found

    def head(self) -> dict[str, Seconds]:
        """Final norm, logits and cross-entropy."""
        t, h, vocab = self.tokens / self.tp, self.model.hidden_size, self.model.vocab_size
        form = "fp32" if self.practice.format == "fp32" else "bf16"
        # Triton reads the logits once forward; backward it reads them again and writes their gradient. In PyTorch they
        # are widened to fp32, and their exponentials written.
        logit = self.e if fused_loss(self.config, self.cluster.kind) else 3 * 4
        return {
            "head": self._product(2 * h * vocab * t, "matmul", form) + self._moved(t * (vocab * logit + 4 * h * self.e))
        }

    def prediction(self) -> dict[str, Seconds]:
        """Multi-token prediction: fusion, a layer, the head once more."""
        model = self.model
        found = self._parts(model.mtp.mixer == "mla", model.moe.num_experts > 0)
        found["projections"] += self._product(4 * model.hidden_size**2 * self.tokens / self.tp)
        if fetched := found.get("redundant experts"):  # again before the backward, for this layer is never run again
            found["redundant experts"] = replace(fetched, backward=(1 + self.returned) * fetched.forward)
        return {**found, **self.head()}

    def again(self) -> float:
        """The share of a layer's forward that its backward runs again."""
        if self.practice.recompute_share is not None:
            return self.practice.recompute_share
        return 1.0 if self.config.parallel.recompute == "full" else 0.0

    def stage(self, layers: tuple[int, ...], embedding: bool, head: bool, mtp: bool) -> dict[str, Seconds]:
        """All parts of a stage for one micro-batch, recomputation in the backward."""
        found: dict[str, Seconds] = {}

        def add(parts: dict[str, Seconds], again: float) -> None:
            for name, seconds in parts.items():
                more = 0.0 if name in _ONCE else again
                whole = replace(seconds, backward=seconds.backward + more * seconds.forward)
                found[name] = found.get(name, ZERO) + whole

        for index in layers:
            add(self.layer(index), self.again())
        if embedding:
            add({"elementwise": self._moved(self.tokens / self.tp * self.model.hidden_size * self.e * 2)}, 0.0)
        if head:
            add(self.head(), 0.0)
        if mtp:
            add(self.prediction(), 0.0)
        return found
