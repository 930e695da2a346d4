"""Which recipes of reinforcement learning make sense."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from k3train.config.rules import check_choice, check_range, refuse
from k3train.config.rules_distill import check_teachers
from k3train.config.rules_rollout_server import SERVERS, check_server
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError

CHOICES = {
    "rl.objective.surrogate": ("mask", "ppo", "reinforce"),
    "rl.objective.clip_on": ("ratio", "log_ratio"),
    "rl.objective.baseline": ("group_mean", "group_norm", "leave_one_out", "none"),
    "rl.objective.normalization": ("token", "group", "sequence"),
    "rl.objective.signal": ("outcome", "mopd"),
    "rl.rollout.engine": ("local", "openai"),
    "rl.rollout.server": SERVERS,
    "rl.rollout.refresh": ("in_place", "disk", "none"),
    "rl.rollout.refresh_experts": ("bf16", "mxfp4"),
    "rl.effort.counts": ("thinking", "output"),
}
EFFORTS = ("low", "high", "max")
REWARDS = ("answer", "format", "unit_tests", "noise")  # k3train/rl/rewards.py
JUDGE = "judge"  # of environments that judge, k3train/rl/environments.py
# key: (cure, bounds)
RANGES: dict[str, tuple[float, dict[str, float]]] = {
    "rl.objective.regularizer": (0.02, {"least": 0}),
    "rl.objective.importance_cap": (0, {"least": 0}),
    "rl.objective.distill_clip": (5, {"above": 0}),
    "rl.objective.task_reward": (0, {"least": 0}),
    "rl.teachers_in_memory": (1, {"least": 1}),
    "rl.rollout.prompts": (8, {"least": 1}),
    "rl.rollout.samples": (8, {"least": 2}),
    "rl.rollout.finish_fraction": (1, {"above": 0, "most": 1}),
    "rl.rollout.max_staleness": (4, {"least": 0}),
    "rl.rollout.max_new_tokens": (128, {"least": 1}),
    "rl.rollout.temperature": (1, {"above": 0}),
    "rl.rollout.top_p": (1, {"above": 0, "most": 1}),
    "rl.rollout.top_k": (0, {"least": 0}),
    "rl.rollout.max_rows": (64, {"least": 1}),
    "rl.rollout.environment_workers": (8, {"least": 1, "most": 1024}),
    "rl.rollout.environment_lag": (32, {"least": 0}),
    "rl.rollout.concurrency": (32, {"least": 1, "most": 4096}),
    "rl.rollout.retries": (3, {"least": 0}),
    "rl.rollout.timeout_seconds": (60, {"above": 0}),
    "rl.rollout.outage_minutes": (15, {"least": 0}),
    "rl.rollout.bucket_mib": (64, {"least": 1, "most": 512}),
    "rl.effort.samples": (4, {"least": 1}),
    "rl.effort.least": (8, {"least": 1}),
    "rl.eval_limit": (64, {"least": 1}),
    "rl.eval_temperature": (0, {"least": 0}),
}


def check_rl(config: RecipeConfig) -> None:
    """Refuse a section `rl` that names no tasks, contradicts itself, or does not fit batch and layout."""
    for key, options in CHOICES.items():
        check_choice(config, key, options)
    for key, (cure, bounds) in RANGES.items():
        check_range(config, key, cure, **bounds)
    if config.engine != "megatron":
        why = "does no reinforcement learning: its loss does not see a stage's own tensors"
        raise refuse(config, "engine", why, "megatron", "engine=megatron")
    _check_objective(config)
    _check_sources(config)
    _check_effort(config)
    _check_batch(config)
    _check_engine(config)


def _check_objective(config: RecipeConfig) -> None:
    objective = config.rl.objective
    neutral = 1.0 if objective.clip_on == "ratio" else 0.0
    low = "rl.objective.clip_low"
    if objective.surrogate != "reinforce" and not objective.clip_low < neutral < objective.clip_high:
        raise refuse(
            config,
            low,
            f"and rl.objective.clip_high={objective.clip_high:g} do not lie around {neutral:g}, where both policies"
            f" agree (clip_on={objective.clip_on})",
            f"clip_low below {neutral:g} and clip_high above it",
            f"{low}={0.5 if neutral else -0.7:g} rl.objective.clip_high={2 if neutral else 0.7:g}",
        )
    _check_unused(config)
    if objective.skip_uniform and (objective.signal == "mopd" or objective.baseline == "none"):
        key = "rl.objective.skip_uniform"
        why = "would leave out groups that signal=mopd and baseline=none learn from"
        raise refuse(config, key, why, "false", f"{key}=false")
    if objective.signal == "mopd" and not config.rl.teachers:
        raise refuse(config, "rl.objective.signal", "needs teachers", "outcome, or rl.teachers", "'rl.teachers=[...]'")
    check_teachers(config)


def _check_unused(config: RecipeConfig) -> None:
    """Refuse values that nothing acts on, and one without which the objective is wrong off policy."""
    objective, rollout = config.rl.objective, config.rl.rollout
    if rollout.engine == "openai" and rollout.keep_states:
        why = "keeps states of the local engine; a server keeps none over a pause"
        raise refuse(config, "rl.rollout.keep_states", why, "false", "rl.rollout.keep_states=false")
    cap = "rl.objective.importance_cap"
    if objective.surrogate != "reinforce" and objective.importance_cap:
        why = f"is for surrogate=reinforce, and surrogate={objective.surrogate} does not look at it"
        raise refuse(config, cap, why, "0, or surrogate=reinforce", f"{cap}=0")
    if objective.signal != "mopd" and objective.task_reward:
        key, why = "rl.objective.task_reward", "is added to teachers' signal, and signal=outcome has none"
        raise refuse(config, key, why, "0, or signal=mopd", f"{key}=0")
    _check_on_policy(config)


def _check_on_policy(config: RecipeConfig) -> None:
    """Refuse REINFORCE that does not weigh by the ratio, where rollouts hold tokens of older policies."""
    objective, rollout, cap = config.rl.objective, config.rl.rollout, "rl.objective.importance_cap"
    if objective.surrogate != "reinforce" or objective.importance_cap:
        return
    if rollout.finish_fraction < 1 and rollout.max_staleness > 0:
        source = f"rl.rollout.finish_fraction={rollout.finish_fraction:g} with max_staleness={rollout.max_staleness}"
        other = "rollouts that are on policy (finish_fraction=1, or max_staleness=0)"
    elif rollout.engine == "openai" and rollout.refresh == "none" and config.train.steps > 1:
        source = f"rl.rollout.refresh=none with train.steps={config.train.steps}"
        other = "a server that gets the weights of each step (rl.rollout.refresh=in_place, disk)"
    else:
        return
    why = f"weighs tokens of older policies as if the present one had drawn them, and {source} trains on such"
    raise refuse(config, cap, why, f"more than 0, or {other}", f"{cap}=2")


def _check_sources(config: RecipeConfig) -> None:
    rl = config.rl
    if not rl.environments:
        example = "'rl.environments=[{tasks: data/tasks/tasks-train.jsonl}]'"
        raise refuse(config, "rl.environments", "names no tasks", "one or more", example)
    for number, environment in enumerate(rl.environments):
        where = f"rl.environments.{number}"
        checks: list[tuple[str, Any, bool, str]] = [
            ("weight", environment.weight, 0 < environment.weight < float("inf"), "more than 0"),
            ("timeout_seconds", environment.timeout_seconds, 0 < environment.timeout_seconds < 1e6, "more than 0"),
            ("tasks", environment.tasks, bool(environment.tasks), "a file of tasks"),
        ]
        for name, value, holds, allowed in checks:
            if not holds:
                raise UserError(f"{where}.{name}={value} is out of range; allowed: {allowed}; correct {where}.{name}")
        _check_rewards(f"{where}.rewards", environment.rewards)
        for effort in environment.efforts:
            if effort not in EFFORTS:
                raise UserError(
                    f"{where}.efforts has {effort}, which does not exist; allowed: {', '.join(EFFORTS)}; try"
                    f" {where}.efforts=[]"
                )
    for effort in rl.efforts:
        if effort not in EFFORTS:
            raise refuse(
                config, "rl.efforts", f"has {effort}, which does not exist", ", ".join(EFFORTS), "rl.efforts=[]"
            )


def _check_rewards(where: str, weights: Mapping[str, float]) -> None:
    for name, weight in weights.items():
        if name not in (*REWARDS, JUDGE):
            raise UserError(
                f"{where} has {name}, which does not exist; allowed: {', '.join(REWARDS)}, with a weight each, and"
                f" {JUDGE} where answers are judged; try"
                " {answer: 1.0}"
            )
        if not math.isfinite(weight):
            raise UserError(f"{where}.{name}={weight} is out of range; allowed: finite numbers; correct {where}.{name}")
    if weights and not any(weights.values()):
        raise UserError(
            f"{where} gives every reward the weight 0, so that nothing can be learned; allowed: at least one other"
            " weight; try {answer: 1.0}"
        )


def _check_effort(config: RecipeConfig) -> None:
    stages, objective = config.rl.effort.stages, config.rl.objective
    if config.rl.effort.enabled and objective.signal == "mopd" and not objective.task_reward:
        why = "overrides rewards, and rl.objective.signal=mopd learns from none where task_reward=0"
        cure = "rl.effort.enabled=false, or rl.objective.task_reward=1"
        raise refuse(config, "rl.effort.enabled", why, "false, or a task reward", cure)
    steps = [stage.step for stage in stages]
    if config.rl.effort.enabled and (not stages or steps != sorted(set(steps)) or steps[0] != 0):
        raise UserError(
            f"rl.effort.stages begin at steps {steps}; allowed: ascending ones, the first 0; try"
            " 'rl.effort.stages=[{step: 0, low: 2, high: 4, max: 8}]'"
        )
    for number, stage in enumerate(stages):
        for effort in EFFORTS:
            tau = getattr(stage, effort)
            if not 0 < tau < float("inf"):
                raise UserError(
                    f"rl.effort.stages.{number}.{effort}={tau} is out of range; allowed: more than 0; try 4"
                )


def _check_batch(config: RecipeConfig) -> None:
    rollout, train = config.rl.rollout, config.train
    samples = rollout.prompts * rollout.samples
    if train.global_batch_size != samples:
        raise refuse(
            config,
            "train.global_batch_size",
            f"is not rl.rollout.prompts * rl.rollout.samples = {samples}, the samples of a step",
            str(samples),
            f"train.global_batch_size={samples}",
        )
    if config.model.mtp.num_layers:
        raise refuse(
            config, "model.mtp.num_layers", "takes no part in reinforcement learning", "0", "model.mtp.num_layers=0"
        )
    if config.model.moe.num_experts and config.model.moe.balancing == "megatron":
        why = "counts the filler that rows of samples end with"
        raise refuse(config, "model.moe.balancing", why, "quantile, sign, none", "model.moe.balancing=quantile")


def _check_engine(config: RecipeConfig) -> None:
    rollout, parallel = config.rl.rollout, config.parallel
    if rollout.engine == "openai":
        check_server(config)
        return
    if parallel.overlap_param_gather:
        raise refuse(
            config,
            "parallel.overlap_param_gather",
            "leaves the local engine without the step's weights",
            "false, or rl.rollout.engine=openai",
            "parallel.overlap_param_gather=false",
        )
