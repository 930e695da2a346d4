"""Which matrices a parameter falls into: heads, parts of heads, experts, or one whole.

A parameter of this rank is a flat run of equal pieces, and every block lies in it as one contiguous range of rows. A
block that tensor parallelism cuts lies on several ranks, one part on each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from k3train.errors import UserError
from k3train.model.gated_mla import GatedMLA
from k3train.model.kda import KimiDeltaAttention


@dataclass(frozen=True)
class LocalBlock:
    """This rank's part of one matrix that is orthogonalized as a whole."""

    label: str  # unique within the parameter over all ranks of the stage: `head 3 part 0`, `expert 17 w1`
    start: int  # first element in this rank's flattened parameter
    rows: int  # of this rank's part, as are columns
    columns: int
    cut: int = 0  # the dimension in which parts are joined: 0 rows, 1 columns
    part: int = 0
    parts: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole block."""
        if self.cut == 0:
            return self.rows * self.parts, self.columns
        return self.rows, self.columns * self.parts


@dataclass(frozen=True)
class HeadRows:
    """How the rows of a projection are laid out: for each head on this rank, its parts one after another."""

    heads: int  # on this rank
    parts: tuple[int, ...]  # rows of each part


def head_rows(models: Iterable[torch.nn.Module]) -> dict[torch.nn.Parameter, HeadRows]:
    """The projections of these model chunks whose rows belong to heads."""
    found: dict[torch.nn.Parameter, HeadRows] = {}
    for module in (m for model in models for m in model.modules()):
        if isinstance(module, KimiDeltaAttention):
            parts = dict.fromkeys(("q", "k", "v", "f_b", "g", "g_b"), (module.kda.head_dim,))
        elif isinstance(module, GatedMLA):
            mla = module.mla
            query = (mla.qk_nope_head_dim, mla.qk_rope_head_dim)
            parts = {"q": query, "q_b": query, "kv_b": (mla.qk_nope_head_dim, mla.v_head_dim), "g": (mla.v_head_dim,)}
        else:
            continue
        for name, rows in parts.items():
            projection = getattr(module, f"{name}_proj", None)
            if projection is not None:
                found[projection.weight] = HeadRows(module.local_heads, rows)
    return found


def blocks_of(
    name: str, parameter: torch.nn.Parameter, split: str, layout: HeadRows | None, head_names: Iterable[str] = ()
) -> list[LocalBlock]:
    """The blocks of which this rank holds a part.

    Args:
        name: the parameter's whole name, for messages.
        parameter: this rank's shard, [rows, columns] or a stack of experts.
        split: whole | heads | head_parts | experts.
        layout: the heads of its rows, or None where they belong to none.
        head_names: parameters that have heads, for messages.

    Raises:
        UserError: the parameter cannot be split so.
    """
    if split == "experts" or getattr(parameter, "k3_expert", False):
        if split != "experts" or not getattr(parameter, "k3_expert", False):
            raise UserError(
                f"optim.policy splits {name} by {split}; allowed: experts for stacks of experts (w13, w2) and only for"
                " them; try a rule of its own such as {match: '.*\\.experts\\..*', split: experts} before it"
            )
        return list(_experts(parameter))
    if parameter.dim() != 2:
        raise UserError(
            f"optim.policy puts {name} {list(parameter.shape)} under muon, which takes matrices; allowed: adamw; try a"
            " rule such as {match: '.*(norm|query|A_log|dt_bias|conv).*', optimizer: adamw} before it"
        )
    if split == "whole":
        return [_whole(parameter)]
    if layout is None:
        known = ", ".join(sorted({other.rpartition(".mixer.")[2] for other in head_names}))
        raise UserError(
            f"optim.policy splits {name} by {split}, but its rows belong to no heads; allowed: {known}; try"
            " split: whole"
        )
    return list(_heads(parameter, layout, split == "head_parts"))


def _whole(parameter: torch.nn.Parameter) -> LocalBlock:
    rows, columns = parameter.shape
    if not getattr(parameter, "tensor_model_parallel", False):
        return LocalBlock("whole", 0, rows, columns)
    rank = parallel_state.get_tensor_model_parallel_rank()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return LocalBlock("whole", 0, rows, columns, parameter.partition_dim, rank, ranks)


def _heads(parameter: torch.nn.Parameter, layout: HeadRows, by_part: bool) -> Iterator[LocalBlock]:
    columns = parameter.shape[1]
    parts = layout.parts if by_part else (sum(layout.parts),)
    first = parallel_state.get_tensor_model_parallel_rank() * layout.heads
    start = 0
    for head in range(first, first + layout.heads):
        for number, rows in enumerate(parts):
            label = f"head {head} part {number}" if by_part else f"head {head}"
            yield LocalBlock(label, start, rows, columns)
            start += rows * columns
    assert start == parameter.numel()


def _experts(parameter: torch.nn.Parameter) -> Iterator[LocalBlock]:
    """`w13` [experts, 2, width / ETP, latent] and `w2` [experts, latent, width / ETP]; the width is cut."""
    rank = parallel_state.get_expert_tensor_parallel_rank()
    ranks = parallel_state.get_expert_tensor_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * parameter.shape[0]
    weights = ("w1", "w3") if parameter.dim() == 4 else ("w2",)
    cut = 0 if parameter.dim() == 4 else 1
    rows, columns = parameter.shape[-2:]
    start = 0
    for expert in range(first, first + parameter.shape[0]):
        for weight in weights:
            yield LocalBlock(f"expert {expert} {weight}", start, rows, columns, cut, rank, ranks)
            start += rows * columns
