"""Every layout of a recipe on a number of devices that the rules allow."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass

from k3train.config.layer_costs import balanced_layout
from k3train.config.rules import divisors
from k3train.config.schema import RecipeConfig
from k3train.config.validate import validate
from k3train.errors import UserError


@dataclass(frozen=True)
class Sizes:
    """What a layout is searched over; everything else stays as in the recipe."""

    tensor: int
    pipeline: int
    virtual: int
    expert: int
    expert_tensor: int
    micro_batch: int
    recompute: str  # none | full


class Layouts:
    """The layouts of one recipe on `world_size` devices. Context parallelism stays as it is.

    Pipelines are cut by cost, as `parallel.pipeline_layout=auto` cuts them. All numbers follow from the recipe: what
    divides the heads, the layers, the experts, the batch and the devices.
    """

    def __init__(self, config: RecipeConfig, world_size: int) -> None:
        self.config, self.world_size = config, world_size
        self._cuts: dict[tuple[int, str], str] = {}

    def of(self, sizes: Sizes) -> RecipeConfig:
        """The recipe in this layout; shares with the recipe what the layout does not change."""
        one = self._uncut(sizes)
        stages = sizes.pipeline * sizes.virtual
        if sizes.pipeline > 1:
            key = stages, sizes.recompute
            if key not in self._cuts:
                self._cuts[key] = balanced_layout(one)
            one.parallel.pipeline_layout = self._cuts[key]
        return one

    def _uncut(self, sizes: Sizes) -> RecipeConfig:
        one = copy.copy(self.config)
        one.parallel, one.train = copy.copy(one.parallel), copy.copy(one.train)
        p = one.parallel
        p.tensor, p.pipeline, p.virtual_pipeline = sizes.tensor, sizes.pipeline, sizes.virtual
        p.expert, p.expert_tensor, p.recompute = sizes.expert, sizes.expert_tensor, sizes.recompute
        p.pipeline_layout = "auto" if sizes.pipeline > 1 else None
        p.world_size = self.world_size
        p.sequence = p.sequence or sizes.tensor > 1  # the rules ask for it
        one.train.micro_batch_size = sizes.micro_batch
        return one

    def allowed(self) -> Iterator[Sizes]:
        """All that the rules allow.

        Rules that only virtual stages break are arithmetic here; every other one is asked of `validate`, once for each
        combination of the other sizes (`tests/unit/test_plan_search.py` asks it of every combination).
        """
        layers = self.config.model.num_layers
        for sizes in self._grid():
            if not self._is_valid(sizes):
                continue
            most = layers // sizes.pipeline if sizes.pipeline > 1 else 1
            for virtual in range(1, most + 1):
                if virtual > 1 and not self._whole_groups(sizes):
                    break
                for recompute in ("none", "full"):
                    yield Sizes(
                        sizes.tensor,
                        sizes.pipeline,
                        virtual,
                        sizes.expert,
                        sizes.expert_tensor,
                        sizes.micro_batch,
                        recompute,
                    )

    def _grid(self) -> Iterator[Sizes]:
        """Sizes that divide, without virtual stages."""
        model, world = self.config.model, self.world_size // self.config.parallel.context
        heads = math.gcd(model.kda.num_heads, model.mla.num_heads)
        for tensor in _common(heads, world):
            for pipeline in _common(world // tensor):
                if pipeline > model.num_layers:
                    continue
                spread = _common(model.moe.num_experts, self.world_size // pipeline) if model.moe.num_experts else [1]
                sequences = self.config.train.global_batch_size // (world // (tensor * pipeline))
                for expert in spread:
                    for expert_tensor in _common(tensor) if model.moe.num_experts else [1]:
                        for micro_batch in _common(sequences) if sequences else []:
                            yield Sizes(tensor, pipeline, 1, expert, expert_tensor, micro_batch, "none")

    def _is_valid(self, sizes: Sizes) -> bool:
        try:
            validate(self._uncut(sizes), self.world_size)
        except UserError:
            return False
        return True

    def _whole_groups(self, sizes: Sizes) -> bool:
        """Whether interleaving gets micro-batches in groups of pipeline ranks, in training and in evaluation."""
        train, p = self.config.train, self.config.parallel
        sequences = sizes.micro_batch * (self.world_size // (sizes.tensor * sizes.pipeline * p.context))
        counts = train.global_batch_size // sequences, train.eval_samples // sequences
        return all(count % sizes.pipeline == 0 for count in counts)


def _common(*numbers: int) -> list[int]:
    """Common divisors, in order."""
    whole = math.gcd(*numbers)
    return divisors(whole, whole)
