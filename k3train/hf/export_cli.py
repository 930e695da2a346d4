"""`k3train export`: k3train to Hugging Face."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

from k3train.checkpoint import directory
from k3train.config.load import recipe_from_dict
from k3train.config.quant import policy_in_force
from k3train.config.schema import RecipeConfig
from k3train.config.validate import resolve_world_size
from k3train.errors import UserError
from k3train.hf.import_cli import lay_out
from k3train.hf.names import K3_PREFIX
from k3train.hf.quant_policy import KEY
from k3train.hf.target import check_target

GB = 10**9


def ranks(args: argparse.Namespace) -> int:
    """How many ranks to start for these arguments."""
    config = recipe_from_dict(directory.read_marker(directory.resolve(args.checkpoint))["config"])
    lay_out(config, args.overrides)
    return resolve_world_size(config, gpus=0)


def run(args: argparse.Namespace) -> int:
    """Export on the ranks that exist; returns the exit code."""
    from k3train import platform
    from k3train.hf.exporter import folders_read, plan_job, run_export
    from k3train.hf.source import find_source
    from k3train.hf.together import together
    from k3train.hf.torch_dist import TensorReader
    from k3train.hf.write_config import check_expressible

    if not (args.max_shard_gb > 0 and math.isfinite(args.max_shard_gb)):
        raise UserError(f"--max-shard-gb {args.max_shard_gb} has to be a number above 0; try 5")
    checkpoint, out = directory.resolve(args.checkpoint), Path(args.hf).absolute()
    config = recipe_from_dict(directory.read_marker(checkpoint)["config"])
    check_expressible(config.model, checkpoint)
    check_target("--hf", out)
    source = find_source(checkpoint, args.like)
    check_target("--hf", out, *folders_read(checkpoint, source))
    here = platform.start("cpu", 1)
    with together():
        if source is not None:
            source.check_model(config.model, checkpoint)
        tensors = TensorReader(checkpoint)
        quant = policy_in_force(config.quant, config.stage.name)
        if args.adapter:
            return _export_adapter(config, checkpoint, out, tensors, source, here.rank)
        job = plan_job(checkpoint, tensors, config.model, source, args.experts, round(args.max_shard_gb * GB), quant)
    job = dataclasses.replace(job, lora=config.lora if config.lora.enabled else None)
    if here.rank == 0:
        _tell_start(config, checkpoint, source, tensors, job)
    count = run_export(checkpoint, out, tensors, job)
    tensors.close()
    if here.rank == 0:
        if count.blocks:
            print(f"{count.blocks:,} MXFP4 blocks: {count.kept:,} with their imported scale, the rest with a new one")
        print(f"exported to {out}: {len(job.files)} files")
    return 0


def _export_adapter(config: RecipeConfig, checkpoint: Path, out: Path, tensors: Any, source: Any, rank: int) -> int:
    """Only the adapters; on the first rank."""
    from k3train.hf.adapters import write_adapter

    if rank == 0:
        base, prefix = (str(source.checkpoint), source.config.prefix) if source else (None, K3_PREFIX)
        number = write_adapter(checkpoint, out, tensors, config.lora, base, prefix)
        print(f"exported to {out}: {number} tensors of adapters, {config.lora.describe()}")
    return 0


def _has_imported_experts(config: RecipeConfig, checkpoint: Path, source: Any) -> bool:
    """Whether experts' values are an import's: of the import itself, and under adapters, which leave them alone."""
    if source is None:
        return False
    adapted = config.lora.enabled and source.packed and config.checkpoint.load is not None
    return source.checkpoint == (Path(config.checkpoint.load) if adapted else checkpoint)


def _tell_start(config: RecipeConfig, checkpoint: Path, source: Any, tensors: Any, job: Any) -> None:
    if source is None:
        print(f"{checkpoint} was not imported: names, dtypes and config.json are the released ones")
    elif source.checkpoint != checkpoint:
        print(f"files, dtypes and scales are those of {source.checkpoint}, which the run started from")
    else:
        print(f"{checkpoint} was imported: files, dtypes and scales are those it came with")
    packed = any(name.endswith("weight_packed") for file in job.files for name, _, _ in file.tensors)
    quant = policy_in_force(config.quant, config.stage.name)
    if packed and not quant and not _has_imported_experts(config, checkpoint, source):
        print(
            "warning: experts' weights are rounded to MXFP4 for the first time here, for the run trained without"
            " quantization: what ships is not what was trained; train with quant.enabled=true, or export --experts bf16"
        )
    if quant:
        print(f"trained with {quant.describe()}, which config.json says under {KEY}")
        if packed != (quant.weights == "mxfp4") or (packed and not quant.is_published_format):
            stored = "MXFP4" if packed else "unrounded"
            print(f"warning: all experts' weights are stored {stored}, which is not what the training's products saw")
    if config.lora.enabled:
        print("adapters are merged into the weights; --adapter writes them by themselves")
    left_out = [key for key in tensors if key.startswith("mtp.")]
    if left_out:
        print(f"{len(left_out)} tensors of multi-token prediction stay behind: the published layout has none")
    print(f"{len(job.files)} files, {sum(file.nbytes for file in job.files):,} bytes", flush=True)
