"""Guards in whole runs: a step that is passed over changes nothing, a rollback gives the checkpoint's bits back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import lines, make_corpus, small_recipe, train

POLICY = [{"match": r".*q_b_proj\.weight", "optimizer": "muon"}, {"match": ".*", "optimizer": "adamw"}]
MUON = {"name": "muon", "policy": POLICY, "qk_clip": {"enabled": True}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def digest(trainer: Any) -> dict[str, str]:
    """Hashes of everything a step may change on this rank: weights, router biases, main weights, moments, schedule."""
    from k3train.checkpoint.store import current_parameters
    from k3train.optim.sharded import main_shards, named_parts

    with current_parameters(trainer.models):  # those that are gathered late
        held = [(n, v.clone()) for m in trainer.models for n, v in m.module.state_dict().items() if v is not None]
    parts: dict[str, list[torch.Tensor]] = {"weights": [], "bias": [], "main": [], "moments": []}
    for name, value in held:
        parts["bias" if name.endswith("selection_bias") else "weights"].append(value)
    for part in named_parts(trainer.optimizer).values():
        for shard in main_shards(part):
            parts["main"].append(shard.main)
            state = part.optimizer.state.get(shard.main, {})
            parts["moments"] += [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
    hashes = {}
    for name, tensors in parts.items():
        assert tensors or (name == "moments" and not trainer.schedule.num_steps), name
        h = hashlib.sha256()
        for tensor in tensors:
            h.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        hashes[name] = h.hexdigest()
    return {**hashes, "updates": str(trainer.schedule.num_steps), "lr": str(trainer.optimizer.param_groups[0]["lr"])}


def watched(
    rank: int, world_size: int, recipe: dict[str, Any], noise_at: tuple[int, ...] = ()
) -> tuple[int | str, dict[int, dict[str, str]], dict[str, Any]]:
    """Train; returns the exit code or sentence, the digest after each step, and the last counters and windows.

    In the steps `noise_at` the loss is reported as three times what it is.
    """
    from k3train.config.load import recipe_from_dict
    from k3train.errors import UserError
    from k3train.platform import Platform
    from k3train.stages.pretrain import PretrainStage
    from k3train.train import loop

    class Noisy(PretrainStage):
        now = 0

        def training_steps(self, consumed_samples: int) -> Iterator[list[dict]]:
            first = consumed_samples // self.config.train.global_batch_size + 1
            for self.now, batches in enumerate(super().training_steps(consumed_samples), start=first):
                yield batches

        def loss(self, losses: Any) -> Any:
            total, tokens, report = super().loss(losses)
            tripled = torch.tensor([3.0, 1.0])
            return (
                total,
                tokens,
                {name: value * tripled if self.now in noise_at else value for name, value in report.items()},
            )

    seen: dict[int, dict[str, str]] = {}
    last: dict[str, Any] = {}

    class Watched(loop.Trainer):
        def _step(self, steps: Any) -> None:
            if not seen:
                seen[self.state.step] = digest(self)
            super()._step(steps)
            seen[self.state.step] = digest(self)
            last.update({**self.state.to_dict(), "guards": self.guards.state.to_dict()})

    here = Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size)
    try:
        code = loop.run_training(recipe_from_dict(recipe), Noisy, here, trainer=Watched)
    except UserError as error:
        return str(error), seen, last
    return code, seen, last


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before if before[name] != after[name]}


SKIPS = {
    "adamw": (1, {}),
    "dp2_ep2_muon": (2, {"parallel__expert": 2, "optim": MUON}),
    "dp2_bf16_overlap": (
        2,
        {
            "train__precision": "bf16",
            "parallel__overlap_grad_reduce": True,
            "parallel__overlap_param_gather": True,
        },
    ),
    "pp2": (2, {"parallel__pipeline": 2}),
    "tp2_unsharded": (2, {"parallel__tensor": 2, "parallel__distributed_optimizer": False}),
}


@pytest.mark.parametrize("name", SKIPS)
def test_a_skipped_step_changes_nothing_but_counters(pool: Any, corpus: Path, tmp_path: Path, name: str) -> None:
    """A gradient that is not a number on one rank: all ranks pass the step over, with every bit as before."""
    world_size, changes = SKIPS[name]
    fault = {"kind": "nan", "step": 3, "rank": world_size - 1}
    recipe = small_recipe(corpus, tmp_path, guards__non_finite="skip", faults=[fault], train__steps=4, **changes)
    results = pool.run(watched, world_size, recipe)
    assert [code for code, _, _ in results] == [0] * world_size, results[0][0]
    for _, seen, last in results:
        everything = set(seen[1])
        # Router biases that already balance may stay where they are from one step to the next.
        assert changed(seen[1], seen[2]) >= everything - {"bias"}
        assert changed(seen[2], seen[3]) == set()
        assert changed(seen[3], seen[4]) >= everything - {"bias"}
        assert (last["step"], last["consumed_samples"], last["guards"]["skipped"]) == (4, 16, 1)
        assert len(last["guards"]["losses"]) == 3
    records = lines(tmp_path, "train")
    assert [line["guards"]["applied"] for line in records] == [1, 1, 0, 1]
    assert records[2]["grad_norm"] == "NaN"
    assert records[1]["lr"] == records[2]["lr"] != records[3]["lr"]
    (event,) = [line["text"] for line in lines(tmp_path, "event") if line.get("guard") == "non_finite"]
    assert "gradients of" in event
    assert "decoder.layers." in event  # the parameter, with its layer
    assert any("FAULT INJECTION" in line["text"] for line in lines(tmp_path, "event"))


def test_a_run_that_skipped_continues_bit_for_bit(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """The number of updates, which Adam corrects its moments by, is not the number of steps."""
    fault = [{"kind": "nan", "step": 2, "rank": 0}]
    options = {"guards__non_finite": "skip", "faults": fault, "train__steps": 5, "parallel__expert": 2}
    whole = pool.run(watched, 2, small_recipe(corpus, tmp_path / "whole", **options))
    cut = small_recipe(corpus, tmp_path / "cut", **{**options, "faults": [*fault, {"kind": "sigterm", "step": 3}]})
    assert [code for code, _, _ in pool.run(watched, 2, cut)] == [143, 143]
    rest = pool.run(watched, 2, cut)
    assert [code for code, _, _ in rest] == [0, 0]
    for (_, one, last_one), (_, other, last_other) in zip(whole, rest):
        assert one[5] == other[5]
        assert one[3] == other[3]
        assert last_one == last_other
    assert lines(tmp_path / "whole", "train") == lines(tmp_path / "cut", "train")


def test_a_gradient_that_is_not_a_number_stops_every_rank_by_default(pool: Any, corpus: Path, tmp_path: Path) -> None:
    recipe = small_recipe(corpus, tmp_path, faults=[{"kind": "nan", "step": 2, "rank": 1}])
    for message, seen, last in pool.run(watched, 2, recipe):
        assert "grad_norm=nan is not finite" in message
        assert "gradients of" in message
        assert "guards.non_finite=skip" in message
        assert (sorted(seen), last["step"]) == ([0, 1], 1)  # it ended before the update


SPIKES = {
    "guards__loss_deviations": 2.0,
    "guards__window": 8,
    "guards__min_history": 3,
    "train__steps": 12,
    "checkpoint__interval": 4,
}


def test_a_loss_spike_rolls_back_to_the_checkpoint_and_leaves_its_data_out(
    pool: Any, corpus: Path, tmp_path: Path
) -> None:
    recipe = small_recipe(corpus, tmp_path, guards__loss_spike="rollback", parallel__expert=2, **SPIKES)
    results = pool.run(watched, 2, recipe, (7,))
    assert [code for code, _, _ in results] == [0, 0], results[0][0]
    for _, seen, last in results:
        assert seen[7] == seen[4]  # bit for bit, the learning rate and the number of updates too
        assert seen[8] != seen[5]  # the same weights meet the data that follow
        assert (last["step"], last["consumed_samples"], last["guards"]["rollbacks"]) == (12, 48, 1)
    # Saved at once, so that a restart does not meet the data again.
    assert any("step_00000007 committed" in line["text"] for line in lines(tmp_path, "event"))
    assert [line["step"] for line in lines(tmp_path, "train")] == list(range(1, 13))
    (told,) = [line["text"] for line in lines(tmp_path, "event") if line.get("rollback")]
    assert "step_00000004" in told


def test_two_checkpoints_back_past_a_damaged_one_and_not_for_ever(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """Of the checkpoints 2, 4 and 6, that of step 4 is asked for, and has lost half of a file."""
    changes = {**SPIKES, "guards__loss_spike": "rollback", "guards__rollback_checkpoints": 2}
    changes |= {"checkpoint__interval": 2, "checkpoint__keep_last": 0, "guards__max_rollbacks": 1}
    recipe = small_recipe(corpus, tmp_path, **changes, faults=[{"kind": "corrupt_checkpoint", "step": 4}])
    ((message, seen, _),) = pool.run(watched, 1, recipe, (7, 11))
    assert seen[7] == seen[2]
    assert "guards.max_rollbacks=1" in message
    (warning,) = [line["text"] for line in lines(tmp_path, "event") if "is damaged" in line["text"]]
    assert "the rollback takes step_00000002, and it is kept as step_00000004.damaged" in warning
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept[:4] == ["step_00000002", "step_00000004.damaged", "step_00000006", "step_00000007"]


def test_spikes_warn_by_default_and_the_window_survives_a_restart(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """Without the window that the checkpoint carries, four steps were too few to call the sixth a spike."""
    options = {**SPIKES, "guards__min_history": 4, "train__steps": 8, "checkpoint__interval": 0}
    spike = {"kind": "spike", "step": 6, "rank": 0}
    stop = {"kind": "sigterm", "step": 4}
    recipe = small_recipe(corpus, tmp_path, faults=[spike, stop], **options)
    assert pool.run(train, 2, recipe)[0][0] == 143
    assert [code for code, _ in pool.run(train, 2, recipe)] == [0, 0]
    trips = [line["guards"]["trips_grad_spike"] for line in lines(tmp_path, "train")]
    assert trips == [0, 0, 0, 0, 0, 1, 1, 1]
    assert all(line["guards"]["applied"] for line in lines(tmp_path, "train"))
    (event,) = [line for line in lines(tmp_path, "event") if line.get("guard") == "grad_spike"]
    assert event["action"] == "warn"


def test_too_many_skips_in_a_row_end_the_run(pool: Any, corpus: Path, tmp_path: Path) -> None:
    fault = {"kind": "nan", "step": 2, "rank": 0, "steps": 4}
    recipe = small_recipe(corpus, tmp_path, faults=[fault], guards__non_finite="skip", guards__max_skips=2)
    ((message, seen, _),) = pool.run(watched, 1, recipe)
    assert "3 steps in a row were skipped (guards.max_skips=2)" in message
    assert seen[1] == seen[2] == seen[3]


def test_experts_that_collapse_are_told_of_on_every_rank(pool: Any, corpus: Path, tmp_path: Path) -> None:
    """Sixteen of 64 experts at the most get one of a step's few tokens."""
    moe = {"num_experts": 64, "top_k": 1, "latent_size": 16, "expert_hidden_size": 8}
    options = {"train__global_batch_size": 2, "train__seq_length": 8, "guards__balance_patience": 2}
    stop = small_recipe(corpus, tmp_path, model__moe=moe, guards__balance="stop", parallel__expert=2, **options)
    for message, seen, _ in pool.run(watched, 2, stop):
        assert "experts have collapsed for 2 steps" in message
        assert max(seen) == 1  # the step in which it was told ends there
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["kind"] == "event"
