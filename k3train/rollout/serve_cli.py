"""`k3train serve`: an OpenAI-compatible completion server over a checkpoint, on one rank."""

from __future__ import annotations

import argparse
import signal
import threading

from k3train.errors import UserError
from k3train.model.lora import merge_adapters
from k3train.rollout.restore import restore, tokenizer_of
from k3train.rollout.serve import CompletionServer
from k3train.rollout.serve_model import ModelThread


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code.

    Raises:
        UserError: an option makes no sense, the checkpoint cannot be read, or the port is taken.
    """
    if args.batch_size < 1:
        raise UserError(f"--batch-size {args.batch_size} must be at least 1")
    if not 0 <= args.port < 65536:
        raise UserError(f"--port {args.port} must lie between 0 and 65535 (0 takes a free one)")
    if not args.model_name:
        raise UserError("--model-name is empty; give at least one character")
    tokenizer, ends = tokenizer_of(args.checkpoint)
    restored = restore(args.checkpoint, command="serve", quant=args.quant)
    if restored.config.lora.enabled:
        merge_adapters(restored.model)  # a refresh brings whole weights, which adapters would change once more
    policy = restored.config.quant.policy() if restored.config.quant.enabled else None
    worker = ModelThread(restored.model, tokenizer, ends, args.batch_size, args.allow_updates, policy)
    try:
        server = CompletionServer((args.host, args.port), worker, args.model_name)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"--host {args.host} --port {args.port} cannot be listened on ({error}); give an address of this machine"
            " and a free port"
        ) from error
    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    server.start()
    print(f"serving {restored.path} as {args.model_name} at {server.url}", flush=True)
    try:
        while not ended.wait(0.2):  # a plain wait would not let a signal through everywhere
            pass
    finally:
        server.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0
