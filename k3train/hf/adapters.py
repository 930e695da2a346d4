"""Adapters on their way out: into the weights they stand beside, or into a folder of their own as PEFT lays it out."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from k3train.config.lora import LoRAConfig
from k3train.errors import UserError
from k3train.hf.names import K3_PREFIX, published_name
from k3train.hf.target import check_target, claimed
from k3train.hf.together import sync_tree
from k3train.hf.torch_dist import TensorReader
from k3train.model.lora import ADAPTER, adapter_of, is_adapter, merged


class Merger:
    """Adds what a checkpoint's adapters do to rows of the weights that are read from it."""

    def __init__(self, tensors: TensorReader, lora: LoRAConfig | None) -> None:
        self._tensors, self._lora = tensors, lora
        self._a: dict[str, torch.Tensor] = {}

    def has(self, key: str) -> bool:
        """Whether the tensor `key` has an adapter."""
        return self._lora is not None and f"{adapter_of(key)}a" in self._tensors

    def rows(self, key: str, rows: torch.Tensor, start: int) -> torch.Tensor:
        """`rows` from `start` on of the tensor `key`; in fp32 where it has an adapter."""
        stem = adapter_of(key)
        if not self.has(key):
            return rows
        if stem not in self._a:
            self._a = {stem: self._tensors.read(f"{stem}a")}
        b = self._tensors.read(f"{stem}b", (start, start + len(rows)))
        return merged(rows, self._a[stem], b, self._lora.scale)


def write_adapter(
    checkpoint: Path, out: Path, tensors: TensorReader, lora: LoRAConfig, base: str | None, prefix: str = K3_PREFIX
) -> int:
    """Write `out` with adapter_model.safetensors and adapter_config.json; returns the number of tensors.

    Names and shapes are PEFT's: base_model.model.NAME.lora_A.weight [rank, input] and .lora_B.weight [output, rank],
    NAME the published one; `base` is what the adapters belong to. On one rank.

    Raises:
        UserError: the checkpoint has no adapters, or the folder cannot be made.
    """
    keys = sorted(key for key in tensors if is_adapter(key) and not key.startswith("optimizer."))
    if not keys:
        raise UserError(f"{checkpoint} has no adapters: it was trained with lora.enabled=false; leave out --adapter")
    found, modules = {}, set()
    for key in keys:
        layer, _, letter = key.rpartition(f".{ADAPTER}.")
        published = published_name(f"{layer}.weight", prefix).removesuffix(".weight")
        modules.add(published.rpartition(".")[2])
        found[f"base_model.model.{published}.lora_{letter.upper()}.weight"] = tensors.read(key).contiguous()
    real = check_target("--hf", out, checkpoint)
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with claimed(real, "--hf") as partial:
        save_file(found, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        (partial / "adapter_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        sync_tree(partial)
        partial.rename(real)
    return len(found)
