"""Context parallelism computes what one rank computes, keeps documents apart, and sends what it says it sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import WorkerPool
from test_layouts_basic import equal_to_one_rank, global_batch, recipe, train
from torch.utils._python_dispatch import TorchDispatchMode

from k3train.config.schema import RecipeConfig

# Documents of each row of 32 tokens. Cut in two or four, they lie over all parts, end at every border or one token
# beside it, or fit between two.
ROWS = ([32], [16, 16], [8, 8, 8, 8], [3, 26, 3], [7, 2, 23], [15, 17], [17, 15], [1, 1, 1, 20, 2, 7])


def bordering_batch(config: RecipeConfig, step: int) -> dict[str, torch.Tensor]:
    """The tokens of `global_batch` in documents that meet the borders in every way, in another order at each step."""
    batch = global_batch(config, step)
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in ROWS]
    batch["document_ids"] = torch.stack(rows).roll(step, dims=0)
    return batch


@pytest.fixture(scope="module")
def one_rank(pool: WorkerPool) -> dict[bool, list[dict[str, Any]]]:
    """The one-rank runs, without and with multi-token prediction."""
    return {mtp: pool.run(train, 1, recipe(mtp=mtp), bordering_batch) for mtp in (False, True)}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2": (2, {"context": 2}),
    "cp4": (4, {"context": 4}),
    "cp2-dp2-micro-batch-1": (4, {"context": 2, "micro_batch_size": 1}),
    "cp2-tp2": (4, {"context": 2, "tensor": 2}),
    "cp2-pp2": (4, {"context": 2, "pipeline": 2}),
    "cp2-vpp2": (4, {"context": 2, "pipeline": 2, "virtual_pipeline": 2, "pipeline_layout": "Et|tt|t|ttL"}),
    "cp2-ep2": (2, {"context": 2, "expert": 2}),
    "cp2-tp2-ep4": (4, {"context": 2, "tensor": 2, "expert": 4}),
    "cp2-tp2-etp2-ep2": (4, {"context": 2, "tensor": 2, "expert_tensor": 2, "expert": 2}),
    "cp4-tp2-ep2": (8, {"context": 4, "tensor": 2, "expert": 2, "micro_batch_size": 4}),
    "cp4-micro-batch-4": (4, {"context": 4, "micro_batch_size": 4}),
    "cp2-recompute": (2, {"context": 2, "recompute": "full"}),
    "cp2-whole-optimizer": (2, {"context": 2, "distributed_optimizer": False}),
    "mtp-cp2": (2, {"mtp": True, "context": 2}),
    "mtp-cp4-recompute": (4, {"mtp": True, "context": 4, "recompute": "full"}),
    "mtp-cp2-tp2-pp2": (8, {"mtp": True, "context": 2, "tensor": 2, "pipeline": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_rank(pool: WorkerPool, one_rank: dict[bool, list[dict[str, Any]]], layout: str) -> None:
    world_size, settings = LAYOUTS[layout]
    mtp = settings.get("mtp", False)
    equal_to_one_rank(pool, world_size, recipe(**settings), recipe(mtp=mtp), one_rank[mtp], bordering_batch)


def mixers(config: RecipeConfig) -> dict[str, torch.nn.Module]:
    """One KDA and one Gated MLA layer with drawn weights, on this rank."""
    from k3train.model.build import build_chunks, start_model_parallel

    start_model_parallel(config.parallel)
    (model,), _ = build_chunks(config)
    return {"kda": model.decoder.layers["0"].mixer, "mla": model.decoder.layers["2"].mixer}


def part_of(rows: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """This rank's part of rows [s, b, h] as a leaf, and its packing."""
    from megatron.core import parallel_state

    from k3train.model.packing import Packing

    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    return rows.chunk(size)[rank].clone().requires_grad_(), Packing(ids).shard(rank, size)


