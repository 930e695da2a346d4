"""Readable short convolution: one ``conv1d`` a document."""

import torch
import torch.nn.functional as F
from torch import Tensor

from k3kernels.kda.documents import document_bounds


def short_conv_reference(
    x: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    activation: str | None = "silu",
) -> tuple[Tensor, Tensor]:
    """``short_conv`` document by document in fp32 (fp64 for fp64 inputs); ``weight`` is [D, W].

    Returns:
        y [B, T, D] in the dtype of ``x``, and the last W - 1 inputs of every document [N, D, W - 1].
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    (batch, seq_length, channels), width = x.shape, weight.shape[-1]
    flat = x.to(dtype).flatten(0, 1)
    outputs, finals = [], []
    for document, (start, end) in enumerate(document_bounds(cu_seqlens, batch, seq_length)):
        if initial_state is None:
            history = flat.new_zeros(channels, width - 1)
        else:
            history = initial_state[document].to(dtype)
        seen = torch.cat([history, flat[start:end].T], dim=1)
        if end > start:
            outputs.append(F.conv1d(seen.unsqueeze(0), weight.to(dtype).unsqueeze(1), groups=channels)[0])
        finals.append(seen[:, seen.shape[1] - (width - 1) :])
    # [D, B * T], as conv1d leaves it: what sums over channels afterwards then adds them one by one.
    z = torch.cat(outputs, dim=1) if outputs else flat.new_zeros(channels, 0)
    y = (F.silu(z) if activation == "silu" else z).T
    final_state = torch.stack(finals) if finals else flat.new_zeros(0, channels, width - 1)
    return y.unflatten(0, (batch, seq_length)).to(x.dtype), final_state.to(x.dtype)
