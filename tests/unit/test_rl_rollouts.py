"""Partial rollouts over a scripted engine: pausing, resuming, groups, staleness, turns, failures, saved state."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from k3train.config.rl import EffortConfig, ObjectiveConfig, RLConfig, RolloutConfig, TauStage
from k3train.data.chat.parse import Completion
from k3train.errors import UserError
from k3train.rl.effort import Budgets, tau_at
from k3train.rl.environments import Environment, Step
from k3train.rl.rollouts import Rollouts
from k3train.rl.sources import Source
from k3train.rl.whole import WholeAnswers
from k3train.rollout.engine import Key, Piece, Work
from k3train.rollout.tasks import Task

END = 99


class Scripted:
    """Draws 1, 2, 3, ... for each sample, one token a poll, and ends it after as many as `length` says."""

    def __init__(self, length: dict[Key, int] | None = None, failing: frozenset[Key] = frozenset()) -> None:
        self.version, self.length, self.failing = 0, length or {}, failing
        self.running: dict[Key, list] = {}
        self.submitted: list[Work] = []
        self.released: list[Key] = []
        self.made = 0

    def submit(self, works: Sequence[Work]) -> None:
        self.submitted += works
        self.running.update({work.key: [work, work.drawn, 0] for work in works})

    def poll(self) -> list[Piece]:
        pieces = []
        for key, entry in list(self.running.items()):
            work, drawn, new = entry
            entry[1:] = drawn + 1, new + 1
            self.made += 1
            finish, token = None, drawn + 1
            if key in self.failing:
                pieces.append(Piece(key, None, 0.0, self.version, "failed", "gone"))
                del self.running[key]
                continue
            if drawn + 1 == self.length.get(key, 3):
                finish, token = "stop", END
            elif new + 1 == work.sampling.max_new_tokens:
                finish = "length"
            pieces.append(Piece(key, token, -0.5 * (drawn + 1), self.version, finish))
            if finish:
                del self.running[key]
        return pieces

    def pause(self) -> list[Piece]:
        self.running.clear()
        return []

    def release(self, key: Key) -> None:
        self.released.append(key)

    def counters(self) -> dict[str, float]:
        return {"generated_tokens": float(self.made), "failures": 0.0}


class Chat:
    """Stands in for the chat format: prompts are the task's number, replies two tokens."""

    stop = frozenset({END})

    def prompt(self, conversation: Any, show_effort: bool = True) -> tuple[int, ...]:
        return (1000 if show_effort else 999, int(conversation.messages[0]["content"][0]))

    def answer(self, tokens: Sequence[int], thinking: bool) -> Completion:
        return Completion(response=" ".join(map(str, tokens)), complete=tokens[-1] == END, thinking_tokens=len(tokens))

    def reply(self, messages: Sequence[dict], thinking: bool) -> tuple[int, ...]:
        return tuple(int(m["content"]) for m in messages)


def tasks(count: int = 5, effort: str | None = None) -> list[Task]:
    from k3train.data.chat.messages import Conversation

    return [
        Task(f"t{i}", "all", Conversation(({"role": "user", "content": [str(i)]},), effort=effort), str(i))
        for i in range(count)
    ]


def by_length(task: Task, turns: Sequence[Completion], seed: int) -> float:
    return float(len(turns[-1].response.split()))


def rollouts(environment: Environment | None = None, effort: str | None = None, **settings: Any) -> Rollouts:
    budget = settings.pop("budget", lambda *_: None)
    effort_config = settings.pop("effort_config", EffortConfig())
    config = RLConfig(
        rollout=RolloutConfig(**{"prompts": 2, "samples": 3, "max_new_tokens": 20, **settings}), effort=effort_config
    )
    source = Source(tasks(effort=effort), environment or Environment(by_length), seconds=60)
    return Rollouts(config, [source], Chat(), seed=3, max_context=64, budget=budget)


def test_what_the_engine_counts_before_sampling_is_the_steps_too() -> None:
    """Such as an outage of the server while it is given weights."""
    queue, engine = rollouts(), Scripted()
    before = engine.counters()
    engine.made += 7
    queue.count_beside(before, engine.counters())
    queue.collect(engine, 0)
    assert queue.metrics()["generated_tokens"] == engine.made == 7 + 6 * 3
    queue.collect(engine, 1)
    assert queue.metrics()["generated_tokens"] == 6 * 3


