"""The machines a plan is made for: one file of recipes/cluster, or one of the user's own."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PeakConfig:
    """Dense peak of one device in TFLOP/s, by format; 0: the device has no such units."""

    fp32: float = 0.0  # what fp32 products run at (TF32 is not used)
    bf16: float = 0.0
    fp8: float = 0.0


@dataclass
class EfficiencyConfig:
    """What share of a device's figures real kernels reach. Assumptions of the model (docs/planner.md says whence)."""

    matmul: float = 0.53  # of the peak, for large products
    grouped: float = 0.42  # of the peak, for the experts' grouped products
    attention: float = 0.45  # of the peak, for softmax attention
    memory: float = 0.75  # of the memory bandwidth
    link: float = 0.75  # of a link's bandwidth, for large messages


@dataclass
class ClusterConfig:
    """Devices, how they are joined, and where checkpoints go. Rates are per device and per direction."""

    name: str = "???"
    device: str = "???"  # as its maker calls it
    kind: str = "cuda"  # cuda | cpu: which implementations run there
    devices: int | None = None  # how many there are; null: as many as the recipe asks for
    memory_gib: float = 0.0
    reserved_gib: float = 4.0  # of it: context, communication buffers, fragmentation
    memory_gbs: float = 0.0  # GB/s
    peak_tflops: PeakConfig = field(default_factory=PeakConfig)
    fast_domain: int = 8  # devices joined by fast links (NVLink)
    fast_gbs: float = 0.0  # GB/s of a device over them
    network_gbs: float = 0.0  # GB/s of a device to other domains
    latency_us: float = 20.0  # of a message or a collective
    launch_us: float = 4.0  # host time of one kernel; layers of tiny models wait for it
    storage_gbs: float = 0.0  # GB/s that all devices together write to storage; 0: not known
    # Token copies of the busiest expert-parallel rank over the mean; 1: even. An assumption about the run, not the
    # machine. Without effect where parallel.balanced_experts makes them equal.
    max_over_mean: float = 1.0
    efficiency: EfficiencyConfig = field(default_factory=EfficiencyConfig)
