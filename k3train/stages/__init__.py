"""The stages of training. Each gives data and a loss to the one loop."""

from __future__ import annotations

import errno
import os
import traceback
from contextlib import AbstractContextManager

from k3train import rank_logs, time_limit
from k3train.config.schema import RecipeConfig
from k3train.environment import note_exit
from k3train.errors import DISK_TROUBLE, StorageError, UserError

# A file system that is read-only now was not when the run started.
_STORAGE = (*DISK_TROUBLE, errno.EROFS)
# What no other start and no other node will change.
_RIGHTS = (errno.EACCES, errno.EPERM, errno.EISDIR)
# Data may be wrong on one rank only, which the others wait for; NCCL then does not let it leave their group.
LEAVE_SECONDS = 10.0


def _tell(error: UserError, rank: int) -> None:
    """Say it at once: leaving the process group may take long, or be cut short."""
    error.told = True
    rank_logs.tell(f"k3train: {error}" if rank == 0 else f"k3train: rank {rank}: {error}")


def _leaving_within(seconds: float, code: int) -> AbstractContextManager[None]:
    """End this process with `code` if the block takes longer."""

    def leave() -> None:
        note_exit(code)
        os._exit(code)

    return time_limit.within(seconds, leave)


def _storage_error(error: Exception, config: RecipeConfig) -> UserError | None:
    if not isinstance(error, OSError) or error.errno not in _STORAGE + _RIGHTS:
        return None
    where = error.filename or f"run.dir={config.run.dir}"
    return (StorageError if error.errno in _STORAGE else UserError)(
        f"{where} cannot be written or read ({error.strerror}); see to space and rights there and run the same command"
        " again: it continues from the newest checkpoint"
    )


def run_stage(config: RecipeConfig) -> int:
    """Run the stage that `config.stage.name` names, on the rank described by the environment; returns the exit code."""
    from k3train import platform

    platform.adapt(config.run.device)  # before the imports that bring Megatron-Core
    from k3train.stages.distill import DistillStage
    from k3train.stages.draft import DraftStage
    from k3train.stages.inputs import check_inputs
    from k3train.stages.pretrain import PretrainStage
    from k3train.stages.rl import RLStage
    from k3train.stages.sft import SftStage
    from k3train.train.loop import run_training

    stages = {
        "pretrain": PretrainStage,
        "sft": SftStage,
        "rl": RLStage,
        "distill": DistillStage,
        "draft": DraftStage,
    }
    here = platform.start(config.run.device, config.run.threads_per_rank, config.run.timeout_minutes)
    try:
        check_inputs(config)
        code = run_training(config, stages[config.stage.name], here)
    except UserError as error:
        if here.world_size > 1:
            _tell(error, here.rank)
        with _leaving_within(LEAVE_SECONDS, error.exit_code):
            platform.stop()
        raise
    except Exception as error:
        full = _storage_error(error, config)
        if here.world_size == 1:
            if full:
                platform.stop()
                raise full from error
            raise
        if full:
            rank_logs.tell(f"k3train: rank {here.rank}: {full}")
            os._exit(full.exit_code)
        # The other ranks wait for this one in a collective, and leaving the group politely would wait for them.
        traceback.print_exc()
        rank_logs.tell(f"k3train: rank {here.rank} failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        os._exit(1)
    platform.stop()
    return code
