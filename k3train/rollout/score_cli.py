"""`k3train score`: log-probabilities of given tokens under a checkpoint."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from tokenize import TokenError

import numpy as np
import torch

from k3train.errors import UserError
from k3train.model.model import K3Model
from k3train.model.packing import Packing
from k3train.model.state import SequenceStates
from k3train.rollout.generate import check_tokens
from k3train.rollout.restore import recipe_of, restore

TOKENS_AT_A_TIME = 8192
POSITIONS_AT_A_TIME = 256


def read_tokens(path: Path) -> torch.Tensor:
    """[b, s] int64 tokens from an .npy file of shape [s] or [b, s].

    Raises:
        UserError: the file is missing, no .npy, or holds something else than two or more integers a row.
    """
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ValueError("no such file")
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    # The reader of the header is Python's own, which has its own errors for what is no Python.
    except (OSError, ValueError, EOFError, MemoryError, SyntaxError, TokenError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"--tokens {path} cannot be read as an .npy file ({why}); write it with numpy.save, as an array of integers"
        ) from error
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        raise UserError(
            f"--tokens {path} holds {array.dtype} {array.shape}; integers of shape [s] or [b, s] are needed"
        )
    if array.shape[-1] < 2:
        raise UserError(f"--tokens {path} holds rows of {array.shape[-1]} tokens; a row needs at least 2 to be scored")
    if array.size == 0:
        raise UserError(f"--tokens {path} holds no rows: its shape is {array.shape}; give at least one")
    if array.max() > np.iinfo(np.int64).max:
        raise UserError(f"--tokens {path} has token {array.max()}, which no vocabulary has")
    return torch.from_numpy(np.atleast_2d(array).astype(np.int64))


def check_out(out: Path, tokens: Path) -> Path:
    """The real path of a file that can be written.

    Raises:
        UserError: its folder is missing or refuses files, it is the file of the tokens, or something else than a file.
    """
    real = Path(os.path.realpath(out))
    try:
        if not real.parent.is_dir():
            raise UserError(f"--out {out}: the folder {real.parent} does not exist; create it")
        if real.exists() and not real.is_file():
            raise UserError(f"--out {out} is no file; give the name of an .npz file to write")
        if real.exists() and tokens.exists() and real.samefile(tokens):
            raise UserError(f"--out {out} is the file of --tokens; give another name")
        with tempfile.NamedTemporaryFile(dir=real.parent, prefix=f"{real.name}."):
            pass
    except OSError as error:
        raise _unwritable(out, error) from error
    return real


def _unwritable(out: Path, error: OSError) -> UserError:
    return UserError(f"--out {out} cannot be written ({error.strerror}); free space or rights there, or give another")


def _write(out: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write the file whole or not at all."""
    temporary = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("wb") as file:
                np.savez(file, **arrays)
            os.replace(temporary, out)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(out, error) from error


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
    out = check_out(Path(args.out), Path(args.tokens))
    tokens = read_tokens(Path(args.tokens))
    vocab_size = recipe_of(args.checkpoint)[1].model.vocab_size
    check_tokens(tokens.flatten().tolist(), vocab_size, f"--tokens {args.tokens}")
    restored = restore(args.checkpoint, layout=args.layout, command="score", kernels=args.kernels, quant=args.quant)
    rows, logits_rows = [], []
    for row in tokens.to(restored.device):
        log_probs, logits = score_row(restored.model, row, args.logits)
        rows.append(log_probs.cpu().numpy())
        if args.logits:
            logits_rows.append(logits.cpu().numpy())
    scored = np.stack(rows)
    if not np.isfinite(scored).all():
        raise UserError(
            f"{restored.path} gives log-probabilities that are not finite: it holds NaN or infinite weights; score an"
            " earlier checkpoint"
        )
    if restored.rank != 0:
        return 0
    arrays = {"log_probs": scored, "loss": np.float64(-scored.mean())}
    if args.logits:
        arrays["logits"] = np.stack(logits_rows)
    _write(out, arrays)
    print(f"{scored.size} tokens scored, mean loss {-scored.mean():.6f} nats; written to {out}")
    return 0
