"""Reinforcement learning: the model in training makes the data, environments reward them, the objective learns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from k3train.config.schema import RecipeConfig
from k3train.errors import UserError
from k3train.model.model import TokenLosses
from k3train.parallel.first_rank import from_first_rank
from k3train.rl import report
from k3train.rl.batches import examples, micro_batches, pack, trainable, with_signal
from k3train.rl.chat import ChatFormat
from k3train.rl.effort import Budgets
from k3train.rl.objective import distillation_advantages, kl_estimate, policy_terms
from k3train.rl.rollouts import Rollouts
from k3train.rl.server_engine import server_engine
from k3train.rl.shared_engine import SharedEngine
from k3train.rl.sources import Source, check_effort, evaluated, fingerprint, make_sources
from k3train.rl.teacher_hosts import check_same_teachers, identities
from k3train.rl.teachers import Teachers
from k3train.rl.trajectory import Group
from k3train.rl.weights import WeightRefresh
from k3train.rl.whole import WholeAnswers
from k3train.rollout.local import LocalEngine
from k3train.stages.inputs import fitting_tokenizer
from k3train.train.stage import Batch
from k3train.train.watchdog import touch_seconds

MOST_EMPTY = 20  # iterations in a row without a group that can be trained on


class RLStage:
    """Rollouts for data, a policy gradient for loss. All ranks hold the same samples; each trains on its rows."""

    bytes_per_token = None

    def __init__(self, config: RecipeConfig) -> None:
        """Read tasks and environments. Every rank calls this once the process groups stand.

        Raises:
            UserError: tokenizer, tasks or environments are not usable.
        """
        self.config, self.rl = config, config.rl
        self.tokenizer = fitting_tokenizer(config)
        self.chat = ChatFormat(self.tokenizer, f"data.tokenizer={config.data.tokenizer}")
        sources = make_sources(self.rl)
        self.fingerprint = fingerprint(self.rl, sources, self.tokenizer)
        check_effort(self.rl.effort, sources)
        self.budgets = Budgets(self.rl.effort)
        self.rollouts = Rollouts(
            self.rl, sources, self.chat, config.train.seed, config.train.seq_length, from_first_rank, self._budget
        )
        shares, self._held_out = evaluated(self.rl, sources)
        self._evaluation = self._whole_answers(shares, 1, "rl.eval_tasks", self.rl.eval_temperature)
        self._trainer: Any = None
        self._teachers: Teachers | None = None
        self._which_teachers: list[dict[str, str] | None] = []
        self._groups: list[Group] = []  # that the last step's rollouts gave
        self._learned: list[Group] = []  # those of them that it trained on
        self._scores: dict[tuple[int, int], list[float]] | None = None  # teachers', of all of them
        self._version = 0
        self._rows = 0

    def _whole_answers(
        self, sources: list[Source], samples: int, where: str = Rollouts.where, temperature: float | None = None
    ) -> WholeAnswers:
        train = self.config.train
        common = (self.chat, train.seed, train.seq_length, from_first_rank)
        made = WholeAnswers(self.rl, sources, *common, samples, where, temperature)
        made.touch.seconds = touch_seconds(self.config)
        return made

    def attach(self, trainer: Any) -> None:
        """Take the trainer's models and start the engine.

        Raises:
            UserError: the rollout server does not answer.
        """
        self._trainer = trainer
        self._model = trainer.models[0].module
        rollout = self.rl.rollout
        if self.rl.objective.signal == "mopd":
            self._teachers = Teachers(self.config, self.rollouts, trainer.here)
            self.rollouts.on_done = self._teachers.begin
            self._which_teachers = from_first_rank(lambda: identities(self.rl.teachers))
            for number, which in enumerate(self._which_teachers):
                if which is not None:
                    trainer.telemetry.event(f"rl.teachers.{number} is {which['checkpoint']}")
        if rollout.engine == "local":
            self.engine: LocalEngine | SharedEngine = LocalEngine(
                [model.module for model in trainer.models],
                min(self.tokenizer.vocab_size, self._model.vocab_size),
                dist.group.WORLD,
                rollout.max_rows,
                rollout.keep_states,
                record_experts=rollout.replay_experts,
            )
        else:
            self.engine = server_engine(self.config, trainer, self._give_again)
            self._refresh_weights = WeightRefresh(self.config, trainer)
        self._refreshed: int | None = None

    def training_steps(self, consumed_samples: int) -> Iterator[list[Batch]]:
        """Sample, reward, pack: one step's rows after the other.

        The policy's version is the number of steps done, by the trainer's own count: samples consumed do not tell it
        where a run goes on with another number of them a step.
        """
        if self.rl.effort.enabled and not self.budgets.base:
            self._measure_budgets()
        while True:
            self._version = version = self._trainer.state.step
            self._groups = self._collect(version)
            yield self._batches(self._groups, version)

    def _collect(self, version: int) -> list[Group]:
        self._refresh(version)
        self.rollouts.touch.seconds = touch_seconds(self.config)
        self.rollouts.on_progress = lambda: self._trainer.watchdog.beat(f"step {version + 1}")
        for _ in range(MOST_EMPTY):
            self._trainer.watchdog.beat(f"step {version + 1}")  # each has its own patience with silent servers
            groups = self.rollouts.collect(self.engine, version)
            self._scores = None if self._teachers is None else self._teachers.scores(groups)
            if trainable(groups):
                return groups
        raise UserError(
            f"no group of {MOST_EMPTY} iterations in a row has two samples that did not fail; the last says:"
            f" {next((s.error for g in groups for s in g.samples if s.error), 'nothing')}"
        )

    def _refresh(self, version: int) -> None:
        """Give a server the weights of this version."""
        if self.rl.rollout.engine == "local" or self.rl.rollout.refresh == "none" or self._refreshed == version:
            return
        before = self.engine.counters()
        self._refresh_weights(self.engine, version)
        self.rollouts.count_beside(before, self.engine.counters())
        self._refreshed = version

    def _give_again(self) -> None:
        """The server lost the weights that it was given: these are still the trainer's."""
        if self._refreshed is not None:
            self._refresh_weights(self.engine, self._refreshed)

    def _batches(self, groups: list[Group], version: int) -> list[Batch]:
        config = self.config
        groups = self._learned = with_signal(groups, self.rl.objective)
        made = examples(groups, self.rl.objective, version, self._scores)
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        micro = config.train.micro_batch_size
        # Megatron's interleaved schedule runs micro-batches in groups of as many as the pipeline has ranks.
        together = config.parallel.pipeline if config.parallel.virtual_pipeline > 1 else 1
        batch = pack(made, config.train.seq_length, micro * ranks * together, self.tokenizer.pad)
        self._rows = len(batch["tokens"])
        return micro_batches(batch, micro, rank, ranks)

    def loss(self, losses: TokenLosses) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """The objective summed over sampled tokens, their number, and what is reported of them.

        `rollout_*` are means over fresh tokens, those that the policy in training drew: a step without any has none.
        """
        batch, config = losses.batch, self.rl.objective
        mask = losses.loss_mask
        # Cross-entropy is the negative log-probability. Where nothing is trained both policies count as equal.
        logprob = -losses.loss
        behaviour = torch.where(mask > 0, batch["behaviour"], logprob.detach())
        advantage = batch["advantage"]
        if config.signal == "mopd":
            dense = distillation_advantages(batch["teacher"], logprob, config.distill_clip)
            advantage = (dense + config.task_reward * batch["advantage"]) * mask
        terms = policy_terms(logprob, behaviour, advantage, config)
        total = (terms.loss * batch["weight"] * mask).sum()
        tokens, fresh = mask.sum(), batch["fresh"]

        def mean(values: torch.Tensor, over: torch.Tensor) -> torch.Tensor:
            return torch.stack([(values * over).sum().detach(), over.sum()])

        divergence = kl_estimate(terms.log_ratio)
        reported = {
            "loss": torch.stack([total.detach(), tokens]),
            "policy_ratio": mean(terms.log_ratio.exp(), mask),
            "policy_masked": mean(terms.masked.float(), mask),
            "policy_kl": mean(divergence, mask),
            "sampled_entropy": mean(-logprob.detach(), mask),
            "rollout_kl": mean(divergence, fresh),
            "rollout_logprob_difference": mean(terms.log_ratio.abs(), fresh),
            "fresh_share": mean(fresh, mask),
            "advantage_abs": mean(advantage.abs(), mask),
        }
        if config.signal == "mopd":
            difference = logprob.detach() - batch["teacher"]
            reported["teacher_kl"] = mean(difference, mask)
            reported["teacher_clipped"] = mean((difference.abs() > config.distill_clip).float(), mask)
        return total, tokens.to(torch.int), reported

    def step_metrics(self, seconds: float) -> dict[str, Any]:
        """Rewards, lengths and staleness of the step's samples; what rolling out took; samples for people."""
        rollout = self.rollouts.metrics()
        trained = sum(s.drawn for _, samples in trainable(self._learned) for s in samples)
        learning = max(seconds - rollout["rollout_seconds"], 1e-9)
        interval = self.config.train.eval_interval
        if dist.get_rank() == 0 and (interval == 0 or self._version % interval == 0):
            rows = report.sample_rows(self.rollouts, self._groups, self._version + 1)
            self._trainer.telemetry.table("samples", self._version + 1, rows)
        return {
            **report.group_metrics(self._groups, self._version),
            "trained_tokens": trained,
            "packed_rows": self._rows,
            "tokens_per_second": trained / seconds,
            "trainer_tokens_per_second": trained / learning,
            "rollout": rollout,
            **({} if self._teachers is None else self._teachers.metrics()),
        }

    def held_out(self) -> list[Batch] | None:
        """None: `evaluate` generates instead."""
        return None

    def evaluate(self) -> dict[str, Any] | None:
        """Accuracy on the held-out tasks, one answer each, under the present weights."""
        if not self._held_out:
            return None
        version = self._trainer.state.step
        self._refresh(version)
        doing = f"the evaluation after step {version}"
        groups = self._evaluation.answers(
            self.engine, self._held_out, version, lambda: self._trainer.watchdog.beat(doing)
        )
        return report.evaluation_metrics(self._evaluation.sources, groups)

    def _budget(self, environment: int, task: int, version: int) -> float | None:
        if not self.rl.effort.enabled:
            return None
        effort = self.rollouts.sources[environment].tasks[task].effort
        return self.budgets.budget(environment, task, effort, version)

    def _measure_budgets(self) -> None:
        """b0 of every training task that states an effort (others have no budget) from the start model.

        All at once: later there is no start model to ask (docs/rl.md).
        """
        version, tell = self._trainer.state.step, self._trainer.telemetry.event
        self._refresh(version)  # a server may still hold whatever it was started with
        answers = self._whole_answers(self.rollouts.sources, self.rl.effort.samples)

        def beat(number: int) -> None:
            self._trainer.watchdog.beat(f"step {version + 1} (the budgets of rl.environments.{number})")

        failed = self.budgets.measure(self.engine, answers, version, beat)
        count = len(self.budgets.base)
        mean = sum(self.budgets.base.values()) / count
        tell(f"rl.effort: {count} tasks have a budget; b0 is {mean:.1f} tokens in the mean")
        silent = sum(len(source.tasks) for source in answers.sources) - count - failed
        if silent:
            tell(f"rl.effort: {silent} tasks state no effort, and have no budget", "warning")
        if failed:
            tell(f"rl.effort: {failed} tasks have no budget, because all answers to them failed", "warning")

    def rolled_back(self) -> None:
        """The policy that samples in flight were drawn from was given up: they would count as one step old, and are
        of weights that no step of the run leads to any more.
        """
        dropped, groups = self.rollouts.restart(self.engine), len(self.rollouts.groups)
        self._refreshed = None
        self._trainer.telemetry.event(
            f"step {self._trainer.state.step}: {groups} groups in flight begin anew after the rollback; {dropped}"
            " tokens of the policy that was given up are dropped",
            "warning",
        )

    def state_dict(self) -> dict[str, Any]:
        """What is in flight and ready, the order of tasks, the budgets, and which teachers there are."""
        return {
            "rollouts": self.rollouts.state_dict(),
            "budgets": self.budgets.state_dict(),
            "teachers": self._which_teachers,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave, under the same recipe: a run directory refuses another one.

        Raises:
            UserError: a teacher is another one than when the run began.
        """
        check_same_teachers(saved.get("teachers", []), self._which_teachers)
        self.rollouts.load_state_dict(saved["rollouts"])
        self.budgets.load_state_dict(saved["budgets"])
        if self.rl.rollout.keep_states and self.rollouts.groups:
            self._trainer.telemetry.event(
                "rl.rollout.keep_states: the states of paused samples are not in a checkpoint; they are computed anew"
                " under the present weights, so this continuation differs from an uninterrupted run",
                "warning",
            )