def test_all_of_it_at_once() -> None:
    """lambda = 1: every group of every iteration is whole and of one policy."""
    queue, engine = rollouts(), Scripted({(0, 1): 7, (1, 2): 5})
    first = queue.collect(engine, 0)
    assert [g.uid for g in first] == [0, 1]
    assert [s.reward for s in first[0].samples] == [3, 7, 3]
    assert first[0].samples[0].tokens == [1, 2, END]
    assert first[0].samples[0].logprobs == [-0.5, -1.0, -1.5]
    assert queue.groups == []
    second = queue.collect(engine, 1)
    assert [g.uid for g in second] == [2, 3]
    assert {v for g in second for s in g.samples for v in s.versions} == {1}
    assert len(set(engine.released)) == 12
    drawn = [g.task for g in [*first, *second]]
    assert len(set(drawn)) == 4  # an epoch has every task once
    assert rollouts().collect(Scripted(), 0)[0].task == drawn[0]


def test_prompts_state_the_effort_unless_told_not_to() -> None:
    shown, hidden = rollouts(effort="low"), rollouts(effort="low")
    hidden.config.show_effort = False
    assert [g.prompt[0] for g in shown.collect(Scripted(), 0)] == [1000, 1000]
    assert [g.prompt[0] for g in hidden.collect(Scripted(), 0)] == [999, 999]


def test_what_is_unfinished_goes_on_first() -> None:
    """Half of 6 has finished when the long ones pause; they resume at their token under the next policy."""
    long = {(0, 1): 12, (1, 0): 9}
    queue, engine = rollouts(finish_fraction=0.5, max_staleness=5), Scripted(long | {(1, 1): 4, (1, 2): 4, (0, 0): 2})
    # After three tokens (0, 0) and (0, 2) are done, after four (1, 1) and (1, 2): but no group is whole before 9.
    first = queue.collect(engine, 0)
    assert [g.uid for g in first] == [1]
    paused = queue.groups[0].samples[1]
    assert (paused.finish, paused.tokens) == (None, list(range(1, 10)))
    assert queue.metrics()["paused"] == 1
    engine.submitted.clear()
    second = queue.collect(engine, 1)
    resumed = engine.submitted[0]
    assert resumed.key == (0, 1)
    group = next(g for g in second if g.uid == 0)
    assert resumed.context == (1000, group.prompt[1], *range(1, 10))
    assert (resumed.drawn, resumed.sampling.max_new_tokens) == (9, 11)
    assert group.samples[1].versions == [0] * 9 + [1] * 3
    assert group.oldest == 0
    assert queue.metrics()["resumed"] == 1
    # Groups of three fill up to six samples in flight: one is paused, so one new group came beside it.
    assert [w.key for w in engine.submitted[1:]] == [(2, 0), (2, 1), (2, 2)]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_nothing_older_than_the_bound_is_trained_on(staleness: int) -> None:
    """One sample in seven takes ten times as long: trained tokens are never older than allowed, and some are as old."""
    queue = rollouts(finish_fraction=0.3, max_staleness=staleness, prompts=3, max_new_tokens=60)
    engine = Scripted({(uid, j): 31 + uid for uid in range(60) for j in range(3) if (uid * 3 + j) % 7 == 0})
    ages, seen = [], set()
    for version in range(12):
        ready = queue.collect(engine, version)
        assert ready
        seen |= {g.uid for g in ready}
        ages += [version - g.oldest for g in ready]
    assert max(ages) == staleness
    left = {g.uid for g in queue.groups}
    assert seen | left == set(range(queue._next_uid))  # nothing is lost
    assert not seen & left


def test_a_saved_state_goes_on_exactly() -> None:
    """Through JSON and into a new object, in the middle of everything: the same groups as without the interruption."""
    script = {(uid, j): 3 + (uid * 7 + j * 5) % 17 for uid in range(60) for j in range(3)}
    whole, engine = rollouts(finish_fraction=0.4), Scripted(script)
    expected = [[g.to_dict() for g in whole.collect(engine, v)] for v in range(8)]
    for stop in (1, 4):
        first = rollouts(finish_fraction=0.4)
        found = [[g.to_dict() for g in first.collect(Scripted(script), v)] for v in range(stop)]
        assert any(s.finish is None and s.tokens for g in first.groups for s in g.samples)
        saved = json.loads(json.dumps(first.state_dict()))
        again = rollouts(finish_fraction=0.4)
        again.load_state_dict(saved)
        found += [[g.to_dict() for g in again.collect(Scripted(script), v)] for v in range(stop, 8)]
        assert found == expected


