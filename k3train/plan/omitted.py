"""What a recipe asks for and its plan does not count, so that no figure is taken for more than it is."""

from __future__ import annotations

from k3train.config.schema import RecipeConfig


def not_counted(config: RecipeConfig) -> list[str]:
    """In a few words each; docs/planner.md says why."""
    train, found = config.train, []
    if config.stage.name == "rl":
        found.append("rollouts (generation and its caches, environments, rewards), so the step is the training alone")
        found += _teachers(config)
    if config.stage.name == "distill":
        found.append("the teacher's pass over all conversations before the first step")
    if config.optim.qk_clip.enabled:
        found.append("QK-Clip's scaling of weights")
    if train.eval_samples:
        found.append("evaluation")
    if config.checkpoint.interval:
        found.append("waiting for saves")
    return [*found, "reading data"]


def _teachers(config: RecipeConfig) -> list[str]:
    if config.rl.objective.signal != "mopd":
        return []
    found, teachers = [], config.rl.teachers
    if any(t.url is not None for t in teachers):
        found.append("waiting for teachers' servers")
    layout = {t.checkpoint for t in teachers if t.checkpoint is not None and t.host == "layout"}
    if len(layout) > config.rl.teachers_in_memory:
        found.append(f"reading {len(layout)} teachers from disk in turns, {config.rl.teachers_in_memory} in memory")
    if any(t.checkpoint is not None and t.host == "zero3" and t.offload for t in teachers):
        found.append("copying offloaded teachers to the device")
    return found
