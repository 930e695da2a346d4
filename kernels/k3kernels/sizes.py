"""The sizes of the shipped models, for which the Triton kernels are compiled and checked without a GPU.

`tests/kernels/test_compiled.py` compares them with the recipes.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Channels and counts of a model. `latent`: what routed experts read. `ranks`: of MLA's low-rank projections."""

    name: str
    hidden: int
    dense: int
    heads: int
    head: int
    ranks: tuple[int, ...]
    latent: int
    expert: int
    shared: int  # shared experts, stored as one feed-forward network of that many widths
    experts: int
    top_k: int
    vocab: int
    layers: int
    block: int  # layers of a block of Attention Residuals
    bins: int = 1000
    taps: int = 4

    @property
    def sources(self) -> int:
        """The most that a mix has: all blocks and the running sum."""
        return -(-self.layers // self.block) + 1

    @property
    def normed(self) -> tuple[int, ...]:
        """Widths of plain RMS norms."""
        return tuple(sorted({self.hidden, self.latent, *self.ranks}, reverse=True))


K3 = Sizes("k3", 7168, 33792, 96, 128, (1536, 512), 3584, 3072, 2, 896, 16, 163840, 93, 12)
MODELS = (
    K3,
    Sizes("k3-8layers", 7168, 33792, 96, 128, (1536, 512), 3584, 3072, 2, 896, 16, 163840, 8, 4),
    Sizes("k3-48b", 2304, 9216, 32, 128, (512,), 2304, 1024, 1, 256, 8, 163840, 27, 3),
    Sizes("k3-mini", 1024, 4096, 8, 128, (384, 256), 512, 512, 2, 64, 6, 65536, 16, 2),
    Sizes("k3-tiny", 128, 384, 4, 32, (48, 32), 64, 96, 1, 16, 4, 2048, 9, 3),
)
MICRO_BATCH = 8192  # tokens on one rank
