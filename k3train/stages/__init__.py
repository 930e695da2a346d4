"""The stages of training. Each gives data and a loss to the one loop."""

from __future__ import annotations

from k3train.config.schema import RecipeConfig


def run_stage(config: RecipeConfig) -> int:
    """Run the stage that `config.stage.name` names, on the rank described by the environment; returns the exit code."""
    from k3train import platform
    from k3train.stages.pretrain import PretrainStage
    from k3train.train.loop import run_training

    stages = {"pretrain": PretrainStage}
    here = platform.start(config.run.device, config.run.threads_per_rank, config.run.timeout_minutes)
    try:
        return run_training(config, stages[config.stage.name], here)
    finally:
        platform.stop()
