"""Calls in a bounded number of threads, and a judge's games in them: limits, failures, the order in which they end."""

from __future__ import annotations

import http.server
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from http_stub import JsonHandler, completion_of
from test_rl_environments import longest_wins, says, task

from k3train.errors import UserError
from k3train.rl import calls as calls_module
from k3train.rl.calls import Calls
from k3train.rl.environments import Environment
from k3train.rl.judge import JudgedEnvironment, tournament
from k3train.rl.rewards import REWARDS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds by which calls are measured; it stands unless somebody changes it."""
    seconds = [0.0]
    monkeypatch.setattr(calls_module.time, "monotonic", lambda: seconds[0])
    return seconds


def test_calls_side_by_side(clock: list[float]) -> None:
    """Results in order; an exception and a hang stand for their own call only."""
    pool, over = Calls(8), threading.Event()

    def hang() -> None:
        while len(pool._running) > 1:  # the clock goes on once the others have ended
            over.wait(0.01)
        clock[0] = 100.0
        over.wait(60)

    def fail() -> None:
        raise ValueError("no")

    results = pool.run([lambda: 1, fail, lambda: 3, hang], 1.0)
    over.set()
    assert (results[0], results[2]) == (1, 3)
    assert isinstance(results[1], ValueError)
    assert isinstance(results[3], TimeoutError)
    assert pool.run([], 1.0) == []


def test_no_more_calls_than_allowed_at_a_time(clock: list[float]) -> None:
    """Three at once (they meet at a barrier), never four; what hangs leaves its place to the next."""
    barrier, lock, running, most = threading.Barrier(3), threading.Lock(), set(), []

    def meet(number: int) -> int:
        with lock:
            running.add(number)
            most.append(len(running))
        barrier.wait(60)
        with lock:
            running.remove(number)
        return number

    assert Calls(3).run([lambda n=n: meet(n) for n in range(9)], 60) == list(range(9))
    assert max(most) == 3
    over = threading.Event()

    def hang() -> None:
        clock[0] = 100.0
        over.wait(60)

    first, second = Calls(1).run([hang, lambda: 2], 0.3)
    over.set()
    assert isinstance(first, TimeoutError)
    assert second == 2


def test_a_time_limit_counts_from_when_a_call_begins(clock: list[float]) -> None:
    pool, go, over = Calls(1), threading.Event(), threading.Event()
    first, second = pool.start(go.wait, 10.0), pool.start(over.wait, 10.0)
    clock[0] = 9.0
    pool.expire()
    assert not first.ended
    go.set()
    assert pool.wait([first]) == [True]
    clock[0] = 18.0
    pool.expire()
    assert not second.ended  # it began at 9
    clock[0] = 19.0
    pool.expire()
    assert isinstance(second.result, TimeoutError)
    over.set()


def test_a_call_that_asks_for_the_end_of_the_program_ends() -> None:
    """Of a thread `sys.exit` would end only the thread, without a word, and the call would keep its place."""
    first, second = Calls(1).run([lambda: sys.exit("no model"), lambda: 2], 60)
    assert (type(first), str(first), second) == (RuntimeError, "SystemExit: no model", 2)


def test_a_call_for_which_there_is_no_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where many wait behind it: their turn comes when there are threads again."""
    begin, tries = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        tries.append(thread)
        if 1 < len(tries) < 2000:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    pool, go = Calls(1), threading.Event()
    calls = [pool.start(action, 60) for action in (go.wait, *[lambda: 1] * 1998, lambda: 2)]
    go.set()
    results = pool.wait(calls)
    assert (results[0], results[-1]) == (True, 2)
    assert {(type(r), str(r)) for r in results[1:-1]} == {(RuntimeError, "can't start new thread")}


ANSWERS = ["x", "xxx", "xx"]


def test_rewards_do_not_follow_the_order_in_which_games_end() -> None:
    """Each game ends only after the one behind it; rewards and verdicts are those of one game after the other."""
    expected = tournament("q", ANSWERS, longest_wins)
    for most in (6, 8):
        ended = [threading.Event() for _ in range(7)]
        ended[6].set()
        order: list[int] = []

        def play(games: Any, ended: Any = ended, order: Any = order, most: int = most) -> list[Any]:
            def held(number: int, game: Callable[[], Any]) -> Any:
                assert ended[number + 1].wait(60)
                order.append(number)
                ended[number].set()
                return game()

            return Calls(most).run([lambda n=n, g=g: held(n, g) for n, g in enumerate(games)], 60)

        found = tournament("q", ANSWERS, longest_wins, play=play)
        assert order == [5, 4, 3, 2, 1, 0]
        assert found == expected


class Judging(http.server.ThreadingHTTPServer):
    """A completion server that judges by length, `together` requests at a time; a prompt with HANG gets no answer."""

    daemon_threads = True

    def __init__(self, together: int) -> None:
        self.barrier = threading.Barrier(together)
        self.lock, self.open, self.most, self.over = threading.Lock(), 0, 0, threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(JsonHandler):
    server: Judging

    def post(self) -> None:
        prompt = self.asked()["prompt"]
        with self.server.lock:
            self.server.open += 1
            self.server.most = max(self.server.most, self.server.open)
        if "HANG" in prompt:
            self.server.over.wait()
            return
        self.server.barrier.wait(60)
        with self.server.lock:
            self.server.open -= 1
        self.answer(200, completion_of(longest_wins(prompt)))


@pytest.fixture
def judging(request: pytest.FixtureRequest) -> Iterator[tuple[str, Judging]]:
    server = Judging(request.param)
    yield f"http://127.0.0.1:{server.server_address[1]}", server
    server.over.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("judging", [3], indirect=True)
def test_games_of_a_judge_are_played_side_by_side(judging: tuple[str, Judging]) -> None:
    """The server answers only three requests at once, and never sees a fourth."""
    url, server = judging
    judge = JudgedEnvironment(REWARDS["format"], url=url, concurrency=3, timeout_seconds=60)
    assert judge.judge_group(task(), [says(a) for a in ANSWERS]).rewards == [0.0, 1.0, 0.5]
    assert server.most == 3
    assert judge.limits_judging is True
    assert Environment.limits_judging is False
    for wrong in ({"concurrency": 0}, {"timeout_seconds": 0.0}):
        with pytest.raises(UserError, match="at least 1, and more than 0"):
            JudgedEnvironment(REWARDS["format"], url=url, **wrong)


@pytest.mark.parametrize("judging", [1], indirect=True)
def test_a_game_that_takes_too_long_is_a_draw(judging: tuple[str, Judging]) -> None:
    """Its time is its own: "xx HANG" draws all four of its games; those of the others, behind them, are played."""
    url, _ = judging
    patient, quick = (
        JudgedEnvironment(REWARDS["format"], url=url, concurrency=4, timeout_seconds=seconds) for seconds in (5.0, 0.5)
    )
    answers = [says("xx HANG"), says("x"), says("xxx")]
    judged = patient.judge_group(task(), answers)
    assert judged.rewards == [0.5, 0.25, 0.75]
    assert judged.info == {"games": 6, "failed_games": 4, "draws": 0, "vetoes": 0}
    with pytest.raises(TimeoutError, match="no verdict in 2 games"):
        quick.judge_group(task(), answers[:2])
