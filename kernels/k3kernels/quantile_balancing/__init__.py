"""Quantile Balancing of expert load (Kimi K3 report §2.3, App. C and D): pure functions."""

from k3kernels.quantile_balancing.balance import centre, dead_fraction, max_violation, sign_rule
from k3kernels.quantile_balancing.histogram import (
    ESTIMATORS,
    histogram_bounds,
    read_off,
    required_bias_histogram,
)
from k3kernels.quantile_balancing.reference import exact_bias
from k3kernels.quantile_balancing.selection import topk_with_cutoff

__all__ = [
    "ESTIMATORS",
    "centre",
    "dead_fraction",
    "exact_bias",
    "histogram_bounds",
    "max_violation",
    "read_off",
    "required_bias_histogram",
    "sign_rule",
    "topk_with_cutoff",
]
