"""The one place that imports DeepSpeed, an optional package, and prepares it for ranks that stand already."""

from __future__ import annotations

import logging
import os
from types import ModuleType
from typing import Any

import torch

from k3train.config.deepspeed import DeepSpeedConfig
from k3train.errors import UserError
from k3train.platform import Platform


def load_deepspeed(here: Platform) -> ModuleType:
    """DeepSpeed, on this rank's device and over the process group that k3train started; its launcher is not used.

    Raises:
        UserError: it is not installed, or was imported for another kind of device.
    """
    # Read once, when DeepSpeed is imported; unset, it probes what it finds and may take a GPU that the run must not.
    os.environ.setdefault("DS_ACCELERATOR", here.kind)
    os.environ.setdefault("LOCAL_RANK", str(here.local_rank))  # it refuses to start without
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(
            f"engine=deepspeed needs the package deepspeed, which cannot be imported ({error}); install it with"
            " `pip install -e '.[deepspeed]'`, or try engine=megatron"
        ) from error
    found = deepspeed.accelerator.get_accelerator().device_name()
    if found != here.kind:
        raise UserError(
            f"DS_ACCELERATOR makes DeepSpeed compute on {found}, but run.device is {here.kind}; unset it, or try"
            f" DS_ACCELERATOR={here.kind}"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # its own import sets another
    # It would compile a C++ extension for reductions in shared memory on the CPU; gloo does without a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(here.backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed


def zero_config(settings: DeepSpeedConfig) -> dict[str, Any]:
    """DeepSpeed's `zero_optimization` section."""
    section: dict[str, Any] = {
        "stage": settings.zero_stage,
        # Our layers save what their backward needs by themselves; DeepSpeed's replaced linear layer would hide it.
        "memory_efficient_linear": False,
        "overlap_comm": False,
    }
    pinned = os.environ["DS_ACCELERATOR"] != "cpu"
    if settings.offload_optimizer:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    if settings.zero_stage == 3:
        section["stage3_param_persistence_threshold"] = settings.persistence_threshold
        if settings.offload_parameters:
            section["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    return section


def prepare_for_zero(model: torch.nn.Module) -> None:
    """Take off the marks of Megatron-Core's data parallelism, which DeepSpeed reads as its own expert parallelism.

    All ranks hold all experts here, so their gradients are reduced like every other.
    """
    for parameter in model.parameters():
        if hasattr(parameter, "allreduce"):
            del parameter.allreduce


def shard_parameters(deepspeed: ModuleType, model: torch.nn.Module, config: dict[str, Any], here: Platform) -> None:
    """Cut the parameters over the ranks (ZeRO-3), one after the other, and move the buffers to the device.

    A decoder layer is fetched as a whole: its parts use each other's parameters, and recompute them in backward. A
    rounded copy of experts' weights that outlived the fetching would be a whole one, so they are rounded at each.
    """
    from k3train.model.experts import LatentExperts
    from k3train.model.layer import K3Layer

    deepspeed.utils.set_z3_leaf_modules(model, [K3Layer])
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    for module in model.modules():
        if isinstance(module, LatentExperts) and module.fake_quant is not None:
            module.fake_quant.keeps = False
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(here.device))


def describe(deepspeed: ModuleType, settings: DeepSpeedConfig) -> str:
    """`deepspeed 0.19.8, ZeRO-3, optimizer on the CPU` for the metrics."""
    words = [f"deepspeed {deepspeed.__version__}", f"ZeRO-{settings.zero_stage}"]
    offloaded = [
        name
        for name, used in (("optimizer", settings.offload_optimizer), ("parameters", settings.offload_parameters))
        if used
    ]
    if offloaded:
        words.append(f"{' and '.join(offloaded)} on the CPU")
    return ", ".join(words)
