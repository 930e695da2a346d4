"""The pool of ranks itself: results, failures, hangs, reuse, and no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import DistributedTestError, WorkerPool


def summed(rank: int, world_size: int, offset: int) -> tuple[int, torch.Tensor]:
    assert dist.get_rank() == rank
    assert dist.get_world_size() == world_size
    total = torch.tensor([float(rank + offset)])
    dist.all_reduce(total)
    return os.getpid(), total


HELD = []


def holds_groups(rank: int, world_size: int, count: int) -> int:
    HELD.extend(dist.new_group([rank]) for _ in range(count))
    return os.getpid()


def fails_on(rank: int, world_size: int, bad_rank: int) -> int:
    print(f"line of rank {rank}", flush=True)
    if rank == bad_rank:
        raise ValueError(f"rank {rank} does not like this")
    dist.barrier()
    return rank


def fails_while_another_is_busy(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("early end")
    time.sleep(3600)


def fails_everywhere(rank: int, world_size: int) -> None:
    raise KeyError("everyone")


def hangs_in_a_collective(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(600)
    dist.barrier()


def dies(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def megatron_groups(rank: int, world_size: int, tensor: int) -> tuple[int, int]:
    from megatron.core import parallel_state

    assert not parallel_state.model_parallel_is_initialized(), "groups of an earlier call are still there"
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    return parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_data_parallel_world_size()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_in_rank_order(pool: WorkerPool, world_size: int) -> None:
    results = pool.run(summed, world_size, 10)
    assert [pid for pid, _ in results] == pool.process_ids[:world_size]
    expected = torch.tensor([float(sum(range(world_size)) + 10 * world_size)])
    for _, total in results:
        torch.testing.assert_close(total, expected)


def test_ranks_are_reused(pool: WorkerPool) -> None:
    first = [pid for pid, _ in pool.run(summed, 2, 0)]
    assert [pid for pid, _ in pool.run(summed, 2, 0)] == first


def test_each_call_has_its_own_megatron_groups(pool: WorkerPool) -> None:
    assert pool.run(megatron_groups, 2, 2) == [(2, 1)] * 2
    assert pool.run(megatron_groups, 2, 1) == [(1, 2)] * 2


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_ranks_that_hold_many_groups_of_earlier_calls_are_replaced(pool: WorkerPool) -> None:
    pool.run(holds_groups, 1, 130)  # whatever earlier tests have left: the next rank is a new one
    [first], [second] = pool.run(holds_groups, 1, 20), pool.run(holds_groups, 1, 0)
    assert first == second
    pool.run(holds_groups, 1, 130)
    assert pool.run(holds_groups, 1, 0) != [second]


def test_one_failing_rank_fails_the_call_while_others_wait(pool: WorkerPool) -> None:
    # The timeout is longer than the test session may last: only the failure itself can end this call.
    with pytest.raises(DistributedTestError) as caught:
        pool.run(fails_on, 2, 1, timeout=3600)
    message = str(caught.value)
    assert "rank 1 of 2 raised" in message
    assert "ValueError: rank 1 does not like this" in message
    assert "in fails_on" in message
    assert "line of rank 0" in message
    assert "rank 1 does not like this" in caught.value.tracebacks[1]


def test_a_failure_ends_ranks_that_notice_nothing(pool: WorkerPool) -> None:
    with pytest.raises(DistributedTestError, match="early end") as caught:
        pool.run(fails_while_another_is_busy, 2, timeout=3600)
    assert "rank 0 was at:" in str(caught.value)
    assert pool.process_ids == []


def test_the_pool_works_after_a_failure(pool: WorkerPool) -> None:
    with pytest.raises(DistributedTestError):
        pool.run(fails_on, 2, 0)
    assert [float(total) for _, total in pool.run(summed, 2, 1)] == [3.0, 3.0]


def test_ranks_that_all_raise_are_kept(pool: WorkerPool) -> None:
    before = [pid for pid, _ in pool.run(summed, 2, 0)]
    with pytest.raises(DistributedTestError, match="KeyError: 'everyone'") as caught:
        pool.run(fails_everywhere, 2)
    assert sorted(caught.value.tracebacks) == [0, 1]
    assert [pid for pid, _ in pool.run(summed, 2, 0)] == before


def test_a_hang_ends_at_its_timeout_with_every_stack(pool: WorkerPool) -> None:
    pool.run(summed, 2, 0)
    with pytest.raises(DistributedTestError) as caught:
        pool.run(hangs_in_a_collective, 2, timeout=3)
    message = str(caught.value)
    assert "ranks [0, 1] of 2 had not finished after 3 s" in message
    for rank in (0, 1):
        stack = message.split(f"rank {rank} was at:")[1].split("\n\nrank")[0]
        assert "in hangs_in_a_collective" in stack
    assert "in barrier" in message


def test_a_hang_of_the_test_process_ends_the_session_with_its_stack(tmp_path: Path) -> None:
    test = tmp_path / "test_hang.py"
    test.write_text("import time\n\ndef test_hangs():\n    time.sleep(600)\n")
    config = Path(__file__).parents[2] / "pyproject.toml"
    command = [sys.executable, "-m", "pytest", "-c", str(config), "-o", "faulthandler_timeout=1", str(test)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode not in (0, 5)
    assert "in test_hangs" in done.stderr + done.stdout


def test_a_dead_rank_is_named_with_its_exit_code(pool: WorkerPool) -> None:
    with pytest.raises(DistributedTestError, match="rank 1 of 2 died with exit code 7"):
        pool.run(dies, 2, timeout=3600)


def test_world_size_beyond_the_pool_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="world_size is 9"):
        pool.run(summed, 9, 0)


def test_ranks_end_when_the_session_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "session.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import sys, time
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from pool import WorkerPool
            from test_pool import summed

            if __name__ == "__main__":
                workers = WorkerPool()
                workers.run(summed, 1, 0)
                print(*workers.process_ids, flush=True)
                time.sleep(600)
            """
        )
    )
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        rank = int(session.stdout.readline())
        os.kill(rank, 0)
        session.send_signal(signal.SIGKILL)
        session.wait()
    for _ in range(300):
        if not _alive(rank):
            return
        time.sleep(0.1)
    os.kill(rank, signal.SIGKILL)
    pytest.fail(f"rank process {rank} outlived the session that started it")


def _alive(pid: int) -> bool:
    """Whether the process runs; one that has ended but was not collected by anybody counts as gone."""
    answer = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return answer.returncode == 0 and not answer.stdout.strip().startswith("Z")
