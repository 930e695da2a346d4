"""The lower bound of memory: it is below what runs really take, and it refuses what cannot run."""

from __future__ import annotations

import pytest

from k3train.config.load import load_recipe
from k3train.config.memory import check_host_memory, least_training_bytes
from k3train.errors import UserError

GIB = 1024**3


def test_bound_of_a_tiny_model_by_hand() -> None:
    """k3-tiny on one rank in fp32: weight, gradient, moments; 4 rows of 256 tokens, logits twice, 2 x 9 activations."""
    from k3train.config.parameters import parameter_count

    for optim, bytes_each in (("adamw-tiny", 16), ("per-head-muon-tiny", 12)):
        config = load_recipe(["recipe=pretrain/k3-tiny", "parallel=single", f"optim={optim}"])
        parameters, activations = least_training_bytes(config, 1)
        assert parameters == bytes_each * parameter_count(config.model)["total"]
    assert activations == 4 * 256 * (2 * 4 * 2048 + 4 * 18 * 128)


def test_a_replica_adds_the_dense_part_only() -> None:
    config = load_recipe(["recipe=pretrain/k3-tiny", "parallel=single", "optim=adamw-tiny"])
    one, _ = least_training_bytes(config, 1)
    two, _ = least_training_bytes(config, 2)
    experts = 16 * 3 * 96 * 64 * 8
    from k3train.config.parameters import parameter_count

    assert two - one == 8 * (parameter_count(config.model)["total"] - experts)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["recipe=pretrain/k3", "parallel=single"], r"model\.name=k3 takes at least .* GiB .*try model=k3-tiny"),
        (
            ["recipe=pretrain/k3-tiny", "parallel=single", "train.seq_length=1000000"],
            r"train\.seq_length=1000000 .* takes at least .* on 1 rank, and .*; try train\.seq_length=\d+",
        ),
    ],
)
def test_what_cannot_fit_is_refused(overrides: list[str], said: str) -> None:
    config = load_recipe([*overrides, "run.device=cpu"])
    with pytest.raises(UserError, match=said) as caught:
        check_host_memory(config, 1, 24 * GIB)
    cure = str(caught.value).rpartition("try ")[2].partition(",")[0]
    check_host_memory(load_recipe([*overrides, "run.device=cpu", cure]), 1, 24 * GIB)
