"""Model FLOPs, peaks, and phase timers."""

import pytest
import torch

from k3train.config.model import ModelConfig, MTPConfig
from k3train.config.parameters import parameter_count
from k3train.telemetry import PhaseTimers, model_flops_per_token, peak_flops
from k3train.train.metrics import Throughput


def attention_pairs(seq_length: int) -> int:
    return sum(position + 1 for position in range(seq_length))


def test_flops_of_a_linear_model_are_six_per_weight() -> None:
    # One matmul [s, n] @ [n, m] forward, and its two gradients, counted one multiply and one add each.
    assert model_flops_per_token(12 * 20, 64) == 3 * 2 * 12 * 20


def test_attention_counts_each_causal_pair() -> None:
    seq_length, heads, qk, v = 37, 3, 48, 32
    pairs = attention_pairs(seq_length)
    whole_sequence = 3 * (2 * pairs * qk + 2 * pairs * v) * heads * 2
    per_token = model_flops_per_token(0, seq_length, num_mla_layers=2, mla_heads=heads, qk_head_dim=qk, v_head_dim=v)
    assert per_token * seq_length == pytest.approx(whole_sequence, rel=1e-12)


def test_kda_state_does_not_depend_on_the_length() -> None:
    def kda(seq_length: int) -> float:
        return model_flops_per_token(0, seq_length, num_kda_layers=5, kda_heads=4, kda_key_dim=32, kda_value_dim=16)

    assert kda(10) == kda(100_000) == 3 * 5 * 4 * 3 * 2 * 32 * 16


def test_the_published_model_is_625_gflop_and_its_attention() -> None:
    k3 = model_flops_per_token(
        104.19e9,
        8192,
        num_mla_layers=24,
        mla_heads=96,
        qk_head_dim=192,
        v_head_dim=128,
        num_kda_layers=69,
        kda_heads=96,
        kda_key_dim=128,
        kda_value_dim=128,
    )
    # 625.14 of matmuls, 18.1 of attention (24 * 96 * 320 * 8193 * 3), 2.0 of KDA state (69 * 96 * 128^2 * 18).
    assert k3 / 1e9 == pytest.approx(625.14 + 18.122 + 1.953, abs=0.01)


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "torch.bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H200", "fp8", 1978.9),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_known_peaks(name: str, dtype: str, tera: float) -> None:
    assert peak_flops(name, dtype) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cpu", "bf16"),
        ("AMD EPYC 9654 96-Core Processor", "bf16"),
        ("NVIDIA GH200 480GB", "bf16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
        ("NVIDIA A100-SXM4-80GB", "fp8"),
        ("NVIDIA H100 80GB HBM3", "fp32"),
    ],
)
def test_unknown_peaks_are_none(name: str, dtype: str) -> None:
    assert peak_flops(name, dtype) is None


def test_mfu_is_of_all_devices_and_counts_the_layer_ahead() -> None:
    """40 % of four devices' peak is 0.4; multi-token prediction adds its layer and a second use of the head."""
    throughput = Throughput(tokens_per_step=1, flops_per_step=4 * 312e12 * 0.4, peak_flops=4 * 312e12)
    assert throughput.metrics(1.0)["mfu"] == pytest.approx(0.4)
    plain = parameter_count(ModelConfig())
    ahead = parameter_count(ModelConfig(mtp=MTPConfig(num_layers=1)))
    assert plain["mtp_active"] == 0
    assert ahead["active"] == plain["active"]
    unused = (16 - 4) * 3 * 64 * 96  # experts that a token does not go to
    assert ahead["mtp_active"] == ahead["mtp"] - unused + 2048 * 128


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_timers_add_up_nest_survive_errors_and_reset() -> None:
    clock = Clock()
    timers = PhaseTimers("cpu", clock)
    for seconds in (1.0, 2.0):
        with timers.phase("forward_backward"):
            clock.now += seconds
            with timers.phase("data"):
                clock.now += 0.25

    def fail() -> None:
        with timers.phase("optimizer"):
            clock.now += 4.0
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert timers.collect() == {"data": 0.5, "forward_backward": 3.5, "optimizer": 4.0}
    assert timers.collect() == {}


def test_timers_wait_for_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    with PhaseTimers("cuda:0").phase("data"):
        assert waited == [torch.device("cuda:0")]
    assert len(waited) == 2
    with PhaseTimers("cpu").phase("data"):
        pass
    assert len(waited) == 2
