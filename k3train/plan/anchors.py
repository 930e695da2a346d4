"""Published throughputs, and what the planner predicts for the same model, layout and devices.

Rows of other programs differ from this one in what they recompute and overlap; `Practice` says how, as far as the
source tells (marks in `assumed` where it does not). One row set the efficiencies of products (`fitted`); the others are
predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from k3train.config.load import load_recipe
from k3train.config.model import AttentionResidualConfig, MLAConfig, ModelConfig, MoEConfig, MTPConfig
from k3train.config.rules_cluster import load_cluster
from k3train.config.schema import ParallelConfig, RecipeConfig, TrainConfig
from k3train.plan.inventory import Inventory, take_inventory
from k3train.plan.links import Links
from k3train.plan.plan import make_plan
from k3train.plan.work import Practice, Work

BRIDGE = "Megatron-Bridge, docs/performance-summary.md and its archive"
SHARED = "recomputation (a tenth of the forward); the router at the speed of other products"
DEEPSEEK = "DeepSeek-V3 report, arXiv:2412.19437, section 3.1 and Table 1"


def deepseek_v3(prediction: bool) -> ModelConfig:
    """DeepSeek-V3 (arXiv:2412.19437, section 4.2): 671B parameters, 37B active."""
    return _mla_model(
        "deepseek-v3", 128, 129280, MoEConfig(**_EXPERTS, num_experts=256, first_dense_layers=3), prediction
    )


def kimi_k2() -> ModelConfig:
    """Kimi K2 (its report, Table 2): 1.04T parameters, 32.6B active."""
    return _mla_model("kimi-k2", 64, 163840, MoEConfig(**_EXPERTS, num_experts=384, first_dense_layers=1), False)


_EXPERTS = {
    "top_k": 8,
    "latent_size": None,
    "latent_norm": False,
    "expert_hidden_size": 2048,
    "num_shared_experts": 1,
    "balancing": "sign",
}


def _mla_model(name: str, heads: int, vocab: int, moe: MoEConfig, prediction: bool) -> ModelConfig:
    return ModelConfig(
        name=name,
        num_layers=61,
        hidden_size=7168,
        vocab_size=vocab,
        ffn_hidden_size=18432,
        full_attention_layers=list(range(1, 62)),
        activation="swiglu",
        mla=MLAConfig(heads, 1536, 512, 128, 64, 128, output_gate=False),
        attention_residual=AttentionResidualConfig(enabled=False),
        moe=moe,
        mtp=MTPConfig(num_layers=int(prediction)),
    )


def k3_slice() -> ModelConfig:
    """The first 8 layers of Kimi K3 at its own widths."""
    return load_recipe(["recipe=pretrain/k3-8layers"]).model


@dataclass(frozen=True)
class Anchor:
    """One published throughput."""

    name: str
    source: str
    cluster: str
    devices: int
    model: Callable[[], ModelConfig]
    layout: dict[str, int]
    batch: tuple[int, int, int]  # sequence length, micro-batch, global batch
    practice: Practice
    tokens: float | None = None  # per second and device, published
    tflops: float | None = None  # model TFLOP/s a device, published, where tokens are not
    fitted: bool = False
    assumed: str = ""  # what the source does not say


def _bridge(
    name: str, cluster: str, model: Callable[[], ModelConfig], layout: tuple, batch: tuple, form: str, tokens: float
) -> Anchor:
    pipeline, virtual, expert, *tensor = layout
    sizes = {"pipeline": pipeline, "virtual_pipeline": virtual, "expert": expert, "tensor": (tensor or [1])[0]}
    # Hybrid-EP and DeepEP send a token once to a domain; H100 recipes run the exchange beside computation. Layers are
    # launched as CUDA graphs, and up-projections and activations recomputed: a tenth of the forward, assumed.
    # Gradients are reduced in bf16 and the permutation is fused.
    practice = Practice(form, False, True, cluster == "h100-8x", True, 0.1, gradient_bytes=2, permute_passes=4)
    devices = 1024 if cluster == "h100-8x" else 256
    return Anchor(name, BRIDGE, cluster, devices, model, sizes, batch, practice, tokens, assumed=SHARED)


def _v3(prediction: bool = True) -> Callable[[], ModelConfig]:
    return lambda: deepseek_v3(prediction)


LONG, SHORT = (4096, 1, 4096), (4096, 1, 8192)
ANCHORS = (
    replace(
        _bridge("DeepSeek-V3 without MTP, bf16", "gb200-nvl72", _v3(False), (4, 4, 64), LONG, "bf16", 3139), fitted=True
    ),
    _bridge("DeepSeek-V3 without MTP, bf16", "gb300-nvl72", _v3(False), (2, 4, 32), LONG, "bf16", 3848),
    _bridge("DeepSeek-V3, MXFP8, release 26.02.01", "gb200-nvl72", _v3(), (4, 4, 64), LONG, "fp8", 4021),
    _bridge("DeepSeek-V3, MXFP8, release 26.08", "gb200-nvl72", _v3(), (4, 4, 64), LONG, "fp8", 4912),
    _bridge("DeepSeek-V3, MXFP8, release 26.08", "gb300-nvl72", _v3(), (2, 8, 32), LONG, "fp8", 6288),
    _bridge("DeepSeek-V3, MXFP8, release 26.02.01", "b200-8x", _v3(), (16, 1, 8), LONG, "fp8", 2790),
    _bridge("DeepSeek-V3, fp8, release 25.09", "h100-8x", _v3(), (8, 4, 64, 2), SHORT, "fp8", 1297),
    _bridge("Kimi K2, MXFP8, release 26.02.01", "gb300-nvl72", kimi_k2, (4, 4, 64), (4096, 2, 4096), "fp8", 5072),
    Anchor(
        "DeepSeek-V3, fp8, as it was trained (180K GPU hours a trillion tokens)",
        DEEPSEEK,
        "h800-8x",
        2048,
        _v3(),
        {"pipeline": 16, "virtual_pipeline": 2, "expert": 64},
        (4096, 1, 16384),
        Practice("fp8", False, True, True, True, 0.1),
        1e12 / (180e3 * 3600),
        assumed=f"{SHARED}; kernels launched ahead of the device; DualPipe as two interleaved chunks; 15,360 sequences"
        " rounded to 16,384 for this schedule",
    ),
    Anchor(
        "Kimi K3, 8-layer slice, bf16 (Primus)",
        "Primus, 4 x 8 MI355X: 191 TFLOP/s a device",
        "mi355x-8x",
        32,
        k3_slice,
        {"expert": 32},
        (4096, 1, 256),
        Practice("bf16"),
        tflops=191.0,
        assumed="layout, batch, length, recomputation",
    ),
)


@dataclass(frozen=True)
class Compared:
    """A published figure and its prediction, in the unit of the first."""

    name: str
    devices: str
    unit: str
    published: float
    predicted: float
    fitted: bool
    source: str
    assumed: str

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def recipe_of(anchor: Anchor) -> RecipeConfig:
    """The row as a recipe."""
    length, micro, whole = anchor.batch
    parallel = ParallelConfig(**anchor.layout, overlap_grad_reduce=True, overlap_param_gather=True)
    parallel.pipeline_layout = "auto" if parallel.pipeline > 1 else None
    parallel.recompute = "none" if anchor.practice.recompute_share is not None else "full"
    train = TrainConfig(seq_length=length, micro_batch_size=micro, global_batch_size=whole, precision="bf16")
    train.eval_samples = 0
    base = load_recipe(["recipe=pretrain/k3", "optim=adamw"])
    return replace(base, recipe_name=anchor.name, model=anchor.model(), parallel=parallel, train=train)


def compare(anchors: tuple[Anchor, ...] = ANCHORS) -> Iterator[Compared]:
    """The published throughputs beside the predicted ones."""
    inventories: dict[str, Inventory] = {}
    for anchor in anchors:
        config, cluster = recipe_of(anchor), load_cluster(anchor.cluster, {})
        key = f"{config.model.name} {config.model.mtp.num_layers}"
        inventory = inventories[key] = inventories.get(key) or take_inventory(config)
        step = make_plan(config, cluster, inventory, anchor.devices, anchor.practice).step
        predicted, published, unit = step.tokens_per_second / anchor.devices, anchor.tokens, "tokens/s a device"
        if published is None:
            predicted, published, unit = step.flops_per_device / 1e12, anchor.tflops, "TFLOP/s a device"
        devices = f"{anchor.devices:,} {cluster.device.removeprefix('NVIDIA ')}"
        yield Compared(anchor.name, devices, unit, published, predicted, anchor.fitted, anchor.source, anchor.assumed)
    yield from compare_kernels()


def compare_kernels() -> Iterator[Compared]:
    """Published timings of single kernels."""
    for device, gbs, published in (("GB200", 8000, 2.327), ("H20", 4000, 4.84)):
        config = load_recipe(["recipe=pretrain/k3"])
        cluster = load_cluster("gb200-nvl72", {"memory_gbs": str(gbs)})
        work = Work(config, cluster, Links(cluster, config.parallel, 1024), Practice())
        predicted = 1e3 * work.mixer(False)["KDA"].forward
        source = "FlashKDA's published table (fla's column)"
        yield Compared("KDA forward of fla, 8,192 x 96 heads", device, "ms", published, predicted, True, source, "")
    config = load_recipe(["recipe=pretrain/k3"])
    config.model.moe.latent_size, config.parallel.expert = None, 8
    config.train.seq_length = 1024
    cluster = load_cluster("h200-8x", {})
    work = Work(config, cluster, Links(cluster, config.parallel, 1024), Practice())
    seconds = work.feed_forward(True)["experts"].forward
    flops = 6 * config.model.hidden_size * config.model.moe.expert_hidden_size * 1024 * config.model.moe.top_k
    name, source = "grouped experts, 896 x (7168, 3072), top-16, EP8, 1,024 tokens", "InferenceX PR #3213"
    yield Compared(name, "H200", "TFLOP/s", 322.6, flops / seconds / 1e12, False, source, "tokens are a device's")
