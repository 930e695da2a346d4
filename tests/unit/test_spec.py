"""The spec: all that K3 is built from goes through it, and Transformer Engine fits where the local layers do."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from test_model import small_model, whole_model

from k3train.config.implementation import resolve_transformer_impl
from k3train.config.load import recipe_from_dict
from k3train.config.rules_parallel import check_parallel
from k3train.config.schema import ParallelConfig, RecipeConfig
from k3train.config.validate import validate_machine
from k3train.errors import UserError


def test_the_cpu_and_fp32_take_local_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert resolve_transformer_impl("auto", "cpu", "bf16") == "local"
    assert resolve_transformer_impl("auto", "cuda", "fp32") == "local"
    assert resolve_transformer_impl("local", "cuda", "bf16") == "local"


@pytest.mark.parametrize("installed", [True, False])
def test_cuda_takes_transformer_engine_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    assert resolve_transformer_impl("auto", "cuda", "bf16") == ("te" if installed else "local")
    if not installed:
        with pytest.raises(UserError, match="transformer-engine is not installed; allowed here: auto, local"):
            resolve_transformer_impl("te", "cuda", "bf16")


def test_asking_for_it_where_it_cannot_run_is_refused() -> None:
    config = RecipeConfig()
    config.parallel.transformer_impl = "te"
    with pytest.raises(UserError, match=r"parallel\.transformer_impl=te needs train\.precision=bf16, found fp32"):
        check_parallel(config, world_size=1)
    config.train.precision = "bf16"
    with pytest.raises(UserError, match=r"this run is on the CPU.*try parallel\.transformer_impl=auto"):
        validate_machine(config, gpus=0)
    config.run.device = "cpu"
    with pytest.raises(UserError, match="this run is on the CPU"):
        validate_machine(config, gpus=8)


def test_the_key_s_old_name_leads_to_the_new_one() -> None:
    with pytest.raises(
        UserError, match=r"parallel\.linear: there is no such key.*try parallel\.transformer_impl=VALUE$"
    ):
        recipe_from_dict({"parallel": {"linear": "te"}})


def test_transformer_engine_that_cannot_be_loaded_is_said() -> None:
    """Never taken for one that is absent: `auto` has chosen it, and local layers would be a silent fallback."""
    from k3train.model.spec import k3_submodules

    with pytest.raises(UserError, match=r"cannot be loaded \(.+\); .*parallel\.transformer_impl=local"):
        k3_submodules("te")


def test_every_layer_is_built_through_the_spec(single_rank: None) -> None:
    """With another implementation of each entry, no layer of the local one is left, and names stay."""
    from k3train.model.model import K3Model
    from k3train.model.spec import k3_submodules
    from k3train.model.transformer_config import build_transformer_config
    
    local = k3_submodules("local")
    built: dict[int, str] = {}

    def recording(entry: str) -> type:
        class Recorded(getattr(local, entry)):
            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(*args, **kwargs)
                built[id(self)] = entry

        return Recorded

    names = [field.name for field in dataclasses.fields(local)]
    model = small_model()
    model.mtp.num_layers = 1
    contents = whole_model(model)
    config = build_transformer_config(model, ParallelConfig())
    plain = [(name, p.shape) for name, p in K3Model(config, contents).named_parameters()]
    config.spec = dataclasses.replace(local, **{name: recording(name) for name in names})
    whole = K3Model(config, contents)
    assert [(name, p.shape) for name, p in whole.named_parameters()] == plain

    counts = Counter(built.values())
    assert set(counts) == set(names)
    assert counts["core_attention"] == len(model.full_attention_layers) + (model.mtp.mixer == "mla")
    bypassed = {
        type(module).__name__
        for module in whole.modules()
        if id(module) not in built and (next(module.parameters(recurse=False), None) is not None)
    }
    assert bypassed == {"KimiDeltaAttention", "AttentionResidual", "QuantileBalancingRouter"}  # parts only K3 has


def compare(ranks: int, precision: str) -> dict:
    """Run `te_stand_in_rank.py` on this many ranks; the report of the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).parent / "te_stand_in_rank.py"
    processes = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-W", "ignore", str(script), str(ranks), precision]
        processes.append(
            subprocess.Popen(command, env=os.environ | place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, err[-4000:]
            outputs.append(out)
    finally:
        for process in processes:
            process.kill()
    return json.loads(outputs[0].splitlines()[-1])


@pytest.mark.parametrize(("ranks", "precision", "tolerance"), [(1, "fp32", 2e-5), (2, "fp32", 2e-5), (1, "bf16", 0.1)])
def test_transformer_engine_s_layers_do_what_the_local_ones_do(ranks: int, precision: str, tolerance: float) -> None:
    """Megatron-Core's wrappers and ours, for real, over a stand-in for Transformer Engine's kernels."""
    report = compare(ranks, precision)
    assert report["parameters differ"] == []
    assert report["states differ"] == []
    assert report["loss"] < tolerance
    assert len(report["gradients"]) > 150
    norm = math.hypot(*(own for _, own in report["gradients"]))
    assert norm > 1.0
    assert math.hypot(*(apart for apart, _ in report["gradients"])) < tolerance * norm

    layers = report["layers"]
    expected = {"TEColumnParallel", "TERowParallel", "TEReplicated", "TERMSNorm", "TECoreAttention", "LatentExperts"}
    assert expected <= set(layers)
    assert not {"RowParallel", "ReplicatedLinear", "RMSNorm", "PackedAttention"} & set(layers)
    assert layers["ColumnParallel"] == 1  # the head
    shape, _, tensor_parallel, _, cut = report["parameters"]["decoder.layers.0.mixer.q_proj.weight"]
    assert (shape, tensor_parallel, cut) == ([32 // ranks, 32], True, 0)
    _, _, tensor_parallel, summed, _ = report["parameters"]["decoder.layers.0.input_norm.weight"]
    assert (tensor_parallel, summed) == (False, ranks > 1)
