"""The `k3train` command: runs recipes, and verbs that look at what a run left behind.

Imports stay light here: torch is imported only by what needs it.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from k3train import rank_logs
from k3train.config.keys import closest
from k3train.config.load import available_recipes, compose_config, load_recipe
from k3train.config.schema import RecipeConfig
from k3train.config.validate import validate, validate_machine
from k3train.environment import Place, is_first_rank, note_exit, place
from k3train.errors import UserError
from k3train.launch import launch
from k3train.machine import local_world_size, visible_gpus

# A launcher ends all ranks when one has ended. Where all refuse the same recipe, the one that says so goes first.
SECONDS_FOR_FIRST_RANK = 1.0
USAGE = """\
k3train trains Kimi-K3-style models on Megatron-Core parallelism.

Run a recipe:
  k3train recipe=NAME [group=OPTION ...] [key=value ...]
      --cfg job          print the composed recipe and exit (--resolve fills in ${...})
      --config-dir DIR   look for more groups and recipes in DIR
      -m, --multirun     run every combination of comma-separated values, one after the other

  k3train recipe=pretrain/k3-tiny
  k3train recipe=pretrain/k3-tiny train.steps=50 optim.lr=1e-3 run.name=short
  k3train recipe=pretrain/k3-tiny --multirun optim.lr=1e-3,3e-3
  k3train recipe=pretrain/k3 --cfg job
  torchrun --nproc-per-node 2 -m k3train recipe=pretrain/k3-tiny parallel.expert=1

k3train starts the ranks on this machine itself; under torchrun or srun it joins theirs.

Look at what a run left behind (k3train VERB --help tells more):
"""


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors said the way ours are."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `{self.prog} --help` shows the usage")


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a run's checkpoints")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    parser.add_argument("--prompts", metavar="FILE", help="FILE.jsonl with a `prompt` a line, or FILE.txt, one a line")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="samples of each prompt (default 1)")
    parser.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="default 100")
    parser.add_argument("--temperature", type=float, default=1.0, help="default 1; 0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest tokens of this mass")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="only the likeliest K tokens; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; several times is fine")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-document token")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="samples at a time (default 32)")
    parser.add_argument("--json", action="store_true", help="one JSON object a sample, with tokens and log-probs")
    parser.add_argument("--draft", metavar="DIR", help="a checkpoint whose draft proposes tokens (docs/draft.md)")
    parser.add_argument("--draft-tokens", type=int, metavar="N", help="proposed at a time (default 4)")
    _reading_arguments(parser)


def _quant_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quant",
        choices=["as-trained", "k3", "none"],
        default="as-trained",
        help="rounding of experts' weights and inputs: as in training (default), K3's (MXFP4 and MXFP8), or none",
    )


def _reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the verbs that read text with a model."""
    parser.add_argument(
        "--kernels",
        choices=["auto", "reference"],
        default="auto",
        help="reference: every operation in the published code's order, slow (default auto: the fast ones)",
    )
    _quant_argument(parser)
    parser.add_argument(
        "layout",
        nargs="*",
        metavar="parallel.KEY=N",
        help="parallel.tensor and parallel.expert of these ranks (under torchrun or srun)",
    )


def _score_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a run's checkpoints")
    parser.add_argument("--tokens", required=True, metavar="FILE.npy", help="token ids, [length] or [rows, length]")
    parser.add_argument("--out", required=True, metavar="FILE.npz")
    parser.add_argument("--logits", action="store_true", help="write the logits as well")
    _reading_arguments(parser)


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a run's checkpoints")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="default %(default)s; 0 takes a free one and says which")
    parser.add_argument("--model-name", default="k3train", help="what clients call it (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="samples at a time (default 32)")
    parser.add_argument("--allow-updates", action="store_true", help="let clients replace the weights")
    _quant_argument(parser)


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="a run, or a checkpoint")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare the stored hashes")


def _show_data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n", type=int, default=3, metavar="N", help="conversations to show (default 3)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="conversations to pass over first")
    parser.add_argument("--scan", type=int, default=1000, metavar="N", help="conversations to summarize (default 1000)")
    parser.add_argument("--valid", action="store_true", help="of sft.valid instead of sft.train")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="look for more recipes in DIR")
    parser.add_argument("overrides", nargs="+", metavar="key=value", help="a recipe, such as recipe=sft/k3-tiny")


