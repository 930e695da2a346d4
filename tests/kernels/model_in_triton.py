"""A small K3 with `model.kernels=triton` beside the same with `torch`, in Triton's interpreter on the CPU.

As a program (the interpreter reads its variable when kernels are defined) it prints one JSON object: how far losses and
gradients of the two lie apart, and how often each operation's Triton form was called, by what the model was doing. A
call that forgets its `backend` runs in PyTorch on a CPU, where "auto" is PyTorch, and is missing among these.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from k3train.config.model import AttentionResidualConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from k3train.config.quant import QuantConfig
from k3train.config.schema import ParallelConfig, RecipeConfig

# Where the Triton forms begin: an operation's name, its module, and its function forward and backward.
ENTRIES = (
    ("situ_glu", "situ.triton_kernel", "glu_forward"),
    ("situ_glu backward", "situ.triton_kernel", "glu_backward"),
    ("scale_rows", "row_scale.triton_kernel", "scale_forward"),
    ("scale_rows backward", "row_scale.triton_kernel", "scale_backward"),
    ("mix", "attention_residual.triton_kernel", "mix_forward"),
    ("mix backward", "attention_residual.triton_kernel", "mix_backward"),
    ("two_phase_mix", "attention_residual.phase_one_kernel", "phase_one_forward"),
    ("two_phase_mix", "attention_residual.merge_kernel", "merge_forward"),
    ("rms_norm", "rms_norm.triton_kernel", "norm_forward"),
    ("rms_norm backward", "rms_norm.triton_kernel", "norm_backward"),
    ("short_conv", "short_conv.by_triton", "conv_forward"),
    ("short_conv backward", "short_conv.by_triton", "conv_backward"),
    ("cross_entropy", "cross_entropy.triton_kernel", "shard_statistics"),
    ("cross_entropy backward", "cross_entropy.triton_kernel", "shard_gradient"),
    ("quantile_balancing", "quantile_balancing.triton_kernel", "select_and_count_triton"),
    ("mx", "mx.triton_kernel", "quantize_dequantize_triton"),
)
DOCUMENTS = [[0] * 5 + [1] * 8, [0] * 13]


def small(kernels: str) -> RecipeConfig:
    """Layer 1: KDA and a dense FFN. Layer 2: MLA and experts, which are quantized. Sizes are multiples of little."""
    model = ModelConfig(
        num_layers=2,
        hidden_size=36,
        vocab_size=50,
        ffn_hidden_size=44,
        full_attention_layers=[2],
        kernels=kernels,
        kda=KDAConfig(num_heads=2, head_dim=12),
        mla=MLAConfig(num_heads=2, q_lora_rank=20, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4),
        attention_residual=AttentionResidualConfig(block_size=1),
        moe=MoEConfig(num_experts=6, top_k=2, latent_size=32, expert_hidden_size=32, quantile_bins=40),
    )
    model.mla.v_head_dim = 12
    quant = QuantConfig(enabled=True, skip_stages=[], backend=kernels)
    return RecipeConfig(model=model, quant=quant)


def built(kernels: str) -> torch.nn.Module:
    """The model with busy weights, the same whatever the kernels."""
    from k3train.model.build import build_chunks

    # What is asked for is taken: the interpreter stands in for a GPU, which the rules ask for.
    with patch("k3train.quant.fake.resolve_quant_backend", lambda asked, kind: asked):
        (model,), _ = build_chunks(small(kernels))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("query", "weight", "w13", "w2")) and "norm" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls of the Triton forms in the meantime; a norm with a gate is `gated_rms_norm`."""
    calls: Counter[str] = Counter()

    def watched(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            gated = name.startswith("rms_norm") and args[1] is not None
            calls["gated_" + name if gated else name] += 1
            return plain(*args, **kwargs)

        return call

    kept = []
    for name, place, function in ENTRIES:
        module = importlib.import_module(f"k3kernels.{place}")
        kept.append((module, function, getattr(module, function)))
        setattr(module, function, watched(name, getattr(module, function)))
    try:
        yield calls
    finally:
        for module, function, plain in kept:
            setattr(module, function, plain)


def batch() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Documents in two rows, their tokens, and the tokens that follow."""
    from k3train.model.packing import Packing

    packing = Packing(torch.tensor(DOCUMENTS, dtype=torch.int32))
    tokens = torch.randint(0, 50, packing.document_ids.shape, generator=torch.Generator().manual_seed(3))
    return packing, tokens, tokens.roll(-1, 1)


def trained(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Losses [b, s] and the gradient of every parameter, and what the router counted."""
    packing, tokens, labels = batch()
    losses = model(tokens, packing, labels, torch.ones(tokens.shape)).loss
    weights = torch.linspace(0.5, 1.5, losses.numel()).view_as(losses)
    (losses * weights).sum().backward()
    found = {"loss": losses.detach()}
    found |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    return found | {"counts": model.decoder.layers["1"].moe.router.histogram.clone()}


def by_shard(model: torch.nn.Module, backend: str) -> dict[str, torch.Tensor]:
    """`shard_losses` of strided bf16 logits [s, b, v], and their gradient."""
    from k3train.parallel.vocab_loss import shard_losses

    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(2, 13, 50, generator=generator).bfloat16().transpose(0, 1).requires_grad_()
    losses = shard_losses(logits, batch()[2], model.tp_group, backend)
    losses.sum().backward()
    return {"loss": losses.detach(), "logits": logits.grad}


@torch.no_grad()
def generated(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Logits of a stretch of three rows' tokens, then of one token more in each."""
    from k3train.model.packing import Packing
    from k3train.model.state import SequenceStates

    model.eval()
    states = SequenceStates.of(model)
    rows = states.add(3)
    _, tokens, _ = batch()
    for what, counts in (("prefill", [5, 1, 4]), ("one token a row", [1, 1, 1])):
        view = states.extend(rows, counts)
        ids = tokens.flatten()[None, : sum(counts)]
        yield what, model(ids, Packing.whole_rows(1, sum(counts), "cpu"), states=view)


def apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of each, against the largest number in it."""
    assert found.keys() == wanted.keys()
    differences = {}
    for name, right in wanted.items():
        distance = (found[name].double() - right.double()).abs().max() / right.double().abs().max().clamp_min(1e-30)
        differences[name] = float(distance) if distance.isfinite() else float("inf")
    return differences


def main() -> None:
    from bench_step import alone

    from k3train import platform
    from k3train.model.build import start_model_parallel

    alone()
    platform.start("cpu", threads=1)
    start_model_parallel(ParallelConfig())
    ours, plain = built("triton"), built("torch")
    calls, differences = {}, {}
    with counted() as none:
        wanted, shards, logits = trained(plain), by_shard(plain, "reference"), dict(generated(plain))
    with counted() as calls["training"]:
        differences["training"] = apart(trained(ours), wanted)
    with counted() as calls["shard_losses"]:
        differences["shard_losses"] = apart(by_shard(ours, "triton"), shards)
    steps = generated(ours)
    for what in logits:
        with counted() as calls[what]:
            found = dict([next(steps)])
        differences[what] = apart(found, {what: logits[what]})
    platform.stop()
    print(json.dumps({"calls": calls, "of the torch form": none, "differences": differences}))


if __name__ == "__main__":
    sys.exit(main())
