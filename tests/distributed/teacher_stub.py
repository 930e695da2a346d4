"""A completion server that scores each token -1, or does worse on demand."""

from __future__ import annotations

import http.server
import threading

from http_stub import JsonHandler


class TeacherStub(http.server.ThreadingHTTPServer):
    """`mood` of each request in turn, the last one for all that follow: well, silent (until `close`), gone (hangs up
    without an answer), broken (503), odd (an answer of another form), refuses (400)."""

    daemon_threads = True

    def __init__(self, *moods: str) -> None:
        self.moods, self.requests, self.over = list(moods) or ["well"], 0, threading.Event()
        self.changed = threading.Condition()
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def mood(self) -> str:
        with self.changed:
            self.requests += 1
            self.changed.notify_all()
            return self.moods.pop(0) if len(self.moods) > 1 else self.moods[0]

    def wait_for(self, requests: int) -> bool:
        """Until so many have been read, which may be after the client has gone away."""
        with self.changed:
            return self.changed.wait_for(lambda: self.requests >= requests, 60)

    def close(self) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()


class _Handler(JsonHandler):
    server: TeacherStub

    def get(self) -> None:
        self.answer(200, {"data": [{"id": "teacher"}]})

    def post(self) -> None:
        rows = self.asked()["prompt"]
        mood = self.server.mood()
        if mood == "silent":
            self.server.over.wait()
        elif mood == "gone":
            self.close_connection = True
        elif mood == "odd":
            self.answer(200, {"choices": [{"index": i, "logprobs": None} for i in range(len(rows))]})
        elif mood != "well":
            self.answer({"broken": 503, "refuses": 400}[mood], {})
        else:
            scores = [[None] + [-1.0] * (len(row) - 1) for row in rows]
            self.answer(
                200, {"choices": [{"index": i, "logprobs": {"token_logprobs": s}} for i, s in enumerate(scores)]}
            )
