"""Which values of `guards` and `faults` make sense."""

from __future__ import annotations

from k3train.config.keys import closest
from k3train.config.rules import check_choice, check_range, refuse
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError

POLICIES = {
    "guards.non_finite": ("skip", "rollback", "stop"),
    "guards.loss_spike": ("off", "warn", "skip", "rollback", "stop"),
    "guards.grad_spike": ("off", "warn", "skip", "rollback", "stop"),
    "guards.balance": ("off", "warn", "rollback", "stop"),
}
FAULT_KINDS = ("kill", "hang", "nan", "spike", "slow", "disk_full", "corrupt_checkpoint", "sigterm")


def check_guards(config: RecipeConfig, world_size: int | None = None) -> None:
    """Refuse policies that do not exist, bounds that cannot be met, and faults that could never happen."""
    for key, options in POLICIES.items():
        check_choice(config, key, options)
    check_range(config, "guards.window", 128, least=2, most=100_000)
    check_range(config, "guards.min_history", 20, least=2)
    if config.guards.min_history > config.guards.window:
        raise refuse(
            config,
            "guards.min_history",
            f"is more than guards.window={config.guards.window} ever holds",
            f"2 to {config.guards.window}",
            f"guards.min_history={min(20, config.guards.window)}",
        )
    check_range(config, "guards.loss_deviations", 8, above=0)
    check_range(config, "guards.grad_factor", 10, above=1)
    check_range(config, "guards.max_dead_fraction", 0.5, above=0, most=1)
    check_range(config, "guards.max_violation", 4, least=0)
    for name, good in (("balance_patience", 20), ("rollback_checkpoints", 1), ("straggler_patience", 10)):
        check_range(config, f"guards.{name}", good, least=1)
    for name, good in (("max_skips", 10), ("max_rollbacks", 3)):
        check_range(config, f"guards.{name}", good, least=0)
    if config.guards.straggler_factor:
        check_range(config, "guards.straggler_factor", 1.5, above=1)
    if config.guards.hang_minutes is not None:
        check_range(config, "guards.hang_minutes", "null", least=0)
    _check_rollback(config)
    for index in range(len(config.faults)):
        _check_fault(config, index, world_size)


def _check_rollback(config: RecipeConfig) -> None:
    guards, keep = config.guards, config.checkpoint.keep_last
    wanting = [key for key in POLICIES if getattr(guards, key.partition(".")[2]) == "rollback"]
    if not wanting:
        return
    if not config.checkpoint.interval:
        raise refuse(
            config,
            wanting[0],
            "goes back to a checkpoint, and checkpoint.interval=0 writes none before the end",
            "rollback where checkpoint.interval is at least 1",
            "checkpoint.interval=100",
        )
    if 0 < keep < guards.rollback_checkpoints:
        raise refuse(
            config,
            "guards.rollback_checkpoints",
            f"is more than checkpoint.keep_last={keep} keeps",
            f"1 to {keep}",
            f"checkpoint.keep_last={guards.rollback_checkpoints}",
        )


def _check_fault(config: RecipeConfig, index: int, world_size: int | None) -> None:
    fault, key = config.faults[index], f"faults.{index}"
    if fault.kind not in FAULT_KINDS:
        near = closest(fault.kind, FAULT_KINDS) or FAULT_KINDS[0]
        raise UserError(
            f"{key}.kind={fault.kind} does not exist; allowed: {', '.join(FAULT_KINDS)}; try {key}.kind={near}"
        )
    steps = config.train.steps
    if not 1 <= fault.step <= steps:
        raise UserError(f"{key}.step={fault.step} never comes; allowed: 1 to train.steps={steps}; try {key}.step=1")
    if fault.rank < 0 or (world_size is not None and fault.rank >= world_size):
        ranks = f"0 to {world_size - 1}" if world_size else "0 or more"
        raise UserError(f"{key}.rank={fault.rank} does not exist; allowed: {ranks}; try {key}.rank=0")
    if fault.steps < 1:
        raise UserError(f"{key}.steps={fault.steps} is out of range; allowed: at least 1; try {key}.steps=1")
    if not 0 < fault.seconds < float("inf"):
        raise UserError(f"{key}.seconds={fault.seconds:g} is out of range; allowed: more than 0; try {key}.seconds=1")