class Asks(Environment):
    """Answers the first two messages with two tokens, then rewards with the number of messages."""

    def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
        if len(turns) < 3:
            return Step(None, ({"content": "77"}, {"content": "78"}), {"asked": 1})
        return Step(float(len(turns)))


def test_several_turns() -> None:
    """The environment's tokens stand between the model's, with no policy; turns are read apart."""
    queue = rollouts(Asks(by_length))
    # Each message of the scripted engine ends where its count says; the first at 3 tokens, the others by room.
    engine = Scripted()
    engine.length = {}
    original = engine.submit
    engine.submit = lambda works: original(works) or engine.length.update({w.key: w.drawn + 3 for w in works})
    [group, _] = queue.collect(engine, 5)
    sample = group.samples[0]
    assert sample.versions == [5] * 3 + [-1] * 2 + [5] * 3 + [-1] * 2 + [5] * 3
    assert sample.turns == [(0, 3), (5, 8), (10, 13)]
    assert sample.tokens[3:5] == [77, 78]
    assert sample.tokens[5:8] == [4, 5, END]
    assert (sample.reward, sample.info, sample.drawn) == (3.0, {"asked": 2.0}, 9)
    assert engine.submitted[6].drawn == 3
    assert engine.submitted[6].context == (*group.prompt, *sample.tokens[:5])


def test_whole_answers_stand_beside_the_queue() -> None:
    """Named tasks, through the environment, whatever is in flight: lengths count all messages, groups keep the order
    asked for, nothing of it stays in the queue or its counters, and no budget holds them."""
    queue, engine = rollouts(Asks(by_length), finish_fraction=0.5, max_staleness=5), Scripted({(0, 0): 40})
    engine.length |= {(0, n): 3 for n in (1, 2)}
    queue.collect(engine, 0)
    before = json.dumps(queue.state_dict())
    config = dataclasses.replace(queue.config, effort=EffortConfig(counts="output", override=-1.0))
    whole = WholeAnswers(config, queue.sources, Chat(), 3, 64, lambda action: action(), samples=2)
    engine = Scripted(failing=frozenset({(-2, 1)}))
    original = engine.submit
    engine.submit = lambda works: original(works) or engine.length.update({w.key: w.drawn + 3 for w in works})
    beats: list[int] = []
    whole.touch.seconds = 0.0
    groups = whole.answers(engine, [(0, 4), (0, 1), (0, 2)], 7, lambda: beats.append(1))
    assert [(g.uid, g.task, g.prompt) for g in groups] == [(-4, 4, [1000, 4]), (-3, 1, [1000, 1]), (-2, 2, [1000, 2])]
    assert [whole.used(g, s) for g in groups for s in g.samples if s.finish != "failed"] == [9] * 5
    assert [s.finish for s in groups[2].samples] == ["stop", "failed"]
    assert {v for g in groups for s in g.samples for v in s.versions} == {7, -1}
    assert len(beats) > 3
    assert json.dumps(queue.state_dict()) == before
    budgets = Budgets(config.effort)
    # No task of these states an effort, so none is measured.
    with pytest.raises(UserError, match="all answers of the start model failed"):
        budgets.measure(engine, whole, 0, lambda number: None)
    stating = [Source(tasks(effort="low"), Asks(by_length), seconds=60)]
    whole = WholeAnswers(config, stating, Chat(), 3, 64, lambda action: action(), samples=2)
    engine.failing = frozenset({(-6, 0), (-6, 1), (-5, 1)})
    assert budgets.measure(engine, whole, 0, lambda number: None) == 1
    assert budgets.base == {(0, n): 9.0 for n in range(1, 5)}


