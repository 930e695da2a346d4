"""What a plan shows and exports of parameters and of the optimizer's step, against numbers made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from k3train.config.load import load_recipe
from k3train.config.rules_cluster import load_cluster

VOCABULARY, HIDDEN = 2048, 128


def planned(*overrides: str) -> Any:
    from k3train.plan.plan import make_plan

    words = ["recipe=pretrain/k3-tiny", "parallel=single", *overrides]
    return make_plan(load_recipe(words), load_cluster("cpu", {}))


def exported(plan: Any) -> list[dict[str, Any]]:
    from k3train.plan.text import plain

    return plain(plan)["memory"]


@pytest.mark.parametrize("prediction", [0, 1])
def test_parameters_of_ranks_stages_and_chunks(single_rank: None, prediction: int) -> None:
    """9 layers in four chunks on two ranks; expert parallelism halves the 16 experts of (64, 96) a mixture has."""
    layout = f"parallel.pipeline_layout='Ett|ttt|tt|tt{'m' * prediction}L'"
    words = ["parallel.world_size=4", "parallel.pipeline=2", "parallel.virtual_pipeline=2", "parallel.expert=2"]
    plan = planned(*words, layout, f"model.mtp.num_layers={prediction}")
    ranks = exported(plan)
    # The last rank embeds next tokens for multi-token prediction with a copy of its own.
    copy = VOCABULARY * HIDDEN * prediction
    assert sum(sum(rank["stage_parameters"]) for rank in ranks) == plan.inventory.total + copy
    half = 16 * 3 * 64 * 96 // 2
    mixtures = [(1, 2), (3, 2 + prediction)]  # in the chunks of rank 0 and of rank 1; the first layer is dense
    for rank, counts in zip(ranks, mixtures):
        spared = [whole - own for whole, own in zip(rank["stage_parameters"], rank["parameters"])]
        assert spared == [count * half for count in counts]


def test_rows_that_pad_the_vocabulary_are_on_devices_alone(single_rank: None) -> None:
    """2,050 rows over two tensor-parallel ranks, padded to 2,304 by 128 a rank: 1,152 of embedding and head each."""
    words = ["parallel.world_size=2", "parallel.tensor=2", "model.vocab_padding_multiple=128", "model.vocab_size=2050"]
    (rank,) = exported(planned(*words, "model.mtp.num_layers=0"))
    (padded,) = exported(planned(*words[:3], "model.vocab_size=2304", "model.mtp.num_layers=0"))
    assert rank["parameters"] == padded["parameters"]
    assert padded["stage_parameters"][0] - rank["stage_parameters"][0] == 2 * (2304 - 2050) * HIDDEN


def test_the_optimizers_step_is_shown_where_passes_need_more(single_rank: None) -> None:
    """Two rounds of a MiB that arrive and one that leaves; blocks, update, momentum and three iterates of a round."""
    from k3train.plan.text import summary

    words = ["optim=muon", "optim.muon.exchange_mib=1"]
    plan, alone = planned(*words, "parallel.world_size=4"), planned(*words)
    (rank,) = exported(plan)
    assert rank["muon_round_bytes"] == 2**20
    assert rank["optimizer_step_bytes"] == {"Muon's exchange": 3 * 2**20, "Newton-Schulz": 6 * 2**20}
    assert rank["passes_bytes"] == plan.fullest.passes > 9 * 2**20
    assert exported(alone)[0]["optimizer_step_bytes"]["Muon's exchange"] == 0  # nothing travels
    lines = summary(plan).splitlines()
    at = lines.index(next(line for line in lines if line.startswith("MiB, optimizer's step (rounds of 1.00)")))
    shown = [line.rsplit(None, 1) for line in lines[at + 1 : at + 5]]
    passes = f"{plan.fullest.passes / 2**20:,.2f}"
    assert [(name.strip(), value) for name, value in shown] == [
        ("Muon's exchange", "3.00"),
        ("Newton-Schulz", "6.00"),
        ("all of it", "9.00"),
        ("for passes", passes),
    ]
    sent = plan.step.volumes["Muon's exchange"]
    assert any(line.split() == ["Muon's", "exchange", f"{sent.fast / 2**20:,.3f}", "0.000"] for line in lines)


def test_parameters_are_shown(single_rank: None) -> None:
    from k3train.plan.text import summary

    plan = planned("parallel.world_size=2", "parallel.expert=2", "model.mtp.num_layers=0")
    lines = [line.split() for line in summary(plan).splitlines()]
    at = lines.index(["parameters", "of", "pipeline", "rank", "0"])
    whole = plan.inventory.total
    assert lines[at + 1] == ["a", "device", f"{(whole - 8 * 16 * 3 * 64 * 96 / 2) / 1e6:,.4g}M"]
    assert lines[at + 2] == ["its", "stage", f"{whole / 1e6:,.4g}M"]
