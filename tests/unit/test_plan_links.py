"""Who sends how much to whom over which link."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3train.config.load import load_recipe
from k3train.config.rules_cluster import load_cluster
from k3train.config.schema import ParallelConfig
from k3train.plan.links import Links

LAYOUT = "parallel.pipeline_layout='Et*2|t*2|t*2|t*2L'"
RACK = load_cluster("gb200-nvl72", {})


@pytest.mark.parametrize(
    ("layout", "world_size", "domain", "near"),
    [
        ({"expert": 64}, 1024, 64, True),  # packed 72 a rack, the second group would lie across two racks
        ({"expert": 36}, 720, 72, True),
        ({"expert": 64}, 64, 72, True),  # one rack holds all
        ({"tensor": 8}, 1024, 72, True),
        ({"tensor": 16, "expert": 8}, 1024, 64, True),
        ({"expert": 128}, 1024, 64, False),
    ],
)
def test_groups_lie_within_a_rack_or_go_over_the_network(
    layout: dict[str, int], world_size: int, domain: int, near: bool
) -> None:
    links = Links(RACK, ParallelConfig(**layout), world_size)
    assert (links.domain, links.idle) == (domain, 72 - domain)
    _, _, network = links.split_all_to_all(1.0, 8, False)
    assert (network == 0) == near
    if world_size > 72:
        assert all(links.domain % span == 0 for span in range(1, 73) if links.stays_fast(span, 1))


def test_a_plan_says_what_stays_idle(single_rank: None) -> None:
    from k3train.plan.plan import make_plan
    from k3train.plan.text import plain, summary

    config = load_recipe(["recipe=pretrain/k3-tiny", "parallel.world_size=16", "train.global_batch_size=64"])
    tight = load_cluster("cpu", {"fast_domain": "3"})
    plan = make_plan(config, tight)
    assert "placement   2 ranks in each of 8 domains of 3 devices, 1 of them idle" in summary(plan)
    assert plain(plan)["idle_devices_a_domain"] == 1
    assert "placement" not in summary(make_plan(config, load_cluster("cpu", {})))


def test_muons_exchange_takes_its_bytes_over_the_link(single_rank: None) -> None:
    """Newton-Schulz runs at the peak of its own precision; what a rank sends takes its whole size."""
    from k3train.plan.muon import orthogonalization
    from k3train.plan.plan import make_plan
    from k3train.plan.sharding import Groups

    words = ["recipe=pretrain/k3-tiny", "optim=muon", "parallel=single", "parallel.world_size=4"]
    cluster = load_cluster("cpu", {"latency_us": "0", "peak_tflops.bf16": "0.24"})
    low, high = (make_plan(load_recipe([*words, f"optim.muon.precision={form}"]), cluster) for form in ("bf16", "fp32"))
    muon = orthogonalization(low.memory[0].held, low.config, Groups.of(low.config, 4), "cpu")
    assert low.step.after["Muon's exchange"] == pytest.approx(muon.sent_bytes / (cluster.fast_gbs * 1e9 * 0.75))
    assert high.step.after["Newton-Schulz"] == pytest.approx(2 * low.step.after["Newton-Schulz"])


def test_muons_exchange_spans_the_whole_stage(single_rank: None) -> None:
    """4 data-parallel ranks, 2 tensor-parallel ranks apart, do not share a domain of 4."""
    from k3train.plan.plan import make_plan

    words = ["recipe=pretrain/k3-tiny", "optim=muon", "parallel=single", "parallel.tensor=2", "parallel.world_size=8"]
    cluster = load_cluster("cpu", {"latency_us": "0", "fast_domain": "4"})
    step = make_plan(load_recipe(words), cluster).step
    volume = step.volumes["Muon's exchange"]
    assert volume.fast == 0
    assert step.after["Muon's exchange"] == pytest.approx(volume.network / (cluster.network_gbs * 1e9 * 0.75))


def test_without_the_distributed_optimizer_gradients_travel_twice_and_parameters_never(single_rank: None) -> None:
    from k3train.plan.plan import make_plan

    words = ["recipe=pretrain/k3-tiny", "optim=muon", "parallel=single", "parallel.world_size=4"]
    cluster = load_cluster("cpu", {})
    whole, sharded = (
        make_plan(load_recipe([*words, f"parallel.distributed_optimizer={on}"]), cluster) for on in ("false", "true")
    )
    held = whole.memory[0].held
    assert "parameter gathering" not in whole.step.volumes
    assert "parameter gathering" in sharded.step.volumes
    assert whole.step.volumes["gradient reduction"].fast == pytest.approx(2 * held.gradients * 3 / 4)
    # Every rank orthogonalizes a quarter, and sends its updates to three others.
    muon = sum(run.length for run in held.runs if run.tensor.muon)
    assert whole.step.volumes["Muon's exchange"].fast == pytest.approx(4 * muon * 3 / 4)


def test_experts_are_reduced_over_one_kind_of_link(single_rank: None) -> None:
    """2 ranks hold the same experts, EP2 x ETP2 apart: 8 ranks, so a domain of 4 does not hold them."""
    from k3train.plan.sharding import Groups
    from k3train.plan.volumes import gradient_shares

    config = load_recipe(["recipe=pretrain/k3-tiny", "parallel=single"])
    config.parallel = replace(config.parallel, tensor=2, expert=2, expert_tensor=2)
    from k3train.plan.inventory import take_inventory
    from k3train.plan.memory import rank_memory

    memory = rank_memory(take_inventory(config), config, load_cluster("cpu", {}), 8, 0)
    (_, data, near), (_, copies, far) = gradient_shares(config, Groups.of(config, 8), memory)
    assert (data, near, copies, far) == (4, 2, 2, 4)


def test_redundant_experts_are_fetched_twice_and_their_gradients_returned(single_rank: None) -> None:
    """Of one expert a rank, layer and micro-batch; memory has room for as many as there may be, and their gradients."""
    from k3train.plan.plan import make_plan

    words = ["recipe=pretrain/k3-tiny", "parallel=single", "parallel.world_size=4", "parallel.expert=4"]
    cluster = load_cluster("cpu", {"latency_us": "0"})
    plans = [make_plan(load_recipe([*words, f"parallel.balanced_experts={on}"]), cluster) for on in ("false", "true")]
    plain, balanced = plans
    assert "redundant experts, one a rank" not in plain.step.volumes
    moe, width = balanced.config.model.moe, 4 if balanced.config.train.precision == "fp32" else 2
    expert = 3 * moe.latent_size * moe.expert_hidden_size * width
    layers = balanced.config.model.num_layers - moe.first_dense_layers
    volume = balanced.step.volumes["redundant experts, one a rank"]
    assert volume.fast == pytest.approx(3 * balanced.step.micro_batches * layers * expert)
    assert volume.network == 0
    assert balanced.fullest.workspace["redundant experts"] == 2 * 3 * expert  # ceil(16 * 3 / 16) of them
    seconds = balanced.step.parts["redundant experts"]
    assert seconds.backward == pytest.approx(2 * seconds.forward)
    assert seconds.forward == pytest.approx(layers * expert / (cluster.fast_gbs * 1e9 * 0.75))
    assert balanced.step.seconds > plain.step.seconds


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_context_parallel_ranks_send_latents_and_states(single_rank: None, recompute: str) -> None:
    """By hand: two ranks send each other half of what both then have."""
    from k3train.plan.plan import make_plan

    words = ["recipe=pretrain/k3-tiny", "parallel=single", "parallel.context=2", "parallel.world_size=4"]
    config = load_recipe([*words, f"parallel.recompute={recompute}", "model.mtp.num_layers=0"])
    volume = make_plan(config, load_cluster("cpu", {"fast_domain": "2"})).step.volumes["context parallel"]
    model, train = config.model, config.train
    mla = train.micro_batch_size * train.seq_length // 2 * (model.mla.kv_lora_rank + model.mla.qk_rope_head_dim) * 4
    state = train.micro_batch_size * model.kda.num_heads * model.kda.head_dim**2 * 4
    full = sum(model.is_full_attention(i) for i in range(model.num_layers))
    forwards = 2 if recompute == "full" else 1
    layers = full * (forwards + 1) * mla + (model.num_layers - full) * (2 * forwards + 1) * state
    assert volume.network == 0
    assert volume.fast == layers * train.global_batch_size // (2 * train.micro_batch_size)


def test_router_counts_are_pooled_over_all_ranks_of_a_stage(single_rank: None) -> None:
    """An all-reduce of every layer's histograms, over tensor-, context- and data-parallel ranks: 4 of them here."""
    from k3train.plan.plan import make_plan

    words = ["recipe=pretrain/k3-tiny", "parallel=single", "parallel.tensor=2", "parallel.world_size=4"]
    plan = make_plan(load_recipe(words), load_cluster("cpu", {"fast_domain": "2"}))
    moe = plan.config.model.moe
    layers = sum(plan.config.model.is_moe(i) for i in range(plan.config.model.num_layers))
    layers += plan.config.model.mtp.num_layers
    counts = layers * moe.num_experts * (2 + moe.quantile_bins) * 4
    volume = plan.step.volumes["router counts"]
    assert volume.fast == 0
    assert volume.network == pytest.approx(2 * 3 / 4 * counts)
    assert plan.step.after["router counts"] > volume.network / (plan.cluster.network_gbs * 1e9)


