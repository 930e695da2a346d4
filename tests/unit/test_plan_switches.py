"""Switches of a recipe change its plan by what they do: rounding, weight clipping, adapters, teachers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from k3train.config.load import load_recipe
from k3train.config.rules_cluster import load_cluster

# k3-tiny: 8 mixtures of 16 experts of (64, 96), top 4; 1024 tokens a micro-batch, four of them a step on one rank.
TOKENS, LAYERS, COPIES = 1024, 8, 4096
EXPERTS = LAYERS * 16 * 3 * 64 * 96
GBS, TFLOPS = 8e9 * 0.75, 0.12e12  # of cluster=cpu
TINY = ("recipe=pretrain/k3-tiny", "parallel=single", "model.mtp.num_layers=0")


def planned(*overrides: str, recipe: tuple[str, ...] = TINY, cluster: str = "cpu") -> Any:
    from k3train.plan.plan import make_plan

    return make_plan(load_recipe([*recipe, *overrides]), load_cluster(cluster, {}))


QUANT = ("quant.enabled=true", "quant.skip_stages=[]")


@pytest.mark.parametrize(
    ("switch", "inputs", "weights"),
    [
        ((), 64 + 96, 1.0),
        (("quant.modules=[experts.w13]",), 64, 2 / 3),
        (("quant.modules=[experts.w2]",), 96, 1 / 3),
        (("quant.inputs=none",), 0, 1.0),
        (("quant.weights=none",), 64 + 96, 0.0),
    ],
)
def test_rounding(single_rank: None, switch: tuple[str, ...], inputs: int, weights: float) -> None:
    """Inputs of the products forward, weights once a step and kept: 128 bytes a number in PyTorch's passes."""
    plan = planned(*QUANT, *switch)
    part = plan.step.parts.get("rounding inputs")
    assert (part.forward if part else 0.0) == pytest.approx(LAYERS * COPIES * inputs * 128 / GBS)
    assert part is None or part.backward == 0
    assert plan.step.after.get("rounding weights", 0.0) == pytest.approx(EXPERTS * weights * 128 / GBS)
    assert plan.fullest.quantized == pytest.approx(4 * EXPERTS * weights)


def test_rounding_by_a_kernel_reads_and_writes_once(single_rank: None) -> None:
    plan = planned(*QUANT, "train.precision=bf16", cluster="h100-8x")
    assert plan.step.after["rounding weights"] == pytest.approx(EXPERTS * 4 / (3350e9 * 0.75))
    assert "rounding weights" not in planned("quant.enabled=true").step.after  # pretraining is among skip_stages


@pytest.mark.parametrize("switch", [(), ("quant.modules=[experts.w13]",), ("quant.weights=none",)])
def test_planned_activations_with_rounding_are_what_autograd_keeps(single_rank: None, switch: tuple[str, ...]) -> None:
    """What is kept more are the rounded weights; inputs as they were before are not."""
    from test_plan_activations import kept_bytes

    from k3train.plan.activations import one_rank_total

    config = load_recipe([*TINY, *QUANT, *switch])
    rounded = planned(*QUANT, *switch).fullest.quantized
    assert kept_bytes(config) == pytest.approx(one_rank_total(config) + rounded, rel=1e-3)


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_weight_clipping_multiplies_queries_and_keys_once_more(
    single_rank: None, interval: int, recompute: str
) -> None:
    """4 rows of 4 heads and 256 x 256 logits of 48 products in 3 layers; in one forward of two.

    Each is written, read and written by the mask, and read for its maximum: 16 bytes, for fp32 needs no widening.
    """
    words = ["optim=muon", "optim.qk_clip.enabled=true", f"optim.qk_clip.interval={interval}"]
    plan = planned(*words, f"parallel.recompute={recompute}")
    logits = 3 * 4 * 4 * 256**2
    once = 2 * 48 * logits / (TFLOPS * 0.45) + logits * 16 / GBS
    part = plan.step.parts["QK-Clip"]
    assert (part.forward, part.backward) == (pytest.approx(once / interval), 0.0)
    assert "QK-Clip's scaling of weights" in plan.not_counted


def test_logits_in_bf16_are_widened(single_rank: None) -> None:
    """Written in 2 bytes, read and written in 4; those masked (read, written), and read for their maximum."""
    from k3train.plan.extras import logit_bytes

    assert (logit_bytes(2), logit_bytes(4)) == (2 + 2 + 4 + 4 + 4 + 4, 4 + 4 + 4 + 4)


def test_weight_clipping_looks_at_blocks_of_queries(single_rank: None) -> None:
    """Blocks of 2^24 / (4 x 4 x 4096) = 256 queries meet the keys up to their end: 16 of 1 to 16 times 256."""
    from k3train.plan.extras import measured_logits

    config = load_recipe([*TINY, "train.seq_length=4096"])
    assert measured_logits(config) == 4 * 4 * 256 * 256 * sum(range(1, 17))


LORA = ("lora.enabled=true", "optim=adamw", "stage.update_router_bias=false")
ALL = "lora.targets=[attention,latent,shared_experts,dense_ffn]"


