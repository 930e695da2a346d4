"""Attention Residuals over a pipeline, without ranks: what crosses a boundary, and that gradients find their way back.

The stages of a pipeline run one after the other in this process. Each gets the payload of the stage before as a new
leaf, as after a transfer, and its backward runs by hand, as a schedule does it.
"""

from __future__ import annotations

import gc
import random

import pytest
import torch

from k3train.config.layout import even_layout
from k3train.parallel import payload
from k3train.parallel.payload import HeldSummaries, StageStream
from k3train.parallel.traffic import (
    PipelineTraffic,
    paper_cached_blocks,
    paper_naive_blocks,
    regular_tensors,
    step_bytes,
)

HIDDEN = 4


def sets_of_summaries(ends: tuple[int, ...], pipeline: int, block: int) -> list[set[int]]:
    """What each boundary has to carry beside the running sum, by set arithmetic over single layers."""
    stages = [range(a, b) for a, b in zip((0, *ends), ends)]
    known: dict[int, set[int]] = {rank: set() for rank in range(pipeline)}
    made: set[int] = set()
    carried = []
    for stage, layers in enumerate(stages):
        for layer in layers:
            if layer % block == 0:
                made.add(layer // block)
        known[stage % pipeline] |= made
        if ends[stage] % block == 0:  # the running sum it computed is the next block's summary
            known[stage % pipeline].add(ends[stage] // block)
        if stage + 1 < len(stages):
            carried.append(made - known[(stage + 1) % pipeline])
    return carried


def random_cuts(chance: random.Random, pipeline: int, virtual: int) -> tuple[int, ...]:
    ends, layers = [], 0
    for _ in range(pipeline * virtual):
        layers += chance.randint(1, 4)
        ends.append(layers)
    return tuple(ends)


@pytest.mark.parametrize("seed", range(40))
def test_boundaries_carry_what_set_arithmetic_says(seed: int) -> None:
    chance = random.Random(seed)
    pipeline, virtual, block = chance.randint(2, 5), chance.randint(1, 4), chance.randint(1, 6)
    traffic = PipelineTraffic(random_cuts(chance, pipeline, virtual), pipeline, block)
    carried = sets_of_summaries(traffic.ends, pipeline, block)
    assert [traffic.tensors_sent(stage) - 1 for stage in range(len(carried))] == [len(c) for c in carried]
    for stage, summaries in enumerate(carried):
        boundary = traffic.boundary(stage)
        assert summaries == set(range(boundary.first_sent, traffic.summaries_after(stage)))
        following = traffic.boundary(stage + 1)
        assert (following.held, following.received) == (boundary.first_sent, len(summaries))
    assert traffic.tensors_sent(len(carried)) == 0


@pytest.mark.parametrize("pipeline", [2, 3, 8])
@pytest.mark.parametrize("virtual", [1, 2, 4])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_regular_pipelines_follow_the_closed_formula(pipeline: int, virtual: int, blocks: int) -> None:
    """Cuts on block edges, N_p blocks a stage: the paper's formulas, adjusted as `regular_tensors` says."""
    block, stages = 5, pipeline * virtual
    traffic = PipelineTraffic(tuple(block * blocks * (i + 1) for i in range(stages)), pipeline, block)
    assert traffic.tensors() == regular_tensors(pipeline, virtual, blocks)
    # The paper counts finished blocks: the embedding is one more source, at every boundary.
    assert traffic.naive_tensors() == paper_naive_blocks(pipeline, virtual, blocks) + stages - 1
    extra = traffic.tensors() - paper_cached_blocks(pipeline, virtual, blocks)
    assert extra == (pipeline - 1) - (virtual - 1) * pipeline * blocks


def test_k3_at_pp8() -> None:
    """The figures that docs/pipeline.md states: 93 layers in blocks of 12, spread evenly."""
    rows = {}
    for virtual in (1, 2, 3, 4):
        traffic = PipelineTraffic.of(even_layout(93, 8 * virtual), 8, 12)
        rows[virtual] = traffic.tensors(), traffic.naive_tensors()
    assert rows == {1: (35, 35), 2: (59, 79), 3: (72, 123), 4: (83, 167)}
    recipe = PipelineTraffic.of("Et*3|(t*3|)*30mL", 16, 12)
    assert (recipe.tensors(), recipe.naive_tensors()) == (123, 167)
    # 8,192 tokens of 7,168 bf16 values, forward and backward
    assert step_bytes(traffic, 8192, 7168, 2) == 83 * 2 * 8192 * 7168 * 2


def test_without_attention_residuals_only_the_stream_travels() -> None:
    traffic = PipelineTraffic((2, 4, 6, 8), 2, None)
    assert traffic.tensors() == traffic.naive_tensors() == 3
    assert not any(traffic.boundary(stage).keeps for stage in range(4))


def layer(index: int, bank: list[torch.Tensor], partial: torch.Tensor, block: int, weights: torch.Tensor):
    """A stand-in for a decoder layer that reads every source with a weight of its own."""
    opens = index % block == 0
    sources = [*bank, partial]
    mixed = sum(torch.sin(source * weights[index, i]) for i, source in enumerate(sources))
    return mixed if opens else partial + mixed


def single_run(embedding: torch.Tensor, layers: int, block: int, weights: torch.Tensor) -> torch.Tensor:
    bank, partial = [], embedding
    for index in range(layers):
        new = layer(index, bank, partial, block, weights)
        if index % block == 0:
            bank = [*bank, partial]
        partial = new
    return sum(torch.sin(s * (i + 2)) for i, s in enumerate([*bank, partial])).sum()


def run_stage(
    traffic: PipelineTraffic, stage: int, arrived: torch.Tensor, held: HeldSummaries, weights: torch.Tensor
) -> torch.Tensor:
    """What `K3Block.forward` does, with the stand-in layers; the loss on the last stage."""
    through = StageStream(traffic.boundary(stage), held, arrived)
    for index in range(traffic.ends[stage - 1] if stage else 0, traffic.ends[stage]):
        opens = index % traffic.block_size == 0
        if opens:
            through.summarise()
        partial, bank = through.partial, through.bank
        through.partial = layer(index, bank, partial, traffic.block_size, weights)
        if opens:
            through.bank = [*bank, partial]
    if stage + 1 < len(traffic.ends):
        return through.send()
    through.close()
    return sum(torch.sin(s * (i + 2)) for i, s in enumerate([*through.bank, through.partial])).sum()


def by_stages(traffic: PipelineTraffic, embedding: torch.Tensor, weights: torch.Tensor) -> tuple[float, int]:
    """Loss and bytes sent forward and backward; gradients go to `embedding` and `weights`."""
    held = [HeldSummaries() for _ in range(traffic.pipeline)]
    inputs, outputs, sent = [embedding], [], 0
    for stage in range(len(traffic.ends)):
        outputs.append(run_stage(traffic, stage, inputs[stage], held[stage % traffic.pipeline], weights))
        if stage + 1 < len(traffic.ends):
            sent += outputs[-1].numel() * outputs[-1].element_size()
            inputs.append(outputs[-1].detach().requires_grad_())
    assert not any(len(h) for h in held), "the last chunk of each rank lets go of what was kept"
    gradient = None
    for stage in reversed(range(len(traffic.ends))):
        torch.autograd.backward(outputs[stage], gradient)
        if stage:
            gradient = inputs[stage].grad
            sent += gradient.numel() * gradient.element_size()
    return float(outputs[-1]), sent


@pytest.mark.parametrize("seed", range(25))
def test_gradients_of_kept_summaries_return_to_their_makers(seed: int) -> None:
    chance = random.Random(seed)
    pipeline, virtual, block = chance.randint(2, 4), chance.randint(1, 4), chance.randint(1, 5)
    traffic = PipelineTraffic(random_cuts(chance, pipeline, virtual), pipeline, block)
    layers, length = traffic.ends[-1], 3
    torch.manual_seed(seed)
    start = torch.randn(length, 2, HIDDEN, dtype=torch.float64)
    values = torch.rand(layers, layers // block + 2, dtype=torch.float64)
    results = []
    for run in (single_run, by_stages):
        embedding, weights = start.clone().requires_grad_(), values.clone().requires_grad_()
        if run is single_run:
            loss = single_run(embedding, layers, block, weights)
            loss.backward()
            results.append((float(loss.detach()), embedding.grad, weights.grad))
        else:
            loss, sent = by_stages(traffic, embedding, weights)
            assert sent == step_bytes(traffic, length * 2, HIDDEN, 8)
            results.append((loss, embedding.grad, weights.grad))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-12)
    torch.testing.assert_close(results[1][1:], results[0][1:], rtol=1e-9, atol=1e-12)


def test_an_embedding_without_layers_is_a_stage_too() -> None:
    traffic = PipelineTraffic.of("E|tt|t|ttL", 2, 2)
    assert traffic.ends == (0, 2, 3, 5)
    start = torch.randn(3, 1, HIDDEN, dtype=torch.float64)
    weights = torch.rand(5, 4, dtype=torch.float64)
    whole, parts = start.clone().requires_grad_(), start.clone().requires_grad_()
    loss = single_run(whole, 5, 2, weights)
    loss.backward()
    assert by_stages(traffic, parts, weights)[0] == pytest.approx(float(loss.detach()), rel=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad)


TWO_BY_TWO = PipelineTraffic((2, 4, 6, 8), 2, 2)


def test_nothing_outlives_a_micro_batch() -> None:
    """Neither after a step, nor without gradients, nor where a step ends in the middle."""
    weights = torch.rand(8, 6, dtype=torch.float64, requires_grad=True)
    start = torch.randn(3, 1, HIDDEN, dtype=torch.float64)

    def alive() -> int:
        gc.collect()
        return sum(isinstance(thing, payload._Slot) for thing in gc.get_objects())

    by_stages(TWO_BY_TWO, start.clone().requires_grad_(), weights)
    assert alive() == 0
    held = HeldSummaries()
    with torch.no_grad():
        out = run_stage(TWO_BY_TWO, 0, start, held, weights)
        assert alive() == len(held) == 2
        out = run_stage(TWO_BY_TWO, 2, start, held, weights)
    assert len(held) == alive() == 0
    out = run_stage(TWO_BY_TWO, 0, start.clone().requires_grad_(), held, weights)
    assert alive() > 0
    del out, held  # an exception drops the micro-batch and its graph
    assert alive() == 0


def test_a_schedule_that_goes_back_in_another_order_is_refused() -> None:
    weights = torch.rand(8, 6, dtype=torch.float64, requires_grad=True)
    held = HeldSummaries()
    first = run_stage(TWO_BY_TWO, 0, torch.randn(3, 1, HIDDEN, dtype=torch.float64).requires_grad_(), held, weights)
    arrived = torch.randn(3, 1, HIDDEN, dtype=torch.float64).requires_grad_()
    run_stage(TWO_BY_TWO, 2, arrived, held, weights)
    with pytest.raises(RuntimeError, match="but 0 of them have run their backward"):
        first.sum().backward()


def test_chunks_out_of_order_are_refused() -> None:
    weights = torch.rand(8, 6, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="holds 0 block summaries of the micro-batch and its stage needs 2"):
        run_stage(TWO_BY_TWO, 2, torch.randn(3, 1, HIDDEN, dtype=torch.float64), HeldSummaries(), weights)
