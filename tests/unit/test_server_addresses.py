"""Addresses of servers that are none are refused before any rank starts, with their key and a cure."""

from __future__ import annotations

import pytest

from k3train.config.load import load_recipe
from k3train.config.rules import check_url
from k3train.config.validate import validate
from k3train.errors import UserError
from k3train.rl.judge import JudgedEnvironment
from k3train.rl.rewards import weighted
from k3train.rollout.client import CompletionClient

WRONG = [
    "ftp://127.0.0.1:80",
    "http://127.0.0.1:99999",
    "http://127.0.0.1:0",
    "http://:8000",
    "http://[::1",
    "http://h:x",
]


@pytest.mark.parametrize("url", WRONG)
def test_a_wrong_address_is_refused_with_its_key(url: str) -> None:
    said = (
        f"rl.rollout.url={url} is no address of a server; allowed: http://HOST:PORT, https://HOST:PORT; try rl.rollout"
    )
    with pytest.raises(UserError) as refused:
        validate(load_recipe(["recipe=rl/k3-tiny", "rl.rollout.engine=openai", f"rl.rollout.url='{url}'"]), 1)
    assert str(refused.value).startswith(said)
    with pytest.raises(UserError, match=r"^url=.* is no address of a server"):
        CompletionClient(url)
    with pytest.raises(UserError, match=r"judge: options\.url=.* is no address of a server"):
        JudgedEnvironment(weighted({}), url=url)


def test_a_teacher_with_a_wrong_address_is_refused() -> None:
    wrong = ["rl.teachers=[{url: 'http://a:99999'}]", "rl.objective.signal=mopd", "rl.objective.skip_uniform=false"]
    with pytest.raises(UserError, match=r"^rl\.teachers\.0\.url=http://a:99999 is no address"):
        validate(load_recipe(["recipe=rl/k3-tiny", *wrong]), 1)


@pytest.mark.parametrize("url", ["localhost:8000", "http://a", "https://a.b:443/v1", "http://[::1]:8000"])
def test_addresses_are_taken(url: str) -> None:
    assert check_url("url", url).hostname
