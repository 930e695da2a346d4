"""What all tests share: no network, no W&B account, an order, and a pool of ranks."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

TESTS = Path(__file__).parent
ORDER = ("unit", "kernels", "parity", "recipes", "slurm", "distributed")

# Before any test module imports a library that reads them; ranks and programs that tests start inherit them.
os.environ["HF_HUB_OFFLINE"] = "1"
# One thread each: the workers share the cores, and an OpenMP thread that waits for one without a core spins.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["WANDB_MODE"] = "offline" if os.environ.get("WANDB_MODE") == "offline" else "disabled"
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
    os.environ.pop(name, None)

sys.path.insert(0, str(TESTS / "distributed"))


def pytest_configure(config: pytest.Config) -> None:
    """Say who ended the session where something under test leaves this process by `os._exit`, which prints nothing."""
    leave, session, stderr = os._exit, os.getpid(), os.dup(sys.__stderr__.fileno())  # before output is captured

    def told(code: int) -> NoReturn:
        if os.getpid() == session:
            text = f"\nos._exit({code}) ended the test session:\n{''.join(traceback.format_stack())}"
            os.write(stderr, text.encode())
        leave(code)

    os._exit = told


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Quick folders first, so that a plain mistake shows in seconds; with several workers, what is on ranks first."""
    workers = hasattr(config, "workerinput")

    def position(item: pytest.Item) -> int:
        folder = item.path.relative_to(TESTS).parts[0]
        if workers and folder == "distributed":
            return -1
        return ORDER.index(folder) if folder in ORDER else len(ORDER)

    items.sort(key=position)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of several workers, one has all tests on ranks and starts with them; the others take the rest, file by file.

    A second pool of ranks would not fit the cores, nor a second Slurm cluster beside the first. The `xdist_group` marks
    of pytest-xdist 3.8 do nothing under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            whole = [folder for folder in ("tests/distributed/", "tests/slurm/") if path.startswith(folder)]
            return whole[0] if whole else path

    config.option.loadscopereorder = False
    return ByFolder(config, log)


@pytest.fixture(scope="session")
def pool() -> Iterator[object]:
    """Gloo ranks that all tests share: `pool.run(fn, world_size, *args)` (see distributed/pool.py)."""
    from pool import WorkerPool

    if workers_of_session := os.environ.get("PYTEST_XDIST_TESTRUNUID"):
        mark = Path(tempfile.gettempdir(), f"k3train-pool-{workers_of_session}")
        # One that has died is replaced by pytest-xdist, and its ranks died with it.
        second = mark.exists() and psutil.pid_exists(int(mark.read_text()))
        assert not second, "a second worker of this session wants ranks (pytest_xdist_make_scheduler)"
        mark.write_text(str(os.getpid()))
    workers = WorkerPool()
    yield workers
    workers.close()
    if workers_of_session:
        mark.unlink()


@pytest.fixture(scope="session")
def _cpu_rank() -> Iterator[None]:
    from k3train import platform

    platform.start("cpu", threads=1)
    yield
    platform.stop()


@pytest.fixture
def record_property(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """pytest's own, with values as text (as its XML has them): a worker can send the session only plain values."""
    return lambda name, value: record_property(name, str(value))


@pytest.fixture(autouse=True)
def _rank_stays() -> Iterator[None]:
    """A test that stops the session's rank fails itself, and not the tests after it that want the rank."""

    def started() -> bool:
        return "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized()

    shared = started()
    yield
    if shared and not started():
        pytest.fail("this test destroyed the process group that the session's tests share (platform.stop?)")


@pytest.fixture
def single_rank(_cpu_rank: None) -> None:
    """One gloo rank in this process with fresh model-parallel groups."""
    from k3train.config.schema import ParallelConfig
    from k3train.model.build import start_model_parallel

    start_model_parallel(ParallelConfig())
