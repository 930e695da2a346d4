"""The `rl` section of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ObjectiveConfig:
    """What a sampled token contributes to the loss (docs/rl.md). The defaults are K2.5's objective, which K3 uses.

    The report gives none of the numbers; the ones here are this project's. Where K2.5's formula and its prose differ,
    a key says which reading is taken.
    """

    # mask: K2.5's, the gradient of the ratio where it lies inside the interval, whatever the advantage's sign |
    # ppo: GRPO's, the smaller of the clipped and the plain product | reinforce: the log-probability itself.
    surrogate: str = "mask"
    # What is clipped: ratio (K2.5's formula) | log_ratio (its prose). clip_low and clip_high are bounds of that.
    clip_on: str = "ratio"
    clip_low: float = 0.5
    clip_high: float = 2.0
    # group_mean: r - mean (K2.5) | group_norm: (r - mean) / std (GRPO) | leave_one_out: r - mean of the others |
    # none: r.
    baseline: str = "group_mean"
    # token: all tokens of the batch weigh the same (K2.5's N as the batch's) | group: the mean over the tokens of the K
    # responses to a prompt, then over prompts (its N as printed, inside the expectation over prompts) | sequence: the
    # mean over a response, then over responses.
    normalization: str = "token"
    regularizer: float = 0.02  # tau, times the squared log-ratio
    regularize_masked: bool = True  # whether the regularizer acts on tokens outside the interval too
    # Leave out groups whose samples all got the same reward: their advantage is 0, so that all they add is time, and
    # the regularizer on tokens of older policies. A step that has no other groups trains on them all the same.
    skip_uniform: bool = False
    # reinforce only: tokens are weighted by the ratio up to this; 0: not at all, for rollouts on policy alone.
    importance_cap: float = 0.0
    # mopd: clip(teacher's log-probability - own) per token, instead of a reward for the response | outcome.
    signal: str = "outcome"
    distill_clip: float = 5.0  # R_max of that difference
    # mopd: the group's advantage of the task reward times this is added to it; 0: the teachers alone.
    task_reward: float = 0.0


@dataclass
class RolloutConfig:
    """How samples are made, and how many."""

    engine: str = "local"  # local (the trainer's own weights, in process) | openai (a completion server)
    prompts: int = 8  # N, in flight
    samples: int = 8  # K of each prompt
    # lambda: generation pauses when this part of what is in flight has finished; 1 waits for all.
    finish_fraction: float = 1.0
    # Training steps that may lie between the policy that drew a token and the one that is trained on it. What would
    # become older is finished first, however long it takes; 0: every step trains on samples of its own policy alone.
    max_staleness: int = 4
    max_new_tokens: int = 128  # of a whole response, tool output counted
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_rows: int = 64  # samples that the local engine generates at a time, on all ranks together
    environment_workers: int = 8  # steps of environments, or judgings of groups, at a time
    # Local engine: tokens that other samples grow by before an environment's answer, such as a tool's output, is taken
    # up; generation waits for one that is not there by then. So samples do not depend on how long environments take.
    environment_lag: int = 32
    # Whether a paused sample keeps its KDA states and latents, which then stem from older weights; else they are
    # computed anew. Local engine only.
    keep_states: bool = False
    # Whether training sends each token to the experts that it went to in the rollout. Local engine only.
    replay_experts: bool = False
    url: str | None = None  # of the server, for openai: http://HOST:PORT
    server: str = "k3train"  # its kind: k3train (`k3train serve`) | sglang | vllm
    model: str | None = None  # the name it serves; null: its first
    concurrency: int = 32  # requests at a time
    retries: int = 3  # of a request that fails, with growing pauses
    timeout_seconds: float = 60.0  # without a byte from the server
    # How long a server that is down is waited for, with all samples kept; then the run ends. 0: not at all.
    outage_minutes: float = 15.0
    # How the server gets new weights: in_place (buckets over HTTP, to `k3train serve`) | disk (an exported folder that
    # it reads) | none (it keeps those it was started with, which count as version 0).
    refresh: str = "in_place"
    refresh_experts: str = "bf16"  # disk: mxfp4 | bf16
    bucket_mib: int = 64  # in_place


@dataclass
class EnvironmentConfig:
    """A source of tasks with what answers and rewards them."""

    name: str = "single"  # single | python | judge | module:Class of your own
    tasks: str = "???"  # file of training tasks (tools/make_tasks.py; docs/rl.md)
    weight: float = 1.0  # share of prompts
    # What counts, by weight: answer | format | unit_tests | noise | judge (of environments that judge, which have to
    # name it). The reward is the weighted sum; empty: answer alone, or judge alone where there is one. The default is
    # empty because maps are merged: one of {answer: 1} would stay in whatever a recipe asks for.
    rewards: dict[str, float] = field(default_factory=dict)
    timeout_seconds: float = 30.0  # of one step; then the sample counts as failed
    options: dict[str, Any] = field(default_factory=dict)  # given to the class
    families: list[str] = field(default_factory=list)  # only tasks of these, of this environment; empty: all
    efforts: list[str] = field(default_factory=list)  # only tasks of these efforts; empty: all


@dataclass
class TauStage:
    """From this step on, budgets are tau times the start model's length."""

    step: int = 0
    low: float = 2.0
    high: float = 4.0
    max: float = 8.0


