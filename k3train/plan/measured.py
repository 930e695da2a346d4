"""Stage times that were measured, from a file: seconds of one micro-batch through every stage of a pipeline.

The file is JSON, `{"stages": [{"forward": 0.12, "backward": 0.25}, ...]}`, in the order in which a micro-batch goes
through them: stage i is virtual chunk i // pipeline of pipeline rank i % pipeline. Other keys are left alone, so that a
plan's own `--json`, which has the modelled times in this form, is a template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from k3train.config.schema import RecipeConfig
from k3train.errors import UserError
from k3train.plan.work import Seconds

_FORM = '{"stages": [{"forward": 0.12, "backward": 0.25}, ...]}, seconds of one micro-batch'
_MOST = 86_400  # a day: larger ones are of another unit, and the largest overflow


def read_stage_times(path: str, config: RecipeConfig) -> list[Seconds]:
    """The times of every stage of the recipe's pipeline.

    Raises:
        UserError: no such file, another form, times that are none, or of another number of stages.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--stage-times {path} cannot be read ({error.strerror}); name a JSON file") from error
    except ValueError as error:
        raise UserError(f"--stage-times {path} is no JSON ({error}); write {_FORM}") from error
    entries = content.get("stages") if isinstance(content, dict) else None
    if entries is None and isinstance(content, dict) and isinstance(content.get("step"), dict):
        entries = content["step"].get("stages")  # a plan's own
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"--stage-times {path} has no list of stages; write {_FORM}")
    p = config.parallel
    if len(entries) != (wanted := p.pipeline * p.virtual_pipeline):
        raise UserError(
            f"--stage-times {path} has {len(entries)} stages, and parallel.pipeline={p.pipeline} with"
            f" parallel.virtual_pipeline={p.virtual_pipeline} has {wanted}; measure this layout, or plan that one"
        )
    return [
        Seconds(*(_seconds(entry, key, number, path) for key in ("forward", "backward")))
        for number, entry in enumerate(entries)
    ]


def _seconds(entry: dict[str, Any], key: str, number: int, path: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST:
        raise UserError(
            f"--stage-times {path}: stages.{number}.{key} is {json.dumps(value)}; allowed: seconds above 0, at most"
            f" {_MOST:,}; write {_FORM}"
        )
    return float(value)
