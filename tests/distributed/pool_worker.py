"""The process behind one rank of the pool (see pool.py)."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Longer than any test may take: a hang is the pool's to report, with every rank's stack.
COLLECTIVE_TIMEOUT = datetime.timedelta(hours=1)


def serve(connection: Connection, log_path: str, stacks_path: str) -> None:
    """Announce this rank and run what arrives on `connection` until the other end closes."""
    _end_with_parent(os.getppid())
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with open(stacks_path, "a") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        # Ctrl-C is the parent's to handle.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _prepare()
        connection.send(True)
        with contextlib.suppress(EOFError):
            while True:
                header, task = connection.recv()
                _run(connection, header, task)


def _end_with_parent(parent: int) -> None:
    """Leave when the test session is gone, however it ended and whatever this rank waits for."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _prepare() -> None:
    """Pay once for the imports and for the adaptation of Megatron-Core to the CPU."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    import torch

    from k3train.platform import cpu
    from k3train.quiet import quiet_libraries

    quiet_libraries()
    cpu.install()
    for module in ("k3train.stages", "k3train.train.loop", "k3train.checkpoint.saver"):
        importlib.import_module(module)
    torch.set_num_threads(1)
    # What the libraries hold stays: 400,000 objects that no later collection has to walk through (0.4 s each time).
    gc.collect()
    gc.freeze()


def _run(connection: Connection, header: dict[str, Any], task: bytes) -> None:
    """Answer ("result", pickled) or ("error", traceback), then ("finished", event loops left) without the groups."""
    try:
        _join(header)
        fn, args = pickle.loads(task)
        result = pickle.dumps(fn(header["rank"], header["world_size"], *args))
    except Exception:  # whatever a test raises is the answer
        connection.send(("error", traceback.format_exc()))
        failed = True
    else:
        connection.send(("result", result))
        failed = False
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        _leave(failed)
    except Exception:  # a rank that cannot leave is not used again: the pool sees no "finished"
        connection.send(("error", traceback.format_exc()))
    else:
        connection.send(("finished", _gloo_loops()))


def _gloo_loops() -> int:
    """Event loops of process groups that something still holds; each wakes a hundred times a second, for ever."""
    folder = Path("/proc/self/task")
    if not folder.is_dir():
        return 0
    names = [(thread / "comm").read_text() for thread in folder.iterdir() if (thread / "comm").exists()]
    return sum(name.startswith("gloo") for name in names)


def _join(header: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    rank, world_size = header["rank"], header["world_size"]
    sys.path[:] = header["sys_path"]
    for prefix in ("", "LOCAL_"):
        os.environ[f"{prefix}RANK"], os.environ[f"{prefix}WORLD_SIZE"] = str(rank), str(world_size)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    store = dist.TCPStore("127.0.0.1", header["port"], is_master=False, wait_for_workers=False)
    store.set_timeout(COLLECTIVE_TIMEOUT)
    store = dist.PrefixStore(header["prefix"], store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)


def _leave(failed: bool) -> None:
    """Take down Megatron-Core's groups and the process group; after a success no rank leaves before the others."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    if dist.is_initialized():
        if not failed:
            dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    get_cuda_rng_tracker().reset()
    unset_num_microbatches_calculator()
    gc.collect()
    gc.collect()  # rings through autograd's nodes open in the first pass and are freed in the second
