"""Attention Residuals through Megatron-Core's schedules: bytes sent, gradients, evaluation, documents, memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from pool import WorkerPool
from test_layouts_basic import equal_to_one_rank, global_batch, recipe, train

from k3train.config.schema import RecipeConfig

# Blocks of one and two layers make more summaries than there are ranks; cuts on, off and across block edges.
PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {
    "p2v3-block1": (1, {"pipeline": 2, "virtual_pipeline": 3}),
    "p2v2-block2-off-edges": (2, {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Et|t*2|t*2|tL"}),
    "p2v2-block2-recompute": (
        2,
        {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Et*2|t*2|t|tL", "recompute": "full"},
    ),
    "p4-block1": (1, {"pipeline": 4, "pipeline_layout": "Et|t*2|t*2|tL"}),
}


@pytest.fixture(scope="module")
def one_rank(pool: WorkerPool) -> dict[int, list[dict[str, Any]]]:
    """One-rank runs by block size."""
    return {block: pool.run(train, 1, recipe(block_size=block)) for block in (1, 2)}


@pytest.mark.parametrize("name", PIPELINES)
def test_any_cut_gives_one_ranks_numbers_and_the_formulas_bytes(
    pool: WorkerPool, one_rank: dict[int, list[dict[str, Any]]], name: str
) -> None:
    from k3train.parallel.stages import traffic_of
    from k3train.parallel.traffic import step_bytes

    block, layout = PIPELINES[name]
    config = recipe(block_size=block, **layout)
    actual = equal_to_one_rank(pool, layout["pipeline"], config, recipe(block_size=block), one_rank[block])
    traffic = traffic_of(config)
    tokens = config.train.global_batch_size * config.train.seq_length
    expected = step_bytes(traffic, tokens, config.model.hidden_size, 4)
    assert expected > 0
    for result in actual:
        assert result["pipeline_bytes"] == [expected] * 3
    if layout.get("virtual_pipeline", 1) > 1:
        assert traffic.tensors() < traffic.naive_tensors()


def test_one_rank_sends_nothing(one_rank: dict[int, list[dict[str, Any]]]) -> None:
    assert one_rank[1][0]["pipeline_bytes"] == [0, 0, 0]


def evaluate(rank: int, world_size: int, config: RecipeConfig, changed: bool) -> dict[str, Any]:
    """An evaluation, a training step, and one more evaluation; with `changed`, of rows whose document 0 is another.

    Only later documents count in the loss. Also what is left of kept summaries after each.
    """
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.optim.build import wrap_data_parallel
    from k3train.parallel import payload, pieces
    from k3train.stages.pretrain import PretrainStage
    from k3train.train.step import StepRunner

    class Loss:
        loss = PretrainStage.loss

        def __init__(self) -> None:
            self.config = config

    start_model_parallel(config.parallel)
    chunks, transformer_config = build_chunks(config)
    models = wrap_data_parallel(chunks, transformer_config, config.parallel, config.optim)
    runner = StepRunner(models, transformer_config, config.train, Loss(), torch.device("cpu"))
    rows = global_batch(config, 0)
    first = rows["document_ids"] == 0
    rows["loss_mask"] = rows["loss_mask"] * ~first
    if changed:
        rows["tokens"] = torch.where(first, (rows["tokens"] + 7) % config.model.vocab_size, rows["tokens"])
    split = {key: value.split(config.train.micro_batch_size) for key, value in rows.items()}
    batches = [dict(zip(split, values)) for values in zip(*split.values())]
    out: dict[str, Any] = {"kept": [], "bytes": []}

    def note() -> None:
        gc.collect()
        out["kept"].append(sum(isinstance(thing, payload._Slot) for thing in gc.get_objects()))
        out["bytes"].append(runner.pipeline_bytes)

    out["before"] = runner.evaluate(batches)
    note()
    out["train"] = runner.forward_backward(batches)
    note()
    out["after"] = runner.evaluate(batches)
    note()
    plain, pieces.PIECE = pieces.PIECE, 1
    try:
        out["in pieces"] = runner.evaluate(batches, stop=lambda: False)
        out["stopped"] = runner.evaluate(batches, stop=lambda: True)
    finally:
        pieces.PIECE = plain
    return out


VPP = {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Et|t*2|t*2|tL"}


def test_evaluation_training_and_evaluation_agree_and_keep_nothing(pool: WorkerPool) -> None:
    config = recipe(block_size=1, **VPP)
    ((alone),) = pool.run(evaluate, 1, recipe(block_size=1), False)
    for result in pool.run(evaluate, 2, config, False):
        assert result["before"] == result["train"] == result["after"] == result["in pieces"] == alone["before"]
        assert result["stopped"] is None
        assert result["kept"] == [0, 0, 0]
        forward = result["bytes"][0]
        assert result["bytes"] == [forward, 2 * forward, forward]


def test_documents_stay_apart_on_every_stage(pool: WorkerPool) -> None:
    """Other tokens in the first document of each row: the loss of the later documents keeps its bits."""
    config = recipe(block_size=1, **VPP)
    plain, other = (pool.run(evaluate, 2, config, changed)[0] for changed in (False, True))
    assert other["train"]["loss"] == plain["train"]["loss"]


def marks(rank: int, world_size: int, config: RecipeConfig) -> dict[str, tuple[tuple[int, ...], bool, bool, bool]]:
    """Of each parameter: its shape here, and whether it is marked as a shard, as an expert's, as replicated."""
    from k3train.model.build import build_chunks, start_model_parallel

    start_model_parallel(config.parallel)
    (model,), _ = build_chunks(config)
    return {
        name: (
            tuple(p.shape),
            bool(getattr(p, "tensor_model_parallel", False)),
            not getattr(p, "allreduce", True),
            bool(getattr(p, "sequence_parallel", False)),
        )
        for name, p in model.named_parameters()
    }


def test_shards_are_marked_as_shards(pool: WorkerPool) -> None:
    """Megatron-LM#7452 (finding 8) and #5916: a shard without its mark drops out of the norm on all ranks but one.

    And what every rank holds whole, while each sees its own part of the tokens, is marked to have its gradient summed.
    """
    (whole,) = pool.run(marks, 1, recipe(mtp=True))
    for shard in pool.run(marks, 2, recipe(mtp=True, tensor=2, expert=2)):
        assert shard.keys() == whole.keys()
        for name, (shape, is_shard, is_expert, is_summed) in shard.items():
            if is_expert:
                assert shape[0] * 2 == whole[name][0][0], name
                assert not is_summed, name
            elif shape != whole[name][0]:
                assert (is_shard, is_summed) == (True, False), f"{name} is a shard without the mark of one"
            else:
                assert (is_shard, is_summed) == (False, True), f"{name} is whole, but its gradient is not summed"
        assert any(is_expert for _, _, is_expert, _ in shard.values())
