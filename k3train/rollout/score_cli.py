"""`k3train score`: log-probabilities of given tokens under a checkpoint."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import torch

from k3train.errors import UserError
from k3train.model.model import K3Model
from k3train.model.packing import Packing
from k3train.model.state import SequenceStates
from k3train.rollout.generate import check_tokens
from k3train.rollout.restore import restore

TOKENS_AT_A_TIME = 8192
POSITIONS_AT_A_TIME = 256


def read_tokens(path: Path) -> torch.Tensor:
    """[b, s] int64 tokens from an .npy file of shape [s] or [b, s].

    Raises:
        UserError: the file is missing, no .npy, or holds something else than two or more integers a row.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(f"--tokens {path} cannot be read as an .npy file ({error})") from error
    if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, np.integer) or array.ndim not in (1, 2):
        found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise UserError(f"--tokens {path} holds {found}; integers of shape [s] or [b, s] are needed")
    if array.shape[-1] < 2:
        raise UserError(f"--tokens {path} holds rows of {array.shape[-1]} tokens; a row needs at least 2 to be scored")
    return torch.from_numpy(np.atleast_2d(array).astype(np.int64))


@torch.inference_mode()
def score_row(model: K3Model, row: torch.Tensor, keep_logits: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities [s - 1] (fp64, nats) of the tokens 1.. of `row` [s] given those before; and [s, vocab] logits.

    A row longer than TOKENS_AT_A_TIME is read in pieces with decoding states, so that its length costs little memory;
    a shorter one goes through the forward pass of training. The softmax is taken in fp64, a few positions at a time.
    """
    states = SequenceStates.of(model) if len(row) > TOKENS_AT_A_TIME else None
    rows = states.add() if states else []
    log_probs, kept = [], []
    for start in range(0, len(row), TOKENS_AT_A_TIME):
        tokens = row[start : start + TOKENS_AT_A_TIME]
        length = len(tokens)
        # Sequence parallelism cuts the tokens; filler behind them changes nothing.
        tokens = torch.nn.functional.pad(tokens, (0, -length % model.config.tensor_model_parallel_size))
        view = states.extend(rows, [length]) if states else None
        packing, wanted = Packing.whole_rows(1, len(tokens), row.device), torch.arange(length, device=row.device)
        logits = model(tokens[None], packing, states=view, logits_at=wanted)[0].float()
        following = row[start + 1 : start + 1 + length]
        for some, ids in zip(logits.split(POSITIONS_AT_A_TIME), following.split(POSITIONS_AT_A_TIME)):
            logged = torch.log_softmax(some[: len(ids)].double(), dim=-1)
            log_probs.append(logged.gather(1, ids[:, None]).squeeze(1))
        if keep_logits:
            kept.append(logits)
    return torch.cat(log_probs), torch.cat(kept) if keep_logits else None


def run(args: argparse.Namespace) -> int:
    """Write `log_probs` [b, s - 1] (of tokens 1.. given those before, nats), `loss`, and `logits` where asked."""
    out = Path(args.out)
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist; create it")
    tokens = read_tokens(Path(args.tokens))
    restored = restore(args.checkpoint, layout=args.layout, command="score", kernels=args.kernels)
    check_tokens(tokens.flatten().tolist(), restored.config.model.vocab_size, f"--tokens {args.tokens}")
    rows, logits_rows = [], []
    for row in tokens.to(restored.device):
        log_probs, logits = score_row(restored.model, row, args.logits)
        rows.append(log_probs.cpu().numpy())
        if args.logits:
            logits_rows.append(logits.cpu().numpy())
    if restored.rank != 0:
        return 0
    scored = np.stack(rows)
    arrays = {"log_probs": scored, "loss": np.float64(-scored.mean())}
    if args.logits:
        arrays["logits"] = np.stack(logits_rows)
    temporary = out.with_name(out.name + ".tmp")
    with temporary.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(temporary, out)
    print(f"{scored.size} tokens scored, mean loss {-scored.mean():.6f} nats; written to {out}")
    return 0