def _encode_data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="look for more recipes in DIR")
    parser.add_argument("overrides", nargs="+", metavar="key=value", help="the recipe as it will be run")


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a run's checkpoints")
    parser.add_argument("--tasks", metavar="FILE", help="tasks with answers (tools/make_tasks.py makes some)")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N tasks")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="answers to each task (default 1)")
    parser.add_argument("--k", default="1", metavar="K,K", help="pass@k for these k, up to N (default 1)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="of an answer (default 256)")
    parser.add_argument("--temperature", type=float, help="default 0 (greedy) for one answer, 1 for several")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest tokens of this mass")
    parser.add_argument("--seed", type=int, default=0)
    efforts = ["low", "high", "max", "none"]
    parser.add_argument("--effort", choices=efforts, help="instead of the tasks' own; none: without that message")
    parser.add_argument(
        "--perplexity", action="append", metavar="NAME=FILE", help="perplexity of conversations or texts; several"
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="instead of the one saved with the checkpoint")
    parser.add_argument("--template", metavar="NAME", help="k3, tokenizer, or a Jinja file (default: as in training)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="answers at a time (default 32)")
    parser.add_argument("--out", metavar="FILE.json", help="write the results, every answer included")
    parser.add_argument("--wandb", metavar="PROJECT", help="send the results to a W&B run of this project")
    _reading_arguments(parser)


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="RUN", help="the directory of a run")
    parser.add_argument("--out", metavar="FILE.html", help="default: RUN/report.html")


def _import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hf", required=True, metavar="DIR", help="a published Kimi K3 or Kimi Linear folder")
    parser.add_argument("--out", required=True, metavar="CKPT", help="the checkpoint to make")
    parser.add_argument("overrides", nargs="*", metavar="parallel.KEY=VALUE", help="the layout; its ranks do the work")


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a run's checkpoints")
    parser.add_argument("--hf", required=True, metavar="DIR", help="the folder to make")
    parser.add_argument("--experts", choices=["mxfp4", "bf16"], help="routed experts (default: as imported or trained)")
    parser.add_argument("--adapter", action="store_true", help="only the LoRA adapters, as PEFT lays them out")
    parser.add_argument("--like", metavar="CKPT", help="imported checkpoint whose files to take along, or none")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="size of new safetensors files (%(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="parallel.KEY=VALUE", help="a layout; its ranks do the work")


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a run's newest")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run directory to make, for the other engine")


def _kernels_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: this machine's")
    parser.add_argument(
        "--kernels",
        choices=["auto", "torch", "triton", "reference"],
        default="auto",
        help="as a recipe's model.kernels (default auto)",
    )
    parser.add_argument(
        "--transformer-impl",
        choices=["auto", "local", "te"],
        default="auto",
        help="as a recipe's parallel.transformer_impl (default auto)",
    )
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], default="bf16", help="as a recipe's train.precision (default bf16)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object an operation")


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="+", metavar="key=value", help="recipe=..., cluster=..., and any override")
    parser.add_argument("--search", action="store_true", help="list layouts that fit, fastest first")
    parser.add_argument("--top", type=int, metavar="N", help="layouts that --search lists (default 10)")
    parser.add_argument("--picture", metavar="FILE.png", help="memory of every rank, and the pipeline's timeline")
    parser.add_argument("--json", metavar="FILE", help="the plan as numbers")
    parser.add_argument("--stage-times", metavar="FILE.json", help="plan with measured times of every stage")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="look for more recipes in DIR")


# verb: (what it does, the module whose run(args) does it, its arguments)
VERBS: dict[str, tuple[str, str, Callable[[argparse.ArgumentParser], None]]] = {
    "generate": ("continue a prompt", "k3train.rollout.generate_cli", _generate_arguments),
    "score": ("log-probabilities of given tokens", "k3train.rollout.score_cli", _score_arguments),
    "eval": ("exact match, pass@k and perplexity", "k3train.rollout.eval_cli", _eval_arguments),
    "show-data": ("conversations, and what is trained on", "k3train.data.chat.show", _show_data_arguments),
    "encode-data": ("encode conversations before a run", "k3train.data.chat.encode_cli", _encode_data_arguments),
    "serve": ("answer completion requests over HTTP", "k3train.rollout.serve_cli", _serve_arguments),
    "import": ("make a checkpoint of a Hugging Face folder", "k3train.hf.import_cli", _import_arguments),
    "export": ("make a Hugging Face folder of a checkpoint", "k3train.hf.export_cli", _export_arguments),
    "convert": ("a checkpoint from one engine to the other", "k3train.engine.convert", _convert_arguments),
    "kernels": ("what serves each operation here, and why", "k3train.telemetry.kernels_cli", _kernels_arguments),
    "plan": ("memory, time and cost of a recipe on a cluster", "k3train.plan.command", _plan_arguments),
    "inspect": ("step, tokens, layout, sizes and health", "k3train.checkpoint.inspect", _inspect_arguments),
    "report": (
        "one HTML page of a run: curves, balance, guards, events",
        "k3train.telemetry.report",
        _report_arguments,
    ),
}
LOADS_MEGATRON = ("k3train.rollout.", "k3train.engine.")  # when imported; the others refuse wrong input before they do


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 for input that cannot work, 74 for a full or broken disk, after
    one sentence on stderr).
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of another encoding, a path that is no UTF-8
    code = _main(sys.argv[1:] if argv is None else argv)
    note_exit(code)
    return code


