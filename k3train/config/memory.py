"""Whether a recipe can fit into this machine's memory at all: a lower bound, so that what it refuses cannot run."""

from __future__ import annotations

from k3train.config.parameters import parameter_count
from k3train.config.rules import refuse
from k3train.config.schema import RecipeConfig
from k3train.errors import UserError

_GIB = 1024**3
_FP32 = 4


def least_training_bytes(config: RecipeConfig, world_size: int) -> tuple[float, float]:
    """Bytes that all ranks together need at least: (of parameters, of one micro-batch).

    Parameters: the weights and fp32 gradients of every data- and context-parallel replica of the dense part, one
    copy of the experts, and once Adam's two fp32 moments (with Muon one, that of the matrices) and, beside bf16
    weights, fp32 main parameters. A micro-batch: its logits and their gradient in fp32, and one activation a sublayer
    (none but the layer's input with recomputation).
    """
    model, parallel, train = config.model, config.parallel, config.train
    count = parameter_count(model)
    low = train.precision == "bf16"
    weight = 2 if low else _FP32
    moments = 1 if config.optim.name == "muon" else 2
    sharded = moments * _FP32 + (_FP32 if low else 0)
    data_parallel = max(1, world_size // (parallel.tensor * parallel.pipeline * parallel.context))
    experts = model.moe.num_experts * (model.num_layers - model.moe.first_dense_layers)
    routed = 3 * model.moe.expert_hidden_size * (model.moe.latent_size or model.hidden_size) * max(0, experts)
    replicated = max(0, count["total"] - routed)
    parameters = (weight + _FP32) * (routed + replicated * data_parallel * parallel.context) + sharded * count["total"]
    tokens = train.micro_batch_size * train.seq_length * data_parallel
    kept = model.num_layers * (1 if parallel.recompute == "full" else 2)
    activations = tokens * (2 * _FP32 * model.vocab_size + weight * kept * model.hidden_size)
    return parameters, activations


def check_host_memory(config: RecipeConfig, world_size: int, available: int) -> None:
    """Refuse a recipe whose CPU ranks need more memory than the machine has.

    Args:
        config: a valid recipe that runs on the CPU.
        world_size: all its ranks, on this machine.
        available: bytes of memory of the machine.

    Raises UserError naming the section at fault.
    """
    parameters, activations = least_training_bytes(config, world_size)
    here = f"this machine has {available / _GIB:.1f} GiB"
    if parameters > available:
        raise UserError(
            f"model.name={config.model.name} takes at least {parameters / _GIB:,.0f} GiB for weights, gradients and "
            f"optimizer state, and {here}; train it on GPUs or on more machines, or try model=k3-tiny"
        )
    if parameters + activations > available:
        per_token = activations / (train_tokens := config.train.micro_batch_size * config.train.seq_length)
        fits = max(2, int((available - parameters) / per_token * 0.5 / config.train.micro_batch_size))
        fits = min(fits, train_tokens)
        unit = config.parallel.tensor * config.parallel.context
        raise refuse(
            config,
            "train.seq_length",
            f"with train.micro_batch_size={config.train.micro_batch_size} takes at least "
            f"{(parameters + activations) / _GIB:,.0f} GiB on {world_size} rank{'s'[: world_size > 1]}, and {here}",
            f"about {fits // unit * unit} at this micro-batch size",
            f"train.seq_length={max(unit, 1 << (fits.bit_length() - 1))}, or a smaller train.micro_batch_size",
        )
