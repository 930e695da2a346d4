"""What the Triton forms keep and move, as far as their source says, and the parts of a layer that run twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3train.config.load import load_recipe
from k3train.config.rules_cluster import load_cluster
from k3train.config.schema import RecipeConfig
from k3train.plan.activations import Activations
from k3train.plan.links import Links
from k3train.plan.work import Practice, Work

H100 = load_cluster("h100-8x", {})


def work_of(config: RecipeConfig) -> Work:
    return Work(config, H100, Links(H100, config.parallel, 1), Practice.of(config))


@pytest.mark.parametrize(
    ("kind", "overrides", "kept", "making"),
    [
        ("cuda", [], 2, 2),
        ("cuda", ["model.kernels=torch"], 4, 6),
        ("cuda", ["train.precision=fp32"], 4, 4),
        ("cpu", [], 4, 6),
    ],
)
def test_triton_keeps_logits_in_their_own_dtype(kind: str, overrides: list[str], kept: int, making: int) -> None:
    """`cross_entropy` saves the logits that it was given and writes their gradient in their dtype."""
    config = load_recipe(["recipe=pretrain/k3-mini", *overrides])
    model, activations = config.model, Activations(config, kind)
    assert model.vocab_size % model.vocab_padding_multiple == 0
    logits = activations.tokens * model.vocab_size
    head = activations.stage((), embedding=False, head=True, mtp=False)
    assert head.bytes["logits"] / logits == pytest.approx(kept, rel=1e-3)
    assert activations.workspace((), True)["logits in the making"] == making * logits


@pytest.mark.parametrize(("placement", "kept"), [("before_w2", 0), ("after_w2", None)])
def test_an_activation_that_weighs_keeps_no_fp32_copy(placement: str, kept: int | None) -> None:
    """`fused_glu` saves `fused` and the weights; weights after w2 multiply by themselves whatever the kernels are."""
    fused, plain = (
        Activations(
            load_recipe(
                ["recipe=pretrain/k3-mini", f"model.kernels={kernels}", f"model.moe.weight_placement={placement}"]
            ),
            "cuda",
        )
        for kernels in ("auto", "reference")
    )
    copies = plain.tokens * plain.model.moe.top_k
    saved = plain.whole_layer(False, True).bytes["experts"] - fused.whole_layer(False, True).bytes["experts"]
    assert saved == (4 * copies * plain.model.moe.expert_hidden_size if kept == 0 else 0)


def test_triton_reads_a_logit_once_forward_and_moves_it_twice_backward() -> None:
    """2 and 4 bytes a logit in bf16, against 12 and 24 of the PyTorch form."""
    fused, plain = (
        work_of(load_recipe(["recipe=pretrain/k3-mini", f"model.kernels={kernels}"])) for kernels in ("auto", "torch")
    )
    a, b = fused.head()["head"], plain.head()["head"]
    logits = fused.tokens * fused.model.vocab_size
    rate = H100.memory_gbs * 1e9 * H100.efficiency.memory
    assert (b.forward - a.forward) * rate == pytest.approx(logits * (12 - 2))
    assert (b.backward - a.backward) * rate == pytest.approx(logits * (24 - 4))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_mixture_is_made_again_once(recompute: str) -> None:
    """By itself or with its layer, never both."""
    work = work_of(load_recipe(["recipe=pretrain/k3-mini", f"parallel.recompute={recompute}"]))
    mixed = work.stage((0, 1), False, False, False)["residual mixture"]
    assert mixed.backward == pytest.approx(3 * mixed.forward)


@pytest.mark.parametrize(
    ("layer", "kernels"), [(0, 60 + 12 + 20), (1, 60 + 110 + 20), (3, 45 + 110 + 20)], ids=["dense", "KDA", "MLA"]
)
def test_tiny_layers_wait_for_the_host(layer: int, kernels: int) -> None:
    """As many kernels as a layer's parts launch, a millisecond each, and twice as many backward."""
    config = load_recipe(["recipe=pretrain/k3-tiny", "parallel=single"])

    def spent(launch_us: str, practice: Practice) -> tuple[float, float, bool]:
        cluster = load_cluster("h100-8x", {"launch_us": launch_us})
        parts = Work(config, cluster, Links(cluster, config.parallel, 1), practice).layer(layer)
        forward, backward = (sum(getattr(part, way) for part in parts.values()) for way in ("forward", "backward"))
        return forward, backward, "waiting for the host" in parts

    practice = Practice.of(config)
    forward, backward, waits = spent("1000", practice)
    assert waits
    assert forward == pytest.approx(kernels * 1e-3)
    assert backward == pytest.approx(2 * kernels * 1e-3)
    free = spent("0", practice)
    assert not free[2]
    assert free[0] < 1e-3  # what the device itself takes
    assert spent("1000", replace(practice, launch_free=True)) == free
