"""Stand-ins for vLLM's and SGLang's servers: they hold requests to what these document, and do badly on demand.

Neither was ever run here. The endpoints, their fields and their types are those of vLLM's development routers and of
SGLang's `io_struct.py` and `http_server.py`, summer 2026.
"""

from __future__ import annotations

import http.server
import json
import random
import threading
import urllib.parse
from typing import Any

from http_stub import JsonHandler

# Of POST /v1/completions, what the client may send and of which type.
FIELDS: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "prompt": list,
    "max_tokens": int,
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": int,
    "seed": int,
    "n": int,
    "stop_token_ids": list,
    "ignore_eos": bool,
    "logprobs": int,
    "return_token_ids": bool,
    "return_tokens_as_token_ids": bool,
    "stream": bool,
}
SGLANG_UPDATE = {"model_path": str, "load_format": str, "abort_all_requests": bool, "weight_version": str}
POSTS = {
    "sglang": {"/v1/completions", "/update_weights_from_disk"},
    "vllm": {"/v1/completions", "/pause", "/resume", "/collective_rpc", "/update_weight_version"},
}
GETS = {"sglang": {"/health", "/v1/models", "/model_info"}, "vllm": {"/health", "/v1/models", "/weight_info"}}
DEVELOPMENT = {"/pause", "/resume", "/collective_rpc", "/update_weight_version", "/weight_info"}
LENGTH = 12  # tokens of every text that nothing ends before


class CompletionStub(http.server.ThreadingHTTPServer):
    """`kind`: vllm or sglang. `development`: whether vLLM's endpoints of that mode are there.

    `odd_ends` are (finish_reason or None, tokens before it) of the next requests. While `is_down` every connection is
    closed without an answer. `hold_after` tokens of each choice a stream waits for `release`.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, kind: str, development: bool = True) -> None:
        self.kind, self.development = kind, development
        self.odd_ends: list[tuple[str | None, int]] = []
        self.statuses: list[int] = []  # that the next completions are answered with
        self.is_shared = False  # somebody else changes its weights after each update
        self.is_down, self.hold_after = False, LENGTH + 1
        self.release, self.held = threading.Event(), threading.Semaphore(0)
        self.weights, self.folder, self.paused, self.starts = "default", "", False, 0
        self.bodies: list[dict[str, Any]] = []  # of completions
        self.updates: list[str] = []  # paths of requests that change something, in order
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def restart(self) -> None:
        """Cuts all streams, and has the first weights."""
        self.starts += 1
        self.weights, self.folder = "default", ""
        self.hold_after = LENGTH + 1
        self.release.set()

    def close(self) -> None:
        self.release.set()
        self.shutdown()
        self.server_close()


class _Handler(JsonHandler):
    server: CompletionStub

    def get(self) -> None:
        self.route("GET")

    def post(self) -> None:
        self.route("POST")

    def route(self, method: str) -> None:
        stub, url = self.server, urllib.parse.urlsplit(self.path)
        body = self.asked()
        if stub.is_down:
            self.close_connection = True
            return
        gets, posts = GETS[stub.kind], POSTS[stub.kind]
        if not stub.development:
            gets, posts = gets - DEVELOPMENT, posts - DEVELOPMENT
        if url.path not in gets | posts:
            self.answer(404, {"detail": "Not Found"})
        elif url.path not in (gets if method == "GET" else posts):
            self.answer(405, {"detail": "Method Not Allowed"})
        elif url.path == "/v1/completions":
            self.complete(body)
        elif method == "POST":
            stub.updates.append(url.path)
            self.change(url.path, body, urllib.parse.parse_qs(url.query))
            if stub.is_shared:
                stub.weights = "another's"
        else:
            models = {"data": [{"id": "policy", "object": "model", "owned_by": stub.kind}]}
            self.answer(200, models if url.path == "/v1/models" else {"weight_version": stub.weights})

    def change(self, path: str, body: dict[str, Any], query: dict[str, list[str]]) -> None:
        stub = self.server
        if path == "/update_weights_from_disk":
            if not typed(body, SGLANG_UPDATE) or "model_path" not in body:
                self.answer(422, {"detail": [{"type": "string_type", "input": body}]})
                return
            stub.folder, stub.weights = body["model_path"], body.get("weight_version", stub.weights)
            self.answer(
                200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
            )
        elif path == "/pause":
            if query.get("mode", ["abort"]) not in (["abort"], ["wait"], ["keep"]):
                self.answer(422, {"detail": "mode"})
                return
            stub.paused = True
            self.answer(200, {"status": "paused"})
        elif path == "/resume":
            stub.paused = False
            self.answer(200, {"status": "resumed"})
        elif path == "/collective_rpc":
            if not typed(body, {"method": str, "args": list, "kwargs": dict, "timeout": (int, float)}):
                self.answer(400, {"detail": "Missing 'method' in request body"})
            elif body["method"] != "reload_weights" or body["kwargs"].keys() != {"weights_path"} or not stub.paused:
                self.answer(500, {"error": {"message": "Call to collective_rpc method failed"}})
            else:
                stub.folder = body["kwargs"]["weights_path"]
                self.answer(200, {"results": [None]})
        elif not typed(body, {"new_version": str}) or "new_version" not in body:
            self.answer(422, {"detail": [{"loc": ["body", "new_version"]}]})
        else:
            stub.weights = body["new_version"]
            self.answer(200, {"success": True, "new_version": stub.weights})

    def complete(self, body: dict[str, Any]) -> None:
        stub, start = self.server, self.server.starts
        if not typed(body, FIELDS) or not all(type(token) is int for token in body["prompt"]):
            self.answer(400, {"error": {"message": f"{sorted(body)}"}})
            return
        if stub.paused or stub.statuses:
            self.answer(503 if stub.paused else stub.statuses.pop(0), {})
            return
        stub.bodies.append(body)
        ends, count = stub.odd_ends.pop(0) if stub.odd_ends else ("stop", LENGTH)
        if body["max_tokens"] <= count:
            ends, count = "length", body["max_tokens"]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.close_connection = True
        for index in range(body["n"]):
            # SGLang documents nothing of several choices with one seed: they may be the same.
            numbers = random.Random(body["seed"] + index * (stub.kind == "vllm"))
            for place in range(count):
                if place == stub.hold_after:
                    stub.held.release()
                    stub.release.wait(60)
                if stub.starts != start or stub.is_down:
                    return
                token = numbers.randrange(300)
                choice = {
                    "index": index,
                    "text": "",
                    "logprobs": {"tokens": [f"token_id:{token}"], "token_logprobs": [-0.5]},
                    "token_ids": [token],
                    "finish_reason": ends if place == count - 1 else None,
                }
                self.wfile.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
                self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")


def typed(body: dict[str, Any], fields: dict[str, type | tuple[type, ...]]) -> bool:
    """Whether a body has these fields alone, each of its type."""
    kinds = {name: kind if isinstance(kind, tuple) else (kind,) for name, kind in fields.items()}
    return all(name in kinds and type(value) in kinds[name] for name, value in body.items())