def _main(argv: list[str]) -> int:
    try:
        return _run(argv)
    except UserError as error:
        if is_first_rank():
            if not error.told:
                print(f"k3train: {error}", file=sys.stderr)
        else:
            time.sleep(SECONDS_FOR_FIRST_RANK)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] in VERBS:
        return _run_verb(argv[0], argv[1:])
    if "=" not in argv[0] and not argv[0].startswith(("-", "~")):
        raise _unknown_verb(argv[0])
    return _run_recipe(argv)


def _help() -> str:
    verbs = [f"  {name:<11} {what}" for name, (what, _, _) in VERBS.items()]
    recipes = ", ".join(available_recipes())
    return "\n".join([USAGE + "\n".join(verbs), "", f"Recipes: {recipes}"])


def _run_verb(verb: str, argv: list[str]) -> int:
    what, module, add_arguments = VERBS[verb]
    parser = _Parser(prog=f"k3train {verb}", description=what)
    add_arguments(parser)
    arguments = parser.parse_intermixed_args(argv)
    if getattr(arguments, "layout", None):
        place()  # ranks that srun started read theirs from Slurm's variables
    if module.startswith(LOADS_MEGATRON):
        from k3train import platform

        platform.adapt()  # before the imports that bring Megatron-Core
    work = importlib.import_module(module)
    # Verbs that work on several ranks say on how many; the others run where they are started.
    if hasattr(work, "ranks") and place() is None and (world_size := work.ranks(arguments)) > 1:
        with tempfile.TemporaryDirectory(prefix="k3train-") as logs:
            return launch([verb, *argv], world_size, Path(logs))
    try:
        code = work.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # what read the output has ended, as `head` does
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None:
            _discard_output()
        raise UserError(
            f"{error.filename or 'the standard output'} cannot be read or written ({error.strerror}); see to its name,"
            " to rights and to space there"
        ) from error


def _discard_output() -> None:
    """The interpreter flushes what is left at its end, and would complain again."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _run_recipe(argv: list[str]) -> int:
    parser = _Parser(prog="k3train", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("-cd", "--config-dir")
    parser.add_argument("-m", "--multirun", action="store_true")
    options = parser.parse_intermixed_args(argv)
    if options.help:
        print(_help())
        return 0
    for word in options.overrides:
        if "=" not in word and not word.startswith("~"):
            raise _unknown_verb(word)
    if options.cfg:
        return _print_config(options)
    here = place()
    if options.multirun:
        if here is not None:
            raise UserError(
                f"--multirun does not work under a launcher of {here.world_size} ranks; start it without torchrun or"
                " srun, or start each run by itself"
            )
        from k3train.sweep import sweep

        return sweep(options.overrides, options.config_dir)
    config = load_recipe(options.overrides, options.config_dir)
    return _train(config, argv, here)


def _unknown_verb(word: str) -> UserError:
    recipes = available_recipes()
    recipe = next((name for name in recipes if word in (name, name.rpartition("/")[2])), None)
    verb = closest(word, VERBS)
    cure = f"k3train recipe={recipe}" if recipe else f"k3train {verb}" if verb else f"k3train recipe={recipes[-1]}"
    return UserError(
        f"{word} is neither a verb nor key=value; allowed verbs: {', '.join(VERBS)}; try `{cure}`, or `k3train --help`"
    )


def _print_config(options: argparse.Namespace) -> int:
    from omegaconf import OmegaConf

    from k3train.config.explain import plain_errors

    config = compose_config(options.overrides, options.config_dir)
    with plain_errors():
        sys.stdout.write(OmegaConf.to_yaml(config, resolve=options.resolve))
    return 0


def _train(config: RecipeConfig, argv: list[str], here: Place | None) -> int:
    if here is None:
        world_size = local_world_size(config)
        if world_size > 1:
            return launch(argv, world_size, Path(config.run.dir) / "logs", config.run.threads_per_rank)
    else:
        validate(config, here.world_size)
        validate_machine(config, visible_gpus(config))
        rank_logs.keep(here.rank, Path(config.run.dir) / "logs")
    from k3train.stages import run_stage

    try:
        return run_stage(config)
    except UserError as error:
        if is_first_rank():
            raise
        # Unlike a recipe, data may be wrong on one rank only: that one has to say so.
        if not error.told:
            rank_logs.tell(f"k3train: rank {here.rank if here else 0}: {error}")
        return error.exit_code
