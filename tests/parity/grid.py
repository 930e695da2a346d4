"""Random small K3 configurations, weights and batches, for comparing two implementations."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

PREFIX = "language_model."
# What each configuration is there for; what it does not fix is drawn.
CASES: dict[str, dict[str, Any]] = {
    "blocks-divide": {"num_hidden_layers": 6, "attn_res_block_size": 3},
    "blocks-do-not-divide": {"num_hidden_layers": 5, "attn_res_block_size": 3},
    "blocks-of-one": {"attn_res_block_size": 1},
    "one-block": {"num_hidden_layers": 4, "attn_res_block_size": 12},
    "two-mla-at-the-end": {"num_hidden_layers": 5, "full_attn_layers": [4, 5]},
    "only-kda": {"full_attn_layers": []},
    "mla-first": {"num_hidden_layers": 4, "full_attn_layers": [1, 3]},
    "other-heads": {"kda_heads": 5, "kda_head_dim": 8, "num_attention_heads": 2, "v_head_dim": 20},
    "wide-heads": {"kda_heads": 1, "kda_head_dim": 64, "num_attention_heads": 1, "qk_rope_head_dim": 24},
    "no-q-lora": {"q_lora_rank": None},
    "three-dense-layers": {"num_hidden_layers": 5, "first_k_dense_replace": 3},
    "top-1": {"num_experts_per_token": 1},
    "all-experts-but-one": {"num_experts": 5, "num_experts_per_token": 4},
    "scaled-not-renormalised": {"routed_scaling_factor": 2.5, "moe_renormalize": False, "num_shared_experts": 2},
    "no-latent": {"routed_expert_hidden_size": None},
    "three-taps": {"conv_size": 3},
    "packed": {"batch": "packed"},
    "padded-left": {"batch": "padded-left"},
    "padded-right": {"batch": "padded-right"},
    "many-chunks": {"length": 150, "rows": 1},
}


@dataclass
class Batch:
    """Tokens, documents and padding [b, s] (see k3train's `Packing`), and which tokens predict their successor."""

    tokens: torch.Tensor
    documents: torch.Tensor
    padding: torch.Tensor | None

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy over successors in the same document, fillers left out."""
        counts = self.documents[:, 1:] == self.documents[:, :-1]
        if self.padding is not None:
            counts = counts & ~self.padding[:, 1:] & ~self.padding[:, :-1]
        return torch.nn.functional.cross_entropy(logits[:, :-1][counts].float(), self.tokens[:, 1:][counts])

    def real(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the tokens that are no filler, [n, vocab]."""
        return logits.flatten(0, 1) if self.padding is None else logits[~self.padding]


def draw_config(name: str) -> tuple[dict[str, Any], Batch]:
    """The published `text_config` of a case, and a batch for it; the same for a name in every run."""
    fixed = dict(CASES[name])
    pick = random.Random(name)
    layers = fixed.pop("num_hidden_layers", pick.choice([4, 5]))
    full = fixed.pop("full_attn_layers", sorted({pick.randrange(2, layers), layers}))
    heads, head_dim = fixed.pop("kda_heads", pick.choice([2, 3])), fixed.pop("kda_head_dim", pick.choice([12, 16]))
    kind, length, rows = fixed.pop("batch", "rows"), fixed.pop("length", 37), fixed.pop("rows", 2)
    text = {
        "vocab_size": pick.choice([61, 96]),
        "hidden_size": pick.choice([40, 48]),
        "intermediate_size": pick.choice([56, 72]),
        "num_hidden_layers": layers,
        "num_attention_heads": pick.choice([2, 3]),
        "q_lora_rank": pick.choice([16, 24]),
        "kv_lora_rank": pick.choice([12, 20]),
        "qk_nope_head_dim": pick.choice([8, 16]),
        "qk_rope_head_dim": pick.choice([4, 8]),
        "v_head_dim": pick.choice([8, 12]),
        "num_experts": pick.choice([6, 9]),
        "num_experts_per_token": pick.choice([2, 3]),
        "num_shared_experts": 1,
        "moe_intermediate_size": pick.choice([16, 24]),
        "routed_expert_hidden_size": pick.choice([20, 28]),
        "first_k_dense_replace": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "attn_res_block_size": pick.choice([2, 3]),
        # Fixed by the architecture.
        "head_dim": 16,  # unused, checked to be even
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "latent_moe_use_norm": True,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "rms_norm_eps": 1e-5,
        "linear_attn_config": {
            "num_heads": heads,
            "head_dim": head_dim,
            "short_conv_kernel_size": fixed.pop("conv_size", 4),
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
            "full_attn_layers": full,
            "kda_layers": [layer for layer in range(1, layers + 1) if layer not in full],
        },
    }
    assert set(fixed) <= set(text), fixed
    text.update(fixed)
    return text, _batch(kind, rows, length, text["vocab_size"], pick.randrange(2**31))


def _batch(kind: str, rows: int, length: int, vocab: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    if kind == "packed":
        rows = 1
    # 0 is the padding token, whose embedding the published code gives no gradient.
    tokens = torch.randint(1, vocab, (rows, length), generator=generator)
    documents = torch.zeros_like(tokens)
    if kind == "packed":
        documents[:, 1:] += 1  # a document of a single token
        documents[:, 18:] += 1
        documents[:, 21:] += 1
        return Batch(tokens, documents, None)
    if kind == "rows":
        return Batch(tokens, documents, None)
    # The first row is filled up, the others are whole.
    padding = torch.zeros_like(tokens, dtype=torch.bool)
    if kind == "padded-left":
        padding[0, :9] = True
        documents[0, 9:] = 1
    else:
        padding[0, -9:] = True
        documents[0, -9:] = 1
    return Batch(tokens.masked_fill(padding, 0), documents, padding)


def draw_weights(shapes: dict[str, torch.Size], seed: int = 0) -> dict[str, torch.Tensor]:
    """fp32 weights for the published names: no two layers, channels or norms alike.

    Latents are small in front of their norms, so that an epsilon counts; gated FFNs get inputs large enough for the
    caps of their activation to count. Queries of KDA resemble its keys: its output is normalised, and at the start of
    a document it is v times q.k, whose sign alone would otherwise decide, so that rounding is amplified several times
    a layer (as in the golden weights, which are drawn without this care).
    """
    generator = torch.Generator().manual_seed(seed)
    spread = {"A_log": 0.5, "conv1d.weight": 0.5, "res_proj.weight": 0.3, "e_score_correction_bias": 0.1}
    spread |= {"embed_tokens.weight": 0.5, "lm_head.weight": 0.2}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith(("norm.weight", "layernorm.weight")):
            weights[name] = 1 + 0.2 * noise
        elif name.endswith("dt_bias"):
            weights[name] = noise - 1
        else:
            known = [value for ending, value in spread.items() if name.endswith(ending)]
            weights[name] = noise * (known[0] if known else _gain(name) / shape[-1] ** 0.5)
    for name in weights:
        key = name.replace(".q_proj", ".k_proj").replace(".q_conv1d", ".k_conv1d")
        if key != name and key in weights:
            weights[name] = 0.9 * weights[key] + 0.45 * weights[name]
    return {PREFIX + name: weight for name, weight in weights.items()}


def _gain(name: str) -> float:
    if ".q_a_proj" in name or ".kv_a_proj" in name:
        return 0.05
    into_activation = name.endswith((".w1.weight", ".w3.weight", ".up_proj.weight", "mlp.gate_proj.weight"))
    return 1.0 if into_activation or name.endswith("shared_experts.gate_proj.weight") else 0.25
