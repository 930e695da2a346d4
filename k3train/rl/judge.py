"""A generative judge over the completion protocol: rubric, scorepad, pairwise tournament, length veto.

As K3's report describes its reward model (section 4.1): before a verdict the judge reads, writes a rubric, scores each
candidate on it and logs the scores in a scorepad; answers to open questions meet pairwise; one that is longer than
sigma times a reference length loses without being read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

from k3train.config.rules import check_url
from k3train.data.chat.messages import Message
from k3train.data.chat.parse import Completion
from k3train.errors import UserError
from k3train.rl.calls import Calls
from k3train.rl.environments import Environment, Judgement
from k3train.rl.rewards import Reward
from k3train.rollout.client import CompletionClient, ServerFailedError, ServerRefusedError
from k3train.rollout.sampling import SamplingConfig
from k3train.rollout.tasks import Task

Ask = Callable[[str], str]  # a prompt, the judge's text

_PROMPT = """\
Two answers to one question are to be compared. Where the question is a conversation, with roles in brackets, they are
two ways to go on after its last message.

Question:
{question}

Answer A:
{a}

Answer B:
{b}

First write a rubric: what a good answer to this question has to do, one point a line, each worth 0 to 10. Then read
both answers and score each point for both in a scorepad, a line for each as `POINT | A: number | B: number`. End with
one line, `VERDICT: A` or `VERDICT: B`.

