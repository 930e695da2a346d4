"""Fake quantization: values rounded to a Microscaling format in the forward pass, gradients as if they were not.

The parameters stay what the optimizer and the checkpoint hold (its high-precision masters, or their bf16 copies); the
products see them rounded, and so does the gradient of their inputs. This is the straight-through estimator of Bengio
et al. (arXiv:1308.3432) in its plain form: the identity, also where a rule clips. Which form K3 uses is UNKNOWN.
"""

from __future__ import annotations

import torch
from k3kernels import mx
from torch.autograd.function import FunctionCtx, once_differentiable

from k3train.config.quant import FORMATS, QuantConfig
from k3train.config.rules_quant import resolve_quant_backend
from k3train.errors import UserError

_TE_CAPABILITY = (10, 0)  # below it Transformer Engine's cast ends in "Not implemented scaling mode"


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, original: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class FakeQuant:
    """The weights and inputs of one rank's routed experts as their products see them.

    A weight is rounded when it is first asked for and kept until `forget` (or until its own tensor is another or has
    been written to, as far as torch counts that: Megatron-Core's optimizers write past the count). It takes as much
    memory as the weight itself.
    """

    def __init__(self, quant: QuantConfig, device_kind: str) -> None:
        """`device_kind`: cpu or cuda. UserError where `quant.backend` cannot run on it, or on this very GPU."""
        self.quant = quant
        self.backend = resolve_quant_backend(quant.backend, device_kind)
        if self.backend == "te" and (found := torch.cuda.get_device_capability()) < _TE_CAPABILITY:
            raise UserError(
                "quant.backend=te needs a GPU of compute capability 10.0 (Blackwell) or later, as Transformer Engine's"
                f" MXFP8 kernels do, and this one has {'.'.join(map(str, found))}; allowed here: auto, torch, triton;"
                " try quant.backend=auto"
            )
        self.times_rounded = 0  # weights, over the life of this object
        self.keeps = True  # rounded weights between two uses; not where the weights themselves are gone in between
        self._codec = "triton" if self.backend == "te" else self.backend
        self._kept: dict[str, tuple[tuple[int, int], torch.Tensor]] = {}

    def forget(self) -> None:
        """The weights have changed, or are about to: round them anew, and free what was kept."""
        self._kept.clear()

    def weight(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """`weight` [experts, ..., n] of the module `experts.<name>`, rounded in blocks of 32 along n."""
        if self.quant.weights == "none" or f"experts.{name}" not in self.quant.modules:
            return weight
        # Tensors made in inference mode have no count.
        state = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        kept = self._kept.get(name)
        if kept is None or kept[0] != state:
            # A tensor made in inference mode could not serve training.
            with torch.inference_mode(False), torch.no_grad():
                rounded = torch.empty_like(weight)
                for expert, values in enumerate(weight.detach()):  # one by one: the temporaries are several times fp32
                    rounded[expert] = self._round(values, self.quant.weights, self.quant.weight_scale)
            self.times_rounded += 1
            kept = state, rounded
            if self.keeps:
                self._kept[name] = kept
        return _StraightThrough.apply(weight, kept[1])

    def input(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """The input [t, n] of the module `experts.<name>`, rounded in blocks of 32 along n."""
        if self.quant.inputs == "none" or f"experts.{name}" not in self.quant.modules:
            return values
        with torch.no_grad():
            if self.backend == "te":
                from k3train.quant.te_mxfp8 import te_round

                rounded = te_round(values.detach())
            else:
                rounded = self._round(values.detach(), self.quant.inputs, self.quant.input_scale)
        return _StraightThrough.apply(values, rounded)

    def _round(self, values: torch.Tensor, name: str, rule: str) -> torch.Tensor:
        return mx.quantize_dequantize(values, FORMATS[name], rule, backend=self._codec)