@pytest.mark.parametrize(
    ("words", "chunks"),
    [
        (["parallel.world_size=4"], 1),
        (["parallel.world_size=4", "parallel.pipeline=2", "parallel.virtual_pipeline=2", LAYOUT], 3),
    ],
    ids=["DP4", "PP2 VPP2 DP2"],
)
@pytest.mark.parametrize("gbs", ["2", "0.001"], ids=["all hidden", "more than passes hide"])
def test_passes_hide_what_overlaps_them(single_rank: None, words: list[str], chunks: int, gbs: str) -> None:
    """By hand: a ring moves (n - 1) / n of the gradients (fp32) and of the parameters, over 3/4 of a link's rate.

    Hidden is at most what the shortest backward (forward) takes, once and with virtual stages another P (V - 1) times.
    """
    from k3train.plan.plan import make_plan

    base = ["recipe=pretrain/k3-tiny", "parallel=single", "model.num_layers=8", "model.full_attention_layers=[4,8]"]
    overlap = ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]
    cluster = load_cluster("cpu", {"latency_us": "0", "fast_gbs": gbs, "network_gbs": gbs})
    hidden, shown = (make_plan(load_recipe([*base, *words, *extra]), cluster) for extra in (overlap, []))
    ranks = 4 // hidden.config.parallel.pipeline
    passes = [p for rank in hidden.step.timeline.ranks for p in rank]
    gradients = max(rank.held.gradients for rank in hidden.memory)
    whole = gradients * (ranks - 1) / ranks / (float(gbs) * 1e9 * 0.75)
    for name, forward in (("gradient reduction", False), ("parameter gathering", True)):
        cover = chunks * min(p.end - p.start for p in passes if p.work.forward is forward)
        assert shown.step.after[name] == pytest.approx(whole, rel=0.02)  # buckets are padded where they overlap
        assert shown.step.hidden[name] == 0
        assert hidden.step.hidden[name] == pytest.approx(min(whole, cover))
        assert hidden.step.after.get(name, 0.0) == pytest.approx(max(0.0, whole - cover))
        assert (whole > cover) == (gbs == "0.001")
