"""Environments beside generation: groups judged together, tools that take their time, the same samples every time."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from saved_weights import VOCAB, recipe
from test_rl_rollouts import Chat, Scripted, by_length, rollouts, tasks

from k3train.config.rl import EffortConfig, RLConfig, RolloutConfig
from k3train.data.chat.parse import Completion
from k3train.rl import calls as calls_module
from k3train.rl.effort import Budgets
from k3train.rl.environments import Environment, Step
from k3train.rl.rollouts import Rollouts
from k3train.rl.sources import Source
from k3train.rl.whole import WholeAnswers
from k3train.rollout.engine import Piece, Work
from k3train.rollout.tasks import Task


class Together(Environment):
    """Judges only where two groups are judged at once."""

    def __init__(self) -> None:
        super().__init__(by_length)
        self.barrier = threading.Barrier(2)

    def judge_group(self, task: Task, answers: Sequence[Completion]) -> list[float] | None:
        self.barrier.wait(30)
        return [float(task.answer)] * len(answers)


def test_groups_are_judged_side_by_side() -> None:
    for group in rollouts(Together()).collect(Scripted(), 0):
        assert [s.reward for s in group.samples] == [3.0 + group.task] * 3


class Patient(Environment):
    """Keeps time limits of its own, longer than the recipe's for one step."""

    limits_judging, seconds = True, 1.0  # the latter in which a limit of the recipe would be noticed
    clock, over = [0.0], threading.Event()

    def judge_group(self, task: Task, answers: Sequence[Completion]) -> list[float] | None:
        self.clock[0] += 100.0
        self.over.wait(self.seconds)
        return [7.0] * len(answers)


class Impatient(Patient):
    limits_judging, seconds = False, 60.0


def test_an_environment_may_limit_its_judging_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes on in judgings alone, so that no step takes too long."""
    monkeypatch.setattr(calls_module.time, "monotonic", lambda: Patient.clock[0])
    config = RLConfig(rollout=RolloutConfig(prompts=2, samples=2))
    for kind, reward in ((Patient, 3.0 + 7.0), (Impatient, None)):
        queue = Rollouts(config, [Source(tasks(), kind(by_length), seconds=0.2)], Chat(), seed=3, max_context=64)
        ready = queue.collect(Scripted(), 0)
        assert [s.reward for g in ready for s in g.samples] == [reward] * 4
        assert queue.totals["judge_failures"] == (0 if reward else 4)
    Patient.over.set()


class Timed(Scripted):
    """Says after which poll each work came, and lets a thread wait for a poll, or for the pause."""

    def __init__(self, length: dict) -> None:
        super().__init__(length)
        self.came: list[tuple[int, tuple[int, int]]] = []
        self.polls, self.reached, self.paused = 0, {n: threading.Event() for n in range(1, 40)}, threading.Event()

    def submit(self, works: Sequence[Work]) -> None:
        self.came += [(self.polls, work.key) for work in works]
        for work in works:  # a further turn has three tokens
            if work.drawn:
                self.length[work.key] = work.drawn + 3
        super().submit(works)

    def poll(self) -> list[Piece]:
        pieces = super().poll()
        self.polls += bool(pieces)
        if pieces:
            self.reached[self.polls].set()
        return pieces

    def pause(self) -> list[Piece]:
        self.paused.set()
        return super().pause()


class Tool(Environment):
    """Answers the first message once `wait` of its task lets it, then rewards with the number of messages."""

    def __init__(self, waits: dict[str, threading.Event] | None = None) -> None:
        super().__init__(by_length)
        self.waits = waits or {}

    def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
        if len(turns) > 1:
            return Step(float(len(turns)))
        event = self.waits.get(task.id)
        if event is not None and not event.wait(30):
            raise RuntimeError("generation stood still")
        return Step(None, ({"content": "77"},))


def of(queue: Rollouts, engine: Scripted) -> dict[str, Any]:
    return {queue.sources[0].tasks[g.task].id: g for g in queue.collect(engine, 0)}


def first_tasks() -> list[str]:
    """The tasks of the groups 0 and 1."""
    return [f"t{g.task}" for g in sorted(rollouts().collect(Scripted(), 0), key=lambda g: g.uid)]


def test_other_samples_go_on_while_an_environment_takes_its_time() -> None:
    """Asked after token 3, the tool answers only once the others are at token 9: with a lag of 8 its sample goes on
    after token 11, as it does where the tool answers at once."""
    slow, _ = first_tasks()
    found = []
    for patient in (False, True):
        engine = Timed({(uid, j): 3 if (uid, j) == (0, 0) else 14 for uid in range(2) for j in range(3)})
        environment = Tool({slow: engine.reached[9]} if patient else None)
        queue = rollouts(environment, samples=3, environment_lag=8)
        groups = of(queue, engine)
        assert engine.came[6] == (11, (0, 0))
        assert not queue.totals
        sample = groups[slow].samples[0]
        assert (len(sample.turns), sample.tokens[3], sample.reward) == (2, 77, 2.0)
        found.append(([g.to_dict() for g in groups.values()], engine.came))
    assert found[0] == found[1]


def test_without_lag_a_tool_is_waited_for() -> None:
    engine = Timed({(uid, j): 3 if (uid, j) == (0, 0) else 14 for uid in range(2) for j in range(3)})
    of(rollouts(Tool(), environment_lag=0), engine)
    assert engine.came[6] == (3, (0, 0))


def test_with_a_server_answers_are_taken_up_as_they_come() -> None:
    """Both tools are asked after token 3; the second one's answer comes first, and its sample goes on first."""
    slow, _ = first_tasks()
    engine = Timed({(uid, j): 3 if j == 0 else 14 for uid in range(2) for j in range(3)})
    queue = rollouts(Tool({slow: engine.reached[9]}), engine="openai", environment_lag=0)
    poll = engine.poll

    def poll_after_the_quick_one() -> list[Piece]:  # the scripted engine draws in no time
        if engine.polls == 5:
            queue._calls.wait([message.call for message in queue._steps._open if message.key == (1, 0)])
        return poll()

    engine.poll = poll_after_the_quick_one
    groups = of(queue, engine)
    (early, first), (late, second) = engine.came[6:8]
    assert (first, second) == ((1, 0), (0, 0))
    assert early <= 6
    assert late >= 9
    assert all(s.reward == 2.0 for g in groups.values() for s in g.samples if len(s.turns) == 2)


