"""Reinforcement learning whose samples are written beforehand: what they say is known, what is learned is real."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_run import rl_recipe
from small_run import train_stage

from k3train.rl.environments import Environment

Script = Callable[[int, int], dict[str, Any]]  # which message of a sample, and of which sample: an assistant's message


def say(text: str, reasoning: str = "", code: str | None = None) -> dict[str, Any]:
    """An assistant's message, with a call of the tool `python` where there is code."""
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": code}}}
    calls = {} if code is None else {"tool_calls": [call]}
    return {"role": "assistant", "content": text, "reasoning": reasoning, **calls}


def with_a_tool(turn: int, sample: int) -> dict[str, Any]:
    """Right with one call; wrong at once; right with two calls, and so the longest; right without any."""
    calls = {0: 1, 2: 2}.get(sample, 0)
    if turn < calls:
        return say("", "ab", f"print(6 * 7 + {turn})")
    return say("41" if sample == 1 else "42", "cd")


def programs(turn: int, sample: int) -> dict[str, Any]:
    """Both of the task's tests hold; the second; none, for it is no program; both, after long thinking."""
    body = {1: "def f(x): return 3", 2: "no program"}.get(sample, "def f(x): return x")
    return say(body, "a" * (30 if sample == 3 else 5))


def sizes(turn: int, sample: int) -> dict[str, Any]:
    """Answers of other lengths, which a judge compares."""
    return say("abcd"[: sample + 1], "think" * (sample + 1))


class Better(Environment):
    """Worth 0.1 in any case: right is what says so, and not every reward above 0."""

    def step(self, task: Any, turns: Any, seed: int) -> Any:
        from k3train.rl.environments import Step

        good = "a" in turns[-1].response
        return Step(0.1 + 0.9 * good, right=good)


def scripted_tasks(folder: Path, **changes: Any) -> dict[str, Any]:
    """A file of four tasks in the folder of `make_tasks`, at the effort low, and a recipe of one step on it."""
    answer = changes.pop("answer", "42")
    rows = [
        {"id": f"t{n}", "family": "say", "messages": [{"role": "user", "content": f"say {n}"}], "answer": answer}
        | {"thinking_effort": "low"}
        for n in range(4)
    ]
    path = folder / f"{changes['run_dir'].name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"tasks": str(path), "timeout_seconds": 60, **changes.pop("source")}
    return rl_recipe(
        folder,
        rl__environments=[source],
        rl__rollout={"prompts": 2, "samples": 4, "max_new_tokens": 600},
        train__seq_length=1024,
        **{"rl__eval_tasks": str(path), "train__steps": 2, "train__eval_interval": 2, **changes},
    )


def train_scripted(
    rank: int, world_size: int, recipe: dict[str, Any], script: Script, signal_at: int = 0
) -> tuple[int | str, dict[str, Any], dict[str, Any]]:
    """As `rl_run.train_rl`, with samples that say what `script` has, at their log-probabilities under the model.

    Beside the code and the parameters: `groups` of each step, `base` of budgets, the `prompts` that were asked, how
    many `trained` labels each step had, and `labels`, their text.
    """
    from k3train.config.validate import validate
    from k3train.stages.rl import RLStage

    seen: dict[str, Any] = {"groups": [], "prompts": [], "trained": [], "labels": []}

    class Scripted(RLStage):
        def attach(self, trainer: Any) -> None:
            super().attach(trainer)
            self.engine = Writer(self._model, self.chat, script, seen["prompts"])

        def _batches(self, groups: Any, version: int) -> Any:
            batches = super()._batches(groups, version)
            seen["base"] = {index: base for (_, index), base in self.budgets.base.items()}
            seen["groups"].append([_plain(self, group) for group in groups])
            labels = [b["labels"][b["loss_mask"] > 0] for b in batches]
            seen["trained"].append(sum(map(len, labels)))
            seen["labels"].append("".join(self.tokenizer.decode(row.tolist()) for row in labels))
            return batches

    code, parameters = train_stage(
        Scripted, rank, world_size, recipe, signal_at, lambda config: validate(config, world_size)
    )
    return code, parameters, seen


