"""The Microscaling codec against the specification's tables and against other people's code, bit for bit.

The independent side is written down here with tables, logarithms and fp64, or is torch's own float8, compressed-tensors
and, where installed, torchao; the codec works on the bits of fp32 and shares nothing with any of them.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from k3kernels import mx
from k3kernels.mx.reference import values_of_codes

RULES = ("round_up", "floor", "nearest")
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP Microscaling v1.0, table 5
# Section 5.3.1 (OCP FP8 v1.0): bias 7, three mantissa bits, subnormals, no infinity, NaN at all ones.
FP8 = [m * 2.0**-9 if m < 8 else (8 + m % 8) * 2.0 ** (m // 8 - 10) for m in range(127)]
TABLES = {"e2m1": (FP4, 1, 2), "e4m3": (FP8, 3, 8)}  # magnitudes, mantissa bits, largest exponent


def random_blocks(number: int, seed: int = 0) -> torch.Tensor:
    """fp32 blocks of all sizes the format has scales for, some of whose values lie exactly between two codes."""
    chance = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-80, 80, (number, 1), generator=chance).float())
    blocks = torch.randn(number, 32, generator=chance)
    coarse = torch.arange(number) % 3 == 0
    blocks[coarse] = (blocks[coarse] * 8).round() / 8
    return blocks * size


def expected(blocks: torch.Tensor, element: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes without packing and scale bytes of finite fp32 blocks, by definition: fp64, logarithms and a table."""
    magnitudes, mantissa, top = TABLES[element]
    wide = blocks.double()
    amax = wide.abs().amax(-1)
    if rule == "nearest":  # to the element's mantissa first, ties up
        unit = torch.exp2(torch.floor(torch.log2(amax)) - mantissa)
        amax = torch.floor(amax / unit + 0.5) * unit
    if rule == "round_up":
        power = torch.ceil(torch.log2(amax / magnitudes[-1]))
        # fp64's logarithm may miss the border by a rounding.
        power = torch.where(magnitudes[-1] * torch.exp2(power - 1) >= amax, power - 1, power)
        power = torch.where(magnitudes[-1] * torch.exp2(power) < amax, power + 1, power)
    else:
        power = torch.floor(torch.log2(amax)) - top
    power = torch.where(amax == 0, 0.0, power).clamp(-127, 127)
    scaled = wide / torch.exp2(power).unsqueeze(-1)
    table = torch.tensor(magnitudes, dtype=torch.float64)
    middles = (table[1:] + table[:-1]) / 2
    size = scaled.abs()
    below, above = torch.bucketize(size, middles), torch.bucketize(size, middles, right=True)
    codes = torch.where(below % 2 == 0, below, above)  # they differ on ties alone; the even one of two neighbours
    sign = 1 << (3 if element == "e2m1" else 7)
    return (codes + torch.signbit(blocks) * sign).to(torch.uint8), (power + 127).to(torch.uint8)


def quantized(blocks: torch.Tensor, element: str, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The codec's, without packing, one scale a row."""
    codes, scales = mx.quantize(blocks, element, rule)
    return mx.unpack_pairs(codes) if element == "e2m1" else codes, scales.squeeze(-1)


def test_all_sixteen_fp4_codes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = torch.tensor([*FP4, *(-m for m in FP4)])
    found = values_of_codes(codes, mx.E2M1)
    assert torch.equal(found, values)
    assert torch.equal(found.signbit(), codes >= 8)
    scale = torch.tensor([127], dtype=torch.uint8)
    packed = mx.pack_pairs(codes)
    assert packed[1] == 0x32  # codes 2 and 3, low nibble first
    assert torch.equal(mx.dequantize(packed, scale, "e2m1", torch.float32), values)
    again, same = mx.quantize(values, "e2m1", "floor")
    assert torch.equal(again, packed)
    assert same.item() == 127


def test_all_256_e4m3_codes_are_those_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    theirs = codes.view(torch.float8_e4m3fn).float()
    ours = values_of_codes(codes, mx.E4M3)
    finite = ~theirs.isnan()
    assert finite.sum() == 254
    assert torch.equal(ours.isnan(), ~finite)
    assert torch.equal(ours[finite], theirs[finite])
    assert torch.equal(ours.signbit()[finite], theirs.signbit()[finite])
    assert ours[:127].tolist() == FP8
    for code in codes[finite]:  # each by itself under scale one: 448 beside it
        block = torch.full((32,), 448.0)
        block[7] = ours[code.long()]
        again, scale = mx.quantize(block, "e4m3")
        assert (again[7], scale.item()) == (code, 127)


@pytest.mark.parametrize("element", TABLES)
@pytest.mark.parametrize("rule", RULES)
def test_every_border_between_codes(element: str, rule: str) -> None:
    """The middle of every two neighbours goes to the even code; one ulp beside it, to the nearer one."""
    magnitudes = TABLES[element][0]
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(magnitudes)])
    up, down = torch.nextafter(middles, torch.tensor(torch.inf)), torch.nextafter(middles, torch.tensor(0.0))
    probes = torch.cat([middles, up, down])
    probes = torch.cat([probes, -probes])
    blocks = torch.full((len(probes), 32), magnitudes[-1])
    blocks[:, 3] = probes
    ours = quantized(blocks, element, rule)
    theirs = expected(blocks, element, rule)
    assert torch.equal(ours[1], theirs[1])
    assert (ours[1] == 127).all()
    assert torch.equal(ours[0], theirs[0])
    number = len(middles)
    codes = ours[0][:, 3]
    assert (codes[:number] % 2 == 0).all()
    assert torch.equal(codes[number : 2 * number] - codes[2 * number : 3 * number], torch.ones(number).to(torch.uint8))


