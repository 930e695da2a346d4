"""Items worked on by several processes, results as they come."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from k3train.errors import UserError


def results_of[Item, Result](
    process: Callable[[Item], Result], items: Sequence[Item], workers: int, preload: str
) -> Iterator[tuple[int, Result]]:
    """(place in `items`, result) as they come; in order and in this process with one worker.

    Args:
        process: what each worker does, sent to it once (pickled).
        items: sent one by one (pickled).
        workers: processes at most.
        preload: the module that workers are forked with.

    Raises:
        UserError: a worker was killed, or `process` raised it.
    """
    workers = min(workers, len(items))
    if workers <= 1:
        yield from enumerate(map(process, items))
        return
    # Not forked from this process: its tokenizer may have threads, which a fork would leave in a locked
    # state. A fork server imports the libraries once for all workers.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(process,)) as pool:
        futures = {pool.submit(_process_in_worker, item): place for place, item in enumerate(items)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "A worker process was killed, most likely for want of memory; what is finished is kept, run "
                f"the same command again with fewer --workers than {workers}."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


_process: Callable[[Any], Any] | None = None


def _start_worker(process: Callable[[Any], Any]) -> None:
    """Keep what all items share, and end this worker when its parent is gone, however that ended."""
    global _process
    _process = process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; an item begun is finished and kept
    parent = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _process_in_worker(item: Any) -> Any:
    return _process(item)
