"""`k3train score` and decoding on the published model's golden weights and tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_golden import GOLDEN, build, model_config

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from saved_weights import save_weights

from k3train import cli


def test_scores_sum_to_the_golden_loss(single_rank: None, tmp_path: Path) -> None:
    """Over positions 0 to 38 of both rows, through a checkpoint and the command line."""
    from k3train.config.schema import DataConfig, RecipeConfig

    golden = load_file(GOLDEN / "golden.safetensors")
    config = RecipeConfig(model=model_config(), data=DataConfig(tokenizer="none"))
    checkpoint = save_weights(tmp_path, config, [build(model_config())])
    np.save(tmp_path / "tokens.npy", golden["input_ids"].numpy())
    arguments = ["score", "--checkpoint", str(checkpoint), "--tokens", str(tmp_path / "tokens.npy"), "--logits"]
    assert cli.main([*arguments, "--out", str(tmp_path / "out.npz")]) == 0
    out = np.load(tmp_path / "out.npz")
    assert out["log_probs"].shape == (2, 39)
    assert out["loss"] == -out["log_probs"].sum() / 78
    assert out["loss"] == pytest.approx(golden["loss"].item(), abs=5e-6)
    # Token by token, what the golden logits themselves give.
    expected = torch.log_softmax(golden["logits"][:, :-1].double(), -1)
    expected = expected.gather(2, golden["input_ids"][:, 1:, None].long())[..., 0].numpy()
    assert np.abs(out["log_probs"] - expected).mean() < 3e-5


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
    model = build(model_config()).eval()
    whole = model(tokens, Packing.whole_rows(*tokens.shape))
    decoded = [decode(model, tokens, split) for split in SPLITS]
    model.double()
    exact = model(tokens, Packing.whole_rows(*tokens.shape))
    for split, logits in zip(SPLITS, decoded):
        assert (decode(model, tokens, split) - exact).abs().max() < 1e-4
        assert (logits - exact).abs().max() < 1e-3
        assert (logits - exact).abs().mean() < 3e-5
    assert (whole - exact).abs().max() > 1e-4  # the noise is the weights', not decoding's
