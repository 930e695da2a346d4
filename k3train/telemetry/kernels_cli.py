"""`k3train kernels`: each operation of k3kernels, its backends, which of them runs on a device, and why."""

from __future__ import annotations

import argparse
import dataclasses
import json

import torch
from k3kernels.registry import Choice, choices

from k3train.errors import UserError


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or one JSON object an operation with `--json`."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(here if arguments.device == "auto" else arguments.device)
    try:
        found = choices(device, arguments.kernels)
    except ValueError as error:
        raise UserError(f"--kernels {arguments.kernels}: {error}") from error
    if arguments.json:
        for choice in found:
            print(json.dumps(dataclasses.asdict(choice)))
        return 0
    name = torch.cuda.get_device_name() if device.type == here == "cuda" else device.type
    print(f"On {name}, with model.kernels={arguments.kernels}:\n")
    print(_table(found))
    idle = [choice.operation for choice in found if not choice.run_on_a_gpu]
    print(f"\nNever run on a GPU by this project: {', '.join(idle)}.")
    return 0


def _table(found: list[Choice]) -> str:
    rows = [("operation", "backends", "used", "why", "what")]
    rows += [(c.operation, " ".join(c.backends), c.used, c.why, c.what) for c in found]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
