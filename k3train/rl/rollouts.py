"""Partial rollouts: N prompts times K samples in flight, paused when a part has finished, and resumed afterwards.

Every rank runs this alike. What only one rank may do (environments run programs and read clocks) rank 0 does for all,
through `agree`; engines see to their own agreement.
"""

from __future__ import annotations

import functools
import hashlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from k3train.config.rl import RLConfig
from k3train.data.chat.messages import Conversation
from k3train.data.chat.parse import Completion
from k3train.errors import UserError
from k3train.rl.calls import Call, Calls
from k3train.rl.chat import ChatFormat
from k3train.rl.checks import Outcome, failed_info, judgement_of, sentence
from k3train.rl.environments import Judgement
from k3train.rl.sources import Source, task_order
from k3train.rl.steps import Agree, Answer, InTouch, Message, Question, Steps
from k3train.rl.trajectory import Group, Trajectory
from k3train.rollout.engine import Engine, Piece, Work
from k3train.rollout.sampling import SamplingConfig
from k3train.rollout.tasks import Task

# Of a group: rewards, a sentence where judging failed, or None to keep those of the steps; and counts.
_Verdicts = tuple[Sequence[float] | str | None, Mapping[str, float]]


class Rollouts:
    """The samples in flight and those that are ready, over iterations.

    Args:
        config: the recipe's section.
        sources: one for each of its environments.
        chat: how tasks become tokens.
        seed: of the order of tasks and of every sample.
        max_context: tokens of prompt and response together.
        agree: runs a function on one rank and gives its result to all.
        budget: of (environment, task, version), in tokens; None: no budget.
    """

    where = "rl.environments.{}"  # the key that the tasks of a source are of

    def __init__(
        self,
        config: RLConfig,
        sources: Sequence[Source],
        chat: ChatFormat,
        seed: int,
        max_context: int,
        agree: Agree = lambda action: action(),
        budget: Callable[[int, int, int], float | None] = lambda *_: None,
    ) -> None:
        self.config, self.sources, self.chat, self.seed = config, sources, chat, seed
        self.max_context, self._budget = max_context, budget
        # Told of a group when its last sample ends, while others go on. Rewards may still be missing, or change.
        self.on_done: Callable[[Group], None] = lambda group: None
        self.groups: list[Group] = []  # begun and not trained on yet, oldest first
        self._beside: dict[str, float] = {}  # what the engine counted outside of `collect` since the last one
        self._next_uid = 0
        self._positions = [0] * len(sources)  # tasks taken from each source
        self.totals: Counter[str] = Counter()
        self._step: Counter[str] = Counter()
        self._calls = Calls(config.rollout.environment_workers)
        lag = config.rollout.environment_lag if config.rollout.engine == "local" else None
        # Told, on every rank, that something came or was waited for: how long all of it takes is no hang.
        self.on_progress: Callable[[], None] = lambda: None
        self.touch, self._last_progress = InTouch(agree, self._progress), 0.0
        self._steps = Steps(self._calls, self.touch, lag, self._encode)
        self._told: set[int] = set()  # groups that `on_done` knows of
        rollout = config.rollout
        self._sampling = SamplingConfig(
            temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k, seed=seed
        )

    def collect(self, engine: Engine, version: int) -> list[Group]:
        """Sample under the policy `version` until enough has finished; returns the groups that are ready to train on.

        Paused samples go on first, then new groups fill up what is in flight. Generation pauses when `finish_fraction`
        of the samples in flight has finished, but not before one group is ready, nor while a group would become older
        than `max_staleness`.

        Raises:
            UserError: a prompt has no room for an answer.
        """
        started = time.perf_counter()
        before = engine.counters()
        self._step.clear()
        engine.version = version
        self._fill(version)
        waiting = [(g, j) for g in self.groups for j, s in enumerate(g.samples) if s.finish is None]
        self._step["in_flight"] = len(waiting)
        self._step["resumed"] = sum(g.samples[j].drawn > 0 for g, j in waiting)
        target = math.ceil(self.config.rollout.finish_fraction * len(waiting))
        index = {(g.uid, j): (g, g.samples[j]) for g, j in waiting}
        engine.submit([self._work(g, j) for g, j in waiting])
        self._steps.begin()
        self._told.clear()
        while True:
            pieces = engine.poll()
            if pieces:
                self._progress()
            self._take(engine, index, pieces)
            more = self._go_on(engine, self._steps.take(idle=not pieces))
            if more:
                engine.submit(more)
            if self._enough(target, version) or not (pieces or more or len(self._steps)):
                break
        self._take(engine, index, engine.pause())
        self._go_on(engine, self._steps.take_all())
        ready = [g for g in self.groups if g.done]
        self.groups = [g for g in self.groups if not g.done]
        self._judge(ready)
        self._count(engine, before, time.perf_counter() - started)
        return ready

    def restart(self, engine: Engine) -> int:
        """Begin the groups in flight anew, with the same tasks: another policy goes on than the one that they are of.

        Returns the tokens that are dropped; `total_dropped_tokens` counts them.
        """
        dropped = sum(sample.drawn for group in self.groups for sample in group.samples)
        for group in self.groups:
            for number in range(len(group.samples)):
                engine.release((group.uid, number))
            group.samples = [Trajectory() for _ in group.samples]
        self.totals["dropped_tokens"] += dropped
        return dropped

    def _progress(self) -> None:
        """As often as needed: a watchdog that is told has a thread to start."""
        now = time.monotonic()
        if now - self._last_progress >= self.touch.seconds:
            self._last_progress = now
            self.on_progress()

    def metrics(self) -> dict[str, float]:
        """Of the last `collect`: counts, and totals of failures and dropped tokens since the start."""
        totals = {f"total_{name}": float(value) for name, value in self.totals.items()}
        return {**{name: float(value) for name, value in self._step.items()}, **totals}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next iteration depends on, as plain data. Random numbers follow from names, so they need
        no state of their own."""
        return {
            "groups": [group.to_dict() for group in self.groups],
            "next_uid": self._next_uid,
            "positions": list(self._positions),
            "totals": dict(self.totals),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self.groups = [Group.from_dict(group) for group in saved["groups"]]
        self._next_uid = saved["next_uid"]
        self._positions = list(saved["positions"])
        self.totals = Counter(saved["totals"])

    def completions(self, group: Group, sample: Trajectory) -> list[Completion]:
        """The model's messages so far."""
        thinking = self.sources[group.environment].tasks[group.task].conversation.thinking
        return [self.chat.answer(sample.tokens[start:stop], thinking) for start, stop in sample.turns]

    def prompt(self, conversation: Conversation) -> tuple[int, ...]:
        """What the policy reads of a task."""
        return self.chat.prompt(conversation, self.config.show_effort)

    def _fill(self, version: int) -> None:
        rollout = self.config.rollout
        unfinished = sum(s.finish is None for g in self.groups for s in g.samples)
        while unfinished + rollout.samples <= rollout.prompts * rollout.samples:
            self.groups.append(self._new_group(version))
            unfinished += rollout.samples

    def _new_group(self, version: int) -> Group:
        uid = self._next_uid
        self._next_uid += 1
        weights = [source.weight for source in self.sources]
        [number] = random.Random(f"environment {self.seed} {uid}").choices(range(len(weights)), weights)
        source, position = self.sources[number], self._positions[number]
        self._positions[number] += 1
        epoch, place = divmod(position, len(source.tasks))
        task = task_order(f"tasks {self.seed} {number} {epoch}", len(source.tasks))[place]
        return self._group(uid, number, task, version)

    def _group(self, uid: int, number: int, task: int, version: int) -> Group:
        source = self.sources[number]
        prompt = self._prompt_of(number, source.tasks[task])
        if len(prompt) >= self.max_context:
            raise UserError(
                f"{self.where.format(number)}: the prompt of task {source.tasks[task].id} has {len(prompt)} tokens and"
                f" leaves none of train.seq_length={self.max_context} for an answer; try a larger train.seq_length"
            )
        samples = [Trajectory() for _ in range(self.config.rollout.samples)]
        return Group(uid, number, task, prompt, version, samples, self._budget(number, task, version))

    def _prompt_of(self, number: int, task: Task) -> list[int]:
        """Without a prompt there is no sample that could count as failed, so that ends the run, with a sentence."""
        environment = self.sources[number].environment
        try:
            return list(self.prompt(environment.conversation(task)))
        except Exception as error:
            raise UserError(
                f"{self.where.format(number)}: {type(environment).__name__}.conversation makes no prompt of task"
                f" {task.id} ({sentence(error)}); correct it, or leave the task out"
            ) from error

    def _room(self, group: Group, sample: Trajectory) -> int:
        """Tokens that the sample may still grow by."""
        most = min(self.config.rollout.max_new_tokens, self.max_context - len(group.prompt))
        return most - len(sample.tokens)

    def _work(self, group: Group, number: int) -> Work:
        sample = group.samples[number]
        sampling = replace(self._sampling, max_new_tokens=self._room(group, sample))
        context = (*group.prompt, *sample.tokens)
        return Work((group.uid, number), context, sampling, self.chat.stop, sample.drawn)

    def _take(self, engine: Engine, index: dict, pieces: Sequence[Piece]) -> None:
        """Add what came, and ask environments about the messages that ended."""
        ended = []
        for piece in pieces:
            group, sample = index[piece.key]
            if piece.experts is not None and self.config.rollout.replay_experts:
                sample.note_experts(piece.experts, len(group.prompt) + len(sample.tokens))
            if piece.token is not None:
                sample.push(piece.token, piece.logprob, piece.version)
            if piece.finish == "failed":
                self._fail(sample, piece.error or "the engine gave it up", "server")
                engine.release(piece.key)
            elif piece.finish is not None:
                sample.end_turn()
                ended.append(Message(group, piece.key[1], piece.finish))
        self._steps.ask(ended, self._question)
        self._let_go(engine, ended)

    def _go_on(self, engine: Engine, answers: Sequence[Answer]) -> list[Work]:
        """Add what environments said; returns the work of samples that have a further turn."""
        for message, outcome in answers:
            self._apply(message, outcome)
        self._let_go(engine, [message for message, _ in answers if not message.last])
        return [self._work(m.group, m.number) for m, _ in answers if m.sample.finish is None]

    def _let_go(self, engine: Engine, messages: Sequence[Message]) -> None:
        """Free the states of the samples of these that are over, and tell of groups that are."""
        for message in messages:
            if self._over(message.group, message.number):
                engine.release(message.key)
        for group in {m.group.uid: m.group for m in messages}.values():
            if group.uid not in self._told and self._all_over(group):
                self._told.add(group.uid)
                self.on_done(group)

    def _question(self, message: Message) -> Question:
        """What the environment is asked about a message. An exception of `ends` is one of the step."""
        group = message.group
        source, turns = self.sources[group.environment], self.completions(group, message.sample)
        task, seed = source.tasks[group.task], self._seed_of(group, message.number)
        try:
            # Without room nothing can follow, whatever the environment says.
            last = message.finish == "length" or bool(source.environment.ends(task, turns))
        except Exception as error:
            return Question(functools.partial(_raise, error), source.seconds, last=True)
        return Question(functools.partial(source.environment.step, task, turns, seed), source.seconds, last)

    def _encode(self, group: Group, messages: Sequence[dict[str, Any]]) -> tuple[int, ...]:
        """What an environment says, as the samples of the group read it."""
        return self.chat.reply(messages, self.sources[group.environment].tasks[group.task].conversation.thinking)

    def _seed_of(self, group: Group, number: int) -> int:
        digest = hashlib.sha256(f"{self.seed} {group.uid} {number}".encode()).digest()
        return int.from_bytes(digest[:6], "little")

    def _apply(self, message: Message, outcome: Outcome | str) -> None:
        group, sample = message.group, message.sample
        if isinstance(outcome, str):
            self._fail(sample, outcome, "environment_timeout" if outcome.startswith("Timeout") else "environment")
            return
        for name, value in outcome.info.items():
            sample.info[name] = sample.info.get(name, 0.0) + value
        if outcome.reward is not None:
            sample.finish, sample.reward = message.finish, outcome.reward
            sample.right = outcome.reward > 0 if outcome.right is None else outcome.right
            self._hold_to_budget(group, sample)
            return
        sample.reply(outcome.reply)
        if self._room(group, sample) <= 0:
            # The last word was the environment's: no answer came of it.
            del sample.tokens[sample.turns[-1][1] :], sample.logprobs[sample.turns[-1][1] :]
            del sample.versions[sample.turns[-1][1] :]
            sample.finish, sample.reward, sample.right = "length", 0.0, False
            self._hold_to_budget(group, sample)
        elif message.last:
            self._fail(sample, "step went on after a message of which ends said that it is the last", "environment")

    def _hold_to_budget(self, group: Group, sample: Trajectory) -> None:
        if group.budget is not None and self.used(group, sample) > group.budget:
            sample.reward, sample.over_budget = self.config.effort.override, True
            self._step["over_budget"] += 1

    def used(self, group: Group, sample: Trajectory) -> int:
        """What a budget counts of a sample: thinking tokens, or all that it drew, over all of its messages."""
        if self.config.effort.counts == "thinking":
            return sum(turn.thinking_tokens for turn in self.completions(group, sample))
        return sample.drawn

    def _fail(self, sample: Trajectory, why: str, kind: str) -> None:
        sample.finish, sample.reward, sample.error = "failed", None, why
        self.totals[f"{kind}_failures"] += 1
        self._step["failed"] += 1

    def _judge(self, groups: Sequence[Group]) -> None:
        """Let environments compare the samples of groups, where they do; all groups side by side."""
        asked = []
        for group in groups:
            whole = [s for s in group.samples if s.finish != "failed"]
            if whole and self.sources[group.environment].environment.compares:
                asked.append((group, whole))
        if not asked:
            return
        for (group, whole), (judged, counts) in zip(asked, self._verdicts(asked)):
            weight = self.sources[group.environment].environment.judge_weight
            for name, count in counts.items():
                self._step[f"judge_{name}"] += count
                self.totals[f"judge_{name}"] += count
            if isinstance(judged, str):
                for sample in whole:
                    self._fail(sample, judged, "judge")
            elif judged is not None:
                for sample, reward in zip(whole, judged, strict=True):
                    sample.right = self.sources[group.environment].environment.is_right(reward)
                    if not sample.over_budget:
                        sample.reward += weight * reward

    def _verdicts(self, asked: Sequence[tuple[Group, list[Trajectory]]]) -> list[_Verdicts]:
        """Of each group its rewards; a sentence where judging fails."""
        calls: list[Call] = []

        def action(seconds: float) -> list[_Verdicts] | None:
            if not calls:
                calls.extend(self._start_judging(asked))
            return self._judged(asked, calls) if self._calls.ended(calls, seconds) else None

        return self.touch.wait(action)

    def _start_judging(self, asked: Sequence[tuple[Group, list[Trajectory]]]) -> list[Call]:
        calls = []
        for group, whole in asked:
            source = self.sources[group.environment]
            answers = [self.completions(group, s)[-1] for s in whole]
            call = functools.partial(source.environment.judge_group, source.tasks[group.task], answers)
            limit = math.inf if source.environment.limits_judging else source.seconds
            calls.append(self._calls.start(call, limit))
        return calls

    @staticmethod
    def _judged(asked: Sequence[tuple[Group, list[Trajectory]]], calls: Sequence[Call]) -> list[_Verdicts]:
        found: list[_Verdicts] = []
        for (_, whole), call in zip(asked, calls):
            judged = judgement_of(call.result, len(whole))
            if isinstance(judged, Judgement):
                found.append((judged.rewards, judged.info))
            else:
                found.append((judged, failed_info(call.result)))
        return found

    def _enough(self, target: int, version: int) -> bool:
        """Whether generation may pause. What is over counts, with its reward or without."""
        going = sum(not self._over(g, j) for g in self.groups for j in range(len(g.samples)))
        if self._step["in_flight"] - going < target or not any(map(self._all_over, self.groups)):
            return False
        last = version + 1 - self.config.rollout.max_staleness
        return all(self._all_over(g) or (version if g.oldest is None else g.oldest) >= last for g in self.groups)

    def _over(self, group: Group, number: int) -> bool:
        """Whether nothing more is drawn of a sample; its reward may be on its way."""
        return group.samples[number].finish is not None or (group.uid, number) in self._steps.over

    def _all_over(self, group: Group) -> bool:
        return all(self._over(group, number) for number in range(len(group.samples)))

    def count_beside(self, before: dict[str, float], after: dict[str, float]) -> None:
        """The engine's counters around something else than `collect`, such as a refresh that found the server down:
        the difference is the next step's."""
        for name, value in after.items():
            self._beside[name] = self._beside.get(name, 0.0) + value - before.get(name, 0.0)

    def _count(self, engine: Engine, before: dict[str, float], seconds: float) -> None:
        for name, value in engine.counters().items():
            self._step[name] = value - before.get(name, 0.0) + self._beside.pop(name, 0.0)
        self._step["paused"] = sum(s.finish is None for g in self.groups for s in g.samples)
        self._step["waiting_groups"] = len(self.groups)
        self._step["rollout_seconds"] = seconds
        self._step["rollout_tokens_per_second"] = self._step["generated_tokens"] / max(seconds, 1e-9)


def _raise(error: Exception) -> None:
    raise error
