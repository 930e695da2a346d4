"""`k3train kernels`: each operation of k3kernels, its backends, which of them runs on a device, and why."""

from __future__ import annotations

import argparse
import dataclasses
import json

import torch

from k3train.errors import UserError
from k3train.model.operations import Service, services


def run(arguments: argparse.Namespace) -> int:
    """Print the table, or one JSON object an operation with `--json`."""
    here = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(here if arguments.device == "auto" else arguments.device)
    try:
        found = services(device, arguments.kernels, arguments.transformer_impl, arguments.precision)
    except ValueError as error:
        raise UserError(f"--kernels {arguments.kernels}: {error}") from error
    if arguments.json:
        for choice in found:
            print(json.dumps(dataclasses.asdict(choice)))
        return 0
    name = torch.cuda.get_device_name() if device.type == here == "cuda" else device.type
    settings = f"model.kernels={arguments.kernels}, parallel.transformer_impl={arguments.transformer_impl}"
    print(f"On {name}, with {settings} and train.precision={arguments.precision}:\n")
    print(_table(found))
    if idle := [service.operation for service in found if not service.run_on_a_gpu]:
        print(f"\nNever run on a GPU by this project: {', '.join(idle)}.")
    return 0


def _table(found: list[Service]) -> str:
    rows = [("operation", "backends", "used", "why", "chosen by", "used by", "what")]
    rows += [(s.operation, " ".join(s.backends), s.used, s.why, s.chosen_by, s.used_by, s.what) for s in found]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)