@pytest.mark.parametrize("element", TABLES)
@pytest.mark.parametrize("rule", RULES)
def test_every_border_between_scales(element: str, rule: str) -> None:
    """Block maxima one ulp around every place where a rule could turn, and the ends of fp32's range."""
    turns = [1.0, 1.5, 1.75, 1.875, 1.9375, 1.96875, 1.25, 1.5625]
    exponents = [-126, -124, -118, -117, -60, -1, 0, 1, 59, 119, 126]
    at = torch.tensor([t * 2.0**e for t in turns for e in exponents])
    maxima = torch.cat([at, torch.nextafter(at, torch.tensor(torch.inf)), torch.nextafter(at, torch.tensor(0.0))])
    blocks = torch.zeros(len(maxima), 32)
    blocks[:, 31] = -maxima
    blocks[:, 0] = maxima / 3
    ours, theirs = quantized(blocks, element, rule), expected(blocks, element, rule)
    assert torch.equal(ours[1], theirs[1])
    assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("element", TABLES)
@pytest.mark.parametrize("rule", RULES)
def test_random_blocks(element: str, rule: str) -> None:
    for start in range(0, 1_000_000, 100_000):
        blocks = random_blocks(100_000, seed=start)
        ours, theirs = quantized(blocks, element, rule), expected(blocks, element, rule)
        assert torch.equal(ours[1], theirs[1])
        assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("rule", RULES)
def test_e4m3_rounds_as_torch_float8_does(rule: str) -> None:
    blocks = random_blocks(100_000, seed=9)
    codes, scales = mx.quantize(blocks, "e4m3", rule)
    scaled = blocks.double() / torch.exp2(scales.double() - 127)
    theirs = scaled.clamp(-448, 448).float().to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codes, theirs)


@pytest.mark.parametrize("element", TABLES)
def test_round_up_clips_nothing_and_floor_does(element: str) -> None:
    blocks = random_blocks(20_000, seed=2)
    largest = TABLES[element][0][-1]
    clipped = {}
    for rule in RULES:
        scales = mx.quantize(blocks, element, rule)[1]
        scaled = blocks.double().abs().amax(-1) / torch.exp2(scales.squeeze(-1).double() - 127)
        clipped[rule] = (scaled > largest).double().mean().item()
        assert (scaled > largest / 2).all() or rule != "round_up"  # the smallest that clips nothing
    assert clipped["round_up"] == 0
    assert clipped["floor"] > 0.05
    assert clipped["floor"] > clipped["nearest"]


@pytest.mark.parametrize(
    ("element", "largest", "step", "turn"), [("e2m1", 6.0, 2.0, 7.0), ("e4m3", 448.0, 32.0, 496.0)]
)
def test_how_far_nearest_clips_and_what_becomes_infinite(
    element: str, largest: float, step: float, turn: float
) -> None:
    """`turn` is where the next scale begins; and half-way between the last code below 2^128 and that."""

    def rounded(value: float, rule: str) -> float:
        return mx.quantize_dequantize(torch.tensor([[value] + [0.0] * 31]), element, rule)[0, 0].item()

    below = float(torch.nextafter(torch.tensor(turn), torch.tensor(0.0)))
    assert rounded(below, "nearest") == largest
    assert (below - largest) / step == pytest.approx(0.5 if element == "e2m1" else 1.5, rel=1e-6)
    assert rounded(turn, "nearest") > turn
    half_way = {"e2m1": 1.75, "e4m3": 1.9375}[element] * 2.0**127
    assert half_way == pytest.approx({"e2m1": 2.98e38, "e4m3": 3.30e38}[element], rel=2e-3)
    assert math.isinf(rounded(half_way, "round_up"))
    assert math.isinf(rounded(half_way, "nearest"))
    assert math.isfinite(rounded(half_way, "floor"))
    assert math.isfinite(rounded(half_way * (1 - 2**-23), "round_up"))


