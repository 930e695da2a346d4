"""Which parallel layouts can hold the model, and which batches they can train on."""

from __future__ import annotations

from math import lcm

from k3train.config.layout import even_layout, expand_layout
from k3train.config.rules import (
    check_choice,
    check_divides,
    check_range,
    divisors,
    listed,
    nearest_multiple,
    refuse,
)
from k3train.config.rules_balanced_experts import check_balanced_experts
from k3train.config.schema import ParallelConfig, RecipeConfig
from k3train.errors import UserError


def least_world_size(parallel: ParallelConfig) -> int:
    """The fewest ranks that hold one copy of the dense and of the expert weights."""
    dense = parallel.tensor * parallel.context * parallel.pipeline
    return lcm(dense, parallel.expert * parallel.expert_tensor * parallel.pipeline)


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """Ranks that train on different sequences."""
    return world_size // (parallel.tensor * parallel.context * parallel.pipeline)


def check_parallel(config: RecipeConfig, world_size: int) -> None:
    """Refuse sizes that do not divide the model, the sequence, the batch or the world."""
    for name in ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor"):
        check_range(config, f"parallel.{name}", 1, least=1)
    check_choice(config, "parallel.recompute", ("none", "full"))
    check_choice(config, "parallel.transformer_impl", ("auto", "local", "te"))
    if config.parallel.transformer_impl == "te" and config.train.precision != "bf16":
        raise refuse(
            config,
            "parallel.transformer_impl",
            f"needs train.precision=bf16, found {config.train.precision}: Transformer Engine multiplies fp32 in TF32",
            "auto, local",
            "parallel.transformer_impl=auto",
        )
    _check_tensor(config)
    _check_context(config)
    _check_expert(config)
    check_balanced_experts(config)
    _check_pipeline(config)
    _check_world_size(config, world_size)
    _check_overlap(config)
    _check_batch(config, data_parallel_size(config.parallel, world_size))


def _check_tensor(config: RecipeConfig) -> None:
    model, parallel = config.model, config.parallel
    dimensions = ["model.kda.num_heads", "model.mla.num_heads"]
    if model.moe.num_experts == 0 or model.moe.first_dense_layers > 0:
        dimensions.append("model.ffn_hidden_size")
    check_divides(config, "parallel.tensor", *dimensions)
    shared = model.moe.num_shared_experts * model.moe.expert_hidden_size
    if model.moe.num_experts and shared % parallel.tensor:
        raise refuse(
            config,
            "parallel.tensor",
            "does not divide the width of the shared experts, model.moe.num_shared_experts *"
            f" model.moe.expert_hidden_size = {shared}",
            listed(divisors(shared)),
            "parallel.tensor=1",
        )
    if parallel.tensor > 1 and not parallel.sequence:
        raise refuse(
            config,
            "parallel.sequence",
            f"is not supported with parallel.tensor={parallel.tensor}: the mixture of experts needs sequence"
            " parallelism",
            "true where parallel.tensor > 1",
            "parallel.sequence=true",
        )
    if config.train.seq_length % (parallel.tensor * parallel.context):
        unit = parallel.tensor * parallel.context
        raise refuse(
            config,
            "train.seq_length",
            f"is not divisible by parallel.tensor * parallel.context = {unit}",
            f"multiples of {unit}",
            f"train.seq_length={nearest_multiple(unit, config.train.seq_length)}",
        )


def _check_context(config: RecipeConfig) -> None:
    """A short convolution looks back into the part of the rank before, not further."""
    parallel, taps = config.parallel, config.model.kda.conv_size
    tokens = config.train.seq_length // parallel.context
    if parallel.context > 1 and tokens < taps - 1:
        unit = parallel.tensor * parallel.context
        least = unit * (taps - 1)
        raise refuse(
            config,
            "train.seq_length",
            f"gives each of parallel.context={parallel.context} ranks {tokens} tokens, fewer than the {taps - 1} that"
            f" model.kda.conv_size={taps} looks back",
            f"multiples of {unit} from {parallel.context * (taps - 1)} on",
            f"train.seq_length={least}",
        )


def _check_expert(config: RecipeConfig) -> None:
    if config.model.moe.num_experts == 0:
        for key in ("expert", "expert_tensor"):
            if getattr(config.parallel, key) != 1:
                why = "is above 1, but model.moe.num_experts=0 has no experts"
                raise refuse(config, f"parallel.{key}", why, "1", f"parallel.{key}=1")
        return
    check_divides(config, "parallel.expert", "model.moe.num_experts")
    # The ranks of one expert's tensor group have to hold shards of the same tokens.
    check_divides(config, "parallel.expert_tensor", "parallel.tensor", "model.moe.expert_hidden_size")


def _check_pipeline(config: RecipeConfig) -> None:
    model, parallel = config.model, config.parallel
    stages = parallel.pipeline * parallel.virtual_pipeline
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise refuse(
            config,
            "parallel.virtual_pipeline",
            "interleaves the chunks of several pipeline ranks, and parallel.pipeline=1 has one",
            "1 with parallel.pipeline=1",
            "parallel.virtual_pipeline=1",
        )
    if parallel.pipeline_layout == "auto":
        _check_balanced(config, stages)
    elif parallel.pipeline_layout is not None:
        _check_layout(config, stages)
    elif model.num_layers % stages:
        sizes = f"parallel.pipeline={parallel.pipeline} x parallel.virtual_pipeline={parallel.virtual_pipeline}"
        if stages > model.num_layers:
            cure = "parallel.pipeline=1 parallel.virtual_pipeline=1"
        else:
            layout = even_layout(model.num_layers, stages, model.mtp.num_layers)
            cure = f"an explicit \"parallel.pipeline_layout='{layout}'\""
        raise refuse(
            config,
            "model.num_layers",
            f"is not divisible by {sizes}",
            f"multiples of {stages}, or an explicit layout",
            cure,
        )


