"""Families of made-up tasks: questions, answers and worked steps from a random generator.

Numbers are written digit by digit, so that every tokenizer cuts them alike. Level 0 is for a model of a few million
parameters that has seen hardly any text, level 1 for one that was pretrained for longer, level 2 has larger numbers,
longer lists and tables. A question belongs to one of three splits by its own hash, so that they never meet, whatever
the seeds and sizes: fine-tuning learns from answers to the first, reinforcement learning tries its own on the second
(questions whose answers it has seen are answered rightly already: nothing is left to reinforce), the third is held out.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from k3train.data.chat.messages import EFFORTS

SPLITS = {"sft": 4, "rl": 3, "held_out": 1}  # shares of the questions
EFFORTLESS = 0.2  # part of the conversations that state no effort and think as at any of them
LEVELS = (0, 1, 2)  # of difficulty
WORDS = ("key", "set", "line", "name", "list", "file", "text", "code", "data", "path", "time", "type")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ORDINALS = ("first", "second", "third", "fourth")
FEW = 6  # words and letters that level 0 is made of; half as many name the rows of its tables
MOST = 9  # its sums have one digit
SMALL = 6  # its other digits go up to here
_DIGITS = range(MOST + 1)
SMALL_SUMS = [(a, b, c) for a in _DIGITS for b in _DIGITS for c in _DIGITS if a + b + c <= MOST]


@dataclass(frozen=True)
class Problem:
    """A question with its answer; `steps` lead to it, `proof` goes over it once more."""

    question: str
    answer: str
    steps: str
    proof: str

    def reasoning(self, effort: str) -> str:
        """The thinking at an effort: nothing, the steps, or the steps and the proof."""
        return {"low": "", "high": self.steps, "max": f"{self.steps} {self.proof}"}[effort]


@dataclass(frozen=True)
class Family:
    """How problems of a kind are drawn at a level, and the checker of their answers."""

    draw: Callable[[random.Random, int], Problem]
    check: str


def _apart(number: int) -> str:
    return " ".join(str(number))


def _add(rng: random.Random, level: int) -> Problem:
    """The sum of three digits, one after the other; of two digits; or of two numbers of two digits, by columns."""
    if level == 0:
        a, b, c = rng.choice(SMALL_SUMS)
        steps = f"{a} + {b} = {a + b} , {a + b} + {c} = {a + b + c} ."
        proof = f"so {c} + {b} = {b + c} , {b + c} + {a} = {a + b + c} ."
        return Problem(f"add {a} and {b} and {c}", str(a + b + c), steps, proof)
    if level == 1:
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        proof = f"so {b} + {a} = {_apart(a + b)} ."
        return Problem(f"add {a} and {b}", _apart(a + b), f"{a} + {b} = {_apart(a + b)} .", proof)
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    low, high = a % 10 + b % 10, a // 10 + b // 10
    carry = low // 10
    steps = f"{a % 10} + {b % 10} = {_apart(low)} , {a // 10} + {b // 10} + {carry} = {_apart(high + carry)} ."
    proof = f"so {_apart(a)} + {_apart(b)} = {_apart(a + b)} ."
    return Problem(f"add {_apart(a)} and {_apart(b)}", _apart(a + b), steps, proof)


def _reverse(rng: random.Random, level: int) -> Problem:
    """Letters in the opposite order."""
    some = LETTERS if level == 2 else LETTERS[: FEW * (1 + level)]
    letters = rng.choices(some, k=rng.randint(3, 5) if level == 2 else 3)
    numbered = [f"{place} {letter}" for place, letter in enumerate(letters, start=1)]
    steps, proof = " ".join(numbered) + " .", "back " + " ".join(reversed(numbered)) + " ."
    return Problem(f"reverse {' '.join(letters)}", " ".join(reversed(letters)), steps, proof)


def _pick(rng: random.Random, level: int) -> Problem:
    """The word in a place of a list."""
    words = rng.sample(WORDS if level else WORDS[:FEW], max(3, 2 + level))
    place = rng.randrange(len(words))
    numbered = [f"{ORDINALS[i]} {word}" for i, word in enumerate(words)]
    steps, proof = " ".join(numbered[: place + 1]) + " .", f"all {' '.join(numbered)} ."
    return Problem(f"{ORDINALS[place]} word of {' '.join(words)}", words[place], steps, proof)


def _sort(rng: random.Random, level: int) -> Problem:
    """Digits from the smallest to the largest."""
    digits = rng.sample(range(10), rng.randint(1 + level, 2 + level)) if level else rng.sample(range(SMALL + 1), 3)
    ordered = sorted(digits)
    question, answer = f"sort {' '.join(map(str, digits))}", " ".join(map(str, ordered))
    rising = " < ".join(map(str, ordered)) + " ."
    if level == 0:
        return Problem(question, answer, rising, f"so {' > '.join(map(str, reversed(ordered)))} .")
    left, steps = list(digits), []
    for digit in ordered:
        steps.append(f"{digit} of {' '.join(map(str, left))}")
        left.remove(digit)
    return Problem(question, answer, " , ".join(steps) + " .", f"so {rising}")


def _table(rng: random.Random, rows: int, level: int, most: int) -> tuple[list[tuple[str, int]], str]:
    names = WORDS if level else WORDS[: FEW // 2]
    table = [(name, rng.randint(1, most)) for name in rng.sample(names, rows)]
    return table, "".join(f"| {name} | {value} |\n" for name, value in table)


def _lookup(rng: random.Random, level: int) -> Problem:
    """The value beside a name."""
    table, text = _table(rng, 2 * level or 3, level, 9 if level else SMALL)
    name, value = rng.choice(table)
    proof = "all " + " , ".join(f"{n} | {v}" for n, v in table) + " ."
    return Problem(f"{text}value of {name}", str(value), f"{name} | {value} .", proof)


def _total(rng: random.Random, level: int) -> Problem:
    """The sum of two values of a table."""
    table, text = _table(rng, max(2, 1 + level), level, 9 if level else MOST // 2)
    (a, x), (b, y) = rng.sample(table, 2)
    steps = f"{a} | {x} , {b} | {y} , {x} + {y} = {_apart(x + y)} ."
    return Problem(f"{text}total of {a} and {b}", _apart(x + y), steps, f"so {y} + {x} = {_apart(x + y)} .")


FAMILIES: dict[str, Family] = {
    "add": Family(_add, "digits"),
    "reverse": Family(_reverse, "exact"),
    "pick": Family(_pick, "exact"),
    "sort": Family(_sort, "exact"),
    "lookup": Family(_lookup, "digits"),
    "total": Family(_total, "digits"),
}


def split_of(family: str, question: str) -> str:
    """The split that a question belongs to."""
    names = [name for name, share in SPLITS.items() for _ in range(share)]
    return names[hashlib.sha256(f"{family} {question}".encode()).digest()[0] % len(names)]


def draw_problem(family: str, split: str, rng: random.Random, level: int = 1) -> Problem:
    """A problem of `family` at a level, out of one of the splits."""
    while True:
        problem = FAMILIES[family].draw(rng, level)
        if split_of(family, problem.question) == split:
            return problem


def task_row(family: str, problem: Problem, effort: str, number: int) -> dict[str, Any]:
    """The row of a task file: one question, its reference answer as an assistant message, and how to check."""
    return {
        "id": f"{family}-{number}",
        "family": family,
        "thinking_effort": effort,
        "messages": turn(problem, effort),
        "answer": problem.answer,
        "check": FAMILIES[family].check,
    }


def turn(problem: Problem, effort: str) -> list[dict[str, Any]]:
    """Question and answer as messages. A space comes first, so that words are the same tokens there as elsewhere."""
    thinking = problem.reasoning(effort)
    answer = {"role": "assistant", "reasoning": thinking and f" {thinking}", "content": f" {problem.answer}"}
    return [{"role": "user", "content": problem.question}, answer]


def draw_tasks(
    count: int,
    split: str,
    seed: int,
    families: tuple[str, ...] = tuple(FAMILIES),
    level: int = 1,
    efforts: tuple[str, ...] = EFFORTS,
) -> list[dict]:
    """`count` different tasks, families in turn and every family's efforts in turn; some come again where a family has
    no more questions in the split."""
    rng = random.Random(f"tasks {seed} {split}")
    rows, seen = [], set()
    for number in range(count):
        family = families[number % len(families)]
        effort = efforts[number // len(families) % len(efforts)]
        problem = draw_problem(family, split, rng, level)
        for _ in range(1000):  # a family may run out of questions that are new
            if (problem.question, effort) not in seen:
                break
            problem = draw_problem(family, split, rng, level)
        seen.add((problem.question, effort))
        rows.append(task_row(family, problem, effort, number))
    return rows


def draw_sessions(
    count: int,
    turns: int,
    seed: int,
    families: tuple[str, ...] = tuple(FAMILIES),
    split: str = "sft",
    level: int = 1,
    efforts: tuple[str, ...] = EFFORTS,
    unstated: float = EFFORTLESS,
) -> list[dict]:
    """`count` conversations of `turns` questions each at one effort: what SFT reads. Their families differ as far as
    there are enough: a model that cannot tell yet which of two like questions is the last one learns from these. A part
    of them, `unstated`, thinks at its effort without a message that states it."""
    rng = random.Random(f"sessions {seed} {split}")
    rows = []
    for number in range(count):
        effort = efforts[number % len(efforts)]
        stated = {} if rng.random() < unstated else {"thinking_effort": effort}
        chosen = [name for start in range(0, turns, len(families)) for name in rng.sample(families, len(families))]
        problems = [draw_problem(family, split, rng, level) for family in chosen[:turns]]
        messages = [message for problem in problems for message in turn(problem, effort)]
        rows.append({"id": f"session-{number}", **stated, "messages": messages})
    return rows
