"""A teacher's server that fails: asked again within a bound; then the run ends, or its samples are dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from teacher_stub import TeacherStub

from k3train.config.load import recipe_from_dict
from k3train.config.rl import RolloutConfig, TeacherConfig
from k3train.config.rules_distill import check_teachers
from k3train.errors import UserError
from k3train.rl import teacher_server
from k3train.rl.teacher_server import ServerHost
from k3train.rl.teachers import Teachers
from k3train.rl.trajectory import Group, Trajectory

ROWS = {(5, j): list(range(3 + j)) for j in range(40)}  # three requests
Make = Callable[..., tuple[TeacherStub, ServerHost]]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(teacher_server, "BACKOFF", 0.01)
    running: list[TeacherStub] = []

    def made(*moods: str, when_silent: str = "stop", seconds: float = 60) -> Any:
        stub = TeacherStub(*moods)
        running.append(stub)
        settings = RolloutConfig(retries=2, timeout_seconds=60, concurrency=1)
        host = ServerHost(TeacherConfig(url=stub.url, when_silent=when_silent), 4, settings)
        host._client.timeout = seconds  # of scoring: it has connected, however long that took
        return stub, host

    yield made
    for stub in running:
        stub.close()


def test_what_fails_is_asked_again(make: Make) -> None:
    """No answer, an error and an answer without scores, each once: the scores are whole, and three failures counted."""
    stub, host = make("gone", "broken", "well", "odd", "well")
    host.begin(dict(list(ROWS.items())[:7]))
    assert host.scores(ROWS) == {key: [-1.0] * (len(row) - 1) for key, row in ROWS.items()}
    assert host.failures == 3
    assert stub.requests == 3 + 4  # seven rows that were sent early, then 16, 16 and 1


@pytest.mark.parametrize(("mood", "reason"), [("silent", "timed out"), ("broken", ": 503 "), ("odd", "subscriptable")])
def test_a_server_that_stays_silent_ends_the_run(make: Make, mood: str, reason: str) -> None:
    """One sentence after the attempts of one request; requests behind it are not tried at all. The sentence has the
    reason, also where the row that is asked for first was one of those behind it."""
    stub, host = make(mood, seconds=0.5 if mood == "silent" else 60)
    host.begin(dict(list(ROWS.items())[20:]))
    with pytest.raises(UserError) as caught:
        host.scores(ROWS)
    assert f"(rl.teachers.4.url={stub.url}) does not answer, asked 3 times" in str(caught.value)
    assert reason in str(caught.value)
    assert "when_silent=drop" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert stub.wait_for(3)
    assert stub.requests == 3
    with pytest.raises(UserError, match="refuses: 127"):
        make("refuses")[1].scores(ROWS)


def test_a_server_that_does_not_answer_at_the_start_ends_the_run() -> None:
    """Whatever `when_silent` says; so the sentence does not offer it."""
    settings = RolloutConfig(retries=0, timeout_seconds=60, concurrency=1)
    with pytest.raises(UserError, match=r"does not answer, asked 1 times.*; start it, or correct its url$"):
        ServerHost(TeacherConfig(url="http://127.0.0.1:1", when_silent="drop"), 0, settings)


def test_its_rows_may_be_dropped(make: Make) -> None:
    """Of three requests the first succeeds. In the next step the server has one attempt; once a whole step succeeds,
    requests have three again."""
    stub, host = make("well", "broken", "broken", "broken", "broken", "well", when_silent="drop")
    assert list(host.scores(ROWS)) == list(ROWS)[:16]
    assert (host.failures, stub.requests) == (3, 4)
    assert host.scores(ROWS) == {}
    assert (host.failures, stub.requests) == (4, 5)
    assert list(host.scores(ROWS)) == list(ROWS)
    stub.moods = ["broken", "broken", "well"]
    assert list(host.scores(ROWS)) == list(ROWS)
    assert host.failures == 6


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_server, "BACKOFF", 0.01)
    stub = TeacherStub()
    stub.close()
    with pytest.raises(UserError, match=r"rl.teachers.0.url=http://127.0.0.1:\d+\) does not answer, asked 2 times"):
        ServerHost(TeacherConfig(url=stub.url), 0, RolloutConfig(retries=1))


def sample(*tokens: int) -> Trajectory:
    return Trajectory(list(tokens), [0.0] * len(tokens), [0] * len(tokens), finish="stop", reward=1.0)


def group(uid: int, task: int) -> Group:
    return Group(uid, 0, task, [1, 2], 0, [sample(5, 6), sample(7)], None)


class Host:
    is_ready = is_remote = True

    def __init__(self, silent: bool) -> None:
        self.silent, self.failures = silent, 3 * silent

    def begin(self, rows: Any) -> None:
        pass

    def scores(self, rows: Any) -> Any:
        return {} if self.silent else {key: [-1.0] * (len(row) - 1) for key, row in rows.items()}


@pytest.fixture
def teachers(monkeypatch: pytest.MonkeyPatch) -> tuple[Teachers, list[Host]]:
    """Of `add` one, of `sort` a mixture of two."""
    hosts = [Host(False), Host(False), Host(False)]
    monkeypatch.setattr("k3train.rl.teachers.make_hosts", lambda *_: hosts)
    entries = [TeacherConfig("a", family="add"), TeacherConfig("b", family="sort"), TeacherConfig("c", family="sort")]
    tasks = [SimpleNamespace(family=f, effort="low", id="t", conversation=None) for f in ("add", "sort")]
    source = SimpleNamespace(tasks=tasks, environment=SimpleNamespace(conversation=lambda task: None))
    chat = SimpleNamespace(prompt=lambda *_: (1, 2), tokenizer=None)
    config = SimpleNamespace(rl=SimpleNamespace(teachers=entries, teachers_in_memory=1))
    return Teachers(config, SimpleNamespace(sources=[source], chat=chat), None), hosts


def test_samples_without_scores_are_left_out(teachers: tuple[Teachers, list[Host]]) -> None:
    """Half of a mixture is not the mixture: its samples fail, those of others are trained on."""
    from k3train.config.rl import ObjectiveConfig
    from k3train.rl.batches import examples

    asked, hosts = teachers
    hosts[2].silent = True
    hosts[2].failures = 3
    groups = [group(4, 0), group(5, 1)]
    found = asked.scores(groups)
    assert found == {(4, 0): [-1.0, -1.0], (4, 1): [-1.0]}
    assert [s.finish for g in groups for s in g.samples] == ["stop", "stop", "failed", "failed"]
    assert groups[1].samples[0].error == "its teacher's server is silent"
    made = examples(groups, ObjectiveConfig(signal="mopd"), 0, found)
    assert [float(e["teacher"].sum()) for e in made] == [-2.0, -1.0]
    metrics = asked.metrics()
    assert (metrics["teacher_dropped"], metrics["teacher_failures"], metrics["teacher_tokens"]) == (2, 3, 3)
    hosts[2].silent = False
    asked.scores([group(6, 1)])
    assert asked.metrics()["teacher_dropped"] == 0


def test_a_step_whose_samples_are_all_dropped_is_made_anew(teachers: tuple[Teachers, list[Host]]) -> None:
    from k3train.stages.rl import MOST_EMPTY, RLStage

    asked, hosts = teachers
    made: list[int] = []
    beats: list[str] = []

    def collect(engine: Any, version: int) -> list[Group]:
        made.append(version)
        hosts[0].silent = len(made) < 3
        return [group(len(made), 0)]

    rollouts = SimpleNamespace(collect=collect, touch=SimpleNamespace())
    config = SimpleNamespace(guards=SimpleNamespace(hang_minutes=None), run=SimpleNamespace(timeout_minutes=30.0))
    stage = SimpleNamespace(rollouts=rollouts, engine=None, _teachers=asked, _refresh=lambda version: None)
    stage.config = config
    stage._trainer = SimpleNamespace(watchdog=SimpleNamespace(beat=beats.append))
    [found] = RLStage._collect(stage, 7)
    assert (found.uid, made, stage._scores) == (3, [7] * 3, {(3, 0): [-1.0, -1.0], (3, 1): [-1.0]})
    assert beats == ["step 8"] * 3  # a silent server may take minutes of each
    hosts[0] = Host(True)
    asked._hosts[0] = hosts[0]
    rollouts.collect = lambda engine, version: [group(9, 0)]
    with pytest.raises(UserError, match=rf"no group of {MOST_EMPTY} iterations.*its teacher's server is silent"):
        RLStage._collect(stage, 7)


@pytest.mark.parametrize(
    ("teacher", "words"),
    [
        ({"url": "http://b", "when_silent": "wait"}, "when_silent=wait does not exist; allowed: stop, drop"),
        ({"checkpoint": "a", "when_silent": "drop"}, "when_silent=drop is for servers"),
    ],
)
def test_wrong_values_get_one_sentence(teacher: dict[str, Any], words: str) -> None:
    rl = {"teachers": [teacher], "objective": {"signal": "mopd"}}
    with pytest.raises(UserError, match=words):
        check_teachers(recipe_from_dict({"rl": rl, "data": {"tokenizer": "t"}}))