@dataclass
class EffortConfig:
    """Token budgets per problem and effort (K3's report, section 4.1.2)."""

    enabled: bool = False
    counts: str = "thinking"  # thinking | output: which tokens a budget counts, over all messages of a sample
    samples: int = 4  # of each training task from the start model, for its budget
    least: int = 8  # tokens; no budget is smaller
    override: float = -1.0  # the reward beyond the budget
    stages: list[TauStage] = field(default_factory=lambda: [TauStage()])


@dataclass
class TeacherConfig:
    """A teacher of multi-teacher distillation, a checkpoint or a server. The first that fits a task counts."""

    checkpoint: str | None = None  # a checkpoint, or a run
    url: str | None = None  # or a completion server that scores prompts: http://HOST:PORT
    model: str | None = None  # the name that server serves; null: its first
    # Of a server that stays silent after all rl.rollout.retries: stop (the run ends) | drop (the step goes on without
    # its samples, which are counted).
    when_silent: str = "stop"
    family: str = "*"  # of tasks; *: any
    effort: str = "*"
    # Teachers of the same family and effort are a mixture: their probabilities count by these weights.
    weight: float = 1.0
    # Whether it reads the effort message, as the student does. K3's teachers do not (report, Eq. 15).
    show_effort: bool = False
    # Where a checkpoint's weights lie: layout (as the trainer's) | zero3 (shared out over all ranks by DeepSpeed, one
    # layer at a time whole; needs a layout of data-parallel ranks alone).
    host: str = "layout"
    offload: bool = False  # zero3: in host memory between uses


@dataclass
class RLConfig:
    """Rollouts and what is learned from them."""

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    environments: list[EnvironmentConfig] = field(default_factory=list)
    effort: EffortConfig = field(default_factory=EffortConfig)
    teachers: list[TeacherConfig] = field(default_factory=list)
    # Teachers of host=layout whose weights stay in memory; the others are read from disk when their turn comes.
    teachers_in_memory: int = 1
    families: list[str] = field(default_factory=list)  # only tasks of these; empty: all
    efforts: list[str] = field(default_factory=list)  # only tasks of these efforts; empty: all
    # Whether prompts state a task's effort. An expert of one effort that is to teach without the message (report, Eq.
    # 15) is trained without it.
    show_effort: bool = True
    # Held-out tasks; each is answered in the first environment that takes it and does not compare answers.
    eval_tasks: str | None = None
    eval_limit: int = 64  # how many of them
    eval_temperature: float = 0.0
