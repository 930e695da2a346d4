"""One rank of `test_spec.py`'s comparison: K3 on local layers and on Transformer Engine's (over the stand-in).

Prints one JSON object: what differs between the two, and by how much.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import te_stand_in

te_stand_in.install()

import torch  # noqa: E402

from k3train import platform  # noqa: E402
from k3train.config.schema import ParallelConfig  # noqa: E402


def build(impl: str, parallel: ParallelConfig, precision: str) -> torch.nn.Module:
    from test_model import small_model, whole_model

    from k3train.model.init import init_weights
    from k3train.model.model import K3Model
    from k3train.model.transformer_config import build_transformer_config

    model = small_model()
    model.mtp.num_layers = 1
    model.init_std = 0.1
    config = build_transformer_config(model, parallel, precision, transformer_impl=impl)
    built = K3Model(config, whole_model(model))
    init_weights(built, config, seed=3)
    return built


def run(model: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token losses and gradients of a packed micro-batch."""
    from k3train.model.packing import Packing

    ids = torch.tensor([[0] * 9 + [1] * 13 + [2] * 8 + [3] * 2, [0] * 32], dtype=torch.int32)
    tokens, labels = torch.randint(0, 64, (2, *ids.shape), generator=torch.Generator().manual_seed(0))
    losses = model(tokens, Packing(ids), labels=labels, loss_mask=torch.ones(ids.shape))
    (losses.loss.sum() + losses.mtp_loss.sum()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses.loss.detach(), gradients


def description(parameter: torch.nn.Parameter) -> list:
    marks = ("tensor_model_parallel", "sequence_parallel")
    cut = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None
    return [list(parameter.shape), str(parameter.dtype), *(bool(getattr(parameter, m, False)) for m in marks), cut]


def sharded(model: torch.nn.Module) -> dict[str, str]:
    from k3train.checkpoint.store import _metadata

    state = model.sharded_state_dict(metadata=_metadata())
    return {k: f"{v.key} {v.global_shape} {v.global_offset} {v.replica_id}" for k, v in state.items()}


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[tuple[float, float]]:
    """Of each gradient: the norm of the difference, and its own."""
    assert one.keys() == other.keys()
    return [((one[n].float() - other[n].float()).norm().item(), one[n].float().norm().item()) for n in one]


def main() -> None:
    tensor, precision = int(sys.argv[1]), sys.argv[2]
    platform.start("cpu", threads=1)
    from k3train.model.build import start_model_parallel

    parallel = ParallelConfig(tensor=tensor)
    start_model_parallel(parallel)
    models = {impl: build(impl, parallel, precision) for impl in ("local", "te")}
    local, te = models["local"], models["te"]
    te.load_state_dict(local.state_dict())  # strict, both ways
    local.load_state_dict(te.state_dict())
    losses = {impl: run(model) for impl, model in models.items()}
    report = {
        "layers": Counter(type(module).__name__ for module in te.modules()),
        "parameters": {n: description(p) for n, p in te.named_parameters()},
        "parameters differ": [
            n for n, p in local.named_parameters() if description(p) != description(te.get_parameter(n))
        ],
        "states differ": sorted(set(sharded(local).items()) ^ set(sharded(te).items())),
        "loss": (losses["local"][0] - losses["te"][0]).abs().max().item(),
        "gradients": differences(losses["local"][1], losses["te"][1]),
    }
    platform.stop()
    print(json.dumps(report))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
