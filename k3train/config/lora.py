"""The lora section of a recipe: low-rank adapters beside a frozen model."""

from __future__ import annotations

from dataclasses import dataclass, field

TARGETS = ("attention", "latent", "shared_experts", "dense_ffn")


@dataclass
class LoRAConfig:
    """Low-rank adapters (Hu et al., arXiv:2106.09685): y = W x + (alpha / rank) B A x, with W frozen."""

    enabled: bool = False
    rank: int = 16
    alpha: float = 32.0
    # attention (every projection of KDA and MLA) | latent (down into and up from the experts' latent) | shared_experts
    # | dense_ffn (the leading dense layers). Routed experts, router, norms, embedding and head have no adapters.
    targets: list[str] = field(default_factory=lambda: ["attention", "latent", "shared_experts"])
    dropout: float = 0.0  # of the adapters' input, in training

    @property
    def scale(self) -> float:
        """What the product of both matrices is multiplied by."""
        return self.alpha / self.rank

    def describe(self) -> str:
        """The adapters in a few words."""
        return f"rank {self.rank}, alpha {self.alpha:g} on {', '.join(self.targets)}; all else frozen"
