"""A second, independent implementation of K3 (`witness_model`) against ours, on the same weights."""

from __future__ import annotations

from collections.abc import Callable

import our_model
import pytest
from test_grid import FAST, LOSS, case, our_logits
from witness_model import build_witness, missing, published_names


@pytest.mark.parametrize("name", ["blocks-divide", "two-mla-at-the-end", "top-1", "scaled-not-renormalised"])
def test_second_witness(single_rank: None, published: None, name: str, record_property: Callable) -> None:
    if reason := missing():
        pytest.skip(reason)
    text, batch, weights = case(name)
    witness = build_witness(text, weights)
    theirs = witness(batch.tokens)
    theirs = getattr(theirs, "logits", theirs)
    loss = batch.loss(theirs)
    loss.backward()
    logits, model = our_logits(our_model.model_config(text), name)
    our_loss = batch.loss(logits)
    our_loss.backward()
    differences = our_model.gradient_differences(model, published_names(witness, weights))
    found = (logits - theirs).abs().max().item(), abs(our_loss.item() - loss.item()), max(differences.values())
    record_property("witness", found)
    assert len(differences) > 50
    assert found[0] < FAST, found
    assert found[1] < LOSS, found
    assert found[2] < FAST, found