def _plain(stage: Any, group: Any) -> dict[str, Any]:
    samples = group.samples
    return {
        "task": group.task,
        "budget": group.budget,
        "used": [stage.rollouts.used(group, s) for s in samples],
        "drawn": [s.drawn for s in samples],
        "tokens": [len(s.tokens) for s in samples],
        "rewards": [s.reward for s in samples],
        "right": [s.right for s in samples],
        "over": [s.over_budget for s in samples],
        "errors": [s.error for s in samples],
    }


class Writer:
    """An engine that draws one token a poll of what is written, for every sample that runs."""

    def __init__(self, model: Any, chat: Any, script: Script, prompts: list[str]) -> None:
        self.version, self._model, self._chat, self._script, self._prompts = 0, model, chat, script, prompts
        self._turns: dict[Any, int] = {}
        self._running: dict[Any, Iterator[Any]] = {}
        self._made = 0.0

    def submit(self, works: Sequence[Any]) -> None:
        for work in works:
            if not work.drawn:
                self._prompts.append(self._chat.tokenizer.decode(work.context))
            self._turns[work.key] = self._turns[work.key] + 1 if work.drawn else 0
            self._running[work.key] = self._pieces(work, self._turns[work.key])

    def _pieces(self, work: Any, turn: int) -> Iterator[Any]:
        from k3train.rollout.engine import Piece
        from k3train.rollout.scoring import token_logprobs

        tokens = self._written(self._script(turn, work.key[1]))
        assert len(tokens) <= work.sampling.max_new_tokens
        [scores] = token_logprobs(self._model, [[*work.context, *tokens]])
        for place, (token, score) in enumerate(zip(tokens, scores[-len(tokens) :])):
            yield Piece(work.key, token, score, self.version, "stop" if place == len(tokens) - 1 else None)

    def _written(self, message: dict[str, Any]) -> list[int]:
        from k3train.data.chat.messages import conversation_of

        asked = {"role": "user", "content": "x"}
        encoder = self._chat._encoder
        whole = encoder.encode(conversation_of({"messages": [asked, message]}, "a script")).ids.tolist()
        return whole[len(encoder.prompt(conversation_of({"messages": [asked]}, "a script"))) :]

    def poll(self) -> list[Any]:
        pieces = [next(running) for running in self._running.values()]
        self._made += len(pieces)
        for piece in pieces:
            if piece.finish:
                del self._running[piece.key]
        return pieces

    def pause(self) -> list[Any]:
        self._running.clear()
        return []

    def release(self, key: Any) -> None:
        pass

    def counters(self) -> dict[str, float]:
        return {"generated_tokens": self._made, "failures": 0.0}


def train_disturbed(
    rank: int, world_size: int, recipe: dict[str, Any], spike_at: int = 0, stale_at: int = 0
) -> tuple[int | str, dict[int, list[int]]]:
    """Train; returns the code, and for each step the policies that drew the tokens it trained on.

    In step `spike_at` the loss is reported as 100 more than it is. In step `stale_at` all samples count as drawn one
    step before.
    """
    import torch

    from k3train.config.validate import validate
    from k3train.stages.rl import RLStage

    versions: dict[int, list[int]] = {}

    class Disturbed(RLStage):
        now = 0

        def training_steps(self, consumed_samples: int) -> Iterator[list[dict]]:
            for batches in super().training_steps(consumed_samples):
                self.now = self._trainer.state.step + 1
                yield batches

        def _collect(self, version: int) -> list[Any]:
            groups = super()._collect(version)
            for sample in (s for g in groups for s in g.samples):
                if version + 1 == stale_at:
                    sample.versions = [v - 1 for v in sample.versions]
            versions[version + 1] = sorted({v for g in groups for s in g.samples for v in s.versions})
            return groups

        def loss(self, losses: Any) -> Any:
            total, tokens, report = super().loss(losses)
            if self.now == spike_at:
                report["loss"] = report["loss"] + torch.stack([100.0 * tokens, torch.zeros(())])
            return total, tokens, report

    code, _ = train_stage(Disturbed, rank, world_size, recipe, 0, lambda config: validate(config, world_size))
    return code, versions
