"""The local engine over pipelines and replicas: the samples of one rank, each computed once, by whom it should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from saved_weights import VOCAB, recipe

# Groups of several samples, prompts of other lengths; more samples than rows, so that some begin later.
GROUPS = ((1, 9, 3), (2, 70, 2), (3, 4, 4), (4, 1, 1))
LAYOUTS = {
    "pp2": (2, {"pipeline": 2}),
    "pp2_vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "pp2_vpp2_uneven": (2, {"pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "E|tt|t|tL"}),
    "dp2": (2, {}),
    "cp2": (2, {"context": 2}),
    "ep2": (2, {"expert": 2}),
    "tp2": (2, {"tensor": 2}),
    "dp3": (3, {}),
    "pp2_ep2": (4, {"pipeline": 2, "expert": 2}),
    "pp2_vpp2_tp2": (4, {"pipeline": 2, "virtual_pipeline": 2, "tensor": 2}),
    "tp2_ep2_dp2": (4, {"tensor": 2, "expert": 2}),
}


def generate(
    rank: int, world_size: int, parallel: dict[str, Any], keep: bool = False, dispatcher: str = "alltoall"
) -> dict[str, Any]:
    """Generate for GROUPS with two pauses; what was said of each sample, and what this rank computed for it."""
    import torch.distributed as dist

    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.rollout.engine import Work
    from k3train.rollout.local import LocalEngine
    from k3train.rollout.sampling import SamplingConfig

    config = recipe(**parallel)
    config.model.moe.dispatcher = dispatcher
    start_model_parallel(config.parallel)
    chunks, _ = build_chunks(config)
    forwarded: list[int] = []
    chunks[0].register_forward_pre_hook(lambda _, args: forwarded.append(int((~padding(args)).sum())))
    engine = LocalEngine(
        chunks, VOCAB, dist.group.WORLD, max_rows=6, keep_states=keep, prefill_tokens=33, record_experts=True
    )
    sampling = SamplingConfig(11, seed=5)
    jobs = []
    for group, length, samples in GROUPS:
        prompt = torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        jobs += [Work((group, j), tuple(prompt), sampling) for j in range(samples)]
    said: dict = {work.key: [] for work in jobs}
    counts: list[int] = []
    for polls in (4, 5, None):
        engine.submit([gone_on(work, said[work.key]) for work in jobs if len(said[work.key]) < 11])
        while (polls is None or polls > 0) and (pieces := engine.poll()):
            polls = None if polls is None else polls - 1
            counts.append(len(pieces))
            for piece in pieces:
                said[piece.key].append((piece.token, piece.logprob, piece.finish, piece.experts))
        engine.pause()
    for work in jobs:
        engine.release(work.key)
    generator = engine._generator
    return {
        "said": said,
        "counts": counts,
        "forwarded": sum(forwarded),
        "left": len(generator.states.tokens) + len(generator.rows._others),
        "counters": engine.counters(),
        "bytes": generator._pipeline.bytes_sent,
    }


def padding(args: tuple) -> torch.Tensor:
    tokens, packing = args[:2]
    return torch.zeros_like(tokens, dtype=torch.bool) if packing.padding is None else packing.padding


def gone_on(work: Any, told: list) -> Any:
    new = tuple(token for token, *_ in told)
    sampling = replace(work.sampling, max_new_tokens=work.sampling.max_new_tokens - len(new))
    return replace(work, context=work.context + new, sampling=sampling, drawn=len(new))


@pytest.fixture(scope="module")
def one_rank(pool: Any) -> dict[str, Any]:
    return pool.run(generate, 1, {})[0]


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["counts"] == expected["counts"]  # every poll gives what it gives on one rank
    assert found["said"].keys() == expected["said"].keys()
    for key, pieces in expected["said"].items():
        ours = found["said"][key]
        assert [p[0] for p in ours] == [p[0] for p in pieces], key
        assert [p[2] for p in ours] == [p[2] for p in pieces]
        assert [p[1] for p in ours] == pytest.approx([p[1] for p in pieces], abs=1e-4)
        for (*_, one), (*_, other) in zip(ours, pieces):
            assert torch.equal(one.sort(dim=-1).values, other.sort(dim=-1).values)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_generate_the_same(pool: Any, one_rank: dict[str, Any], name: str) -> None:
    """Tokens, log-probabilities and experts, with pauses; and no sample is computed by two replicas."""
    ranks, parallel = LAYOUTS[name]
    results = pool.run(generate, ranks, parallel)
    for found in results:
        same(found, one_rank)
        assert found["left"] == 0
    size, tensor = parallel.get("pipeline", 1), parallel.get("tensor", 1)
    replicas = ranks // (size * tensor)
    assert sum(found["forwarded"] for found in results) == one_rank["forwarded"] * ranks // replicas
    shares = [v for k, v in results[0]["counters"].items() if k.startswith("generated_tokens_replica")]
    assert len(shares) == (replicas if replicas > 1 else 0)
    if replicas > 1:
        assert sum(shares) == results[0]["counters"]["generated_tokens"] == 110
        assert min(shares) >= 0.2 * 110 / replicas  # whole groups, of 1 to 4 samples
    assert (sum(found["bytes"] for found in results) > 0) == (size > 1)


@pytest.mark.parametrize("name", ["dp2", "pp2_vpp2"])
def test_states_kept_over_pauses(pool: Any, name: str) -> None:
    """Whoever began a sample goes on with it."""
    ranks, parallel = LAYOUTS[name]
    [expected] = pool.run(generate, 1, {}, True)
    for found in pool.run(generate, ranks, parallel, True):
        same(found, expected)
        assert found["counters"]["kept_states"] == expected["counters"]["kept_states"] > 0
        assert found["counters"]["prefilled_tokens"] == expected["counters"]["prefilled_tokens"]
        assert found["left"] == 0


def test_experts_that_gather_all_tokens(pool: Any, one_rank: dict[str, Any]) -> None:
    """A dispatcher that needs as many tokens from every rank gets filler."""
    for found in pool.run(generate, 2, {"expert": 2}, False, "allgather"):
        same(found, one_rank)


def spoil(rank: int, world_size: int, parallel: dict[str, Any]) -> str:
    """Generate with weights that are no numbers in the last stage of the last replica."""
    import torch.distributed as dist

    from k3train.errors import UserError
    from k3train.model.build import build_chunks, start_model_parallel
    from k3train.rollout.generate import BatchGenerator, Request

    config = recipe(**parallel)
    start_model_parallel(config.parallel)
    chunks, _ = build_chunks(config)
    if rank == world_size - 1:
        with torch.no_grad():
            chunks[-1].decoder.final_norm.weight.fill_(torch.nan)
    generator = BatchGenerator([chunk.eval() for chunk in chunks], group=dist.group.WORLD)
    for prompt in ((1, 2), (3, 4)):
        generator.submit(Request(prompt))
    try:
        list(generator.run())
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("parallel", [{}, {"pipeline": 2}], ids=["dp2", "pp2"])
def test_all_ranks_learn_of_logits_that_are_none(pool: Any, parallel: dict[str, Any]) -> None:
    """One of them meets NaN, and none waits for it."""
    assert all("logits are not finite" in said for said in pool.run(spoil, 2, parallel))
