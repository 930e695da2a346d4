"""`k3train import`: Hugging Face to k3train."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from k3train.config.load import load_recipe
from k3train.config.rules_parallel import least_world_size
from k3train.config.schema import DataConfig, ParallelConfig, RecipeConfig, RunConfig, TrainConfig
from k3train.config.validate import resolve_world_size, validate_model
from k3train.errors import UserError
from k3train.hf.config import HFConfig, read_config
from k3train.hf.quant_policy import policy_of
from k3train.hf.target import check_target


def ranks(args: argparse.Namespace) -> int:
    """How many ranks to start for these arguments, checked against the model of the folder."""
    config, _ = _prepare(args)
    return resolve_world_size(config, gpus=0)


def _prepare(args: argparse.Namespace) -> tuple[RecipeConfig, HFConfig]:
    """The recipe that the checkpoint will carry, and what config.json says.

    Raises:
        UserError: wrong input, or a layout that does not fit the model.
    """
    source = read_config(Path(args.hf) / "config.json")
    out = Path(args.out)
    config = RecipeConfig(
        recipe_name="imported",
        run=RunConfig(name=source.model.name, dir=str(out), device="cpu"),
        model=source.model,
        quant=policy_of(source.content, Path(args.hf) / "config.json"),
        data=DataConfig(tokenizer=str(out / "tokenizer")),
        train=TrainConfig(precision="bf16"),  # fp32 where the tensors turn out to be
    )
    lay_out(config, args.overrides)
    return config, source


def lay_out(config: RecipeConfig, overrides: list[str]) -> None:
    """Give a recipe the layout of `overrides`, and a batch that any number of ranks can share: nothing is trained.

    Raises:
        UserError: the layout does not fit the model or the ranks that exist.
    """
    config.parallel, config.run.device = parallel_of(overrides), "cpu"
    ranks = int(os.environ.get("WORLD_SIZE", 0)) or config.parallel.world_size or least_world_size(config.parallel)
    config.train.micro_batch_size, config.train.global_batch_size, config.train.eval_samples = 1, max(1, ranks), 0
    validate_model(config, ranks)


def parallel_of(overrides: list[str]) -> ParallelConfig:
    """The parallel section of overrides such as parallel.tensor=2 or parallel=ep8.

    Raises:
        UserError: another section is named, or a key is wrong.
    """
    for word in overrides:
        if not word.startswith(("parallel.", "parallel=")):
            raise UserError(f"{word}: only parallel.KEY=VALUE and parallel=GROUP may follow; try parallel.expert=2")
    base = [] if any(word.startswith("parallel=") for word in overrides) else ["parallel=single"]
    return load_recipe(["recipe=pretrain/k3-tiny", *base, *overrides]).parallel


def run(args: argparse.Namespace) -> int:
    """Import on the ranks that exist; returns the exit code."""
    from k3train import platform
    from k3train.hf.importer import run_import

    config, source = _prepare(args)
    out = Path(args.out).absolute()
    check_target("--out", out, Path(args.hf))
    here = platform.start("cpu", 1)
    if here.rank == 0:
        model = config.model
        print(
            f"{args.hf}: {source.architecture}, {model.num_layers} layers, hidden {model.hidden_size},"
            f" {model.moe.num_experts} experts; {here.world_size} ranks",
            flush=True,
        )
    run_import(Path(args.hf), out, config, source)
    if here.rank == 0:
        lacking = " (no tokenizer.json, which texts need; tools/tiktoken_to_json.py makes it of tiktoken.model)"
        tokenizer = "" if (out / "tokenizer").is_dir() else lacking
        print(f"imported to {out}{tokenizer}\nto train on it: --config-dir {out}/recipes model=imported", end=" ")
        print(f"checkpoint.load={out}")
    return 0
