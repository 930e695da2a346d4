"""The Microscaling codec: checks its input, and leaves the work to PyTorch or to Triton."""

import torch
from torch import Tensor

from k3kernels import backend as backends
from k3kernels.mx.formats import BLOCK, E2M1, ELEMENTS, RULES, Element
from k3kernels.mx.reference import dequantize_reference, quantize_dequantize_reference, quantize_reference

BACKENDS = ("auto", "torch", "triton")
_DTYPES = (torch.float32, torch.bfloat16)


def resolve_backend(backend: str, device: torch.device) -> str:
    """`backend`, with "auto" decided: Triton on CUDA where it is installed, else PyTorch.

    Raises:
        ValueError: unknown backend, or Triton where it can't run.
    """
    return backends.resolve_backend("mx", backend, device, backends=BACKENDS)


def _element(name: str) -> Element:
    if name not in ELEMENTS:
        raise ValueError(f"The element is {name!r}; it must be one of {', '.join(ELEMENTS)}.")
    return ELEMENTS[name]


def _check(values: Tensor, rule: str, noise: Tensor | None) -> None:
    if values.dtype not in _DTYPES or values.dim() == 0:
        raise ValueError(
            f"values are {values.dtype} {tuple(values.shape)}; they must be fp32 or bf16 of shape [..., n]."
        )
    if rule not in RULES:
        raise ValueError(f"The scale rule is {rule!r}; it must be one of {', '.join(RULES)}.")
    if noise is not None and (noise.shape != values.shape or noise.dtype != torch.float32):
        raise ValueError(
            f"noise is {noise.dtype} {tuple(noise.shape)}; it must be fp32 {tuple(values.shape)}, as the values are."
        )


def quantize(
    values: Tensor, element: str, rule: str = "round_up", *, noise: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes of values in blocks of 32 along the last dimension (OCP Microscaling v1.0).

    Args:
        values: [..., n], fp32 or bf16. The last block of a row may be shorter; e2m1 packs pairs and needs an even n.
        element: "e2m1" (MXFP4) or "e4m3" (MXFP8).
        rule: how a block's scale is chosen: "round_up" (clips nothing), "floor" (the specification's) or "nearest";
            see `Element.scale_carry`.
        noise: fp32 [..., n], uniform in [0, 1), rounds up or down at random; None rounds to nearest, ties to even.
        backend: auto | torch | triton.

    Returns (codes, scales), uint8: codes [..., n] for e4m3 and [..., n / 2] for e2m1 (even column in the low nibble),
    scales [..., ceil(n / 32)]. A block with an infinity or a NaN gets scale 255, a block of zeros 127. Zeros keep
    their sign.

    Raises:
        ValueError: unknown element, rule or backend; a dtype or shape that does not fit.
    """
    chosen = _element(element)
    _check(values, rule, noise)
    if chosen == E2M1 and values.shape[-1] % 2:
        raise ValueError(f"Rows of {values.shape[-1]} values do not pack into pairs; e2m1 needs an even number.")
    if resolve_backend(backend, values.device) == "triton":
        from k3kernels.mx.triton_kernel import quantize_triton

        return quantize_triton(values, chosen, rule, noise)
    return quantize_reference(values, chosen, rule, noise)


def dequantize(
    codes: Tensor, scales: Tensor, element: str, dtype: torch.dtype = torch.bfloat16, *, backend: str = "auto"
) -> Tensor:
    """The values [..., n] that codes under scale bytes stand for, exact wherever `dtype` (fp32 or bf16) has them.

    Shapes as `quantize` returns them. Scale 255 makes its block NaN.

    Raises:
        ValueError: unknown element or backend; a dtype or shape that does not fit.
    """
    chosen = _element(element)
    columns = codes.shape[-1] * (2 if chosen == E2M1 else 1)
    wanted = (*codes.shape[:-1], -(-columns // BLOCK))
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8 or tuple(scales.shape) != wanted:
        raise ValueError(
            f"codes are {codes.dtype} {tuple(codes.shape)} and scales {scales.dtype} {tuple(scales.shape)}; both must"
            f" be uint8, and the scales {wanted}."
        )
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype}; it must be fp32 or bf16.")
    if resolve_backend(backend, codes.device) == "triton":
        from k3kernels.mx.triton_kernel import dequantize_triton

        return dequantize_triton(codes, scales, chosen, dtype)
    return dequantize_reference(codes, scales, chosen, dtype)


def quantize_dequantize(
    values: Tensor, element: str, rule: str = "round_up", *, noise: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """`dequantize(quantize(values))` in the dtype of the values, in one pass and without writing codes.

    Arguments and errors as for :func:`quantize`; any n will do.
    """
    chosen = _element(element)
    _check(values, rule, noise)
    if resolve_backend(backend, values.device) == "triton":
        from k3kernels.mx.triton_kernel import quantize_dequantize_triton

        return quantize_dequantize_triton(values, chosen, rule, noise)
    return quantize_dequantize_reference(values, chosen, rule, noise)