def with_one_document_changed(
    rank: int, world_size: int, config: RecipeConfig, ids: torch.Tensor, changed: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Outputs and input gradients of each mixer on this rank's part, with other numbers in one document."""
    out = {}
    for name, mixer in mixers(config).items():
        generator = torch.Generator().manual_seed(4)
        rows, other = torch.randn(2, *ids.t().shape, config.model.hidden_size, generator=generator)
        rows = torch.where((ids.t() == changed).unsqueeze(-1), 3.0 * other, rows)
        x, packing = part_of(rows, ids)
        y = mixer(x, packing)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        out[name] = (y.detach(), grad)
    return out


@pytest.mark.parametrize("lengths", [[5, 22, 5], [16, 16], [9, 23]], ids=str)
def test_documents_do_not_touch_each_other(pool: WorkerPool, lengths: list[int]) -> None:
    """Other numbers in one document leave outputs and gradients of the others bit-equal, on every rank."""
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    config = recipe(context=4)
    before = pool.run(with_one_document_changed, 4, config, ids, -1)
    for document in range(len(lengths)):
        after = pool.run(with_one_document_changed, 4, config, ids, document)
        for mixer in ("kda", "mla"):
            for a, b in zip(*(list(zip(*(result[mixer] for result in runs))) for runs in (before, after))):
                kept = torch.cat(a)[ids[0] != document], torch.cat(b)[ids[0] != document]
                touched = torch.cat(a)[ids[0] == document], torch.cat(b)[ids[0] == document]
                assert torch.equal(*kept), (mixer, document)
                assert not torch.isclose(*touched).all(-1).any(), (mixer, document)


class CountBytes(TorchDispatchMode):
    """Bytes that this rank hands to each kind of communication, wherever in the code it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d":
            # Inputs are the second argument of a collective and the first of a send.
            name = func._schema.name.removeprefix("c10d::")
            tensors = args[0] if name == "send" else args[1]
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            if name != "recv_":
                self.sent.setdefault(name, []).append(sum(t.numel() * t.element_size() for t in tensors))
        return func(*args, **(kwargs or {}))


def traffic(rank: int, world_size: int, config: RecipeConfig, batch: int, name: str) -> list[dict[str, list[int]]]:
    """What one mixer sends in its forward and in its backward pass, for one micro-batch of `batch` rows."""
    mixer = mixers(config)[name]
    length = config.train.seq_length
    x, packing = part_of(torch.randn(length, batch, config.model.hidden_size), torch.zeros(batch, length).long())
    with CountBytes() as forward:
        y = mixer(x, packing)
    with CountBytes() as backward:
        y.sum().backward()
    return [forward.sent, backward.sent]


@pytest.mark.parametrize("context", [2, 4])
def test_kda_sends_the_same_at_every_length(pool: WorkerPool, context: int) -> None:
    """The closed form of docs/context_parallel.md at two lengths; Gated MLA's grows, so the counter sees lengths."""
    batch, counted = 2, {}
    for length in (32, 128):
        config = recipe(context=context)
        config.train.seq_length = length
        counted[length] = (
            pool.run(traffic, context, config, batch, "kda"),
            pool.run(traffic, context, config, batch, "mla"),
        )
    kda = config.model.kda
    transition, state = (batch * kda.num_heads * kda.head_dim * kda.head_dim * 4 for _ in range(2))
    tail = batch * (kda.conv_size - 1) * 3 * kda.num_heads * kda.head_dim * 4
    for length, (of_kda, of_mla) in counted.items():
        for rank, (forward, backward) in enumerate(of_kda):
            assert forward == {
                "_allgather_base_": [transition + state],
                **({"send": [tail]} if rank < context - 1 else {}),
            }
            assert backward == {"_allgather_base_": [state], **({"send": [tail]} if rank > 0 else {})}
        width = config.model.mla.kv_lora_rank + config.model.mla.qk_rope_head_dim
        for forward, backward in of_mla:
            assert forward == {"_allgather_base_": [batch * length // context * width * 4]}
            assert backward == {"_reduce_scatter_base_": [batch * length * width * 4]}
