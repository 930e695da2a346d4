"""A small Hugging Face folder in the published K3 layout: packed experts, padded A_log, vision tensors, a tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB, HIDDEN, LATENT, WIDTH, EXPERTS, LAYERS, HEADS, HEAD_DIM = 304, 64, 64, 96, 4, 4, 2, 16
PADDED_HEADS = 8
FULL = (3, 4)
SHARDS = 3

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "rms_norm_eps": 1e-5,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_experts": EXPERTS,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "moe_intermediate_size": WIDTH,
    "routed_expert_hidden_size": LATENT,
    "latent_moe_use_norm": True,
    "first_k_dense_replace": 1,
    "moe_renormalize": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "linear_attn_config": {
        "num_heads": HEADS,
        "head_dim": HEAD_DIM,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "full_attn_layers": list(FULL),
        "kda_layers": [n for n in range(1, LAYERS + 1) if n not in FULL],
    },
    "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": []},
}


def k3_config() -> dict[str, Any]:
    """A fresh copy of config.json's content."""
    text = json.loads(json.dumps(TEXT_CONFIG))
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}


def packed_matrix(rows: int, columns: int, chance: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scales, with every kind of block that could be stored in more than one way."""
    codes = torch.randint(0, 16, (rows, columns), generator=chance, dtype=torch.uint8)
    blocks = codes.view(-1, 32)
    kind = torch.arange(blocks.shape[0]) % 8
    blocks[kind == 1] &= 0b1101  # magnitudes 0, 0.5, 2, 3: may be stored one exponent lower
    blocks[kind == 2] &= 0b1001  # magnitudes 0, 0.5: three exponents lower
    blocks[kind == 3] = 0  # zeros
    blocks[kind == 4] = 8  # negative zeros
    blocks[kind == 5] &= 0b1000  # zeros of both signs
    scales = torch.randint(110, 140, (rows, columns // 32), generator=chance, dtype=torch.uint8)
    flat = scales.view(-1)
    flat[::7] = 0  # the smallest scale: values down to 2^-128, subnormal in bf16
    flat[5::64] = 252  # the largest under which every code is finite in bf16
    ends = kind == 3
    flat[ends] = torch.tensor([0, 254, 127, 128], dtype=torch.uint8).repeat(len(flat))[: int(ends.sum())]
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales


def k3_tensors(seed: int = 0, tame: bool = False) -> dict[str, torch.Tensor]:
    """All tensors by published name. `tame` experts have ordinary sizes and no zeros."""
    chance = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 0.1, mean: float = 0.0) -> None:
        tensors[name] = (torch.randn(shape, generator=chance) * scale + mean).to(dtype)

    root = "language_model."
    add(f"{root}lm_head.weight", VOCAB, HIDDEN)
    add(f"{root}model.embed_tokens.weight", VOCAB, HIDDEN, scale=1.0)
    add(f"{root}model.norm.weight", HIDDEN, mean=1.0)
    add(f"{root}model.output_attn_res_norm.weight", HIDDEN, mean=1.0)
    add(f"{root}model.output_attn_res_proj.weight", 1, HIDDEN)
    for layer in range(LAYERS):
        base = f"{root}model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            add(f"{base}{name}.weight", HIDDEN, mean=1.0)
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            add(f"{base}{name}.weight", 1, HIDDEN)
        _attention(add, tensors, f"{base}self_attn.", layer + 1 in FULL, chance)
        if layer == 0:
            _dense(add, f"{base}mlp.", 80)
        else:
            _experts(add, tensors, f"{base}block_sparse_moe.", chance, tame)
    add("vision_tower.patch_embed.proj.weight", 8, 3, 4, 4)
    add("vision_tower.pos_emb.weight", 5, 8, dtype=torch.float32)
    add("mm_projector.proj.0.weight", 16, 8)
    return tensors


def _attention(add: Any, tensors: dict, base: str, full: bool, chance: torch.Generator) -> None:
    width = HEADS * HEAD_DIM
    fp32 = {"dtype": torch.float32}
    add(f"{base}g_proj.weight", width, HIDDEN)
    add(f"{base}o_proj.weight", HIDDEN, width)
    if full:
        add(f"{base}q_a_proj.weight", 24, HIDDEN)
        add(f"{base}q_a_layernorm.weight", 24, mean=1.0)
        add(f"{base}q_b_proj.weight", 2 * 24, 24)
        add(f"{base}kv_a_proj_with_mqa.weight", 24, HIDDEN)
        add(f"{base}kv_a_layernorm.weight", 16, mean=1.0)
        add(f"{base}kv_b_proj.weight", 2 * 32, 16)
        return
    for letter in "qkv":
        add(f"{base}{letter}_proj.weight", width, HIDDEN)
        add(f"{base}{letter}_conv1d.weight", width, 1, 4, **fp32, scale=0.5)
    add(f"{base}f_a_proj.weight", HEAD_DIM, HIDDEN)
    add(f"{base}f_b_proj.weight", width, HEAD_DIM)
    add(f"{base}b_proj.weight", HEADS, HIDDEN)
    a_log = torch.zeros(PADDED_HEADS)
    a_log[:HEADS] = torch.rand(HEADS, generator=chance)
    tensors[f"{base}A_log"] = a_log
    add(f"{base}dt_bias", width, **fp32, mean=-3.0)
    add(f"{base}o_norm.weight", HEAD_DIM, **fp32, mean=1.0)


def _dense(add: Any, base: str, width: int) -> None:
    add(f"{base}gate_proj.weight", width, HIDDEN)
    add(f"{base}up_proj.weight", width, HIDDEN)
    add(f"{base}down_proj.weight", HIDDEN, width)


def _experts(add: Any, tensors: dict, base: str, chance: torch.Generator, tame: bool) -> None:
    add(f"{base}gate.weight", EXPERTS, HIDDEN)
    add(f"{base}gate.e_score_correction_bias", EXPERTS, dtype=torch.float32, scale=0.01)
    add(f"{base}routed_expert_down_proj.weight", LATENT, HIDDEN)
    add(f"{base}routed_expert_norm.weight", LATENT, mean=1.0)
    add(f"{base}routed_expert_up_proj.weight", HIDDEN, LATENT)
    _dense(add, f"{base}shared_experts.", 2 * WIDTH)
    for expert in range(EXPERTS):
        for part, rows, columns in (("w1", WIDTH, LATENT), ("w3", WIDTH, LATENT), ("w2", LATENT, WIDTH)):
            codes, scales = packed_matrix(rows, columns, chance)
            if tame:
                scales = torch.randint(121, 125, scales.shape, generator=chance, dtype=torch.uint8)
                codes |= (codes & 0x07 == 0).to(torch.uint8) | (((codes & 0x70) == 0).to(torch.uint8) << 4)
            tensors[f"{base}experts.{expert}.{part}.weight_packed"] = codes
            tensors[f"{base}experts.{expert}.{part}.weight_scale"] = scales


def write_folder(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None, shards: int = SHARDS
) -> Path:
    """Write the folder, with an index where there are several files, and files that are only carried along."""
    folder.mkdir(parents=True)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        mine = names[shard::shards]
        save_file({name: tensors[name] for name in mine}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(mine, file))
    if shards > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config or k3_config(), indent=1))
    (folder / "generation_config.json").write_text('{"temperature": 1.0}\n')
    (folder / "chat_template.jinja").write_text("{{ messages }}\n")
    (folder / "modeling_kimi_k3.py").write_text("# remote code\n")
    (folder / "figures").mkdir()
    (folder / "figures" / "one.txt").write_text("1\n")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "download.lock").write_text("")
    return folder


def add_tokenizer(folder: Path) -> None:
    """A tokenizer of at most VOCAB tokens."""
    from k3train.data.tokenizer import train_tokenizer

    train_tokenizer(iter(["kan mol tix ruta sen"] * 20), 270).save(folder)


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file that is not hidden."""
    files = [
        p for p in folder.rglob("*") if p.is_file() and not any(x.startswith(".") for x in p.relative_to(folder).parts)
    ]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes, signs of zeros included."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))
