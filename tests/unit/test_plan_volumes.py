"""Every volume of a step against numbers made by hand from the recipe's sizes, with and without MTP."""

from __future__ import annotations

import math
from typing import Any

import pytest

from k3train.config.load import load_recipe
from k3train.config.rules_cluster import load_cluster

# k3-tiny: 9 layers of which the first is dense, hidden 128, top 4 of 16 experts of (64, 96), micro-batches of 4 x 256
# tokens in fp32, 16 rows a step. Written out so that a wrong formula cannot hide behind the same formula here.
TOKENS, HIDDEN, LAYERS, MOE, LATENT, TOP, BYTES = 1024, 128, 9, 8, 64, 4, 4
EXPERT = 3 * 64 * 96 * BYTES


def planned(prediction: int, *overrides: str, cluster: dict[str, str] | None = None) -> Any:
    from k3train.plan.plan import make_plan

    words = ["recipe=pretrain/k3-tiny", "parallel=single", f"model.mtp.num_layers={prediction}", *overrides]
    return make_plan(load_recipe(words), load_cluster("cpu", cluster or {}))


@pytest.mark.parametrize("prediction", [0, 1])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_dispatch_of_tokens(single_rank: None, prediction: int, recompute: str) -> None:
    """To experts and back in every pass of every mixture; the layer that predicts is not run again."""
    words = ["parallel.world_size=4", "parallel.expert=4", f"parallel.recompute={recompute}"]
    volume = planned(prediction, *words).step.volumes["token dispatch"]
    micro_batches = 16 // (4 * 4)
    passes = MOE * (3 if recompute == "full" else 2) + 2 * prediction
    assert volume.fast == pytest.approx(micro_batches * passes * 2 * TOKENS * TOP * LATENT * BYTES * 3 / 4)
    assert volume.network == 0


@pytest.mark.parametrize("prediction", [0, 1])
def test_dispatch_across_domains(single_rank: None, prediction: int) -> None:
    """Of four ranks two share a domain: a third of what leaves a rank stays in it."""
    words = ["parallel.world_size=4", "parallel.expert=4"]
    volume = planned(prediction, *words, cluster={"fast_domain": "2"}).step.volumes["token dispatch"]
    whole = (2 * MOE + 2 * prediction) * 2 * TOKENS * TOP * LATENT * BYTES
    assert volume.fast == pytest.approx(whole * 1 / 4)
    assert volume.network == pytest.approx(whole * 2 / 4)


@pytest.mark.parametrize("prediction", [0, 1])
def test_dispatch_with_expert_tensor_parallelism_gathers_copies(single_rank: None, prediction: int) -> None:
    """Both ranks of an expert get the copies of both: gathered there, scattered back, in every pass."""
    words = ["parallel.world_size=2", "parallel.tensor=2", "parallel.expert_tensor=2"]
    volume = planned(prediction, *words).step.volumes["token dispatch"]
    micro_batches, copies = 16 // 4, TOKENS // 2 * TOP
    passes = 2 * MOE + 2 * prediction
    assert volume.fast == pytest.approx(micro_batches * passes * 2 * (2 * copies * LATENT * BYTES) * 1 / 2)


@pytest.mark.parametrize("prediction", [0, 1])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_redundant_experts(single_rank: None, prediction: int, recompute: str) -> None:
    """One a rank and mixture: fetched, fetched again, its gradients returned; times take the same three turns."""
    words = ["parallel.world_size=4", "parallel.expert=4", "parallel.balanced_experts=true"]
    plan = planned(prediction, *words, f"parallel.recompute={recompute}", cluster={"latency_us": "0"})
    turns = 3 * (MOE + prediction)
    assert plan.step.volumes["redundant experts, one a rank"].fast == pytest.approx(turns * EXPERT)
    spent = plan.step.parts["redundant experts"]
    once = EXPERT / (plan.cluster.fast_gbs * 1e9 * plan.cluster.efficiency.link)
    assert spent.forward + spent.backward == pytest.approx(turns * once)