def test_a_restart_draws_what_is_in_flight_anew() -> None:
    queue, engine = rollouts(finish_fraction=0.5, max_staleness=5), Scripted({(0, 1): 12, (1, 0): 9})
    queue.collect(engine, 0)
    [group] = queue.groups
    drawn, engine.released = [s.drawn for s in group.samples], []
    assert queue.restart(engine) == sum(drawn) > 0
    assert set(engine.released) == {(0, 0), (0, 1), (0, 2)}
    queue.config.rollout.finish_fraction = 1.0
    found = next(g for g in queue.collect(Scripted({(0, 1): 6}), 1) if g.uid == 0)
    assert (found.task, found.prompt) == (group.task, group.prompt)
    assert {v for s in found.samples for v in s.versions} == {1}
    assert [s.drawn for s in found.samples] == [3, 6, 3]
    assert queue.metrics()["total_dropped_tokens"] == sum(drawn)


def test_a_reply_without_room_ends_the_sample() -> None:
    queue = rollouts(Asks(by_length), max_new_tokens=5)
    [group, _] = queue.collect(Scripted(), 0)
    sample = group.samples[0]
    assert (sample.finish, sample.reward, sample.tokens) == ("length", 0.0, [1, 2, END])
    effort = EffortConfig(enabled=True, counts="output", override=-1.0)  # it holds for such a sample too
    queue = rollouts(Asks(by_length), max_new_tokens=5, effort_config=effort, budget=lambda *_: 2.0)
    assert {(s.reward, s.over_budget) for s in queue.collect(Scripted(), 0)[0].samples} == {(-1.0, True)}


class Breaks(Environment):
    """Raises for one task, hangs for another."""

    over = threading.Event()

    def step(self, task: Task, turns: Sequence[Completion], seed: int) -> Step:
        if task.id == "t1":
            raise RuntimeError("no such file")
        if task.id == "t2":
            self.over.wait(60)
        return super().step(task, turns, seed)


def test_failures_are_counted_and_survived() -> None:
    """An environment that raises, one that hangs, and an engine that gives samples up: the rest goes on."""
    config = RLConfig(rollout=RolloutConfig(prompts=5, samples=2))
    source = Source(tasks(), Breaks(by_length), seconds=5)
    queue = Rollouts(config, [source], Chat(), seed=3, max_context=64)
    ready = queue.collect(Scripted(failing=frozenset({(0, 1)})), 0)
    Breaks.over.set()
    assert len(ready) == 5
    state = {source.tasks[g.task].id: [s.error for s in g.samples] for g in ready}
    assert all("RuntimeError: no such file" in error for error in state["t1"])
    assert all("TimeoutError" in error for error in state["t2"])
    assert queue.totals["environment_failures"] == 2
    assert queue.totals["environment_timeout_failures"] == 2
    assert queue.totals["server_failures"] == 1
    assert queue.metrics()["failed"] == 5
    fine = [e for name, errors in state.items() if name not in ("t1", "t2") for e in errors]
    assert sum(e is not None for e in fine) == 1


def test_a_prompt_without_room_is_named() -> None:
    config = RLConfig()
    queue = Rollouts(config, [Source(tasks(), Environment(by_length))], Chat(), seed=0, max_context=2)
    with pytest.raises(UserError, match=r"prompt of task t\d has 2 tokens"):
        queue.collect(Scripted(), 0)


def test_effort_budgets() -> None:
    """b0 from right answers, tau by stage, and the reward beyond tau * b0."""
    config = EffortConfig(
        enabled=True, least=2, stages=[TauStage(0, 9.0, 9.0, 2.0), TauStage(10, low=0.5, high=1.0, max=2.0)]
    )
    assert [tau_at(config, "low", step) for step in (0, 9, 10, 99)] == [9.0, 9.0, 0.5, 0.5]
    assert tau_at(config, None, 0) is None
    budgets = Budgets(config)
    budgets.learn(0, 3, [4, 10, 6], [True, False, True])
    budgets.learn(0, 4, [1, 1], [False, False])
    assert budgets.budget(0, 3, "low", 12) == 2.5
    assert budgets.budget(0, 4, "max", 12) == 4.0
    assert budgets.budget(0, 9, "max", 12) is None
    again = Budgets(config)
    again.load_state_dict(json.loads(json.dumps(budgets.state_dict())))
    assert again.base == budgets.base
    queue = rollouts(effort="low", budget=lambda e, t, v: 4.0, effort_config=config)
    [group, _] = queue.collect(Scripted({(0, 1): 5, (0, 2): 4}), 0)
    assert [s.reward for s in group.samples] == [3.0, -1.0, 4.0]
    assert [s.over_budget for s in group.samples] == [False, True, False]


