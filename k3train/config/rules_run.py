"""Which data, loop and run sections make sense."""

from __future__ import annotations

from k3train.config.rules import check_choice, check_range, refuse, value_at
from k3train.config.rules_distill import check_distill
from k3train.config.rules_draft import check_draft
from k3train.config.rules_lora import check_lora
from k3train.config.rules_optim import check_optim
from k3train.config.rules_quant import check_quant
from k3train.config.rules_rl import check_rl
from k3train.config.rules_sft import check_sft
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError

CHOICES = {
    "stage.name": ("pretrain", "sft", "rl", "distill", "draft"),
    "train.precision": ("fp32", "bf16"),
    "checkpoint.resume": ("auto", "never"),
    "checkpoint.async_busy": ("wait", "skip"),
    "telemetry.wandb.mode": ("auto", "online", "offline", "disabled"),
    "run.device": ("auto", "cpu", "cuda"),
}
AT_LEAST = {
    "train.steps": (1, 300),
    "train.seq_length": (2, 256),
    "train.micro_batch_size": (1, 4),
    "train.global_batch_size": (1, 16),
    "train.seed": (0, 1234),
    "train.eval_interval": (0, 50),
    "train.eval_samples": (0, 64),
    "train.log_expert_load_interval": (1, 10),
    "checkpoint.interval": (0, 100),
    "checkpoint.keep_last": (0, 2),
    "checkpoint.keep_every": (0, 1000),
}
MOST_MINUTES = 525600  # a year
MOST_THREADS = 1024  # and processes that read data: more are a mistake rather than a wish
NOT_EMPTY = {
    "run.name": "k3-tiny",
    "run.dir": "runs/k3-tiny",
    "data.tokenizer": "data/demo/tokenizer.json",
    "telemetry.wandb.project": "k3train",
}


def check_run(config: RecipeConfig) -> None:
    """Refuse values of the sections other than model and parallel that are out of range or contradict."""
    for key, options in CHOICES.items():
        check_choice(config, key, options)
    for key, (least, good) in AT_LEAST.items():
        check_range(config, key, good, least=least)
    for key, good in NOT_EMPTY.items():
        if not value_at(config, key):
            raise refuse(config, key, "is empty", "any text", f"{key}={good}")
    check_range(config, "run.timeout_minutes", 30, above=0, most=MOST_MINUTES)
    check_range(config, "data.num_workers", 0, least=0, most=MOST_THREADS)
    if config.run.threads_per_rank is not None:
        check_range(config, "run.threads_per_rank", "null", least=1, most=MOST_THREADS)
    _check_milestones(config)
    check_optim(config)
    check_lora(config)
    check_quant(config, CHOICES["stage.name"])
    if config.stage.name == "sft":
        check_sft(config)
    elif config.stage.name == "rl":
        check_rl(config)
    elif config.stage.name == "distill":
        check_sft(config)
        check_distill(config)
    elif config.stage.name == "draft":
        check_draft(config)
        (check_sft if config.draft.data == "conversations" else _check_corpora)(config)
    else:
        _check_corpora(config)


def _check_milestones(config: RecipeConfig) -> None:
    if config.stage.name in ("sft", "distill") and config.sft.epochs is not None:
        return  # how many steps these take is known once the conversations are read
    steps = config.train.steps
    for step in config.checkpoint.milestones:
        if not 1 <= step <= steps:
            raise refuse(
                config,
                "checkpoint.milestones",
                f"names step {step}, which train.steps={steps} never reaches",
                f"steps from 1 to {steps}",
                f"'checkpoint.milestones=[{steps}]'",
            )


def _check_corpora(config: RecipeConfig) -> None:
    example = "=[{path: data/demo/%s, weight: 1.0}]'"
    if not config.data.train:
        raise refuse(config, "data.train", "names no corpus", "one or more", "'data.train" + example % "train")
    if not config.data.valid and config.train.eval_samples:
        raise refuse(
            config,
            "data.valid",
            f"names no corpus, and train.eval_samples={config.train.eval_samples} asks for held-out text",
            "one or more",
            "'data.valid" + example % "valid" + ", or train.eval_samples=0",
        )
    for key in ("data.train", "data.valid"):
        for index, corpus in enumerate(value_at(config, key)):
            if not corpus.path:
                raise UserError(
                    f"{key}.{index}.path is empty; allowed: the prefix of a .bin and .idx pair; try"
                    f" {key}.{index}.path=data/demo/{key.rpartition('.')[2]}"
                )
            if not 0 < corpus.weight < float("inf"):
                raise UserError(
                    f"{key}.{index}.weight={corpus.weight:g} is out of range; allowed: more than 0; try"
                    f" {key}.{index}.weight=1.0"
                )
