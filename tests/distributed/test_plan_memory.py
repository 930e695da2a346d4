"""The planner's bytes of weights, gradients and optimizer state are those that ranks really hold, to the byte."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kept_by_autograd import kept_storages, total_bytes
from pool import WorkerPool
from test_layouts_basic import recipe

MUON = [
    {"match": r".*(norm|norm\.weight|query|A_log|dt_bias|_conv)", "optimizer": "adamw"},
    {"match": r"(embedding|output_layer)\.weight", "optimizer": "adamw"},
    {"match": r".*\.mixer\.(q|q_b|k|v)_proj\.weight", "split": "heads"},
    {"match": r".*\.experts\.(w13|w2)", "split": "experts"},
    {"match": ".*"},
]
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"precision": "bf16", "optim": "muon"},
    {"precision": "bf16", "optim": "muon", "distributed_optimizer": False},
    {"distributed_optimizer": False, "expert": 2},
    {"tensor": 2, "precision": "bf16", "optim": "muon"},
    {"tensor": 2, "expert": 4, "precision": "bf16"},
    {"tensor": 2, "expert_tensor": 2, "expert": 2, "optim": "muon"},
    {"tensor": 4, "expert_tensor": 4},
    {"pipeline": 2, "expert": 2, "precision": "bf16", "optim": "muon"},
    {"pipeline": 2, "pipeline_layout": "Et*2|t*4mL", "mtp": True, "precision": "bf16"},
    {"pipeline": 2, "virtual_pipeline": 3, "expert": 2, "optim": "muon", "overlap_grad_reduce": True},
    {"pipeline": 4, "pipeline_layout": "Et|t*2|t*2|tL", "precision": "bf16"},
    {"context": 2, "expert": 4, "precision": "bf16", "optim": "muon"},
    {"pipeline": 2, "tensor": 2, "pipeline_layout": "Et*3|t*3mL", "mtp": True, "optim": "muon"},
]


def config_of(layout: dict[str, Any]) -> Any:
    """The recipe of one row."""
    from k3train.config.schema import PolicyRule

    settings = dict(layout)
    precision, optim = settings.pop("precision", "fp32"), settings.pop("optim", "adamw")
    config = recipe(**settings)
    config.train.precision = precision
    if optim == "muon":
        config.optim.name, config.optim.policy = "muon", [PolicyRule(**rule) for rule in MUON]
        config.model.vocab_size = 600  # so that embedding and head are shared out apart from the rest
    return config


def really_held(config: Any) -> tuple[dict[str, int], tuple[int, int, int]]:
    """Bytes by kind on this rank, and its numbers in the pipeline, data- and expert-data-parallel groups."""
    from megatron.core import parallel_state

    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.optim.build import allocate_state, build_optimizer, named_parts, wrap_data_parallel

    start_model_parallel(config.parallel)
    chunks, transformer_config = build_chunks(config, init=False)
    models = wrap_data_parallel(chunks, transformer_config, config.parallel, config.optim)
    optimizer = build_optimizer(config.optim, models, config.parallel, config.train.precision)
    allocate_state(optimizer)
    size = dict.fromkeys(("weights", "padding", "gradients", "main", "moments", "router"), 0)
    for model in models:
        size["weights"] += sum(nbytes(p) for p in model.module.parameters())
        size["router"] += sum(nbytes(b) for m in model.module.modules() for b in m.buffers(recurse=False))
        for buffer in [*model.buffers, *model.expert_parallel_buffers]:
            size["gradients"] += nbytes(buffer.grad_data)
            if buffer.param_data is not None:
                size["padding"] += nbytes(buffer.param_data) - sum(nbytes(p) for p in buffer.params)
    for part in named_parts(optimizer).values():
        if part.optimizer is None:
            continue
        copies = getattr(part, "shard_fp32_from_float16_groups", getattr(part, "fp32_from_float16_groups", []))
        size["main"] += sum(nbytes(t) for group in copies for t in group if t is not None)
        for state in part.optimizer.state.values():
            size["moments"] += sum(nbytes(state[name]) for name in ("exp_avg", "exp_avg_sq") if name in state)
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_expert_data_parallel_rank(),
    )
    return size, place


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def hold_all(rank: int, world_size: int, layouts: list[dict[str, Any]]) -> list[tuple[dict[str, int], tuple]]:
    """`really_held` for every layout, one after the other."""
    return [really_held(config_of(layout)) for layout in layouts]


KEEPING: list[dict[str, Any]] = [
    {"tensor": 2},
    {"expert": 4},
    {"tensor": 4, "expert_tensor": 2, "expert": 2},
    {"pipeline": 2, "pipeline_layout": "Et*3|t*3L"},
    {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Et|t*2|t*2|tL"},
    # What is left with recomputation is the stream and the block summaries.
    {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Et|t*2|t*2|tL", "recompute": "full"},
    {"pipeline": 4, "pipeline_layout": "Et*2|t*2|t|tL", "recompute": "full"},
]


def kept_by_all(rank: int, world_size: int, layouts: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """This pipeline rank's number, and the bytes that one micro-batch keeps on it, without weights, for every layout.

    All its chunks together: what their graphs save, and the payloads that came and went.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.model.packing import Packing
    from k3train.parallel.stages import traffic_of

    found = []
    for layout in layouts:
        config = config_of(layout)
        start_model_parallel(config.parallel)
        models, _ = build_chunks(config)
        size, place = config.parallel.pipeline, parallel_state.get_pipeline_model_parallel_rank()
        shape = (config.train.micro_batch_size, config.train.seq_length)
        seed = parallel_state.get_data_parallel_rank()  # tensor-parallel ranks see the same tokens
        tokens = torch.randint(0, config.model.vocab_size, shape, generator=torch.Generator().manual_seed(seed))
        packing, kept, outputs, traffic = Packing.whole_rows(*shape), {}, [], traffic_of(config)
        for stage in range(size * config.parallel.virtual_pipeline):
            if stage % size != place:
                continue
            model = models[stage // size]
            if stage:
                payload = torch.empty(traffic.tensors_sent(stage - 1) * shape[1], shape[0], config.model.hidden_size)
                dist.recv(payload, parallel_state.get_pipeline_model_parallel_prev_rank())
                kept[payload.untyped_storage().data_ptr()] = payload.untyped_storage()
                model.set_input_tensor(payload.requires_grad_())
            with kept_storages(model) as saved:
                out = model(tokens, packing, tokens, torch.ones(shape))
                outputs.append(out.loss.sum() if model.post_process else out)
            kept |= saved
            if not model.post_process:
                kept[out.untyped_storage().data_ptr()] = out.untyped_storage()
                dist.send(out.detach(), parallel_state.get_pipeline_model_parallel_next_rank())
        found.append((place, total_bytes(kept)))
    return found


def test_planned_activations_of_parallel_ranks(pool: WorkerPool) -> None:
    """Mean over the ranks of a stage, for experts get more or fewer tokens by chance.

    The model is so small that indices count.
    """
    from k3train.parallel.stages import traffic_of
    from k3train.plan.activations import Activations
    from k3train.plan.memory import stage_activations, stages_of

    measured, shares = pool.run(kept_by_all, 4, KEEPING), []
    for number, layout in enumerate(KEEPING):
        config = config_of(layout)
        activations, stages, traffic = Activations(config, "cpu"), stages_of(config), traffic_of(config)
        size = config.parallel.pipeline
        for place in range(size):
            own = range(place, len(stages), size)
            kept = [stage_activations(activations, stages[i], traffic.tensors_sent(i)) for i in own]
            planned, summaries = sum(k.total for k in kept), sum(k.bytes.get("block summaries", 0.0) for k in kept)
            mean = sum(size for at, size in (rank[number] for rank in measured) if at == place) / (4 // size)
            print(f"{layout} {place}: kept {mean:.0f}, planned {planned:.0f}, {planned / mean - 1:+.1%}")
            assert abs(planned / mean - 1) < 0.1, (layout, place)
            shares.append(summaries / mean)
    assert max(shares) > 0.2  # so that a plan without the summaries would fail


def test_planned_bytes_are_those_that_ranks_hold(pool: WorkerPool, single_rank: None) -> None:
    from k3train.plan.inventory import take_inventory
    from k3train.plan.sharding import StageLayout

    ranks = 4
    measured = pool.run(hold_all, ranks, LAYOUTS)
    for number, layout in enumerate(LAYOUTS):
        config = config_of(layout)
        inventory = take_inventory(config)
        stages = [StageLayout(inventory, config, ranks, stage) for stage in range(config.parallel.pipeline)]
        most = [0] * len(stages)
        for rank in range(ranks):
            size, (stage, data, expert) = measured[rank][number]
            planned = stages[stage].held(data, expert)
            assert {kind: getattr(planned, kind) for kind in size} == size, (layout, rank)
            most[stage] = max(most[stage], size["main"] + size["moments"])
        assert [stage.largest().optimizer for stage in stages] == most, layout
    assert len({str(layout) for layout in LAYOUTS}) >= 10


@pytest.mark.parametrize(("words", "ranks"), [(["pretrain/k3-tiny", "single"], 4), (["pretrain/k3-mini", "ep8"], 8)])
def test_no_rank_holds_more_moments_than_its_share_and_a_block(single_rank: None, words: list[str], ranks: int) -> None:
    """At the proportions of real recipes, whose embeddings and heads are larger than any block and have two moments."""
    from k3train.config.load import load_recipe
    from k3train.plan.inventory import take_inventory
    from k3train.plan.sharding import StageLayout

    config = load_recipe([f"recipe={words[0]}", f"parallel={words[1]}", "parallel.overlap_grad_reduce=false"])
    inventory = take_inventory(config)
    layout = StageLayout(inventory, config, ranks, 0)
    held = [layout.held(rank, rank % layout.groups.expert_data) for rank in range(layout.groups.data)]
    assert len(held) == ranks
    block = max(math.prod(t.shape) for t in inventory.tensors if t.muon and t.split == "whole")
    assert max(math.prod(t.shape) for t in inventory.tensors if t.part == "embedding") > 2 * block
    for numbers in ([h.moments // 4 for h in held], [h.main // 4 for h in held]):
        assert max(numbers) - sum(numbers) / ranks < block / 10, numbers
