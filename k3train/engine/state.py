"""The whole tensors of a model that DeepSpeed has sharded: out of it for saving, and into it for loading.

Everything here is called by all ranks, for they hold the shards. Whole tensors do not depend on the number of ranks, on
the ZeRO stage or on where things are kept, so all of these may differ between two starts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from k3train.checkpoint.whole import Tensors
from k3train.engine.zero import MOMENTS, ZeroParts


def whole_tensors(parts: ZeroParts) -> Iterator[tuple[str, Tensors]]:
    """Every parameter and stored buffer by name: `fp32` and AdamW's moments, or `frozen`, or `buffer`.

    The tensors are valid until the next is asked for.
    """
    utils = parts.deepspeed.utils
    for name, parameter in parts.engine.module.named_parameters():
        if parameter.requires_grad:
            group = {"fp32": utils.safe_get_full_fp32_param(parameter)}
            group |= {m: utils.safe_get_full_optimizer_state(parameter, m) for m in MOMENTS}
            shape = getattr(parameter, "ds_shape", parameter.shape)
            yield name, {kind: tensor.view(shape) for kind, tensor in group.items()}
        else:
            with parts.deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
                yield name, {"frozen": parameter.detach().float()}
    for name, buffer in stored_buffers(parts.engine.module):
        yield name, {"buffer": buffer}


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and whole shapes of what `whole_tensors` gives, of a model that is sharded or not."""
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}
    return shapes | {name: tuple(buffer.shape) for name, buffer in stored_buffers(model)}


def set_everything(parts: ZeroParts, read: Mapping[str, Tensors], step: int) -> None:
    """Weights, moments and buffers as `whole_tensors` gave them, after `step` steps."""
    set_weights(parts, ((name, kinds) for name, kinds in read.items()))
    for name, parameter in parts.engine.module.named_parameters():
        if parameter.requires_grad:
            for moment in MOMENTS:
                _set_state(parts, parameter, read[name][moment], moment)
    for state in parts.optimizer.adamw.state.values():
        state["step"].fill_(step)


def set_weights(parts: ZeroParts, read: Iterable[tuple[str, Tensors]]) -> None:
    """Weights and buffers alone."""
    parameters = dict(parts.engine.module.named_parameters())
    buffers = dict(parts.engine.module.named_buffers())
    for name, kinds in read:
        if name in buffers:
            buffers[name].copy_(kinds["buffer"])
            continue
        parameter = parameters[name]
        value = kinds["fp32"] if "fp32" in kinds else kinds["frozen"]
        sharded = hasattr(parameter, "ds_id")
        with (
            torch.no_grad(),
            parts.deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=sharded),
        ):
            parameter.copy_(value)
        if parameter.requires_grad:
            _set_state(parts, parameter, value, None)


def stored_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a checkpoint keeps: router biases."""
    stored = model.state_dict(keep_vars=True)
    return ((name, buffer) for name, buffer in model.named_buffers() if name in stored)


def _set_state(parts: ZeroParts, parameter: torch.nn.Parameter, value: torch.Tensor, moment: str | None) -> None:
    """This rank's shard of the fp32 parameter (`moment` None) or of a moment, from the whole tensor."""
    utils, value = parts.deepspeed.utils, value.float().flatten()
    if not hasattr(parameter, "ds_id"):
        if moment is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, moment)
        return
    # DeepSpeed's own setter of whole tensors does not fill up those that the ranks do not divide.
    size = parameter.ds_tensor.numel()
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    own = torch.nn.functional.pad(value, (0, size * ranks - value.numel()))[size * rank : size * (rank + 1)]
    if moment is None:
        utils.safe_set_local_fp32_param(parameter, own)
    else:
        utils.safe_set_local_optimizer_state(parameter, own, moment)
