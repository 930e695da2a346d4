"""Where the bins of a histogram of required biases lie: even over the whole range, or dense around the bias itself.

Even bins (K3 report App. D) have one width, about ``range / num_bins``. Tokens whose scores differ by less cannot be
told apart, however long the run: a young router, whose tokens all look alike, then sends all of them to the same
experts.

Logarithmic bins are centred on each expert's own bias. Once the load is even the required bias *is* the bias (a
token's cutoff is some expert's biased score), so that is where resolution is needed: a bin at distance d from the bias
is about ``d / bins_per_octave`` wide, hence each update leaves a small share of the last one's error. They need no
state beyond the bias. Distances are cut by the bits of their fp32 form, as floating-point numbers are themselves
spaced, so that every device finds the same bin.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SPACINGS = ("uniform", "log")
LEAST_BINS = 64
_MANTISSA_BITS = 23
# Octaves of distance that the bins on one side have to span at the least; below them bins are even.
_LEAST_OCTAVES = 14


class LogBins(NamedTuple):
    """Logarithmic bins: ``half`` on either side; a distance's bin is ``(bits(d + bits^-1(base)) - base) >> shift``."""

    base: Tensor  # int32 [...]: the bits of the offset that makes bins even near the centre
    shift: int
    half: int

    @property
    def offset(self) -> Tensor:
        """The distance up to which bins are even, fp32 [...]."""
        return self.base.view(torch.float32)


def log_bins(bounds: tuple[Tensor, Tensor], num_bins: int) -> LogBins:
    """Bins for biases and scores within ``bounds`` (low, high), tensors [...]; the outermost end at ``high - low``.

    Raises:
        ValueError: fewer than LEAST_BINS bins.
    """
    if num_bins < LEAST_BINS:
        raise ValueError(f"num_bins is {num_bins}; logarithmic bins need at least {LEAST_BINS}.")
    half = num_bins // 2
    bits_per_octave = (half // _LEAST_OCTAVES).bit_length() - 1
    shift = _MANTISSA_BITS - bits_per_octave
    reach = (bounds[1] - bounds[0]).to(torch.float32).contiguous()
    return LogBins(reach.view(torch.int32) - (half << shift), shift, half)


def log_bin_index(distance: Tensor, bins: LogBins) -> Tensor:
    """The bin, int32, of signed fp32 distances from the centre; whatever lies outside, or NaN, is in an edge bin."""
    below = distance.view(torch.int32) >> 31  # -1 left of the centre, 0 right of it
    # Subtracting in int32 cannot overflow: both are bits of positive numbers.
    index = (distance.abs() + bins.offset).view(torch.int32).sub_(bins.base).bitwise_right_shift_(bins.shift)
    # ~i is -1 - i: the mirrored bin.
    return index.clamp_(0, bins.half - 1).bitwise_xor_(below).add_(bins.half)


def log_bin_edges(index: Tensor, bins: LogBins) -> tuple[Tensor, Tensor]:
    """Lower and upper signed distance, fp64, of bins ``index`` [..., n_experts]."""
    side = index - bins.half
    above = side >= 0
    inner = torch.where(above, side, -1 - side).to(torch.int32)
    base, offset = bins.base.unsqueeze(-1), bins.offset.double().unsqueeze(-1)
    near = (base + (inner << bins.shift)).view(torch.float32).double() - offset
    far = (base + ((inner + 1) << bins.shift)).view(torch.float32).double() - offset
    return torch.where(above, near, -far), torch.where(above, far, -near)
