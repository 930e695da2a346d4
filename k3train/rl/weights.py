"""How a rollout server gets the weights of a step: bucket by bucket over HTTP, or from an exported folder."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica

from k3train.checkpoint import directory, store
from k3train.checkpoint.state import TrainState
from k3train.config.lora import LoRAConfig
from k3train.config.quant import policy_in_force
from k3train.config.schema import RecipeConfig, to_plain
from k3train.model.lora import adapter_of, is_adapter, merged
from k3train.rl.shared_engine import SharedEngine
from k3train.rollout.refresh import bucketed, largest_bucket

FOLDER = "rollout_weights"
_VOCABULARY = ("embedding.weight", "output_layer.weight")  # may have rows added to fill up ranks


class WeightRefresh:
    """Gives a server the trainer's weights, whatever layout they lie in. Every rank makes one and calls it."""

    def __init__(self, config: RecipeConfig, trainer: Any) -> None:
        self._config, self._trainer = config, trainer
        if config.rl.rollout.refresh == "disk":
            from k3train.hf.mapping import weights_of

            self._weights = weights_of(config.model)[0]  # once: building the model takes new groups in most layouts

    def __call__(self, engine: SharedEngine, version: int) -> None:
        """Give `engine` the present weights as `version`.

        Raises:
            UserError: the folder cannot be written, or the server refuses.
        """
        rollout, models = self._config.rl.rollout, self._trainer.models
        with store.current_parameters(models):
            if rollout.refresh == "in_place":
                lora = self._config.lora if self._config.lora.enabled else None

                def buckets() -> Iterator[dict[str, torch.Tensor]]:
                    return whole_buckets(models, self._config.model.vocab_size, rollout.bucket_mib << 20, lora)

                engine.refresh_in_place(buckets, version)
                return
            root = Path(self._trainer.run_dir) / FOLDER
            checkpoint = _save_weights(root / "checkpoint", self._config, models, version)
        out = root / f"version_{version:08d}"
        self._export(checkpoint, out)
        engine.refresh_from_disk(out, version)
        if dist.get_rank() == 0:
            shutil.rmtree(root / "checkpoint", ignore_errors=True)
            for other in root.glob("version_*"):  # also later ones, of a run that was taken up from before them
                if other != out:
                    shutil.rmtree(other, ignore_errors=True)
        dist.barrier()

    def _export(self, checkpoint: Path, out: Path) -> None:
        from k3train.hf.exporter import plan_job, run_export
        from k3train.hf.torch_dist import TensorReader

        if dist.get_rank() == 0:
            shutil.rmtree(out, ignore_errors=True)
        dist.barrier()
        tensors = TensorReader(checkpoint)
        config, experts = self._config, self._config.rl.rollout.refresh_experts
        quant = policy_in_force(config.quant, config.stage.name)  # packed by the rule that they are trained with
        job = plan_job(checkpoint, tensors, config.model, None, experts, 5 * 10**9, quant, self._weights)
        job = dataclasses.replace(job, lora=config.lora if config.lora.enabled else None)
        run_export(checkpoint, out, tensors, job)
        tensors.close()


@torch.no_grad()
def whole_buckets(
    models: list[Any], vocab_size: int, most_bytes: int, lora: LoRAConfig | None = None
) -> Iterator[dict[str, torch.Tensor]]:
    """`rollout.refresh.buckets` of a model that ranks share: rank 0's buckets hold the whole rows, bit for bit.

    With `lora` adapters are in the weights that they stand beside (W + scale B A, computed in fp32, in W's dtype),
    under the names of a model without any. Every rank has to draw all buckets; those of other ranks hold nothing of
    use. No rank has more of other ranks' weights than one bucket and one adapter at a time.
    """
    whole = _Whole(models)

    def rows(name: str, start: int, stop: int) -> torch.Tensor:
        weight = whole.rows(name, start, stop)
        stem = adapter_of(name)
        if lora is None or f"{stem}a" not in whole.table:
            return weight
        a = whole.rows(f"{stem}a", 0, whole.table[f"{stem}a"][0][0])
        return merged(weight, a, whole.rows(f"{stem}b", start, stop), lora.scale).to(weight.dtype)

    return bucketed(_sizes(whole.table, vocab_size), rows, most_bytes)


def largest_sent(models: list[Any], vocab_size: int, most_bytes: int) -> int:
    """Bytes of weights that no bucket of `whole_buckets` goes beyond. Every rank calls this."""
    return largest_bucket(_sizes(_Whole(models).table, vocab_size), most_bytes)


def _sizes(table: dict[str, tuple[tuple[int, ...], torch.dtype]], vocab_size: int) -> dict[str, tuple[int, int]]:
    sizes = {}
    for key, (shape, dtype) in table.items():
        if not is_adapter(key):
            length = min(shape[0], vocab_size) if key in _VOCABULARY else shape[0]
            sizes[key] = (length, math.prod(shape[1:]) * dtype.itemsize)
    return sizes


class _Whole:
    """Rows of the weights that ranks share, whole on rank 0. Every rank makes one, and asks for the same rows."""

    def __init__(self, models: list[Any]) -> None:
        state = [entry for chunk in store.model_state(models).values() for entry in chunk.values()]
        entries = [entry for entry in state if isinstance(entry, ShardedTensor)]
        listed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(listed, [(e.key, tuple(e.global_shape), e.dtype) for e in entries])
        self.table = {key: (shape, dtype) for rank in listed for key, shape, dtype in rank}
        self._mine: dict[str, list[ShardedTensor]] = {}
        for entry in entries:
            if is_main_replica(entry.replica_id):  # one rank has each element
                self._mine.setdefault(entry.key, []).append(entry)
        self._device = entries[0].data.device if entries else torch.device("cpu")

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        shape, dtype = self.table[name]
        out = torch.zeros(stop - start, *shape[1:], dtype=dtype, device=self._device)
        for entry in self._mine.get(name, ()):
            first, count = entry.global_offset[0], entry.local_shape[0]
            low, high = max(start, first), min(stop, first + count)
            if low < high:
                spans = [slice(o, o + n) for o, n in zip(entry.global_offset[1:], entry.local_shape[1:])]
                out[(slice(low - start, high - start), *spans)] = entry.data[low - first : high - first]
        if dist.get_world_size() > 1:
            # As bytes: one rank's are its own, all others' 0, so that the sum is exact in any dtype.
            dist.reduce(out.view(torch.uint8), dst=0)
        return out


def _save_weights(root: Path, config: RecipeConfig, models: list[Any], version: int) -> Path:
    partial = directory.partial_of(root, version)
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(store.model_state(models), str(partial))
    if dist.get_rank() == 0:
        directory.copy_tokenizer(Path(config.data.tokenizer), partial / directory.TOKENIZER)
        marker = {"state": TrainState(version).to_dict(), "config": to_plain(config), "versions": store.versions()}
        directory.commit(root, version, marker)
    dist.barrier()
    return directory.directory_of(root, version)
