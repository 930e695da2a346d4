"""`k3train score` and decoding on the published model's golden weights and tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import our_model
import pytest
import torch
from safetensors.torch import load_file
from test_golden import GOLDEN, STATED, Distance, machine_bound, text_config

from k3train import cli


@pytest.fixture(scope="module")
def imported(_cpu_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden folder through `k3train import`."""
    folder = tmp_path_factory.mktemp("golden")
    (folder / "hf").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / name, folder / "hf" / name)
    assert cli.main(["import", "--hf", str(folder / "hf"), "--out", str(folder / "ckpt")]) == 0
    return folder / "ckpt"


def scored(checkpoint: Path, tmp_path: Path, *extra: str) -> dict[str, np.ndarray]:
    """What `k3train score` writes for the golden tokens."""
    np.save(tmp_path / "tokens.npy", load_file(GOLDEN / "golden.safetensors")["input_ids"].numpy())
    arguments = ["score", "--checkpoint", str(checkpoint), "--tokens", str(tmp_path / "tokens.npy"), "--logits"]
    assert cli.main([*arguments, "--out", str(tmp_path / "out.npz"), *extra]) == 0
    return dict(np.load(tmp_path / "out.npz"))


def test_scores_sum_to_the_golden_loss(
    imported: Path, single_rank: None, tmp_path: Path, record_property: Callable
) -> None:
    """Over positions 0 to 38 of both rows, imported and scored on the command line: the bounds of the golden test with
    `--kernels reference`, and what the golden weights make of rounding without."""
    golden = load_file(GOLDEN / "golden.safetensors")
    exact = scored(imported, tmp_path, "--kernels", "reference")
    logits = np.abs(exact["logits"] - golden["logits"].numpy()).max()
    found = Distance(logits, abs(exact["loss"] - golden["loss"].item()), 0.0)
    record_property("reference", found)
    assert found.within(STATED) or found.within(machine_bound()), found
    fast = scored(imported, tmp_path)
    assert fast["loss"] == pytest.approx(golden["loss"].item(), abs=1e-5)
    assert not np.array_equal(fast["logits"], exact["logits"])  # the option chose other operations
    # Token by token, what the golden logits themselves give.
    expected = torch.log_softmax(golden["logits"][:, :-1].double(), -1)
    expected = expected.gather(2, golden["input_ids"][:, 1:, None].long())[..., 0].numpy()
    for out, mean in ((exact, 1e-5), (fast, 5e-5)):
        assert out["log_probs"].shape == (2, 39)
        assert out["loss"] == -out["log_probs"].sum() / 78
        assert np.abs(out["log_probs"] - expected).mean() < mean


def decode(model: torch.nn.Module, tokens: torch.Tensor, split: list[int]) -> torch.Tensor:
    """Logits [b, s, vocab] of rows that advance together by the lengths of `split`."""
    from k3train.model.packing import Packing
    from k3train.model.state import SequenceStates

    states = SequenceStates.of(model)
    rows = states.add(len(tokens))
    parts = []
    for piece in tokens.split(split, dim=1):
        view = states.extend(rows, [piece.shape[1]] * len(rows))
        parts.append(model(piece, Packing.whole_rows(*piece.shape), states=view))
    return torch.cat(parts, dim=1)


SPLITS = ([40], [1] * 40, [17, 1, 1, 1, 13, 7], [39, 1])


@torch.no_grad()
def test_decoding_equals_the_whole_forward(single_rank: None) -> None:
    """In fp64 at every position. In fp32 these weights amplify rounding (see test_golden.py), and by as much in one
    whole forward as in decoding: both lie equally close to the fp64 logits."""
    from k3train.model.packing import Packing

    tokens = load_file(GOLDEN / "golden.safetensors")["input_ids"]
    weights = load_file(GOLDEN / "model.safetensors")
    model = our_model.build(our_model.model_config(text_config()), weights).eval()
    whole = model(tokens, Packing.whole_rows(*tokens.shape))
    decoded = [decode(model, tokens, split) for split in SPLITS]
    model.double()
    exact = model(tokens, Packing.whole_rows(*tokens.shape))
    for split, logits in zip(SPLITS, decoded):
        assert (decode(model, tokens, split) - exact).abs().max() < 1e-4
        assert (logits - exact).abs().max() < 1e-3
        assert (logits - exact).abs().mean() < 3e-5
    assert (whole - exact).abs().max() > 1e-4  # the noise is the weights', not decoding's