Rubric:
"""
_SCORE = re.compile(r"^(.*?)\|\s*A:\s*(\d+(?:\.\d+)?)\s*\|\s*B:\s*(\d+(?:\.\d+)?)\s*$", re.MULTILINE)
_VERDICT = re.compile(r"^\s*VERDICT:\s*([AB])\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Verdict:
    """What a judge said of a pair: the winner (0 or 1), and its scorepad as (point, first's, second's score)."""

    winner: int
    scorepad: tuple[tuple[str, float, float], ...] = ()


Game = Callable[[], Any]  # a Verdict, None where the judge's text gives none, or what stands for a failure


@dataclass
class Outcome:
    """Of a tournament: the share of its games that each answer won, which were vetoed, and what went wrong.

    `failures` are games without a text of the judge, `draws` those whose text gives no verdict; both count half for
    either side. A veto decides games unplayed.
    """

    rewards: list[float]
    vetoed: list[bool]
    verdicts: list[tuple[int, int, Verdict]] = field(default_factory=list)
    failures: int = 0
    draws: int = 0

    @property
    def info(self) -> dict[str, float]:
        """Counts for the metrics: games that were played, of them failed and drawn ones, and vetoed answers."""
        return {
            "games": len(self.verdicts) + self.failures + self.draws,
            "failed_games": self.failures,
            "draws": self.draws,
            "vetoes": sum(self.vetoed),
        }


class NoVerdictError(TimeoutError):
    """Not a single game of a tournament gave a verdict, so that the rewards would say nothing."""

    def __init__(self, outcome: Outcome) -> None:
        self.info = outcome.info
        failed = f"{outcome.failures} failed, of {outcome.draws} the judge's text gives none"
        super().__init__(f"the judge gave no verdict in {self.info['games']} games: {failed}")


_FAILED = object()  # the result of a game without a text


def read_verdict(text: str, swapped: bool = False) -> Verdict | None:
    """The verdict in a judge's text, or None where the text does not keep to the form.

    A scorepad is needed, and it has to agree with the verdict: one that names the answer with the lower sum counts as
    none. `swapped`: the second answer was shown as A.
    """
    scores = [(point.strip(), float(a), float(b)) for point, a, b in _SCORE.findall(text)]
    named = _VERDICT.findall(text)
    if not scores or not named:
        return None
    first, second = sum(a for _, a, _ in scores), sum(b for _, _, b in scores)
    winner = "AB".index(named[-1])
    if (first, second)[winner] < (first, second)[1 - winner]:
        return None
    if swapped:
        return Verdict(1 - winner, tuple((point, b, a) for point, a, b in scores))
    return Verdict(winner, tuple(scores))


def in_turn(games: Sequence[Game]) -> list[Any]:
    """One game after the other."""
    return [game() for game in games]


def tournament(
    question: str,
    answers: Sequence[str],
    ask: Ask,
    most_length: float | None = None,
    both_orders: bool = True,
    play: Callable[[Sequence[Game]], Sequence[Any]] = in_turn,
) -> Outcome:
    """Every answer against every other; an answer's reward is the share of its games that it won, from 0 to 1.

    Args:
        question: what was asked.
        answers: the candidates.
        ask: the judge; an exception it raises is counted as a failed game.
        most_length: characters, sigma * l0; a longer answer loses every game unread. Of two that are too long neither
            wins.
        both_orders: each pair is shown in both orders, because judges favour a place; the two are two games.
        play: gives the results of games in their order, however it plays them; a TimeoutError stands for a game that
            took too long.

    A game that fails, or whose text cannot be read, is a draw: half a win for both. Rewards follow from the results
    alone, not from the order in which they come.
    """
    too_long = [most_length is not None and len(answer) > most_length for answer in answers]
    orders = (False, True) if both_orders else (False,)
    pairs = [(i, j, swapped) for i, j in combinations(range(len(answers)), 2) for swapped in orders]
    read = [(i, j, swapped) for i, j, swapped in pairs if not (too_long[i] or too_long[j])]
    results = play([partial(_play, question, answers[i], answers[j], ask, swapped) for i, j, swapped in read])
    won, outcome = [0.0] * len(answers), Outcome([], too_long)
    for i, j, _ in pairs:
        if too_long[i] or too_long[j]:
            won[i] += not too_long[i]
            won[j] += not too_long[j]
    for (i, j, _), verdict in zip(read, results, strict=True):
        if isinstance(verdict, Exception) and not isinstance(verdict, TimeoutError):
            raise verdict
        if isinstance(verdict, Verdict):
            outcome.verdicts.append((i, j, verdict))
            won[(i, j)[verdict.winner]] += 1
            continue
        failed = verdict is _FAILED or isinstance(verdict, TimeoutError)
        outcome.failures += failed
        outcome.draws += not failed
        won[i] += 0.5
        won[j] += 0.5
    games = (len(answers) - 1) * len(orders)  # of each answer
    outcome.rewards = [w / games if games else 0.0 for w in won]
    return outcome


def _play(question: str, first: str, second: str, ask: Ask, swapped: bool) -> Any:
    a, b = (second, first) if swapped else (first, second)
    try:
        return read_verdict(ask(_PROMPT.format(question=question, a=a, b=b)), swapped)
    except (ServerFailedError, ServerRefusedError, OSError, LookupError, TypeError):
        return _FAILED


class JudgedEnvironment(Environment):
    """Open questions: the K answers to a prompt meet in a tournament before a judge behind a completion server.

    Options: `url` and `model` of the judge's server; `max_tokens` (1024), `temperature` (0); `sigma` (0: no length
    veto), times the length of the task's reference answer; `both_orders` (true); `concurrency` (8), games at a time
    over all groups; `timeout_seconds` (60) of each game. An answer that breaks the chat format is worth 0 to the judge
    and does not play. What the recipe's `rewards` name besides `judge` is added.
    """

    limits_judging = True  # game by game: how long a tournament takes depends on the number of answers

    def __init__(
        self,
        reward: Reward,
        url: str = "",
        model: str | None = None,
        max_tokens: int = 1024,
        temperature: float = 0.0,
        sigma: float = 0.0,
        both_orders: bool = True,
        timeout_seconds: float = 60.0,
        concurrency: int = 8,
    ) -> None:
        super().__init__(reward)
        if not url:
            raise UserError("rl.environments: judge needs options.url, the address of the judge's server")
        check_url("rl.environments: judge: options.url", url)
        if sigma < 0 or max_tokens < 1:
            raise UserError(f"rl.environments: judge has sigma={sigma}, max_tokens={max_tokens}; at least 0 and 1")
        if concurrency < 1 or not 0 < timeout_seconds < math.inf:
            raise UserError(
                f"rl.environments: judge has concurrency={concurrency}, timeout_seconds={timeout_seconds}; at least 1,"
                " and more than 0"
            )
        self._client = CompletionClient(url, model, timeout_seconds)
        self._calls, self._seconds = Calls(concurrency), timeout_seconds
        self._sampling = SamplingConfig(max_tokens, temperature)
        self._sigma, self._both = sigma, both_orders

    def judge_group(self, task: Task, answers: Sequence[Completion]) -> Judgement:
        """Rewards by tournament.

        Raises:
            NoVerdictError: not a single game could be judged.
        """
        playing = [i for i, answer in enumerate(answers) if answer.complete]
        if len(playing) < 2:
            return Judgement([float(i in playing) for i in range(len(answers))])
        most = self._sigma * len(task.answer) if self._sigma else None
        texts = [answers[i].response for i in playing]
        outcome = tournament(question_of(task), texts, self._ask, most, self._both, self._play)
        if outcome.info["games"] and not outcome.verdicts:
            raise NoVerdictError(outcome)
        rewards = [0.0] * len(answers)
        for i, reward in zip(playing, outcome.rewards):
            rewards[i] = reward
        return Judgement(rewards, outcome.info)

    def is_right(self, judged: float) -> bool:
        """Half of its games or more: of answers that are compared, the better ones."""
        return judged >= 0.5

    def _play(self, games: Sequence[Game]) -> list[Any]:
        return self._calls.run(games, self._seconds)

    def _ask(self, prompt: str) -> str:
        return self._client.complete(prompt, self._sampling)


def question_of(task: Task) -> str:
    """What the answers answer, as a judge reads it: the text of a single question, else all messages with their roles.

    Thinking is left out; calls of tools and their results are not.
    """
    messages = task.conversation.messages
    if len(messages) == 1:
        return _text(messages[0])
    parts = []
    for message in messages:
        name = message.get("tool") or message.get("name")
        calls = [f"calls {c.name} with {c.raw or json.dumps(c.arguments)}" for c in message.get("tool_calls") or ()]
        said = [text for text in (_text(message), *calls) if text]
        parts.append("\n".join([f"[{message['role']}{f' {name}' if name else ''}]", *said]))
    return "\n\n".join(parts)


def _text(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(content)