def _check_balanced(config: RecipeConfig, stages: int) -> None:
    layers = config.model.num_layers
    if stages > layers:
        raise refuse(
            config,
            "parallel.pipeline_layout",
            f"cannot fill the {stages} stages of parallel.pipeline x parallel.virtual_pipeline from"
            f" model.num_layers={layers}",
            f"up to {layers} stages",
            "parallel.pipeline=1 parallel.virtual_pipeline=1",
        )


def _check_layout(config: RecipeConfig, stages: int) -> None:
    """The conditions of Megatron-Core's `validate_layer_layout`, said for a person."""
    model, parallel, key = config.model, config.parallel, "parallel.pipeline_layout"
    mtp = model.mtp.num_layers
    if stages <= model.num_layers:
        cure = f"\"{key}='{even_layout(model.num_layers, stages, mtp)}'\""
    else:
        cure = f"{key}=null with a smaller parallel.pipeline"
    sizes = f"parallel.pipeline={parallel.pipeline} x parallel.virtual_pipeline={parallel.virtual_pipeline}"
    allowed = f"{stages} stages (|) that hold E first, {model.num_layers} t, {mtp} m and L last"

    def wrong(why: str) -> UserError:
        return refuse(config, key, why, allowed, cure)

    try:
        rows = expand_layout(parallel.pipeline_layout)
    except ValueError as error:
        raise wrong(f"is malformed: {error}") from error
    flat = "".join(rows)
    if len(rows) != stages:
        raise wrong(f"has {len(rows)} stages but {sizes} needs {stages}")
    if "" in rows:
        raise wrong(f"leaves stage {rows.index('')} empty")
    if not (flat.startswith("E") and flat.endswith("L") and flat.count("E") == flat.count("L") == 1):
        raise wrong("does not start with its only E and end with its only L")
    if flat.count("t") != model.num_layers:
        raise wrong(f"holds {flat.count('t')} decoder layers but model.num_layers={model.num_layers}")
    if flat.count("m") != mtp:
        raise wrong(f"holds {flat.count('m')} m but model.mtp.num_layers={mtp}")
    if mtp and not flat.endswith("mL"):
        raise wrong("does not put m after the last t and before L")
    last_chunks = rows[-parallel.pipeline :]
    if mtp and (all("m" not in row for row in last_chunks) or (parallel.pipeline > 1 and "m" in last_chunks[0])):
        raise wrong("does not put m in the last virtual chunk of a pipeline rank after the first")


def _check_world_size(config: RecipeConfig, world_size: int) -> None:
    parallel = config.parallel
    needed = least_world_size(parallel)
    if world_size % needed == 0:
        return
    dense = parallel.tensor * parallel.context * parallel.pipeline
    if world_size % dense:
        why = "parallel.tensor * parallel.context * parallel.pipeline"
        unit = dense
        cure = "parallel.tensor=1 parallel.pipeline=1 parallel.pipeline_layout=null"
    else:
        why = "parallel.expert * parallel.expert_tensor * parallel.pipeline"
        unit = parallel.expert * parallel.expert_tensor * parallel.pipeline
        cure = f"parallel.expert={_largest_expert(config, world_size)}"
        if parallel.expert_tensor > 1:
            cure += " parallel.expert_tensor=1"
    nearest = nearest_multiple(needed, world_size)
    if world_size == parallel.world_size:
        name, sizes = "parallel.world_size", f"parallel.world_size={nearest}"
    else:
        name = "the number of ranks"
        sizes = f"{nearest} ranks (without a launcher: parallel.world_size={nearest})"
    raise UserError(
        f"{name}={world_size} is not divisible by {why} = {unit}; allowed: multiples of {needed}; try {sizes} or {cure}"
    )


def _largest_expert(config: RecipeConfig, world_size: int) -> int:
    ranks = world_size // config.parallel.pipeline
    options = [d for d in divisors(ranks, ranks) if config.model.moe.num_experts % d == 0]
    return max(d for d in options if d <= config.parallel.expert)


def _check_overlap(config: RecipeConfig) -> None:
    parallel = config.parallel
    if not parallel.overlap_param_gather:
        return
    for name in ("distributed_optimizer", "overlap_grad_reduce"):
        if not getattr(parallel, name):
            raise refuse(
                config,
                "parallel.overlap_param_gather",
                f"needs parallel.{name}=true",
                f"false, or true with parallel.{name}=true",
                f"parallel.{name}=true",
            )


def _check_batch(config: RecipeConfig, data_parallel: int) -> None:
    train, parallel = config.train, config.parallel
    sequences = train.micro_batch_size * data_parallel
    product = f"train.micro_batch_size={train.micro_batch_size} x {data_parallel} data-parallel ranks"
    for key in ("train.global_batch_size", "train.eval_samples"):
        value = getattr(train, key.partition(".")[2])
        if value % sequences:
            cure = f"{key}={nearest_multiple(sequences, value)}"
            raise refuse(config, key, f"is not divisible by {product}", f"multiples of {sequences}", cure)
        # Megatron's interleaved schedule runs micro-batches in groups of PP.
        if parallel.virtual_pipeline > 1 and (value // sequences) % parallel.pipeline:
            unit = sequences * parallel.pipeline
            raise refuse(
                config,
                key,
                f"makes {value // sequences} micro-batches of {product}, and parallel.virtual_pipeline="
                f"{parallel.virtual_pipeline} needs a multiple of parallel.pipeline={parallel.pipeline}",
                f"multiples of {unit}",
                f"{key}={nearest_multiple(unit, value)}",
            )
