"""Doing things on all ranks, or on one for all: what fails on any rank is raised on every one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from k3train.errors import UserError


@contextmanager
def together(cleanup: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Wait for all ranks at the end of the block. Where one met bad input or a full disk, `cleanup` runs on rank 0.

    Raises:
        UserError: on every rank, the sentence of the first that failed.
    """
    failure: str | None = None
    try:
        yield
    except UserError as error:
        failure = str(error)
    except OSError as error:
        file = error.filename2 or error.filename or "a file"
        failure = f"{file} cannot be read or written ({error.strerror}); see to space and rights there"
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    told = next((f for f in failures if f is not None), None)
    if told is not None:
        if dist.get_rank() == 0:
            cleanup()
        raise UserError(told)


@contextmanager
def naming(file: Path | str) -> Iterator[None]:
    """Errors of a full or broken disk do not say which file they met: here it is `file`."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(file)
        raise


def share_of[Item](items: list[Item], sizes: list[int], rank: int, ranks: int) -> list[Item]:
    """This rank's run of the items, so that ranks have about equal sizes and neighbours stay together."""
    total, before, mine = max(1, sum(sizes)), 0, []
    for item, size in zip(items, sizes):
        if min(ranks - 1, (before + size // 2) * ranks // total) == rank:
            mine.append(item)
        before += size
    return mine


def sync_tree(folder: Path) -> None:
    """Wait until every file and folder below, and the folder itself, are on the disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_space(folder: Path, needed: int, what: str) -> None:
    """Raise UserError where the file system of `folder` has fewer than `needed` bytes left."""
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    if free < needed:
        gib = 2**30
        raise UserError(
            f"{what} needs {needed / gib:.1f} GiB, and {folder} has {free / gib:.1f} GiB left; free space there or"
            " choose another folder"
        )
