"""Lets Megatron-Core run on the CPU. The only place in this project that patches somebody else's code.

Megatron-Core 0.19 takes CUDA for granted in a few spots: it asks for the current device, makes streams and events,
allocates scalars with ``device="cuda"``, compares ``Tensor.type()`` with ``"torch.cuda.*"`` names, keeps its random
number states on the GPU, turns split sizes into numpy arrays only when they come from a GPU, and compiles helpers with
``torch.compile``. `install` answers
each of these for the CPU. It does nothing on a machine where CUDA is used, and is idempotent.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import queue
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_installed = False

# Modules of Megatron-Core that allocate with a literal device="cuda" on paths this project uses.
_LITERAL_CUDA_MODULES = (
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
    "megatron.core.transformer.moe.token_dispatcher",
    "megatron.core.utils",
)


class _NullStream:
    """A stream that is always finished: CPU work is synchronous."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *args: Any) -> _NullEvent:
        return _NullEvent()

    def __enter__(self) -> _NullStream:
        return self

    def __exit__(self, *args: Any) -> None: ...


class _NullEvent:
    """An event that has always happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _CpuTorch(types.ModuleType):
    """The torch module as seen by one Megatron-Core module: factories asked for "cuda" allocate on the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in ("zeros", "ones", "empty", "full", "tensor", "arange", "empty_like", "zeros_like"):
            setattr(self, name, _redirect_device(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _redirect_device(factory: Any) -> Any:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return on_cpu


def _patch_torch_cuda() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = _NullStream
    cuda.Event = _NullEvent
    cuda.current_stream = lambda *args: _NullStream()
    cuda.default_stream = lambda *args: _NullStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda *args: None
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.random.get_rng_state = cuda.get_rng_state


def _patch_tensor_methods() -> None:
    original_type = torch.Tensor.type

    def type_as_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original_type(self, *args, **kwargs)
        return original_type(self).replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_as_cuda
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


def _patch_megatron() -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.tensor_parallel import random as tp_random
    from megatron.core.transformer.moe import token_dispatcher

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    def split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    # Checkpoints are written by threads of the rank itself; the default is a queue in a process of its own per rank,
    # which takes seconds to start on a laptop and cannot start in a daemonic worker.
    filesystem_async._results_queue = queue.Queue()
    tp_random._get_cuda_rng_state = get_state
    tp_random._set_cuda_rng_state = set_state
    token_dispatcher.maybe_move_tensor_to_cpu = split_sizes
    proxy = _CpuTorch()
    for name in _LITERAL_CUDA_MODULES:
        importlib.import_module(name).torch = proxy


def _run_eagerly() -> None:
    """Megatron-Core compiles small functions at their first call; on a CPU that costs more than it ever gives back.

    Its decorators load the compiler when Megatron-Core is imported, a third of the time that takes; where that is still
    to come, it happens here and without them.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True

    def as_it_is(model: Any = None, **options: Any) -> Any:  # the parameter's name is torch.compile's
        return as_it_is if model is None else model

    compiler, torch.compile = torch.compile, as_it_is
    try:
        importlib.import_module("megatron.core")
    finally:
        torch.compile = compiler


def _padded(parts: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """Tensors [n_i, ...] end to end as [len(parts) * length, ...], each filled up with zeros."""
    whole = parts[0].new_zeros(len(parts), length, *parts[0].shape[1:])
    for row, part in zip(whole, parts):
        row[: len(part)] = part
    return whole.flatten(0, 1)


def _patch_uneven_collectives() -> None:
    """Expert tensor parallelism gathers and reduce-scatters as many tokens as each rank has; pad them for gloo."""
    from megatron.core.tensor_parallel import mappings

    even_gather, even_reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(
        input_: torch.Tensor,
        group: Any,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, None, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = _padded([input_], max(sizes))
        whole = [torch.empty_like(padded) for _ in sizes]
        if padded.numel():
            dist.all_gather(whole, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(whole, sizes)])

    def reduce_scatter(
        input_: torch.Tensor,
        group: Any,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_reduce_scatter(input_, group, None, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        padded = _padded(input_.split(sizes), max(sizes))
        mine = input_.new_empty(max(sizes), *input_.shape[1:])
        if mine.numel():
            dist.reduce_scatter_tensor(mine, padded, group=group)
        return mine[: sizes[group.rank()]]

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce_scatter


def install() -> None:
    """Adapt torch and Megatron-Core to the CPU, once. Call before any Megatron module is built."""
    global _installed
    if _installed:
        return
    _run_eagerly()
    _patch_torch_cuda()
    _patch_tensor_methods()
    _patch_megatron()
    _patch_uneven_collectives()
    _installed = True
