"""What a checkpoint carries beside tensors: what guards remember, who wrote it, and where the data go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import make_corpus, small_recipe, train_until
from stored import newest

from k3train.checkpoint import directory

LAYERS = {"model__num_layers": 2, "model__full_attention_layers": [2]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def guarded(rank: int, world_size: int, recipe: dict[str, Any], value: int | None) -> dict[str, Any]:
    """What the loop's guards remember at the start; `value` is what they go on to remember."""
    from k3train.config.load import recipe_from_dict
    from k3train.platform import Platform
    from k3train.stages.pretrain import PretrainStage
    from k3train.train import loop

    found: dict[str, Any] = {}

    class Guarded(loop.Trainer):
        def run(self) -> int:
            found.update(self.guards.state.to_dict())
            if value is not None:
                self.guards.state.trips, self.guards.state.losses = {"loss_spike": value}, [0.1 + 0.2]
            return super().run()

    here = Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size)
    loop.run_training(recipe_from_dict(recipe), PretrainStage, here, trainer=Guarded)
    return found


def test_what_guards_remember_and_who_wrote_it_is_kept(pool: Any, corpus: Path, tmp_path: Path) -> None:
    recipe = small_recipe(corpus, tmp_path, train__steps=1, **LAYERS)
    for found in pool.run(guarded, 2, recipe, 7):
        assert (found["trips"], found["losses"], found["skipped"]) == ({}, [], 0)
    for found in pool.run(guarded, 2, recipe, None):
        assert found["trips"] == {"loss_spike": 7}
        assert (found["losses"][0], len(found["losses"])) == (0.1 + 0.2, 2)
    marker = directory.read_marker(newest(tmp_path))
    assert marker["state"] == {"step": 1, "consumed_samples": 4, "tokens": 4 * 32}
    assert marker["config"]["train"]["steps"] == 1
    assert marker["versions"].keys() == {"k3train", "torch", "megatron-core", "python", "code"}
    assert marker["rng"]["world"] == 2


def counting(rank: int, world_size: int, recipe: dict[str, Any]) -> int:
    """Train on a slow disk; the loop's guards remember the loss of every step."""
    import time

    from k3train.checkpoint import writing
    from k3train.config.load import recipe_from_dict
    from k3train.platform import Platform
    from k3train.stages.pretrain import PretrainStage
    from k3train.train import loop

    plain = writing.Writing._write

    def slow(self: writing.Writing) -> None:
        time.sleep(2.0)
        plain(self)

    writing.Writing._write = slow
    here = Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size)
    try:
        return loop.run_training(recipe_from_dict(recipe), PretrainStage, here)
    finally:
        writing.Writing._write = plain


EVERY_THIRD = {"train__steps": 4, "checkpoint__interval": 3, "checkpoint__keep_last": 0}


def test_guards_are_saved_as_they_were_when_the_save_began(pool: Any, corpus: Path, tmp_path: Path) -> None:
    recipe = small_recipe(corpus, tmp_path, **LAYERS, **EVERY_THIRD, checkpoint__async_save=True)
    assert pool.run(counting, 1, recipe) == [0]
    markers = [directory.read_marker(path) for _, path in directory.committed(tmp_path / "checkpoints")]
    assert [len(marker["guards"]["losses"]) for marker in markers] == [3, 4]


def reading(rank: int, world_size: int, recipe: dict[str, Any], stop_at: int) -> list[list[tuple[int, ...]]]:
    """The samples that this rank trains on, step by step."""
    from k3train.stages.pretrain import PretrainStage

    read: list[list[tuple[int, ...]]] = []

    class Reading(PretrainStage):
        def training_steps(self, consumed_samples: int) -> Iterator[list[dict]]:
            for batches in super().training_steps(consumed_samples):
                read.append([tuple(row.tolist()) for batch in batches for row in batch["tokens"]])
                yield batches

    train_until(Reading, rank, world_size, recipe, stop_at)
    return read


def test_each_sample_once_while_dp_changes_and_over_epochs(pool: Any, tmp_path: Path) -> None:
    """DP2 to step 3, DP1 to 5, DP4 to 12, over a text that lasts for a few steps: a ledger of all that was read."""
    from k3train.data.pretrain import build_datasets
    from k3train.data.tokenizer import load_tokenizer

    corpus = make_corpus(tmp_path, documents=60)
    recipe = small_recipe(corpus, tmp_path / "run", train__steps=12, train__eval_samples=0, **LAYERS)
    recipe["train"].update(global_batch_size=16, micro_batch_size=4)
    ledger: list[list[tuple[int, ...]]] = []
    for ranks, stop in ((2, 3), (1, 5), (4, 0)):
        parts = pool.run(reading, ranks, recipe, stop)
        ledger += [sorted(row for part in step for row in part) for step in zip(*parts, strict=True)]
    assert len(ledger) == 12
    data, _ = build_datasets(
        [(corpus / "train", 1.0)], load_tokenizer(corpus), 32, 1234, 12 * 16, 0, cache_dir=tmp_path / "again"
    )
    samples = [tuple(data[index]["tokens"].tolist()) for index in range(12 * 16)]
    assert ledger == [sorted(samples[step * 16 : step * 16 + 16]) for step in range(12)]
    # The text is over before the run is: the order of samples goes on into the next epoch.
    tokens = (corpus / "train.bin").stat().st_size // 2
    assert 2 * tokens < 12 * 16 * 32
