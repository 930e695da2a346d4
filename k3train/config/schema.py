"""The sections of a recipe as typed dataclasses. Hydra composes YAML into these; `validate` checks them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from k3train.config.deepspeed import DeepSpeedConfig
from k3train.config.distill import DistillConfig
from k3train.config.draft import DraftConfig
from k3train.config.guards import FaultConfig, GuardsConfig
from k3train.config.lora import LoRAConfig
from k3train.config.model import ModelConfig
from k3train.config.quant import QuantConfig
from k3train.config.rl import RLConfig
from k3train.config.sft import SftConfig


@dataclass
class ParallelConfig:
    """How ranks share the work. World size = TP x CP x PP x DP; experts: EP x expert TP x PP x expert DP."""

    # Ranks to start when not under torchrun or srun; null: one per GPU, or without GPUs the least that fits.
    world_size: int | None = None
    tensor: int = 1
    sequence: bool = True  # sequence parallelism; always on where tensor > 1
    pipeline: int = 1
    virtual_pipeline: int = 1  # model chunks per pipeline rank (interleaved schedule)
    # Megatron's layout string over PP x VPP stages, e.g. "Et*5|t*4mL" (E embedding, t decoder layer, m MTP,
    # L loss); null spreads the layers evenly, auto by what they cost (FLOPs; config/layer_costs.py).
    pipeline_layout: str | None = None
    context: int = 1  # contiguous parts of every sequence, one a rank (docs/context_parallel.md)
    expert: int = 1
    expert_tensor: int = 1
    # In training every expert-parallel rank computes as many token copies, by redundant experts that are planned anew
    # for each layer and micro-batch (the report's MoonEP; docs/balanced_experts.md).
    balanced_experts: bool = False
    distributed_optimizer: bool = True  # ZeRO-1: optimizer state sharded over data-parallel ranks
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    # Whose linear layers, norms and core attention: local | te (Transformer Engine; CUDA, bf16) | auto (te where it can
    # run and is installed, else local).
    transformer_impl: str = "auto"
    recompute: str = "none"  # none | full (each decoder layer recomputed in backward)


@dataclass
class PolicyRule:
    """How the parameters whose whole name a pattern matches are trained; the first rule that matches counts."""

    # Regular expression over the whole name, such as decoder.layers.3.mixer.q_proj.weight.
    match: str = "???"
    optimizer: str = "muon"  # muon | adamw
    # What is orthogonalized as one matrix: whole | heads | head_parts (a head's key and value, nope and rope parts)
    # | experts (each expert's w1, w2 and w3). Only for muon.
    split: str = "whole"
    lr_mult: float = 1.0  # times optim.lr and optim.min_lr
    decay: bool = True  # vectors and convolutions never decay


@dataclass
class MuonConfig:
    """Momentum and orthogonalization of the parameters under Muon. Defaults: Moonlight's and K2's."""

    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5  # Newton-Schulz iterations
    coefficients: list[float] = field(default_factory=lambda: [3.4445, -4.7750, 2.0315])
    update_scale: float = 0.2  # times sqrt(max(rows, columns)) of the block: the RMS of an update
    precision: str = "auto"  # of Newton-Schulz: fp32 | bf16 | auto (bf16 on CUDA)
    exchange_mib: int = 256  # fp32 MiB of blocks that a rank collects and orthogonalizes at a time


@dataclass
class QKClipConfig:
    """K2's weight clipping: heads whose attention logits grow too large have their query and key weights shrunk."""

    enabled: bool = False
    tau: float = 100.0  # largest pre-softmax logit that is left alone
    interval: int = 1  # steps between measurements; the logits cost another product of queries and keys


@dataclass
class OptimConfig:
    """Optimizer and schedule."""

    name: str = "adamw"  # adamw | muon (with AdamW for what policy gives it)
    lr: float = 3e-3
    min_lr: float = 3e-4
    schedule: str = "cosine"  # cosine | wsd (warm-up, stable, decay) | constant
    warmup_fraction: float = 0.01  # of train.steps, linear
    decay_fraction: float = 0.2  # of train.steps at the end, for wsd
    decay_style: str = "linear"  # of that end: linear | cosine | minus_sqrt
    weight_decay: float = 0.1  # decoupled
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    clip_grad: float = 1.0  # global gradient norm; 0 turns clipping off
    policy: list[PolicyRule] = field(default_factory=list)  # empty: AdamW for all
    muon: MuonConfig = field(default_factory=MuonConfig)
    qk_clip: QKClipConfig = field(default_factory=QKClipConfig)