@pytest.mark.parametrize("element", TABLES)
@pytest.mark.parametrize("rule", RULES)
def test_zeros_subnormals_infinities_and_nans(element: str, rule: str) -> None:
    blocks = torch.ones(6, 32)
    blocks[0] = torch.tensor([0.0, -0.0] * 16)
    blocks[1] = torch.tensor([2.0**-149, -(2.0**-130)] * 16)  # fp32's own subnormals, below every scale
    blocks[2, 4], blocks[3, 4], blocks[4, 4] = torch.nan, torch.inf, -torch.inf
    codes, scales = quantized(blocks, element, rule)
    sign = 8 if element == "e2m1" else 128
    assert codes[0].tolist() == [0, sign] * 16
    assert scales[0] == 127
    assert scales[1] == 0
    small = 0 if element == "e2m1" else round(2.0**-130 / 2.0**-127 / 2.0**-9)  # in steps of 2^-9
    # In e2m1 the steps are halves of 2^-127: an eighth of it is nearer to zero.
    assert (codes[1] & (sign - 1)).tolist() == ([0, 0] * 16 if element == "e2m1" else [0, codes[1, 1] & 127] * 16)
    assert small == (0 if element == "e2m1" else 64)
    if element == "e4m3":
        assert values_of_codes(codes[1, 1], mx.E4M3) == -0.125
    assert scales[2:5].tolist() == [255] * 3
    for dtype in (torch.float32, torch.bfloat16):
        back = mx.quantize_dequantize(blocks.to(dtype), element, rule)
        assert back[2:5].isnan().all()
        assert torch.equal(back[5], torch.ones(32, dtype=dtype))
        assert torch.equal(back[0].signbit(), blocks[0].signbit())


