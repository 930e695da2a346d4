"""Kinds of rollout servers over loopback: odd ends, seeds, updates as each kind documents them, restarts, outages.

vLLM and SGLang are stand-ins (`completion_stub.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from completion_stub import LENGTH, CompletionStub
from test_rl_local_engine import finish

from k3train.errors import UserError
from k3train.rollout.client import CompletionClient, seed_of
from k3train.rollout.engine import Work
from k3train.rollout.remote import WEIGHTS, OpenAIEngine
from k3train.rollout.sampling import SamplingConfig
from k3train.rollout.servers import ServerSettings

KINDS = ("vllm", "sglang")


@pytest.fixture(params=KINDS)
def stub(request: pytest.FixtureRequest) -> Iterator[CompletionStub]:
    running = CompletionStub(request.param)
    yield running
    running.close()


def engine(stub: CompletionStub, refresh: str = "disk", outage: float = 0.0, retries: int = 3) -> OpenAIEngine:
    settings = ServerSettings(stub.kind, refresh, outage_seconds=outage)
    return OpenAIEngine(CompletionClient(stub.url, timeout=60), retries=retries, backoff=0.01, settings=settings)


def works(group: int, samples: int = 2, tokens: int = 50) -> list[Work]:
    return [Work((group, j), (5, 6, 7), SamplingConfig(tokens, seed=3)) for j in range(samples)]


def shared(stub: CompletionStub, **settings: Any) -> tuple[Any, list[str], list[str], list[int]]:
    """A `SharedEngine` that gives the server a folder named by its version; what it told, its beats, what it gave."""
    from k3train.rl.shared_engine import SharedEngine

    told: list[str] = []
    beats: list[str] = []
    given: list[int] = []

    def restore() -> None:
        given.append(7)
        built.refresh_from_disk(Path("/weights/7"), 7)

    built = SharedEngine(lambda: engine(stub, **settings), restore, beats.append, told.append)
    built.slice_seconds = 0.02
    restore()
    return built, told, beats, given


@pytest.mark.parametrize("reason", ["abort", "content_filter", "error", "tool_calls"])
def test_only_stop_and_length_end_a_text(stub: CompletionStub, reason: str) -> None:
    """Whatever else the server ends a text by is its failure: the text goes on from there."""
    outside = engine(stub)
    stub.odd_ends = [(reason, 4), (reason, 1)]
    outside.submit(works(1, samples=1))
    said = finish(outside, {})[1, 0]
    assert [p.finish for p in said] == [None] * (len(said) - 1) + ["stop"]
    assert len(said) == 3 + LENGTH
    assert outside.counters()["failures"] == 2
    assert stub.bodies[1]["prompt"] == [5, 6, 7, *(p.token for p in said[:3])]
    stub.odd_ends = [(reason, 1)] * 9  # never anything else: given up as failed, and no token of it is a last one
    outside.submit(works(2, samples=1))
    assert [p.finish for p in finish(outside, {})[2, 0]] == ["failed"]


def test_a_stream_that_ends_before_its_texts_is_a_failure_too(stub: CompletionStub) -> None:
    """`[DONE]` after some tokens, of which none is said to be the last: the text goes on from there."""
    outside = engine(stub)
    stub.odd_ends = [(None, 4), (None, 0)]
    outside.submit(works(1, samples=1))
    said = finish(outside, {})[1, 0]
    assert [p.finish for p in said] == [None] * (4 + LENGTH - 1) + ["stop"]
    assert outside.counters()["failures"] == 2
    assert stub.bodies[1]["prompt"] == [5, 6, 7, *(p.token for p in said[:4])]


def test_a_text_as_long_as_asked_for_ends_by_length(stub: CompletionStub) -> None:
    outside = engine(stub)
    outside.submit(works(1, samples=1, tokens=5))
    assert [p.finish for p in finish(outside, {})[1, 0]] == [None] * 4 + ["length"]


def test_every_request_has_numbers_of_its_own(stub: CompletionStub) -> None:
    """Samples of a group, another group with the same prompt, and a text that goes on: no two draw alike; and the same
    run draws the same again."""
    texts = []
    for _ in range(2):
        outside = engine(stub)
        stub.odd_ends = [("abort", 5)] if stub.kind == "vllm" else []
        outside.submit(works(1, samples=3))
        said = finish(outside, {})
        outside.submit(works(2, samples=3))
        finish(outside, said)
        texts.append({key: [p.token for p in pieces] for key, pieces in said.items()})
    assert texts[0] == texts[1]
    assert len({tuple(text[-LENGTH:]) for text in texts[0].values()}) == 6
    if stub.kind == "vllm":
        assert {len(text) for key, text in texts[0].items() if key[0] == 1} == {4 + LENGTH, LENGTH}
    else:
        assert {body["n"] for body in stub.bodies} == {1}
    assert (
        len({seed_of(3, (group,), first, drawn) for group in range(9) for first in range(9) for drawn in (0, 5)}) == 162
    )
    assert all(0 <= body["seed"] < 2**48 for body in stub.bodies)


def test_weights_from_disk_as_each_kind_takes_them(stub: CompletionStub) -> None:
    outside = engine(stub)
    assert outside.refresh_from_disk(Path("/weights/4"), 4)
    assert (stub.folder, stub.weights.partition(":")[2], stub.paused) == ("/weights/4", "4", False)
    expected = ["/pause", "/collective_rpc", "/update_weight_version", "/resume"]
    assert stub.updates == (expected if stub.kind == "vllm" else ["/update_weights_from_disk"])
    outside.submit(works(1))
    assert {p.version for pieces in finish(outside, {}).values() for p in pieces} == {4}


def test_a_server_that_cannot_do_it_is_refused_at_once() -> None:
    """Before any step, with a sentence that names the cure; without a refresh nothing of it is needed."""
    plain, sglang = CompletionStub("vllm", development=False), CompletionStub("sglang")
    try:
        with pytest.raises(UserError, match=r"has no /collective_rpc .*VLLM_SERVER_DEV_MODE=1"):
            engine(plain)
        outside = engine(plain, refresh="none")
        outside.submit(works(1))
        assert {p.version for pieces in finish(outside, {}).values() for p in pieces} == {0}
        for kind in ("k3train", "vllm"):
            with pytest.raises(UserError, match=r"try rl.rollout.server=sglang"):
                OpenAIEngine(CompletionClient(sglang.url), settings=ServerSettings(kind, "disk"))
        with pytest.raises(UserError, match=r"takes no buckets.*try rl.rollout.refresh=disk"):
            OpenAIEngine(CompletionClient(sglang.url), settings=ServerSettings("sglang", "in_place"))
        assert not sglang.updates
        assert not plain.updates
    finally:
        plain.close()
        sglang.close()


def test_a_restarted_server_gets_its_weights_before_it_samples_again(stub: CompletionStub) -> None:
    """Restarted in the middle of two texts: what came before stays, the rest is drawn under the right weights."""
    outside, told, _, given = shared(stub)
    stub.hold_after = 4
    outside.submit(works(1, samples=1) + works(2, samples=1))
    for _ in range(2):
        assert stub.held.acquire(timeout=60)
    before = len(stub.updates)
    stub.restart()
    said = finish(outside, {})
    assert [p.finish for p in said[1, 0]] == [None] * (3 + LENGTH) + ["stop"]
    assert len(said[2, 0]) == 4 + LENGTH
    assert {p.version for pieces in said.values() for p in pieces} == {7}
    assert given == [7, 7]
    assert stub.weights.endswith(":7")
    assert len(stub.updates) > before
    assert sum("other weights" in sentence for sentence in told) == 1
    assert outside.counters()["given_up"] == 0


def test_other_weights_are_seen_between_two_texts(stub: CompletionStub) -> None:
    """Nothing runs while the server is restarted: the next text is not drawn before it has its weights again."""
    outside, _, _, given = shared(stub)
    stub.restart()
    outside.submit(works(1))
    finish(outside, {})
    assert given == [7, 7]
    alone = engine(stub)
    stub.restart()
    alone.submit(works(1))
    assert alone.attend() == ([], WEIGHTS)
    with pytest.raises(UserError, match="has other weights than it was given"):
        alone.poll()
    alone.pause()


def test_a_server_that_others_change_ends_the_run(stub: CompletionStub) -> None:
    """Not for ever to and fro: a few times without a token in between, then a sentence."""
    outside, _, _, given = shared(stub)
    stub.weights, stub.is_shared = "another's", True
    outside.submit(works(1))
    with pytest.raises(UserError, match="give each run a server of its own"):
        finish(outside, {})
    assert len(given) == 1 + 5
    outside.pause()


def test_a_server_that_comes_back_unable_is_told() -> None:
    """Restarted without what a refresh needs: the cure, instead of samples that fail."""
    stub = CompletionStub("vllm")
    try:
        outside, _, _, _ = shared(stub)
        stub.restart()
        stub.development = False
        outside.submit(works(1))
        with pytest.raises(UserError, match="VLLM_SERVER_DEV_MODE=1"):
            finish(outside, {})
        assert outside.counters()["given_up"] == 0
        outside.pause()
    finally:
        stub.close()


def test_a_server_that_is_busy_is_asked_again(stub: CompletionStub) -> None:
    outside = engine(stub)
    stub.statuses = [429, 408, 503]
    outside.submit(works(1, samples=1))
    assert len(finish(outside, {})[1, 0]) == LENGTH
    assert outside.counters()["failures"] == 3
    stub.statuses = [422]
    outside.submit(works(2, samples=1))
    [piece] = finish(outside, {})[2, 0]
    assert (piece.finish, "422" in piece.error) == ("failed", True)


def test_an_outage_is_waited_for(stub: CompletionStub) -> None:
    """Down in the middle of texts and back with its weights: no sample is lost, ranks beat, it is told once."""
    outside, told, beats, given = shared(stub, outage=60.0, retries=1)
    stub.hold_after = 4
    outside.submit(works(1, samples=1) + works(2, samples=1))
    for _ in range(2):
        assert stub.held.acquire(timeout=60)
    stub.is_down, stub.hold_after = True, LENGTH + 1
    stub.release.set()
    came_back = threading.Event()

    def beat(doing: str) -> None:
        beats.append(doing)
        if len(beats) == 3:
            stub.is_down = False
            came_back.set()

    outside._beat = beat
    said = finish(outside, {})
    assert came_back.is_set()
    assert {key: (len(pieces), pieces[-1].finish) for key, pieces in said.items()} == {
        (1, 0): (4 + LENGTH, "stop"),
        (2, 0): (4 + LENGTH, "stop"),
    }
    counters = outside.counters()
    assert (counters["outages"], counters["given_up"], given) == (1, 0, [7])
    assert counters["outage_seconds"] > 0
    assert sum("DOWN" in sentence for sentence in told) == 1
    assert len(beats) == 3


def test_an_outage_during_a_refresh_is_waited_for(stub: CompletionStub) -> None:
    outside, _, _, _ = shared(stub, outage=60.0, retries=1)
    stub.is_down = True
    outside._beat = lambda doing: setattr(stub, "is_down", False)
    outside.refresh_from_disk(Path("/weights/8"), 8)
    assert (stub.folder, stub.weights.partition(":")[2]) == ("/weights/8", "8")
    assert outside.counters()["outages"] == 1


def test_an_outage_that_does_not_end_ends_the_run(stub: CompletionStub) -> None:
    """With one sentence, and no sample counted as failed."""
    outside, _, _, _ = shared(stub, outage=0.2, retries=1)
    stub.is_down = True
    outside.submit(works(1))
    with pytest.raises(UserError, match=r"does not answer, .*rl.rollout.outage_minutes=0.00333"):
        finish(outside, {})
    assert outside.counters()["given_up"] == 0
    outside.pause()


def test_more_samples_than_a_request_may_ask_for(stub: CompletionStub) -> None:
    outside = engine(stub)
    outside.submit(works(1, samples=130, tokens=1))
    assert len(finish(outside, {})) == 130
    assert sorted({body["n"] for body in stub.bodies}) == ([2, 128] if stub.kind == "vllm" else [1])
