"""One checkpoint handed from layout to layout: what is loaded and saved again is the same bit for bit, and the step
that follows is one rank's to 1e-6. AdamW and Per-Head Muon, optimizer state and all. Within one layout that shares a
replica, interrupted equals uninterrupted bit for bit, as on one rank (test_checkpoint_resume.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import lines, make_corpus, small_recipe, train
from stored import assert_same, newest, stored
from test_muon_training import muon_recipe

STEP = 3
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "dp2": (2, {}),
    "dp4": (4, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2 vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "ep4": (4, {"expert": 4}),
    "tp2 ep2 etp2": (4, {"tensor": 2, "expert": 2, "expert_tensor": 2}),
    "one": (1, {}),
}
# Each layout loads what the one before it saved, so that every pair of neighbours is a change.
CHAINS = {
    "adamw": ("dp2", "pp2 vpp2", "ep4", "cp2", "tp2 ep2 etp2"),
    "muon": ("tp2", "pp2 vpp2", "cp2", "dp4", "tp2 ep2 etp2", "one"),
}


def again_and_on(rank: int, world_size: int, recipe: dict[str, Any], again: str, stop_at: int) -> int | str:
    """Continue a run: save at once what was loaded, under `again`, train to `stop_at`, and save that there too."""
    from k3train.config.load import recipe_from_dict
    from k3train.errors import UserError
    from k3train.platform import Platform
    from k3train.stages.pretrain import PretrainStage
    from k3train.train import loop

    class Again(loop.Trainer):
        def run(self) -> int:
            self._save_again()
            return super().run()

        def _save(self) -> None:
            super()._save()
            self._save_again()

        def _save_again(self) -> None:
            if self.origin.state.step:
                root, self.saver.root, self.saver.last_committed = self.saver.root, Path(again), -1
                self.saver.save(self.state, self.guards.state.to_dict(), last=True)
                self.saver.root = root

        def _agree(self) -> int:
            peak = super()._agree()
            self.flag_raised = 15 if self.state.step == stop_at else 0
            return peak

    here = Platform("cpu", torch.device("cpu"), "gloo", rank, rank, world_size)
    try:
        return loop.run_training(recipe_from_dict(recipe), PretrainStage, here, trainer=Again)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("optimizer", CHAINS)
def test_layouts_hand_a_checkpoint_on(pool: Any, tmp_path: Path, optimizer: str) -> None:
    corpus = make_corpus(tmp_path)
    make = muon_recipe if optimizer == "muon" else small_recipe
    few = {"train__eval_samples": 0, "checkpoint__keep_last": 0}
    name, after = f"step_{STEP:08d}", f"step_{STEP + 1:08d}"
    reference = make(corpus, tmp_path / "reference", **few)
    for stop in (STEP, STEP + 1):
        assert pool.run(again_and_on, 1, reference, str(tmp_path / "unused"), stop) == [143]
    first = tmp_path / "reference" / "checkpoints" / name
    expected = stored(first.with_name(after))
    expected_line = lines(tmp_path / "reference", "train")[-1]
    source = first
    for layout in CHAINS[optimizer]:
        ranks, sizes = LAYOUTS[layout]
        run_dir = tmp_path / layout
        shutil.copytree(source, run_dir / "checkpoints" / name)
        recipe = make(corpus, run_dir, **few, **{f"parallel__{key}": size for key, size in sizes.items()})
        codes = pool.run(again_and_on, ranks, recipe, str(run_dir / "again"), STEP + 1)
        assert codes == [143] * ranks, (layout, codes)
        source = run_dir / "again" / name
        assert_same(source, first)
        # The third save of a process only copies values, the second is planned by Megatron-Core.
        assert_same(run_dir / "again" / after, run_dir / "checkpoints" / after)
        assert not any("planned anew" in line["text"] for line in lines(run_dir, "event"))
        (line,) = lines(run_dir, "train")
        for key in ("loss", "grad_norm"):
            assert line[key] == pytest.approx(expected_line[key], rel=1e-6), (layout, key)
        assert (line["lr"], line["tokens"]) == (expected_line["lr"], expected_line["tokens"])
        found = stored(run_dir / "checkpoints" / after)
        assert found.keys() == expected.keys()
        for key, tensor in found.items():
            assert torch.allclose(tensor, expected[key], rtol=1e-6, atol=1e-6), (
                f"{layout}, {key}: {(tensor - expected[key]).abs().max()}"
            )


@pytest.mark.parametrize("layout", ["tp2", "pp2 vpp2", "cp2"])
def test_interrupted_equals_uninterrupted_where_a_replica_is_shared(pool: Any, tmp_path: Path, layout: str) -> None:
    """Tensor, pipeline and context parallel: the same bits as the run of that layout which nothing disturbed."""
    corpus = make_corpus(tmp_path)
    made: dict[str, Any] = {"train__steps": 3, "train__eval_interval": 2, "train__eval_samples": 2}
    if layout != "pp2 vpp2":  # which has a stage for each of four layers
        made |= {"model__num_layers": 2, "model__full_attention_layers": [2]}
    ranks, sizes = LAYOUTS[layout]
    made |= {f"parallel__{key}": size for key, size in sizes.items()}
    whole, halves = (small_recipe(corpus, tmp_path / name, **made) for name in ("whole", "halves"))
    halves["checkpoint"].update(interval=1, async_save=True)
    assert [code for code, _ in pool.run(train, ranks, whole)] == [0] * ranks
    assert [code for code, _ in pool.run(train, ranks, halves, 2)] == [143] * ranks
    assert [code for code, _ in pool.run(train, ranks, halves)] == [0] * ranks
    for kind in ("train", "eval"):
        assert lines(tmp_path / "halves", kind) == lines(tmp_path / "whole", kind)
    assert_same(newest(tmp_path / "halves"), newest(tmp_path / "whole"))
