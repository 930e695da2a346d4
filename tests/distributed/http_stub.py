"""What servers that stand in for others share: JSON in, JSON out, over loopback, without a word on the terminal."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any


class JsonHandler(http.server.BaseHTTPRequestHandler):
    """A request's body is `asked()`; `answer` sends one back. Subclasses say what `get` and `post` do."""

    def do_GET(self) -> None:
        self.get()

    def do_POST(self) -> None:
        self.post()

    def get(self) -> None:
        self.answer(501, {})

    def post(self) -> None:
        self.answer(501, {})

    def asked(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")

    def answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


def completion_of(text: str) -> dict[str, Any]:
    """A completion server's answer of one choice."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}


@contextlib.contextmanager
def serving(handler: type[JsonHandler]) -> Iterator[str]:
    """The address of a server with this handler, until the block ends."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
