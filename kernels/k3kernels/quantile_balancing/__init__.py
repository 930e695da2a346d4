"""Quantile Balancing of expert load (Kimi K3 report §2.3, App. C and D): pure functions."""

from k3kernels.quantile_balancing.balance import centre, dead_fraction, max_violation, sign_rule
from k3kernels.quantile_balancing.histogram import (
    ESTIMATORS,
    histogram_bounds,
    read_off,
    required_bias_histogram,
)
from k3kernels.quantile_balancing.op import BACKENDS, resolve_backend, select_and_count
from k3kernels.quantile_balancing.reference import exact_bias
from k3kernels.quantile_balancing.selection import topk_with_cutoff
from k3kernels.quantile_balancing.spacing import SPACINGS, LogBins, log_bin_edges, log_bin_index, log_bins

__all__ = [
    "BACKENDS",
    "ESTIMATORS",
    "SPACINGS",
    "LogBins",
    "centre",
    "dead_fraction",
    "exact_bias",
    "histogram_bounds",
    "log_bin_edges",
    "log_bin_index",
    "log_bins",
    "max_violation",
    "read_off",
    "required_bias_histogram",
    "resolve_backend",
    "select_and_count",
    "sign_rule",
    "topk_with_cutoff",
]
