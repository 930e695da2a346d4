"""The model reaches the kernels: `model.kernels=triton` gives what `torch` gives, through each Triton form, as often as
the model has a use for it. In Triton's interpreter, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import model_in_triton
import pytest
from k3kernels.registry import OPERATIONS

from k3train.model.operations import USED_BY

pytest.importorskip("triton", reason="Triton has no build for this machine")

ROOT = Path(__file__).resolve().parents[2]
# Two norms a layer, two of MLA's latents, the sum of the experts', the last one; a KDA layer's q, k and v; a dense FFN,
# the routed and the shared experts; every mixture but the first, whose source is alone.
PREFILL = {
    "rms_norm": 8,
    "gated_rms_norm": 1,
    "short_conv": 1,  # of q, k and v together
    "mix": 4,
    "situ_glu": 3,
    "scale_rows": 1,
    "quantile_balancing": 1,
    "mx": 2,  # the inputs of the experts' two products, whose weights are kept
}
TRAINING = {
    **PREFILL,
    "rms_norm": 8 + 4,  # sublayers mix and normalise again in the backward
    "mix": 4 + 3,
    "short_conv": 3,
    "mx": 2 + 2 * 6,  # and two weights of each expert
    "cross_entropy": 1,
    "rms_norm backward": 8,
    "gated_rms_norm backward": 1,
    "mix backward": 4,
    "situ_glu backward": 3,
    "scale_rows backward": 1,
    "short_conv backward": 3,
    "cross_entropy backward": 1,
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    """What the program prints; most of its time goes into imports."""
    places = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "tools")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": places}
    command = [sys.executable, model_in_triton.__file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_call_of_the_model_reaches_its_triton_form(found: dict[str, dict]) -> None:
    assert found["calls"]["training"] == TRAINING
    assert found["calls"]["shard_losses"] == {"cross_entropy": 1, "cross_entropy backward": 1}
    assert found["calls"]["prefill"] == PREFILL
    # A convolution and KDA of one token a row are a few products in PyTorch.
    assert found["calls"]["one token a row"] == {name: n for name, n in PREFILL.items() if name != "short_conv"}
    assert found["of the torch form"] == {}


def test_k3train_kernels_names_the_paths_that_come_to_each(found: dict[str, dict]) -> None:
    paths = {"training": "training", "prefill": "prefill", "decoding": "one token a row"}
    for name in TRAINING:
        came = {path for path, what in paths.items() if name in found["calls"][what]}
        assert name.endswith(" backward") or came == set(USED_BY[name]) - {"export"}, name
    assert not any(USED_BY["two_phase_mix"] and calls.get("two_phase_mix") for calls in found["calls"].values())


def test_losses_gradients_and_logits_are_those_of_the_torch_forms(found: dict[str, dict]) -> None:
    apart = found["differences"]
    assert len(apart["training"]) > 45
    assert apart["training"].pop("counts") == 0.0
    assert max(apart["training"].values()) < 2e-5, apart["training"]
    assert max(apart["prefill"].values()) < 2e-5, apart["prefill"]
    assert max(apart["one token a row"].values()) < 2e-5, apart["one token a row"]
    assert apart["shard_losses"]["loss"] < 2e-6
    assert apart["shard_losses"]["logits"] < 2**-7  # of bf16


def test_no_operation_is_forgotten() -> None:
    watched = {name.removesuffix(" backward") for name, _, _ in model_in_triton.ENTRIES} | {"gated_rms_norm"}
    assert watched == {operation.name for operation in OPERATIONS if "triton" in operation.backends}
