"""Which teachers make sense, of distillation on the student's own samples and of distillation from stored logits."""

from __future__ import annotations

from k3train.config.rules import check_choice, check_range, check_url, refuse
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError

_EFFORTS = ("low", "high", "max", "*")
_HOSTS = ("layout", "zero3")
_WHEN_SILENT = ("stop", "drop")
_SHARED = ("tensor", "pipeline", "context", "expert")


def check_teachers(config: RecipeConfig) -> None:
    """Refuse teachers that are none, and those that the layout cannot hold."""
    for number, teacher in enumerate(config.rl.teachers):
        where = f"rl.teachers.{number}"
        if (teacher.checkpoint is None) == (teacher.url is None):
            raise UserError(
                f"{where} has {'no checkpoint and no' if teacher.url is None else 'both a checkpoint and a'} url;"
                f" allowed: one of them; try {where}.checkpoint=runs/EXPERT"
            )
        if teacher.url is not None:
            check_url(f"{where}.url", teacher.url)
        for name, options in (("effort", _EFFORTS), ("host", _HOSTS), ("when_silent", _WHEN_SILENT)):
            value = getattr(teacher, name)
            if value not in options:
                raise UserError(
                    f"{where}.{name}={value} does not exist; allowed: {', '.join(options)}; try"
                    f" {where}.{name}={'*' if name == 'effort' else options[0]}"
                )
        if teacher.url is None and teacher.when_silent != "stop":
            raise UserError(
                f"{where}.when_silent={teacher.when_silent} is for servers, and this teacher is a checkpoint; allowed:"
                f" stop, or a url; try {where}.when_silent=stop"
            )
        if not 0 < teacher.weight < float("inf"):
            raise UserError(f"{where}.weight={teacher.weight} is out of range; allowed: more than 0; try 1")
        if teacher.checkpoint is not None and teacher.host == "zero3":
            _check_zero3(config, where)
    if config.rl.teachers and config.rl.objective.signal != "mopd":
        raise refuse(
            config,
            "rl.objective.signal",
            "asks no teacher, and rl.teachers names some",
            "mopd with rl.teachers",
            "rl.objective.signal=mopd",
        )


def _check_zero3(config: RecipeConfig, where: str) -> None:
    for name in _SHARED:
        if getattr(config.parallel, name) > 1:
            raise refuse(
                config,
                f"parallel.{name}",
                f"cannot hold a teacher of {where}.host=zero3",
                f"1, {where}.host=layout, or a teacher behind a server",
                f"{where}.host=layout, or {where}.checkpoint=null {where}.url=http://HOST:PORT",
            )


def check_distill(config: RecipeConfig) -> None:
    """Refuse a section `distill` without a teacher, values out of range, and layouts whose logits are not at hand."""
    distill = config.distill
    if not distill.teacher:
        cure = "distill.teacher=runs/TEACHER"
        raise refuse(config, "distill.teacher", "names no teacher", "a checkpoint or a run", cure)
    check_choice(config, "distill.logits", ("top_k", "full"))
    check_choice(config, "distill.rest", ("bucket", "drop"))
    check_choice(config, "distill.store", ("fp16", "fp32"))
    check_range(config, "distill.top_k", 64, least=1, below=config.model.vocab_size)
    check_range(config, "distill.temperature", 1, above=0)
    check_range(config, "distill.weight", 1, above=0, most=1)
    if config.engine != "megatron":
        why = "has no distillation: its loss does not see the logits"
        raise refuse(config, "engine", why, "megatron", "engine=megatron")
    for name in ("pipeline", "context"):
        if getattr(config.parallel, name) > 1:
            why = "is no layout that distillation from stored logits runs in"
            raise refuse(config, f"parallel.{name}", why, "1", f"parallel.{name}=1")
    if config.model.mtp.num_layers:
        why = "takes no part in distillation"
        raise refuse(config, "model.mtp.num_layers", why, "0", "model.mtp.num_layers=0")
