"""Which balancing of the experts' load can run."""

from __future__ import annotations

from k3train.config.model import MoEConfig
from k3train.config.rules import check_range, nearest_multiple, refuse, value_at
from k3train.config.schema import RecipeConfig

# Scores of the global batch that the exact estimator may gather on a rank, all of its layers together.
MOST_GATHERED_BYTES = 2**30
MOST_BINS = 1_000_000  # counts per expert and layer; K3 has 1000
LEAST_LOG_BINS = 64  # k3kernels.quantile_balancing.spacing.LEAST_BINS
_DEFAULTS = MoEConfig()


def check_balancing(config: RecipeConfig) -> None:
    """Refuse settings out of range, and settings that the chosen rule would ignore."""
    moe = config.model.moe
    check_range(config, "model.moe.quantile_bins", 1000, least=2, most=MOST_BINS)
    check_range(config, "model.moe.quantile_alternations", 1, least=1, most=64)
    check_range(config, "model.moe.quantile_ema", 0.0, least=0.0, below=1.0)
    for key, owner in (
        ("quantile_estimator", "quantile"),
        ("quantile_spacing", "quantile"),
        ("quantile_bins", "quantile"),
        ("quantile_alternations", "quantile"),
        ("quantile_ema", "quantile"),
        ("sign_rate", "sign"),
    ):
        if moe.balancing != owner:
            _check_is_default(config, key, f"model.moe.balancing={moe.balancing}", f"model.moe.balancing={owner}")
    if moe.balancing == "quantile" and moe.quantile_estimator == "exact":
        for key in ("quantile_spacing", "quantile_bins"):
            _check_is_default(
                config, key, "model.moe.quantile_estimator=exact", "model.moe.quantile_estimator=order_statistic"
            )
        _check_exact(config)
    if moe.balancing == "quantile" and moe.quantile_spacing == "log":
        check_range(config, "model.moe.quantile_bins", 1000, least=LEAST_LOG_BINS)
    if moe.balancing == "megatron":
        _check_megatron(config)


def _check_is_default(config: RecipeConfig, name: str, present: str, cure: str) -> None:
    key, default = f"model.moe.{name}", getattr(_DEFAULTS, name)
    if value_at(config, key) == default:
        return
    shown = f"{default:g}" if isinstance(default, float | int) else default
    raise refuse(
        config,
        key,
        f"has no effect with {present}",
        f"{shown} (its default) unless {cure}",
        f"{cure} or {key}={shown}",
    )


def _check_exact(config: RecipeConfig) -> None:
    """The exact estimator gathers every score of a step on every rank."""
    model, train = config.model, config.train
    layers = max(1, model.num_layers - model.moe.first_dense_layers + model.mtp.num_layers)
    needed = 4 * train.global_batch_size * train.seq_length * model.moe.num_experts * layers
    if needed > MOST_GATHERED_BYTES:
        raise refuse(
            config,
            "model.moe.quantile_estimator",
            f"gathers the scores of a step's tokens, {needed / 2**30:.1f} GiB, where counts would do",
            f"up to {MOST_GATHERED_BYTES / 2**30:g} GiB (train.global_batch_size * train.seq_length *"
            " model.moe.num_experts * MoE layers * 4 bytes), or another estimator",
            "model.moe.quantile_estimator=order_statistic",
        )


def _check_megatron(config: RecipeConfig) -> None:
    """Megatron-Core's rule needs an integer fair load in each micro-batch."""
    train, moe = config.train, config.model.moe
    chosen = train.micro_batch_size * train.seq_length * moe.top_k
    if chosen % moe.num_experts:
        raise refuse(
            config,
            "model.moe.balancing",
            f"needs train.micro_batch_size * train.seq_length * model.moe.top_k = {chosen} to be a multiple of"
            f" model.moe.num_experts={moe.num_experts}",
            "such a micro-batch, or another rule",
            f"train.seq_length={nearest_multiple(moe.num_experts, train.seq_length)} or model.moe.balancing=quantile",
        )
