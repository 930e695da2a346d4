"""Kimi Linear as transformers implements it, against the same weights imported through `k3train import`, in fp32."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from k3train import cli
from k3train.hf.names import published_name

transformers = pytest.importorskip("transformers", reason="the reference implementation is transformers' own")

SHAPES = {
    "direct queries, one dense layer": {"q_lora_rank": None, "first_k_dense_replace": 1},
    "low-rank queries, two dense layers, no renormalisation": {
        "q_lora_rank": 24,
        "first_k_dense_replace": 2,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
    },
}


@pytest.fixture
def reference_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own torch forms of the operations, where it would call CUDA kernels that are installed."""
    from transformers.models.kimi_linear import modeling_kimi_linear as code

    for name in ("chunk_kimi_delta_attention", "causal_conv1d_fn"):
        monkeypatch.setattr(code, name, getattr(code, name).__wrapped__)


def random_reference(seed: int, **changes: object) -> torch.nn.Module:
    """A tiny model whose every parameter and buffer is drawn away from its initial value."""
    config = transformers.KimiLinearConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=80,
        moe_intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        v_head_dim=16,
        qk_nope_head_dim=16,
        num_experts_per_tok=2,
        num_local_experts=8,
        linear_attn_config={
            "head_dim": 16,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "full_attn_layers": [3, 5],
            "kda_layers": [1, 2, 4],
        },
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )
    config._attn_implementation = "eager"
    model = transformers.KimiLinearForCausalLM(config)
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            drawn = torch.randn(tensor.shape, generator=chance)
            is_norm = "norm" in name
            tensor.copy_(1 + 0.1 * drawn if is_norm else 0.02 * drawn if "correction" in name else 0.15 * drawn)
    return model


def reference_gradient(gradients: dict[str, torch.Tensor], name: str, shape: torch.Size) -> torch.Tensor:
    """The gradient of one of our parameters: transformers joins experts, and the three convolutions."""
    if match := re.fullmatch(r"(.*)\.moe\.experts\.(w13|w2)", name):
        base = published_name(match[1] + ".input_norm.weight", "").removesuffix("input_layernorm.weight")
        joined = {"w13": "mlp.experts.gate_up_proj", "w2": "mlp.experts.down_proj"}[match[2]]
        return gradients[base + joined].reshape(shape)
    published = published_name(name, "").replace("block_sparse_moe.", "mlp.")
    published = re.sub(r"self_attn\.(f_a_proj|f_b_proj|A_log|dt_bias)", r"self_attn.forget_gate.\1", published)
    if match := re.search(r"([qkv])_conv1d", published):
        joined = gradients[published.replace(match[0], "conv1d")]
        return joined.chunk(3)["qkv".index(match[1])].reshape(shape)
    return gradients[published].reshape(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_loss_and_every_gradient(single_rank: None, reference_ops: None, tmp_path: Path, shape: str) -> None:
    from k3train.model.packing import Packing
    from k3train.rollout.restore import restore

    reference = random_reference(3, **SHAPES[shape])
    reference.save_pretrained(tmp_path / "hf")
    assert cli.main(["import", "--hf", str(tmp_path / "hf"), "--out", str(tmp_path / "ckpt")]) == 0
    # More than a chunk of 64, and without token 0: as padding, transformers gives its embedding no gradient.
    tokens = torch.randint(1, 96, (2, 70), generator=torch.Generator().manual_seed(1))

    expected = reference(tokens, use_cache=False).logits
    expected_loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    expected_loss.backward()
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}

    model = restore(tmp_path / "ckpt").model
    logits = model(tokens, Packing.whole_rows(*tokens.shape))
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()

    assert expected.std() > 0.5  # the weights matter
    assert (logits - expected).abs().max() < 1e-4
    assert abs(loss.item() - expected_loss.item()) < 1e-6
    for name, parameter in model.named_parameters():
        wanted = reference_gradient(gradients, name, parameter.shape)
        assert (parameter.grad - wanted).norm() < 1e-4 * wanted.norm(), name


def test_export_gives_the_folder_back(single_rank: None, tmp_path: Path) -> None:
    """Byte for byte, and transformers reads it without a missing or unexpected tensor."""
    random_reference(4).save_pretrained(tmp_path / "hf")
    assert cli.main(["import", "--hf", str(tmp_path / "hf"), "--out", str(tmp_path / "ckpt")]) == 0
    assert cli.main(["export", "--checkpoint", str(tmp_path / "ckpt"), "--hf", str(tmp_path / "back")]) == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "back" / name).read_bytes()


def test_a_model_of_our_own_is_read_by_transformers(single_rank: None, reference_ops: None, tmp_path: Path) -> None:
    """Written without any imported file: config.json and names have to be the ones that transformers expects."""
    from k3train.hf.mapping import weights_of
    from k3train.model.packing import Packing
    from k3train.rollout.restore import restore

    random_reference(5, q_lora_rank=24).save_pretrained(tmp_path / "hf")
    assert cli.main(["import", "--hf", str(tmp_path / "hf"), "--out", str(tmp_path / "ckpt")]) == 0
    arguments = ["export", "--checkpoint", str(tmp_path / "ckpt"), "--hf", str(tmp_path / "new"), "--like", "none"]
    assert cli.main([*arguments, "--max-shard-gb", "0.0003"]) == 0
    assert (tmp_path / "new" / "model.safetensors.index.json").is_file()
    read, report = transformers.KimiLinearForCausalLM.from_pretrained(
        tmp_path / "new", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(40)[None]
    restored = restore(tmp_path / "ckpt")
    stored = {weight.key: weight.dtype for weight in weights_of(restored.config.model)[0]}
    with torch.no_grad():
        for name, parameter in restored.model.named_parameters():
            parameter.copy_(parameter.to(stored[name]))  # as the export rounded them
        expected = restored.model(tokens, Packing.whole_rows(1, 40))
        logits = read(tokens, use_cache=False).logits
    assert (logits - expected).abs().max() < 1e-4