def whole(of: list[Task], samples: int) -> WholeAnswers:
    config = RLConfig(effort=EffortConfig(enabled=True, counts="output", least=1))
    sources = [Source(of, Environment(by_length))]
    answers = WholeAnswers(config, sources, Chat(), 3, 64, lambda action: action(), samples)
    answers.touch.seconds = 0.0
    return answers


def test_budgets_are_measured_of_tasks_that_state_an_effort() -> None:
    """The others have none, so the start model is not asked about them; each task keeps its number."""
    mixed = [task for pair in zip(tasks(3, effort="low"), tasks(3)) for task in pair]
    answers = whole(mixed, 4)
    engine = Scripted({(-4 + n, sample): n + 2 for n in range(4) for sample in range(4)})
    budgets = Budgets(answers.config.effort)
    assert budgets.measure(engine, answers, 0, lambda number: None) == 0
    assert budgets.base == {(0, 0): 2.0, (0, 2): 3.0, (0, 4): 4.0}
    assert len(engine.submitted) == 12


def test_each_answer_to_a_task_is_progress() -> None:
    """Budgets are measured of all tasks within one step: their number must not decide whether that is a hang."""
    beats: list[int] = []  # the tokens that were drawn before
    engine = Scripted({(-3, 0): 2, (-3, 1): 4, (-2, 0): 4, (-2, 1): 7})
    found = whole(tasks(2), 2).answers(engine, [(0, 0), (0, 1)], 0, lambda: beats.append(engine.made))
    assert [[len(sample.tokens) for sample in group.samples] for group in found] == [[2, 4], [4, 7]]
    assert sorted(set(beats)) == [4, 8, 11, 14, 15, 16, 17]


class Waits(Environment):
    """Rewards only once generation has paused, or reached a token."""

    event = threading.Event()

    def ends(self, task: Task, turns: Sequence[Completion]) -> bool:
        return True

    def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
        if not self.event.wait(30):
            raise RuntimeError("generation stood still")
        return super().step(task, turns, seed)


def test_rewards_are_not_waited_for_before_generation_pauses() -> None:
    """What is over counts as finished while its reward is still computed: the pause is where it is without waiting."""
    lengths = {(0, 0): 2, (0, 1): 12, (1, 0): 9, (1, 1): 4, (1, 2): 4}
    plain = rollouts(finish_fraction=0.5)
    expected = [g.to_dict() for g in plain.collect(Scripted(lengths), 0)]
    queue, engine = rollouts(Waits(by_length), finish_fraction=0.5), Timed(dict(lengths))
    queue.sources[0].environment.event = engine.paused
    told: list[int] = []
    queue.on_done = lambda group: told.append(group.uid if not engine.paused.is_set() else -1)
    assert [g.to_dict() for g in queue.collect(engine, 0)] == expected
    assert [g.to_dict() for g in queue.groups] == [g.to_dict() for g in plain.groups]
    assert told == [1]  # teachers begin on a group at once


class Lies(Environment):
    def ends(self, task: Task, turns: Sequence[Completion]) -> bool:
        if task.id == "t1":
            raise LookupError("no such turn")
        return True

    def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
        return Step(None, ({"content": "77"},)) if task.id == "t2" else super().step(task, turns, seed)


def test_an_environment_that_is_wrong_about_its_ends_fails_its_samples() -> None:
    config = RLConfig(rollout=RolloutConfig(prompts=5, samples=2))
    queue = Rollouts(config, [Source(tasks(), Lies(by_length))], Chat(), seed=3, max_context=64)
    groups = of(queue, Scripted())
    assert all("LookupError: no such turn" in s.error for s in groups["t1"].samples)
    assert all("ends said that it is the last" in s.error for s in groups["t2"].samples)
    assert queue.totals["environment_failures"] == 4
    assert all(s.reward == 3.0 for name in ("t0", "t3", "t4") for s in groups[name].samples)


