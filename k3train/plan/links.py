"""Which links a group's messages take, and how long they take.

Ranks are numbered as Megatron-Core numbers them: tensor-parallel ranks are neighbours, then context, then data
parallel, pipeline ranks are farthest apart; experts are spread over neighbours. Ranks are placed so that no group of
tensor-parallel or expert-parallel ranks that fits into a domain of `fast_domain` devices lies across two: a rack of 72
takes 64 ranks where experts are spread over 64, and 8 devices of it stay idle. Groups that share a domain use fast
links, everything else goes over the network, in whole domains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3train.config.cluster import ClusterConfig
from k3train.config.schema import ParallelConfig


@dataclass(frozen=True)
class Links:
    """Links of one cluster as a layout uses them; sizes in bytes sent by one rank, times in seconds."""

    cluster: ClusterConfig
    parallel: ParallelConfig
    world_size: int

    def _rate(self, fast: bool) -> float:
        gbs = self.cluster.fast_gbs if fast else self.cluster.network_gbs
        return gbs * 1e9 * self.cluster.efficiency.link

    @property
    def _latency(self) -> float:
        return self.cluster.latency_us * 1e-6

    @property
    def domain(self) -> int:
        """Devices of a domain that ranks are placed on: all of them, or whole groups of neighbours."""
        size, p = self.cluster.fast_domain, self.parallel
        if self.world_size <= size:
            return size
        unit = 1
        for group in (p.tensor, p.expert * p.expert_tensor):  # of one that is larger than a domain a part that is not
            part = max(n for n in range(1, min(group, size) + 1) if group % n == 0)
            unit = both if (both := math.lcm(unit, part)) <= size else unit
        return size // unit * unit

    @property
    def idle(self) -> int:
        """Devices that stay without a rank in each domain."""
        return self.cluster.fast_domain - self.domain

    def stays_fast(self, ranks: int, stride: int) -> bool:
        """Whether every group of `ranks` ranks, `stride` apart, lies in one domain."""
        span = ranks * stride
        return span <= self.domain and (self.world_size <= self.domain or self.domain % span == 0)

    def send(self, size: float, fast: bool) -> float:
        """`size` bytes from one rank to another."""
        return self._latency + size / self._rate(fast)

    def gather(self, size: float, ranks: int, stride: int) -> float:
        """An all-gather to, or a reduce-scatter of, `size` bytes over `ranks` ranks `stride` apart (ring)."""
        if ranks == 1:
            return 0.0
        return self._latency + size * (ranks - 1) / ranks / self._rate(self.stays_fast(ranks, stride))

    def all_to_all(self, size: float, copies: int, once_a_domain: bool) -> float:
        """Each rank sends `size` bytes of tokens, spread evenly over the expert-parallel ranks.

        `copies` experts get each token; `once_a_domain`: the network carries one copy to each other domain.
        """
        near, inside, outside = self.split_all_to_all(size, copies, once_a_domain)
        del near
        return self._latency + max(inside / self._rate(True), outside / self._rate(False))

    def split_all_to_all(self, size: float, copies: int, once_a_domain: bool) -> tuple[float, float, float]:
        """Bytes of `all_to_all` that stay on the rank, go over fast links, and over the network."""
        ranks, etp = self.parallel.expert, self.parallel.expert_tensor
        together = max(1, min(ranks, self.domain // etp))
        domains = ranks / together
        outside = size * (ranks - together) / ranks
        if once_a_domain and domains > 1:
            reached = domains * (1 - (1 - 1 / domains) ** copies)  # domains that hold an expert of a token
            outside = size / copies * reached * (domains - 1) / domains
        return size / ranks, size * (together - 1) / ranks, outside

    def to_next_stage(self, size: float) -> float:
        """A message to the next pipeline rank."""
        if self.parallel.pipeline == 1:
            return 0.0
        return self.send(size, self.stage_is_near)

    @property
    def stage_is_near(self) -> bool:
        """Whether pipeline neighbours share a domain."""
        return self.stays_fast(2, self.world_size // self.parallel.pipeline)
