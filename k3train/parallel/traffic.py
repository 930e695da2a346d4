"""Which block summaries of Attention Residuals cross which pipeline boundary, by counting, without any tensors.

Decoder layer l opens a block where l is a multiple of the block size: the running sum that it receives becomes summary
l / block_size. A stage that ends after e layers therefore has ceil(e / block_size) summaries, and one more where e is
itself a multiple, since the running sum that it leaves is the next one.

Stage i is virtual chunk i // P of pipeline rank i % P. A rank keeps what it knew at the end of its previous chunk, so
the boundary before stage i carries what stages i - P + 1 ... i - 1 added, and the running sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3train.config.layout import expand_layout


@dataclass(frozen=True)
class Boundary:
    """What one stage does with summaries. They are numbered over the whole model and always come in order."""

    held: int  # summaries that an earlier chunk of this rank kept
    received: int  # summaries that come with the running sum; together with `held`: all that there are
    first_sent: int  # of the stage's summaries at its end, the first that the next stage's rank does not hold
    keeps: bool  # a later chunk of this rank needs them again
    keeps_output: bool  # the running sum that this stage leaves is a summary


@dataclass(frozen=True)
class PipelineTraffic:
    """The stages of a layout, as far as summaries are concerned."""

    ends: tuple[int, ...]  # decoder layers in stages 0 .. i
    pipeline: int  # P
    block_size: int | None  # None: no Attention Residuals, a plain residual stream

    @staticmethod
    def of(layout: str, pipeline: int, block_size: int | None) -> PipelineTraffic:
        """From Megatron-Core's layout string over pipeline x virtual-pipeline stages."""
        ends, layers = [], 0
        for stage in expand_layout(layout):
            layers += stage.count("t")
            ends.append(layers)
        return PipelineTraffic(tuple(ends), pipeline, block_size)

    def summaries_after(self, stage: int) -> int:
        """How many summaries exist when a stage ends (none before stage 0)."""
        if self.block_size is None or stage < 0:
            return 0
        return -(-self.ends[stage] // self.block_size)

    def known_after(self, stage: int) -> int:
        """The same, counting the running sum that the stage leaves where that is a summary already."""
        if self.block_size is None or stage < 0:
            return 0
        return self.ends[stage] // self.block_size + 1

    def boundary(self, stage: int) -> Boundary:
        """What a stage holds, receives and sends."""
        held = self.known_after(stage - self.pipeline)
        keeps = self.block_size is not None and stage + self.pipeline < len(self.ends)
        return Boundary(
            held=held,
            received=self.summaries_after(stage - 1) - held if stage else 0,
            first_sent=self.known_after(stage + 1 - self.pipeline),
            keeps=keeps,
            keeps_output=keeps and self.known_after(stage) > self.summaries_after(stage),
        )

    def tensors_sent(self, stage: int) -> int:
        """How many [s, b, h] tensors a stage sends to the next one: summaries and the running sum (last stage: 0)."""
        if stage + 1 == len(self.ends):
            return 0
        return self.summaries_after(stage) - self.boundary(stage).first_sent + 1

    def tensors(self) -> int:
        """[s, b, h] tensors that all stages of one pipeline send for a micro-batch, in each direction."""
        return sum(self.tensors_sent(stage) for stage in range(len(self.ends)))

    def naive_tensors(self) -> int:
        """The same where every boundary carries every summary."""
        return sum(self.summaries_after(stage) + 1 for stage in range(len(self.ends) - 1))


def step_bytes(
    traffic: PipelineTraffic, tokens: int, hidden_size: int, element_size: int, forward_only: bool = False
) -> int:
    """Bytes that the stages of one pipeline send for `tokens` tokens: activations, and as much for their gradients.

    `tokens` are those of all its micro-batches on one tensor-parallel rank (s / TP x b x micro-batches).
    """
    return traffic.tensors() * tokens * hidden_size * element_size * (1 if forward_only else 2)


def paper_naive_blocks(pipeline: int, virtual: int, blocks_per_stage: int) -> int:
    """Blocks sent for a micro-batch where every boundary carries all: C (C - 1) / 2 x N_p, C = P V.

    Attention Residuals paper (arXiv:2603.15031), which counts finished blocks only, all stages having N_p of them.
    """
    stages = pipeline * virtual
    return stages * (stages - 1) // 2 * blocks_per_stage


def paper_cached_blocks(pipeline: int, virtual: int, blocks_per_stage: int) -> int:
    """Blocks sent where ranks keep what they received: P (P - 1) / 2 x N_p + (V - 1) P^2 N_p (same source)."""
    first_pass = pipeline * (pipeline - 1) // 2 * blocks_per_stage
    return first_pass + (virtual - 1) * pipeline**2 * blocks_per_stage


def regular_tensors(pipeline: int, virtual: int, blocks_per_stage: int) -> int:
    """`PipelineTraffic.tensors` where all cuts fall on block edges and every stage has N_p blocks, in closed form.

    The paper's count, and the embedding, which is a summary too, at the P - 1 boundaries of the first pass; less the
    N_p blocks at each of the (V - 1) P later boundaries that the receiver computed itself and so holds as well.
    """
    own = (virtual - 1) * pipeline * blocks_per_stage
    return paper_cached_blocks(pipeline, virtual, blocks_per_stage) + (pipeline - 1) - own