def test_packed_rows() -> None:
    """What every label gets: prompts and tool output nothing, own tokens their values; filler is marked."""
    from k3train.rl.batches import examples, micro_batches, pack
    from k3train.rl.trajectory import Group, Trajectory

    first = Trajectory([11, 12, 70, 13], [-1.0, -2.0, 0.0, -3.0], [4, 4, -1, 5], finish="stop", reward=1.0)
    second = Trajectory([21], [-0.5], [5], finish="stop", reward=0.0)
    failed = Trajectory([31], [-0.5], [5], finish="failed")
    lone = Group(1, 0, 0, [5], 5, [Trajectory([41], [-1.0], [5], finish="stop", reward=1.0), failed])
    group = Group(0, 0, 0, [7, 8], 4, [first, second, failed])
    made = examples([group, lone], ObjectiveConfig(normalization="sequence"), version=5)
    assert len(made) == 2
    batch = pack(made, 6, 2, pad_token=0)
    assert batch["tokens"].tolist() == [[7, 8, 11, 12, 70, 0], [7, 8, 0, 0, 0, 0]]
    assert batch["labels"][0].tolist() == [8, 11, 12, 70, 13, 0]
    assert batch["loss_mask"].tolist() == [[0, 1, 1, 0, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert batch["behaviour"][0].tolist() == [0, -1, -2, 0, -3, 0]
    assert batch["advantage"][0].tolist() == [0, 0.5, 0.5, 0, 0.5, 0]
    assert batch["fresh"][0].tolist() == [0, 0, 0, 0, 1, 0]
    # Four own tokens in two responses: 4 / (2 * 3) and 4 / (2 * 1).
    assert batch["weight"][0].tolist() == pytest.approx([0, 2 / 3, 2 / 3, 0, 2 / 3, 0])
    assert batch["weight"][1, 1] == 2.0
    assert batch["document_ids"].tolist() == [[0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 1]]
    assert batch["padding"][1].tolist() == [False, False, True, True, True, True]
    other = Group(2, 0, 0, [5], 5, [Trajectory([51], [-1.0], [5], finish="stop", reward=float(i)) for i in range(2)])
    by_group = examples([group, lone, other], ObjectiveConfig(normalization="group"), version=5)
    # Four own tokens in one group, two in the other: 6 / (2 * 4) and 6 / (2 * 2).
    assert [float(e["weight"].max()) for e in by_group] == [0.75, 0.75, 1.5, 1.5]
    together = pack(made, 12, 4, pad_token=0)
    assert together["tokens"].shape == (4, 12)
    assert together["document_ids"][0].tolist() == [0] * 5 + [1] * 2 + [2] * 5
    shares = [micro_batches(together, 1, rank, 2) for rank in range(2)]
    assert [len(share) for share in shares] == [2, 2]
    assert shares[0][0]["tokens"].tolist() == together["tokens"][:1].tolist()
    with pytest.raises(ValueError, match="does not fit"):
        pack(made, 4, 1, 0)


def test_groups_without_signal_are_left_out_where_asked() -> None:
    """The policy gradient that remains is the same, because theirs is 0; failed samples do not make a difference."""
    from k3train.rl.batches import examples, with_signal
    from k3train.rl.trajectory import Group, Trajectory

    def group(uid: int, *rewards: float | None) -> Group:
        samples = [Trajectory([21], [-0.5], [5], finish="failed" if r is None else "stop", reward=r) for r in rewards]
        return Group(uid, 0, 0, [7, 8], 5, samples)

    groups = [group(0, 1.0, 1.0), group(1, 0.0, 1.0, None), group(2, 0.0, 0.0, None)]
    asked = ObjectiveConfig(skip_uniform=True)
    assert [g.uid for g in with_signal(groups, asked)] == [1]
    assert [g.uid for g in with_signal(groups, ObjectiveConfig())] == [0, 1, 2]
    assert [g.uid for g in with_signal([groups[0], groups[2]], asked)] == [0, 2]  # a step needs something
    left = [e["advantage"].sum() for e in examples(with_signal(groups, asked), asked, 5)]
    everything = [e["advantage"].sum() for e in examples(groups, asked, 5)]
    assert sorted(map(float, left)) == sorted(float(a) for a in everything if a != 0) == [-0.5, 0.5]