@dataclass
class CorpusConfig:
    """One corpus of a blend."""

    path: str = "???"  # prefix of <path>.bin and <path>.idx
    weight: float = 1.0


@dataclass
class DataConfig:
    """Where the tokens come from."""

    tokenizer: str = "???"  # tokenizer.json, or a directory that holds one
    train: list[CorpusConfig] = field(default_factory=list)
    valid: list[CorpusConfig] = field(default_factory=list)
    cache_dir: str | None = None  # index cache; null: beside the run
    num_workers: int = 0


@dataclass
class StageConfig:
    """What is trained for."""

    name: str = "pretrain"
    # Whether balancing moves the router's bias; null: in pretraining alone.
    update_router_bias: bool | None = None

    @property
    def moves_router_bias(self) -> bool:
        """`update_router_bias`, with its default resolved."""
        return self.name == "pretrain" if self.update_router_bias is None else self.update_router_bias


@dataclass
class TrainConfig:
    """The loop."""

    steps: int = 300
    seq_length: int = 256
    micro_batch_size: int = 4
    global_batch_size: int = 16  # sequences per optimizer step
    precision: str = "fp32"  # fp32 | bf16 (fp32 main parameters and gradients)
    seed: int = 1234
    eval_interval: int = 50  # steps; 0: only at the end
    eval_samples: int = 64  # held-out sequences per evaluation; 0: no evaluation
    log_expert_load_interval: int = 10  # steps between tokens-per-expert records


@dataclass
class CheckpointConfig:
    """Distributed checkpoints (torch_dist)."""

    interval: int = 100  # steps; 0: only at the end
    keep_last: int = 2  # older ones are pruned after a newer one is committed; 0 keeps all
    keep_every: int = 0  # those after a multiple of this many steps are never pruned; 0: none
    milestones: list[int] = field(default_factory=list)  # steps that are saved, and never pruned
    async_save: bool = False  # training goes on while a checkpoint is written, from a copy in memory
    async_busy: str = "wait"  # a save while another is being written: wait (for it) | skip (this one, with a word)
    verify: bool = True  # hash every file of the checkpoint to continue from; sizes are always checked
    resume: str = "auto"  # auto: continue this run directory's newest checkpoint | never
    load: str | None = None  # start from the weights of this checkpoint (a fresh run)


@dataclass
class WandbConfig:
    mode: str = "auto"  # auto: online with a key, offline without | online | offline | disabled
    project: str = "k3train"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    log_checkpoints: bool = False  # each as an artifact that refers to its directory; nothing is uploaded


@dataclass
class TelemetryConfig:
    """What a person and a dashboard see."""

    console: bool = True
    interactive: bool | None = None  # self-updating line; null: when standard output is a terminal
    pictures: bool = True  # curves.png and experts.png at the end of a run
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class RunConfig:
    name: str = "k3-tiny"
    dir: str = "runs/${run.name}"
    device: str = "auto"  # auto | cpu | cuda
    threads_per_rank: int | None = None  # CPU threads of each rank; null: cores // local ranks, at least 1
    timeout_minutes: float = 30.0  # collectives that take longer end the run


@dataclass
class RecipeConfig:
    """A whole recipe."""

    recipe_name: str = "custom"
    engine: str = "megatron"  # whose loop trains: megatron | deepspeed (data parallel alone, ZeRO; docs/deepspeed.md)
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    data: DataConfig = field(default_factory=DataConfig)
    stage: StageConfig = field(default_factory=StageConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    faults: list[FaultConfig] = field(default_factory=list)  # rehearsals; empty in every real run


def to_plain(config: Any) -> dict[str, Any]:
    """A recipe as plain nested dicts and lists, for saving and for comparing runs."""
    from dataclasses import asdict

    return asdict(config)