@pytest.mark.parametrize(
    "model", [(), ("model.mla.q_lora_rank=null", "model.kda.output_gate=low_rank"), ("model.moe.num_shared_experts=2",)]
)
def test_adapters_lie_where_the_model_puts_them(single_rank: None, model: tuple[str, ...]) -> None:
    from k3train.plan.adapters import adapted
    from k3train.plan.inventory import take_inventory

    config = load_recipe([*TINY, *LORA, ALL, *model])
    built = [math.prod(t.shape) for t in take_inventory(config).tensors if ".lora." in t.name]
    layers = [
        linear
        for i in range(config.model.num_layers)
        for linear in adapted(config, config.model.is_full_attention(i), config.model.is_moe(i))
    ]
    assert len(built) == 2 * len(layers)
    assert sum(built) == sum(16 * (linear.inputs + linear.outputs) for linear in layers)


def test_adapters_add_products_and_frozen_weights_spare_some(single_rank: None) -> None:
    """Rank 16 beside gate, up and down of 8 shared experts: 224 rows and columns each, and 320 outputs."""
    plan, whole = planned(*LORA, "lora.targets=[shared_experts]"), planned("optim=adamw")
    part = plan.step.parts["adapters"]
    products, moved = LAYERS * 2 * 16 * TOKENS * 3 * 224 / (TFLOPS * 0.83), LAYERS * 5 * TOKENS * 320 * 4 / GBS
    assert part.forward == pytest.approx(products + moved)
    assert part.backward == pytest.approx(2 * part.forward)
    for name in ("projections", "experts", "router"):
        frozen, learned = plan.step.parts[name], whole.step.parts[name]
        assert frozen.forward == learned.forward == pytest.approx(frozen.backward)
        assert learned.backward == pytest.approx(2 * learned.forward)
    assert "adapters" not in whole.step.parts


def test_adapters_alone_are_reduced(single_rank: None) -> None:
    """As dense parameters, although the frozen experts outnumber them."""
    plan = planned(*LORA, "parallel.world_size=4", "parallel.expert=2")
    adapters = sum(math.prod(t.shape) for t in plan.inventory.tensors if t.trained)
    assert adapters < plan.memory[0].held.expert_parameters
    assert plan.step.volumes["gradient reduction"].fast == pytest.approx(4 * adapters * 3 / 4, rel=2e-3)


def test_redundant_experts_that_are_frozen_return_nothing(single_rank: None) -> None:
    """Fetched forward and once more for the backward; room for the weights of three, as many as there may be."""
    words = ["parallel.world_size=4", "parallel.expert=4", "parallel.balanced_experts=true"]
    plan = planned(*LORA, *words)
    expert = 3 * 64 * 96 * 4
    assert plan.step.volumes["redundant experts, one a rank"].fast == pytest.approx(2 * LAYERS * expert)
    spent = plan.step.parts["redundant experts"]
    assert spent.backward == spent.forward
    assert plan.fullest.workspace["redundant experts"] == 3 * expert


@pytest.mark.parametrize(("tensor", "kind"), [(1, "column"), (2, "column"), (2, "row"), (2, "whole")])
def test_adapters_are_cut_as_their_layers(tensor: int, kind: str) -> None:
    """Of 10 to 30 numbers, 8 tokens, rank 16: a column layer's first matrix is whole on each of two ranks."""
    from k3train.plan.adapters import Linear, flops

    config = load_recipe([*TINY, f"parallel.tensor={tensor}"])
    rows = {(1, "column"): 10 + 30, (2, "column"): 10 + 15, (2, "row"): 5 + 15, (2, "whole"): 5 + 15}
    assert flops(config, [Linear(10, 30, kind)], 8) == 2 * 16 * 8 * rows[tensor, kind]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [ALL, "model.mtp.num_layers=1"],
        ["lora.targets=[shared_experts]", "train.precision=bf16"],
        ["lora.dropout=0.1", "train.precision=bf16", "model.mtp.num_layers=1"],
        ["parallel.recompute=full"],
    ],
    ids=lambda overrides: ",".join(overrides) or "as shipped",
)
def test_planned_activations_of_adapters_are_what_autograd_keeps(single_rank: None, overrides: list[str]) -> None:
    from test_plan_activations import kept_bytes

    from k3train.plan.activations import one_rank_total

    config = load_recipe([*TINY, *LORA, *overrides])
    assert kept_bytes(config) == pytest.approx(one_rank_total(config), rel=1e-3)


ON_POLICY = ("recipe=distill/k3-tiny",)


def test_teachers_lie_beside_the_student_and_score_its_texts(single_rank: None) -> None:
    """Two of the student's size; a text is scored by one, a forward without what only training does."""
    plan, alone = planned(recipe=ON_POLICY), planned("rl.teachers_in_memory=1", recipe=ON_POLICY)
    weights = 4 * plan.inventory.total
    assert plan.fullest.bars()["teachers"] == 2 * weights
    assert plan.fullest.total - alone.fullest.total == weights
    forward = sum(s.forward for name, s in plan.step.parts.items() if name not in ("QK-Clip", "balancing"))
    assert plan.step.after["teachers' scoring"] == pytest.approx(64 * forward)
    assert "reading 2 teachers from disk in turns, 1 in memory" in alone.not_counted
    assert len(plan.teachers.assumed) == 2