class Dawdles(Environment):
    """Up to two tool calls a sample, each taking a time of its own, which differs between runs."""

    def __init__(self, run: int | None) -> None:
        super().__init__(by_length)
        self.run = run

    def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
        if self.run is not None:
            digest = hashlib.sha256(f"{self.run} {seed} {len(turns)}".encode()).digest()
            time.sleep(digest[0] / 256 * 0.03)
        if len(turns) < 1 + seed % 3:
            return Step(None, ({"content": str(seed % 50)},), {"tool_calls": 1})
        return Step(float(len(turns[-1].response)))


class Letters(Chat):
    """Of a real model's tokens one in eight ends a message."""

    stop = frozenset(range(0, VOCAB, 8))

    def answer(self, tokens: Sequence[int], thinking: bool) -> Completion:
        return Completion(response=" ".join(map(str, tokens)), complete=tokens[-1] in self.stop)

    def prompt(self, conversation: Any, show_effort: bool = True) -> tuple[int, ...]:
        return (250, *range(1, 2 + int(conversation.messages[0]["content"][0])))


@pytest.fixture(scope="module")
def model(_cpu_rank: None) -> torch.nn.Module:
    from k3train.config.schema import ParallelConfig
    from k3train.model.build import build_chunks, start_model_parallel

    start_model_parallel(ParallelConfig())
    (built,), _ = build_chunks(recipe())
    return built


def iterations(model: torch.nn.Module, run: int | None, stop: int | None = None, **settings: Any) -> list[Any]:
    """Four iterations, each under other weights; with `stop`, those behind it by new objects, from the saved state."""
    from k3train.rollout.local import LocalEngine

    rollout = {"prompts": 3, "samples": 3, "max_new_tokens": 24, "finish_fraction": 0.4, "max_rows": 5} | settings

    def queue() -> Rollouts:
        source = Source(tasks(), Dawdles(run), seconds=20)
        return Rollouts(RLConfig(rollout=RolloutConfig(**rollout)), [source], Letters(), seed=3, max_context=64)

    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor is not None}
    rolling, engine, found = queue(), LocalEngine(model, VOCAB, max_rows=rollout["max_rows"]), []
    for version in range(4):
        if version == stop:
            saved = json.loads(json.dumps(rolling.state_dict()))
            rolling, engine = queue(), LocalEngine(model, VOCAB, max_rows=rollout["max_rows"])
            rolling.load_state_dict(saved)
        found.append([g.to_dict() for g in rolling.collect(engine, version)])
        found.append([g.to_dict() for g in rolling.groups])
        with torch.no_grad():
            model.embedding.weight.mul_(1.05)
    model.load_state_dict(before, strict=False)
    return found


def test_samples_do_not_depend_on_how_long_tools_take(model: torch.nn.Module) -> None:
    """Through the local engine, with pauses, tools and fewer rows than samples: every token, log-probability and
    version is bit for bit the same, also where the run continues from a saved state."""
    expected = iterations(model, None, environment_lag=4)
    groups = [g for some in expected for g in some]
    versions = {tuple(sorted({v for v in s["versions"] if v >= 0})) for g in groups for s in g["samples"]}
    assert any(len(v) > 1 for v in versions)  # samples that several policies drew
    assert max(len(s["turns"]) for g in groups for s in g["samples"]) == 3
    assert iterations(model, 1, environment_lag=4) == expected
    assert iterations(model, 2, stop=2, environment_lag=4) == expected


def test_the_order_of_answers_changes_no_token(model: torch.nn.Module) -> None:
    """Without pauses the lag decides which rows meet in a forward pass: tokens are the same, log-probabilities too but
    for rounding."""
    settings = {"finish_fraction": 1.0, "max_rows": 16}
    at_once, later = (iterations(model, None, environment_lag=lag, **settings) for lag in (0, 5))
    for one, other in zip([g for some in at_once for g in some], [g for some in later for g in some], strict=True):
        for a, b in zip(one["samples"], other["samples"], strict=True):
            assert (a["tokens"], a["versions"], a["turns"]) == (b["tokens"], b["versions"], b["turns"])
            assert a["logprobs"] == pytest.approx(b["logprobs"], abs=1e-4)


def test_whole_answers_look_at_each_sample_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the answers are: budgets are measured on all training tasks at once."""
    looks: list[int] = []
    over = Rollouts._over
    monkeypatch.setattr(Rollouts, "_over", lambda self, group, number: looks.append(1) or over(self, group, number))
    config = RLConfig(rollout=RolloutConfig(prompts=2, samples=2, max_new_tokens=60))
    sources = [Source(tasks(), Environment(by_length), seconds=60)]
    answers = WholeAnswers(config, sources, Chat(), 3, 100, lambda action: action(), samples=1)
    engine = Scripted({(-21 + place, 0): 3 * place + 3 for place in range(20)})
    groups = answers.answers(engine, [(0, place % 5) for place in range(20)], 0)
    assert [g.samples[0].drawn for g in groups] == [3 * place + 3 for place in range(20)]
    assert len(looks) <= 10 * 20
