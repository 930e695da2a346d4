"""The MXFP4 codec: exact both ways, the round-up rule, hints, and compressed-tensors as an independent reader."""

from __future__ import annotations

import pytest
import torch
from hf_folder import packed_matrix, same_bytes
from k3kernels.mx import pack_pairs, unpack_pairs

from k3train.hf.write_config import quantization_config
from k3train.quant import mxfp4

MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP Microscaling Formats v1.0, table 5


def test_every_code_and_scale_by_definition() -> None:
    """Low nibble first, bit 3 the sign, 2^(byte - 127): each of the 16 codes under each scale, in exact arithmetic."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = codes[0::2] | (codes[1::2] << 4)
    assert packed[0] == 0x10
    assert torch.equal(unpack_pairs(packed), codes)
    assert torch.equal(pack_pairs(codes), packed)
    expected = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64).repeat(2)
    for byte in range(253):
        scale = torch.tensor([[byte]], dtype=torch.uint8)
        exact = expected * 2.0 ** (byte - 127)
        for dtype in (torch.bfloat16, torch.float32):
            values = mxfp4.decode(packed[None], scale, dtype)[0]
            assert torch.equal(values.double(), exact)
            assert torch.equal(values.signbit(), codes >= 8)  # negative zero is not zero


@pytest.mark.parametrize("seed", range(3))
def test_a_block_goes_back_to_its_own_bytes_with_its_scale_as_a_hint(seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    packed, scales = packed_matrix(96, 128, chance)
    for dtype in (torch.bfloat16, torch.float32):
        values = mxfp4.decode(packed, scales, dtype)
        again, same = mxfp4.encode(values, scales)
        assert torch.equal(again, packed)
        assert torch.equal(same, scales)


def test_without_hints_values_come_back_and_scales_do_not() -> None:
    """What is wrong with requantizing: every value is kept, but blocks that fit a smaller scale get it."""
    packed, scales = packed_matrix(96, 128, torch.Generator().manual_seed(0))
    values = mxfp4.decode(packed, scales)
    again, fresh = mxfp4.encode(values)
    large = scales >= 3  # below that the smallest scale cannot go lower
    changed = (fresh != scales) & large
    assert 0.2 < changed.float().mean() < 0.8
    assert same_bytes(mxfp4.decode(again, fresh), values)


def test_a_changed_block_gets_a_new_scale_and_its_neighbours_keep_theirs() -> None:
    packed, scales = packed_matrix(8, 64, torch.Generator().manual_seed(1))
    scales.fill_(120)
    values = mxfp4.decode(packed, scales).float()
    values[3, 40] = 1.0  # of block (3, 1): 128 times the scale
    again, fresh = mxfp4.encode(values, scales)
    expected = scales.clone()
    expected[3, 1] = 125  # 2^ceil(log2(1 / 6)) = 2^-2
    assert torch.equal(fresh, expected)
    untouched = torch.ones(8, 32, dtype=torch.bool)
    untouched[3, 16:] = False
    assert torch.equal(again[untouched], packed[untouched])


def test_hints_that_do_not_fit_are_not_taken() -> None:
    """Too small, so large that the values vanish, and NaN."""
    values = torch.full((1, 32), 2.0**-30)
    for hint in (60, 96, 254, 255):
        _, scale = mxfp4.encode(values, torch.tensor([[hint]], dtype=torch.uint8))
        kept = hint == 96  # code 1, 2, ... times 2^-31
        assert scale.item() == (hint if kept else 127 - 30 - 2)


def test_rounds_to_nearest_with_ties_to_even_codes_and_never_clips() -> None:
    grid = torch.linspace(-6, 6, 12 * 64 + 1)[:768].view(24, 32)
    grid[:, 0] = 6.0  # the scale of every block is 1
    packed, scales = mxfp4.encode(grid)
    assert (scales == 127).all()
    found = mxfp4.decode(packed, scales, torch.float32)
    table = torch.tensor(MAGNITUDES)
    distance = (grid.abs()[..., None] - table).abs()
    nearest = distance.amin(-1)
    assert torch.equal((found.abs() - grid.abs()).abs(), nearest)
    ties = (distance == nearest[..., None]).sum(-1) > 1
    assert ties.sum() > 7
    assert (unpack_pairs(packed)[ties] % 2 == 0).all()


@pytest.mark.parametrize("rule", ["round_up", "floor", "nearest"])
@pytest.mark.parametrize("size", [1e-40, 1e-38, 1.0, 1e36])
def test_export_packs_by_the_codec_to_the_bit(monkeypatch: pytest.MonkeyPatch, rule: str, size: float) -> None:
    """Without hints `encode` is `k3kernels.mx.quantize`, and that is codes under scales of this module's own."""
    chance = torch.Generator().manual_seed(0)
    values = torch.randn(48, 96, generator=chance) * torch.randn(48, 1, generator=chance).exp() * size
    values[0, :40], values[1, 3] = 0.0, -0.0
    called = []
    plain = mxfp4.quantize
    monkeypatch.setattr(mxfp4, "quantize", lambda *args: called.append(args[1:]) or plain(*args))
    packed, scales = mxfp4.encode(values, rule=rule)
    assert called == [("e2m1", rule)]
    assert torch.equal(scales, mxfp4.scales_of(values, rule))
    assert torch.equal(packed, pack_pairs(mxfp4.codes_of(values, scales)[0]))