def test_teachers_of_a_mixture_both_score(single_rank: None) -> None:
    """Those of one family and effort; two ranks share the texts out."""
    words = [f"rl.teachers={_teachers(('pick', 'low'), ('pick', 'low'))}"]
    one, both = planned(recipe=ON_POLICY), planned(*words, recipe=ON_POLICY)
    assert both.step.after["teachers' scoring"] == pytest.approx(2 * one.step.after["teachers' scoring"])
    spread = ["parallel.world_size=2", "train.micro_batch_size=1"]
    apart = planned(*spread, recipe=ON_POLICY).step.after["teachers' scoring"]
    assert apart == pytest.approx(one.step.after["teachers' scoring"] / 2)


@pytest.mark.parametrize(("pipeline", "slots"), [(2, 32 * (2 + 1)), (3, 21 * (3 + 2) + 1 + 2)])
def test_teachers_in_a_pipeline_score_in_groups_of_its_ranks(single_rank: None, pipeline: int, slots: int) -> None:
    """64 batches, as many at a time as there are ranks; each group fills the pipeline and leaves it."""
    layout = {2: "Et*4|t*5L", 3: "Et*3|t*3|t*3L"}[pipeline]
    sizes = [f"parallel.{name}={pipeline}" for name in ("world_size", "pipeline")]
    step = planned(*sizes, f"parallel.pipeline_layout='{layout}'", recipe=ON_POLICY).step
    assert step.micro_batches == 64
    # The last stage is the slowest: its layers and the head; it sends nothing on.
    only_training = [step.parts[name].forward for name in ("QK-Clip", "balancing") if name in step.parts]
    forward = step.stages[-1].forward - sum(only_training)
    assert step.slowest == pipeline - 1
    assert step.after["teachers' scoring"] == pytest.approx(slots * forward)


def _teachers(*tasks: tuple[str, str], more: str = "") -> str:
    entries = [f"{{checkpoint: runs/{n}, family: {f}, effort: {e}{more}}}" for n, (f, e) in enumerate(tasks)]
    return f"[{', '.join(entries)}]"


def test_teachers_under_zero3_are_shared_out_and_gathered(single_rank: None) -> None:
    """Half of each of two on either of two ranks, one layer whole; all of one's weights for every eight rows."""
    from k3train.plan.inventory import take_inventory
    from k3train.plan.teachers import plan_teachers

    teachers = _teachers(("pick", "low"), ("reverse", "high"), more=", host: zero3")
    config = load_recipe([*ON_POLICY, f"rl.teachers={teachers}", "parallel.world_size=2"])
    inventory = take_inventory(config)
    found = plan_teachers(config, load_cluster("cpu", {}), inventory, 2)
    layers = [sum(math.prod(t.shape) for t in inventory.tensors if t.layer == i) for i in range(9)]
    assert found.resident == 4 * inventory.total + 4 * max(layers)
    rows = config.train.global_batch_size // 2
    assert found.sent.fast == pytest.approx(-(-rows // 8) * 4 * inventory.total / 2)


def test_a_teacher_that_goes_before_the_first_step(single_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights beside the student's training state can be the peak: 4 x 4.2M bytes against 16 rows of 16 tokens."""
    from k3train.plan import teachers

    recipe = ("recipe=distill/k3-tiny-offline",)
    small = ("train.seq_length=16",)
    unread = planned(*small, recipe=recipe)
    assert unread.teachers.assumed == (
        "that runs/k3-tiny-sft, which is not there to be read, is of the student's size",
    )
    monkeypatch.setattr(teachers, "recipe_of", lambda path: (Path(path), load_recipe(list(TINY))))
    plan = planned(*small, recipe=recipe)
    assert plan.teachers.assumed == ()
    weights = 4 * 4_223_000
    assert plan.fullest.before == pytest.approx(weights, rel=1e-3)
    assert plan.fullest.total == plan.fullest.held.total + plan.fullest.before
    assert sum(plan.fullest.bars().values()) == pytest.approx(plan.fullest.total)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (("recipe=rl/k3-tiny",), "rollouts (generation and its caches, environments, rewards)"),
        (("recipe=distill/k3-tiny-offline",), "the teacher's pass over all conversations before the first step"),
        (("recipe=sft/k3-tiny",), "QK-Clip's scaling of weights"),
        (TINY, "evaluation; waiting for saves; reading data"),
    ],
)
def test_what_is_not_counted_is_said(single_rank: None, recipe: tuple[str, ...], said: str) -> None:
    from k3train.plan.text import plain, summary

    plan = planned(recipe=recipe)
    line = next(line for line in summary(plan).splitlines() if line.startswith("not counted"))
    assert said in line
    assert "; ".join(plain(plan)["not_counted"]) == line.removeprefix("not counted ")


def test_nothing_is_said_of_what_is_not_asked_for(single_rank: None) -> None:
    plan = planned("train.eval_samples=0", "checkpoint.interval=0", "optim=adamw")
    assert plan.not_counted == ["reading data"]