@pytest.mark.parametrize("prediction", [0, 1])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tensor_parallel_gathers(single_rank: None, prediction: int, recompute: str) -> None:
    """Before and after both sublayers of every layer, in every pass."""
    words = ["parallel.world_size=2", "parallel.tensor=2", f"parallel.recompute={recompute}"]
    volume = planned(prediction, *words).step.volumes["tensor parallel"]
    passes = LAYERS * (3 if recompute == "full" else 2) + 2 * prediction
    assert volume.fast == pytest.approx(4 * passes * 4 * TOKENS * HIDDEN * BYTES * 1 / 2)


@pytest.mark.parametrize("prediction", [0, 1])
def test_context_parallel_exchanges(single_rank: None, prediction: int) -> None:
    """Latents of 32 + 16 numbers in the 3 layers of full attention (and that of prediction), states in the 6 others."""
    words = ["parallel.world_size=2", "parallel.context=2", "model.mtp.mixer=mla"]
    volume = planned(prediction, *words).step.volumes["context parallel"]
    latents, states = 2 * TOKENS // 2 * (32 + 16) * BYTES, 2 * 4 * 4 * 32**2 * 4
    assert volume.fast == pytest.approx(4 * ((3 + prediction) * 2 * latents + 6 * 3 * states) / 2)


@pytest.mark.parametrize("prediction", [0, 1])
def test_the_pipeline_and_the_embedding_that_two_ranks_hold(single_rank: None, prediction: int) -> None:
    """4 and 5 layers: at the boundary the running sum, one closed block summary and the embedding's; and its gradients.

    The last rank embeds next tokens for multi-token prediction; both ranks' gradients of the embedding are added.
    """
    from k3train.parallel.stages import traffic_of

    layout = f"parallel.pipeline_layout='Et*4|t*5{'m' * prediction}L'"
    words = ["parallel.world_size=2", "parallel.pipeline=2", layout]
    step = (plan := planned(prediction, *words)).step
    tensors = traffic_of(plan.config).tensors_sent(0)
    assert tensors == 3
    assert step.volumes["pipeline"].fast == pytest.approx(4 * tensors * TOKENS * HIDDEN * BYTES)
    if not prediction:
        assert "shared embedding" not in step.volumes
        assert "shared embedding" not in step.after
        return
    assert step.volumes["shared embedding"].fast == 2048 * HIDDEN * 4
    rate = plan.cluster.fast_gbs * 1e9 * plan.cluster.efficiency.link
    assert step.after["shared embedding"] == pytest.approx(200e-6 + 2048 * HIDDEN * 4 / rate)


@pytest.mark.parametrize("prediction", [0, 1])
def test_gradients_parameters_and_counts(single_rank: None, prediction: int) -> None:
    """Every parameter once over 4 ranks; counts of 16 experts, a bias and 1,000 bins a router, there and back."""
    plan = planned(prediction, "parallel.world_size=4", "optim=adamw")
    volumes, elements = plan.step.volumes, plan.inventory.total
    # Buckets are padded so that ranks have equal parts.
    assert volumes["gradient reduction"].fast == pytest.approx(4 * elements * 3 / 4, rel=1e-3)
    assert volumes["parameter gathering"].fast == pytest.approx(4 * elements * 3 / 4, rel=1e-3)
    assert volumes["router counts"].fast == pytest.approx(2 * (MOE + prediction) * 16 * 1002 * 4 * 3 / 4)
    assert "Muon's exchange" not in volumes


@pytest.mark.parametrize("prediction", [0, 1])
def test_muons_exchange_without_sharding(single_rank: None, prediction: int) -> None:
    """A rank orthogonalizes a quarter of the blocks and sends each update to three others."""
    plan = planned(prediction, "parallel.world_size=4", "optim=muon", "parallel.distributed_optimizer=false")
    under_muon = sum(math.prod(t.shape) for t in plan.inventory.tensors if t.muon)
    assert plan.step.volumes["Muon's exchange"].fast == pytest.approx(4 * under_muon * 3 / 4)
    names = {t.part for t in plan.inventory.tensors if t.muon}
    assert ("mtp" in names) == bool(prediction)
