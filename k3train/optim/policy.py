"""Which optimizer trains which parameter, and in which blocks, from the rules of `optim.policy`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from k3train.config.schema import OptimConfig, PolicyRule
from k3train.errors import UserError
from k3train.optim.blocks import LocalBlock, blocks_of, head_rows


@dataclass(frozen=True)
class Treatment:
    """How one parameter is trained."""

    name: str  # global, the same in every layout
    muon: bool
    split: str
    lr_mult: float
    decay: bool
    blocks: tuple[LocalBlock, ...] = ()  # of Muon, on this rank


def without_decay(parameter: torch.nn.Parameter) -> bool:
    """Vectors take no weight decay: norms, Attention Residual queries, decay rates and biases; nor do convolutions."""
    return parameter.dim() == 1 or getattr(parameter, "k3_init", "") == "conv"


def apply_policy(optim: OptimConfig, models: Iterable[torch.nn.Module]) -> dict[torch.nn.Parameter, Treatment]:
    """The treatment of every trained parameter of this rank's model chunks. Every rank of the world takes part.

    Raises:
        UserError: a rule matches no parameter of the model, a parameter is matched by no rule, or cannot be split so.
    """
    models = list(models)
    named = [(name, p) for model in models for name, p in model.named_parameters() if p.requires_grad]
    rules = list(optim.policy) or [PolicyRule(match=".*", optimizer="adamw")]
    rows = head_rows(models)
    with_heads = [name for name, p in named if p in rows]
    treatments: dict[torch.nn.Parameter, Treatment] = {}
    used = [False] * len(rules)
    failure: str | None = None
    for name, parameter in named:
        index = next((i for i, rule in enumerate(rules) if re.fullmatch(rule.match, name)), None)
        if index is None:
            failure = failure or (
                f"optim.policy has no rule for {name}; every parameter needs one; try a last rule"
                " {match: '.*', optimizer: adamw}"
            )
            continue
        used[index], rule = True, rules[index]
        try:
            treatments[parameter] = _treat(name, parameter, rule, rows.get(parameter), with_heads)
        except UserError as error:
            failure = failure or str(error)
    _agree(rules, used, failure)
    return treatments


def _treat(name: str, parameter: torch.nn.Parameter, rule: PolicyRule, layout: object, names: list[str]) -> Treatment:
    muon = rule.optimizer == "muon"
    blocks = blocks_of(name, parameter, rule.split, layout, names) if muon else []
    decay = rule.decay and not without_decay(parameter)
    return Treatment(name, muon, rule.split, rule.lr_mult, decay, tuple(blocks))


def _agree(rules: list[PolicyRule], used: list[bool], failure: str | None) -> None:
    """Raise on every rank what any rank found, and name rules that match nothing on any stage."""
    found: list[tuple[list[bool], str | None]] = [([], None)] * dist.get_world_size()
    dist.all_gather_object(found, (used, failure))
    told = next((text for _, text in found if text is not None), None)
    if told is not None:
        raise UserError(told)
    for index, rule in enumerate(rules):
        if not any(flags[index] for flags, _ in found):
            raise UserError(
                f"optim.policy.{index}.match={rule.match} matches no parameter of the model that an earlier rule has"
                " not taken; allowed: a regular expression over whole names such as"
                " decoder.layers.0.mixer.q_proj.weight; try to correct it, or leave the rule out"
            )


@dataclass(frozen=True)
class TableRow:
    """One parameter of the whole model, as the table shows it."""

    name: str
    optimizer: str
    blocks: str  # `96 heads of 128 x 7168`
    update_scale: str  # what an orthogonalized block is multiplied by, before the learning rate
    lr_mult: float
    decay: bool


def optimizer_table(treatments: dict[torch.nn.Parameter, Treatment], update_scale: float) -> list[TableRow]:
    """Every parameter of the model, in order of its name's first appearance along the pipeline. All ranks take part."""
    own = [(p.shape, t) for p, t in treatments.items()]
    rows = [_row(tuple(shape), t, update_scale) for shape, t in own]
    group = parallel_state.get_pipeline_model_parallel_group()
    gathered: list[list[TableRow]] = [[] for _ in range(group.size())]
    dist.all_gather_object(gathered, rows, group=group)
    return list({row.name: row for stage in gathered for row in stage}.values())


def _row(shape: tuple[int, ...], treatment: Treatment, update_scale: float) -> TableRow:
    if not treatment.muon:
        size = " x ".join(map(str, shape))
        return TableRow(treatment.name, "adamw", size, "", treatment.lr_mult, treatment.decay)
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for block in treatment.blocks:
        counts[block.shape] += 1
    copies = 1
    if treatment.split in ("heads", "head_parts"):
        copies = parallel_state.get_tensor_model_parallel_world_size()
    elif treatment.split == "experts":
        copies = parallel_state.get_expert_model_parallel_world_size()
    texts, scales = [], []
    for (rows, columns), count in counts.items():
        texts.append(f"{count * copies} x [{rows} x {columns}]")
        scales.append(f"{update_scale * max(rows, columns) ** 0.5:.3g}")
    return TableRow(
        treatment.name,
        f"muon, {treatment.split}",
        " + ".join(texts),
        " / ".join(dict.fromkeys(scales)),
        treatment.lr_mult,
        treatment.decay,
    )


def format_table(rows: list[TableRow], grouped: bool = True) -> str:
    """The table as text; `grouped` folds the layers that treat a parameter alike into one line."""
    lines: dict[tuple, list[int]] = {}
    for row in rows:
        match = re.fullmatch(r"(.*\.layers\.)(\d+)(\..*)", row.name) if grouped else None
        name = f"{match[1]}*{match[3]}" if match else row.name
        key = (name, row.optimizer, row.blocks, row.update_scale, f"{row.lr_mult:g}", "" if row.decay else "no decay")
        lines.setdefault(key, []).extend([int(match[2])] if match else [])
    head = ("parameter", "optimizer", "blocks" if grouped else "shape or blocks", "scale", "lr x", "decay")
    cells = [head]
    for (name, *rest), layers in lines.items():
        cells.append((f"{name} ({len(layers)} layers)" if layers else name, *rest))
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells)
