"""Which optimizer sections make sense. Whether a policy fits the model is checked when the optimizer is built."""

from __future__ import annotations

import math
import re

from k3train.config.rules import check_choice, check_range, refuse
from k3train.config.schema import PolicyRule, RecipeConfig
from k3train.errors import UserError

CHOICES = {
    "optim.name": ("adamw", "muon"),
    "optim.schedule": ("cosine", "wsd", "constant"),
    "optim.decay_style": ("linear", "cosine", "minus_sqrt"),
    "optim.muon.precision": ("auto", "fp32", "bf16"),
}
AT_LEAST = {
    "optim.min_lr": (0, 3e-4),
    "optim.weight_decay": (0, 0.1),
    "optim.clip_grad": (0, 1.0),
    "optim.muon.steps": (1, 5),
    "optim.muon.exchange_mib": (1, 256),
    "optim.qk_clip.interval": (1, 1),
}
ABOVE_ZERO = {"optim.lr": 3e-3, "optim.eps": 1e-8, "optim.muon.update_scale": 0.2, "optim.qk_clip.tau": 100.0}
RULE_OPTIMIZERS = ("muon", "adamw")
SPLITS = ("whole", "heads", "head_parts", "experts")


def check_optim(config: RecipeConfig) -> None:
    """Refuse an optimizer section that is out of range or contradicts itself."""
    optim = config.optim
    for key, options in CHOICES.items():
        check_choice(config, key, options)
    for key, (least, good) in AT_LEAST.items():
        check_range(config, key, good, least=least)
    for key, good in ABOVE_ZERO.items():
        check_range(config, key, good, above=0)
    check_range(config, "optim.warmup_fraction", 0.01, least=0, below=1)
    check_range(config, "optim.decay_fraction", 0.2, above=0, most=1)
    check_range(config, "optim.muon.momentum", 0.95, least=0, below=1)
    if optim.schedule == "wsd" and optim.warmup_fraction + optim.decay_fraction > 1:
        raise refuse(
            config,
            "optim.decay_fraction",
            f"and optim.warmup_fraction={optim.warmup_fraction:g} are more than the whole run",
            f"more than 0 and at most {1 - optim.warmup_fraction:g}",
            f"optim.decay_fraction={min(0.2, 1 - optim.warmup_fraction):g}",
        )
    if optim.min_lr > optim.lr:
        raise refuse(
            config,
            "optim.min_lr",
            f"is above optim.lr={optim.lr:g}",
            f"0 to {optim.lr:g}",
            f"optim.min_lr={optim.lr / 10:g}",
        )
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        raise refuse(
            config,
            "optim.betas",
            "is not a pair of decay rates",
            "two numbers from 0 up to, but not, 1",
            "optim.betas=[0.9,0.95]",
        )
    if len(optim.muon.coefficients) != 3 or not all(map(math.isfinite, optim.muon.coefficients)):
        raise refuse(
            config,
            "optim.muon.coefficients",
            "are not the three numbers a, b, c of a x + b x^3 + c x^5",
            "three numbers",
            "optim.muon.coefficients=[3.4445,-4.775,2.0315]",
        )
    if config.train.precision == "bf16" and not config.parallel.distributed_optimizer:
        raise refuse(
            config,
            "parallel.distributed_optimizer",
            "cannot save checkpoints with train.precision=bf16: Megatron-Core's unsharded optimizer passes over the"
            " parameters that stay in fp32",
            "true with bf16",
            "parallel.distributed_optimizer=true",
        )
    _check_policy(config)


def _check_policy(config: RecipeConfig) -> None:
    optim = config.optim
    for index, rule in enumerate(optim.policy):
        _check_rule(f"optim.policy.{index}", rule)
    under_muon = any(rule.optimizer == "muon" for rule in optim.policy)
    if optim.name == "adamw" and under_muon:
        raise UserError(
            "optim.policy puts parameters under muon, and optim.name=adamw has none; allowed: optimizer: adamw in"
            " every rule; try optim.name=muon, or optim.policy=[]"
        )
    if optim.name == "muon" and not under_muon:
        raise UserError(
            "optim.policy has no rule that puts a parameter under muon, which optim.name=muon needs; allowed: one or"
            " more such rules; try optim=per-head-muon, which has K3's"
        )


def _check_rule(key: str, rule: PolicyRule) -> None:
    try:
        re.compile(rule.match)
    except re.error as error:
        raise UserError(
            f"{key}.match={rule.match} is not a regular expression ({error}); allowed: one over whole parameter names;"
            f" try {key}.match='.*q_proj.weight'"
        ) from error
    for name, value, options in (
        ("optimizer", rule.optimizer, RULE_OPTIMIZERS),
        ("split", rule.split, SPLITS),
    ):
        if value not in options:
            raise UserError(
                f"{key}.{name}={value} does not exist; allowed: {', '.join(options)}; try {key}.{name}={options[0]}"
            )
    if rule.optimizer == "adamw" and rule.split != "whole":
        raise UserError(
            f"{key}.split={rule.split} has no effect with optimizer: adamw, which treats every number on its own;"
            f" allowed: whole; try {key}.split=whole"
        )
    if not 0 < rule.lr_mult < float("inf"):
        raise UserError(f"{key}.lr_mult={rule.lr_mult:g} is out of range; allowed: more than 0; try {key}.lr_mult=1.0")
