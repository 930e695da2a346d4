"""How a rollout server gets the weights of a step: bucket by bucket over HTTP, or from an exported folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from k3train.checkpoint import directory, store
from k3train.checkpoint.state import TrainState
from k3train.config.schema import RecipeConfig, to_plain
from k3train.errors import UserError
from k3train.rl.shared_engine import SharedEngine

FOLDER = "rollout_weights"


def refresh(engine: SharedEngine, config: RecipeConfig, trainer: Any, version: int) -> None:
    """Give the server the trainer's weights as `version`. Every rank calls this.

    Raises:
        UserError: the layout cannot do it in place, the folder cannot be written, or the server refuses.
    """
    rollout = config.rl.rollout
    # The export asks `hf.mapping.weights_of` for the model's tensors, which lays the ranks out anew to build it; the
    # trainer's layout would be gone, and the next weights saved in another.
    if dist.get_world_size() > 1:
        raise UserError(
            f"rl.rollout.refresh={rollout.refresh} sends the weights of one rank, and this run has"
            f" {dist.get_world_size()}; try rl.rollout.engine=local"
        )
    if rollout.refresh == "in_place":
        engine.refresh_in_place(trainer.models[0].module, version, rollout.bucket_mib << 20)
        return
    root = Path(trainer.run_dir) / FOLDER
    checkpoint = _save_weights(root / "checkpoint", config, trainer.models, version)
    out = root / f"version_{version:08d}"
    _export(checkpoint, out, config, rollout.refresh_experts)
    engine.refresh_from_disk(out, version)
    if dist.get_rank() == 0:
        shutil.rmtree(root / "checkpoint", ignore_errors=True)
        for old in sorted(root.glob("version_*"))[:-1]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def _save_weights(root: Path, config: RecipeConfig, models: list[Any], version: int) -> Path:
    partial = directory.partial_of(root, version)
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(store.model_state(models), str(partial))
    if dist.get_rank() == 0:
        directory.copy_tokenizer(Path(config.data.tokenizer), partial / directory.TOKENIZER)
        marker = {"state": TrainState(version).to_dict(), "config": to_plain(config), "versions": store.versions()}
        directory.commit(root, version, marker)
    dist.barrier()
    return directory.directory_of(root, version)


def _export(checkpoint: Path, out: Path, config: RecipeConfig, experts: str) -> None:
    from k3train.hf.exporter import plan_job, run_export
    from k3train.hf.torch_dist import TensorReader

    if dist.get_rank() == 0:
        shutil.rmtree(out, ignore_errors=True)
    dist.barrier()
    tensors = TensorReader(checkpoint)
    job = plan_job(checkpoint, tensors, config.model, None, experts, 5 * 10**9)
    run_export(checkpoint, out, tensors, job)
    tensors.close()
