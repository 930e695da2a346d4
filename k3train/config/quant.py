"""The quant section of a recipe: quantization-aware training of the routed experts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

FORMATS = {"mxfp4": "e2m1", "mxfp8": "e4m3"}
MODULES = ("experts.w13", "experts.w2")


@dataclass
class QuantConfig:
    """Which weights and inputs the forward pass rounds to a Microscaling format; gradients pass straight through.

    The defaults are K3's policy (report sections 4.1.1 and 4.1.4), switched off. UNKNOWN for K3: both scale rules
    (`weight_scale` is what the released weights show), E4M3 for the inputs, and whether w2's input is rounded as well.
    """

    enabled: bool = False
    # Routed experts' products: experts.w13 (gate and up) and experts.w2 (down), each with its input.
    modules: list[str] = field(default_factory=lambda: list(MODULES))
    weights: str = "mxfp4"  # mxfp4 | mxfp8 | none
    inputs: str = "mxfp8"  # mxfp4 | mxfp8 | none
    weight_scale: str = "round_up"  # round_up (clips nothing) | floor (OCP's rule) | nearest
    input_scale: str = "round_up"  # the same; Transformer Engine has round_up alone
    # Stages that train without it although it is enabled. K3: pretraining; SFT, RL and draft training all have it.
    skip_stages: list[str] = field(default_factory=lambda: ["pretrain"])
    # auto (triton on CUDA, else torch) | torch | triton | te (inputs by Transformer Engine's MXFP8 kernels; Blackwell)
    backend: str = "auto"

    def applies_to(self, stage: str) -> bool:
        """Whether runs of that stage are quantized."""
        return self.enabled and stage not in self.skip_stages

    def policy(self) -> dict[str, object]:
        """What decides the numbers: everything but when and how they are computed."""
        values = asdict(self)
        return {key: values[key] for key in ("modules", "weights", "inputs", "weight_scale", "input_scale")}

    def describe(self) -> str:
        """The policy in a few words."""
        where = "" if set(self.modules) == set(MODULES) else f" of {', '.join(self.modules)}"
        parts = []
        if self.weights != "none":
            parts.append(f"{self.weights} weights ({self.weight_scale})")
        if self.inputs != "none":
            parts.append(f"{self.inputs} inputs ({self.input_scale})")
        return " and ".join(parts) + where

    @property
    def is_published_format(self) -> bool:
        """Whether all experts' weights are rounded to what `export --experts mxfp4` stores."""
        return self.weights == "mxfp4" and set(self.modules) == set(MODULES)


def policy_in_force(quant: QuantConfig, stage: str) -> QuantConfig | None:
    """`quant` where it applies to the stage, else None."""
    return quant if quant.applies_to(stage) else None


def said_change(was: QuantConfig | None, now: QuantConfig | None, where: str, doing: str) -> str | None:
    """A sentence where weights trained under one policy are used under another, else None.

    `where` names the weights, `doing` what is done with them ("this run trains them", "they are scored").
    """
    if (was and was.policy()) == (now and now.policy()):
        return None
    before = f"was trained with {was.describe()}" if was else "was trained without quantization"
    here = f"with {now.describe()}" if now else "without quantization"
    return f"{where} {before}, and {doing} {here}: the same weights give other numbers"