@pytest.mark.parametrize("element", TABLES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("columns", [2, 30, 32, 34, 62, 96, 100])
def test_a_short_last_block_is_one_filled_up_with_zeros(element: str, rule: str, columns: int) -> None:
    values = random_blocks(40, seed=5).flatten()[: 8 * columns].view(8, columns)
    filled = torch.nn.functional.pad(values, (0, -columns % 32))
    codes, scales = mx.quantize(values, element, rule)
    wide_codes, wide_scales = mx.quantize(filled, element, rule)
    assert torch.equal(scales, wide_scales)
    assert torch.equal(codes, wide_codes[:, : codes.shape[1]])
    back = mx.dequantize(codes, scales, element, torch.float32)
    assert torch.equal(back, mx.quantize_dequantize(values, element, rule))
    assert torch.equal(back, mx.dequantize(wide_codes, wide_scales, element, torch.float32)[:, :columns])


@pytest.mark.parametrize("element", TABLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_trip_is_there_and_back_and_a_second_one_changes_nothing(element: str, dtype: torch.dtype) -> None:
    values = random_blocks(3000, seed=11).to(dtype).view(1000, 3, 32)
    for rule in RULES:
        once = mx.quantize_dequantize(values, element, rule)
        assert once.dtype == dtype
        assert torch.equal(once, mx.dequantize(*mx.quantize(values, element, rule), element, dtype))
        assert torch.equal(once, mx.quantize_dequantize(once, element, rule))


@pytest.mark.parametrize("element", TABLES)
def test_stochastic_rounding_is_right_on_average_and_takes_neighbours_alone(element: str) -> None:
    magnitudes = torch.tensor(TABLES[element][0])
    chance = torch.Generator().manual_seed(0)
    block = torch.rand(32, generator=chance) * magnitudes[-1]
    block[0], block[1] = magnitudes[-1], -0.3 * magnitudes[-1]
    tries = 4000
    values = block.expand(tries, 32)
    found = mx.quantize_dequantize(values, element, noise=torch.rand(tries, 32, generator=chance))
    above = torch.bucketize(block.abs(), magnitudes)
    upper, lower = magnitudes[above], magnitudes[(above - 1).clamp(min=0)]
    size = found.abs()
    assert ((size == upper) | (size == lower)).all()
    error = (found.mean(0) - block).abs()
    allowed = 5 * (upper - lower) / 2 / math.sqrt(tries)  # five standard deviations of the mean
    assert (error <= allowed).all()
    nearest = mx.quantize_dequantize(block, element)
    assert ((nearest - block).abs() > allowed).sum() > 5  # what rounding to nearest would not pass
    exact = magnitudes[-32:].expand(100, -1) if element == "e4m3" else magnitudes.repeat(4).expand(100, -1)
    noise = torch.rand(exact.shape, generator=chance)
    assert torch.equal(mx.quantize_dequantize(exact.contiguous(), element, noise=noise), exact)


def test_wrong_input_is_named() -> None:
    values = torch.ones(2, 64)
    cases = [
        (lambda: mx.quantize(values, "e5m2"), "'e5m2'; it must be one of e2m1, e4m3"),
        (lambda: mx.quantize(values, "e2m1", "ceil"), "'ceil'; it must be one of round_up, floor, nearest"),
        (lambda: mx.quantize(values, "e2m1", backend="cuda"), "'cuda'; it must be one of auto, torch, triton"),
        (lambda: mx.quantize(values.half(), "e2m1"), "float16"),
        (lambda: mx.quantize(torch.ones(2, 33), "e2m1"), "33 values do not pack"),
        (lambda: mx.quantize(values, "e2m1", noise=torch.rand(2, 32)), r"noise is torch.float32 \(2, 32\)"),
        (lambda: mx.dequantize(torch.ones(2, 32).byte(), torch.ones(2, 1).byte(), "e2m1"), r"the scales \(2, 2\)"),
        (lambda: mx.dequantize(torch.ones(2, 32).byte(), torch.ones(2, 2).byte(), "e2m1", torch.half), "float16"),
    ]
    for call, words in cases:
        with pytest.raises(ValueError, match=words):
            call()


class TestOthers:
    """Other people's code over the same blocks."""

    def test_compressed_tensors_scales(self) -> None:
        """Its rule for MXFP4 is "nearest", on block maxima in bf16. For MXFP8 it uses MXFP4's mantissa as well."""
        utils = pytest.importorskip("compressed_tensors.quantization.utils.mxfp_utils")
        blocks = random_blocks(50_000, seed=3).bfloat16()
        amax = blocks.abs().amax(-1)
        theirs = utils.generate_mx_scales(amax, num_bits=4)
        assert torch.equal(mx.quantize(blocks, "e2m1", "nearest")[1].squeeze(-1).float(), theirs.float())

    @pytest.mark.parametrize(("rule", "theirs"), [("floor", "FLOOR"), ("nearest", "EVEN"), ("round_up", "RCEIL")])
    @pytest.mark.parametrize("element", TABLES)
    def test_torchao(self, element: str, rule: str, theirs: str) -> None:
        """Equal on everything but what the specification leaves open: zeros' scale, and infinities (it saturates)."""
        ao = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="make setup installs torchao")
        kind = torch.float8_e4m3fn if element == "e4m3" else torch.float4_e2m1fn_x2
        blocks = random_blocks(20_000, seed=4)
        blocks[0] = 2.0**-140
        blocks[1, 5] = torch.nan
        scales, data = ao.to_mx(blocks, kind, 32, ao.ScaleCalculationMode[theirs])
        codes, ours = mx.quantize(blocks, element, rule)
        assert torch.equal(scales.view(torch.uint8).flatten(), ours.flatten())
        assert ours[1].item() == 255
        finite = torch.arange(len(blocks)) != 1
        assert torch.equal(data.view(torch.uint8)[finite], codes[finite])


@pytest.mark.parametrize("rule", ["round_up", "floor", "nearest"])
def test_weights_in_mxfp4_are_the_same_numbers_in_mxfp8(rule: str) -> None:
    """So products on MXFP8 operands, such as Transformer Engine's, can multiply the very weights that ship."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(-20, 20, (512, 1), generator=generator).float().exp2()
    weights = mx.quantize_dequantize(torch.randn(512, 256, generator=generator) * rows, "e2m1", rule)
    assert torch.equal(mx.quantize_dequantize(weights, "e4m3", "round_up"), weights)
    assert not torch.equal(mx.quantize_dequantize(weights * 1.3, "e4m3", "round_up"), weights * 1.3)