@pytest.mark.parametrize("amax", [1e-36, 0.1, 0.75, 0.7500001, 1.0, 5.99, 6.0, 6.01, 12.0, 1e30])
def test_the_scale_is_the_smallest_that_clips_nothing(amax: float) -> None:
    values = torch.zeros(1, 32)
    values[0, 5] = -amax
    byte = mxfp4.scales_of(values).item()
    scale = 2.0 ** (byte - 127)
    stored = float(values.abs().max())
    assert 6 * scale >= stored > 6 * scale / 2


def test_zeros_are_stored_under_scale_one() -> None:
    packed, scales = mxfp4.encode(torch.zeros(2, 64))
    assert (scales == 127).all()
    assert (packed == 0).all()


@pytest.mark.parametrize(
    ("byte", "code", "words"), [(255, 0, "255 (NaN)"), (254, 4, "scale byte 254"), (253, 6, "scale byte 253")]
)
def test_values_that_are_not_finite_are_refused_with_their_place(byte: int, code: int, words: str) -> None:
    codes = torch.zeros(2, 64, dtype=torch.uint8)
    codes[1, 50] = code
    scales = torch.full((2, 2), 127, dtype=torch.uint8)
    scales[1, 1] = byte
    with pytest.raises(ValueError, match=r"at \(1, (1|50)\)") as error:
        mxfp4.decode(pack_pairs(codes), scales)
    assert words in str(error.value)


def test_largest_scales_with_finite_values_are_kept() -> None:
    """254 under codes up to 1.5, 253 under codes up to 3: finite in bf16, so they come and go like any other."""
    codes = torch.tensor([[0, 1, 2, 3] * 8, [0, 5, 4, 3] * 8], dtype=torch.uint8)
    scales = torch.tensor([[254], [253]], dtype=torch.uint8)
    values = mxfp4.decode(pack_pairs(codes), scales)
    assert values.isfinite().all()
    again, same = mxfp4.encode(values, scales)
    assert torch.equal(again, pack_pairs(codes))
    assert torch.equal(same, scales)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    values = torch.ones(2, 64)
    values[1, 3] = bad
    with pytest.raises(ValueError, match=r"not finite in block \(1, 0\)"):
        mxfp4.encode(values, torch.full((2, 2), 127, dtype=torch.uint8))


class TestCompressedTensors:
    """The library whose format it is, as the other side."""

    def scheme(self) -> object:
        pytest.importorskip("compressed_tensors", reason="the library that defines the packing")
        from compressed_tensors.quantization import QuantizationConfig

        config = QuantizationConfig.model_validate(quantization_config())
        assert config.format == "mxfp4-pack-quantized"
        return config.config_groups["group_0"]

    def test_it_decodes_the_same(self) -> None:
        scheme = self.scheme()
        from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor

        packed, scales = packed_matrix(64, 96, torch.Generator().manual_seed(2))
        scales = scales.clamp(10, 240)  # it computes powers of two in bf16, not the ends of the range
        theirs = MXFP4PackedCompressor.decompress({"weight_packed": packed, "weight_scale": scales}, scheme)["weight"]
        assert same_bytes(mxfp4.decode(packed, scales), theirs.detach())

    def test_it_packs_the_same_under_our_scales(self) -> None:
        scheme = self.scheme()
        from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor

        weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)).bfloat16()
        packed, scales = mxfp4.encode(weight)
        state = {"weight": weight.float(), "weight_scale": 2.0 ** (scales.float() - 127)}
        theirs = MXFP4PackedCompressor.compress(state, scheme)
        assert torch.equal(theirs["weight_scale"], scales)
        assert torch.equal(theirs["weight_packed"], packed)
