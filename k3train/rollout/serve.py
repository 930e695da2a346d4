"""A completion server over one model: HTTP threads hand requests to a single thread that owns the model."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from k3train.errors import UserError
from k3train.rollout.generate import check_tokens
from k3train.rollout.protocol import (
    BUCKET_NUMBER,
    LAST_BUCKET,
    MOST_BODY_BYTES,
    MOST_CHOICES,
    QUANT,
    WEIGHTS,
    BadRequestError,
    Choice,
    CompletionRequest,
    choice_body,
    completion_body,
    parse_completion,
)
from k3train.rollout.serve_model import Answer, Job, ModelThread, new_identity

MOST_BUCKET_BYTES = 1 << 30  # of weights in one bucket
HEADER_BYTES = 16 << 20  # what their names and shapes may take beside them
ENDPOINTS = {
    "GET": ("/health", "/v1/models"),
    "POST": ("/v1/completions", "/update_weights_from_disk", "/update_weights_from_bucket"),
}


class CompletionServer(ThreadingHTTPServer):
    """HTTP in front of a `ModelThread`. Start with `start`, end with `close`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], worker: ModelThread, name: str, read_timeout: float = 60.0) -> None:
        self.worker, self.model_name, self.read_timeout = worker, name, read_timeout
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]}:{self.server_address[1]}"

    def start(self) -> CompletionServer:
        """Serve from threads of this process; returns itself."""
        self.worker.start()
        threading.Thread(target=self.serve_forever, name="k3train-http", daemon=True).start()
        return self

    def close(self) -> None:
        """Stop taking requests, and end the model's thread."""
        self.shutdown()
        self.server_close()
        self.worker.stop()
        self.worker.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the server."""


class _Handler(BaseHTTPRequestHandler):
    server: CompletionServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        self.timeout = self.server.read_timeout
        super().setup()

    def log_message(self, *_: Any) -> None:
        """One line a request would drown the model's own words."""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def _answer(self, method: str) -> None:
        path = self.path.partition("?")[0]
        try:
            if path not in ENDPOINTS[method]:
                other = next((m for m, paths in ENDPOINTS.items() if path in paths), None)
                if other:
                    raise BadRequestError(f"{path} takes {other}, not {method}", status=405)
                there = ", ".join(ENDPOINTS["GET"] + ENDPOINTS["POST"])
                raise BadRequestError(f"{path} does not exist; there are {there}", status=404)
            getattr(self, "_" + path.rsplit("/", 1)[1])()
        except BadRequestError as error:
            self._send(error.status, error.body())
        except UserError as error:
            self._send(400, BadRequestError(str(error)).body())
        except (BrokenPipeError, ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            self.close_connection = True
            self._send(500, {"error": {"message": message, "type": "server_error", "param": None, "code": 500}})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        if status >= 400:
            self.close_connection = True  # the body may not have been read
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _body(self, most: int = MOST_BODY_BYTES) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise BadRequestError("Content-Length is missing or no number", status=411)
        if int(length) > most:
            raise BadRequestError(f"the body has {length} bytes; at most {most} are taken", status=413)
        return self.rfile.read(int(length))

    def _health(self) -> None:
        self._send(200, {"status": "ok", "k3train_version": self.server.worker.version})

    def _models(self) -> None:
        worker = self.server.worker
        own = {
            "updates": worker.allow_updates,
            "quant": worker.quant,
            "most_bucket_bytes": MOST_BUCKET_BYTES,
            "most_choices": MOST_CHOICES,
        }
        listed = {"id": self.server.model_name, "object": "model", "owned_by": "k3train", "k3train": own}
        self._send(200, {"object": "list", "data": [listed]})

    def _refuse_updates(self) -> None:
        if not self.server.worker.allow_updates:
            raise BadRequestError(
                "this server's weights stay; start it with --allow-updates to change them", status=403
            )

    def _update_weights_from_disk(self) -> None:
        self._refuse_updates()
        try:
            given = json.loads(self._body())
        except ValueError as error:
            raise BadRequestError(f"the body is not JSON ({error})") from error
        folder = given.get("model_path") if isinstance(given, dict) else None
        version = given.get("weight_version") if isinstance(given, dict) else None
        if not isinstance(folder, str) or not Path(folder).is_dir():
            raise BadRequestError(f"model_path is {folder!r:.200}; an existing folder is needed", "model_path")
        if version is not None and (type(version) not in (int, str) or version == ""):
            raise BadRequestError(f"weight_version is {version!r:.100}; a text is needed", "weight_version")
        worker, quant = self.server.worker, [given[QUANT]] if QUANT in given else []
        name = None if version is None else str(version)
        version = worker.call(lambda: worker.update(Path(folder), name, *quant))
        self._send(200, {"success": True, "message": "", "k3train_version": version})

    def _update_weights_from_bucket(self) -> None:
        self._refuse_updates()
        version, number = self.headers.get(WEIGHTS), self.headers.get(BUCKET_NUMBER, "")
        if not version or not number.isdecimal():
            raise BadRequestError(f"{WEIGHTS} names the weights and {BUCKET_NUMBER} numbers the bucket; one is missing")
        is_last = self.headers.get(LAST_BUCKET) == "1"
        try:
            quant = [json.loads(text)] if (text := self.headers.get("K3train-Quant")) else []
        except ValueError as error:
            raise BadRequestError(f"K3train-Quant is not JSON ({error})") from error
        content, worker = self._body(MOST_BUCKET_BYTES + HEADER_BYTES), self.server.worker
        try:
            done = worker.call(lambda: worker.update_bucket(content, int(number), version, is_last, *quant))
        except BadRequestError:
            raise
        except (ValueError, KeyError) as error:
            raise BadRequestError(f"the body is no bucket of safetensors ({error})") from error
        except Exception as error:
            if type(error).__module__.startswith("safetensors"):
                raise BadRequestError(f"the body is no bucket of safetensors ({error})") from error
            raise
        self._send(200, {"success": True, "k3train_version": done})

    def _completions(self) -> None:
        request = parse_completion(self._body())
        if request.model not in (None, self.server.model_name):
            raise BadRequestError(
                f"model {request.model!r:.100} is not served; {self.server.model_name} is", "model", 404
            )
        prompts = [self._tokens(prompt) for prompt in request.prompts]
        if request.stop and self.server.worker.tokenizer is None:
            raise BadRequestError("stop needs a tokenizer, which this model lacks; give stop_token_ids", "stop")
        if request.sampling.max_new_tokens == 0:
            self._score(request, prompts)
            return
        job, worker = Job(request, prompts), self.server.worker
        worker.call(lambda: worker.start_job(job))
        answer = Answer(job, worker)
        try:
            if request.stream:
                self._stream(answer)
            else:
                for _ in answer.events():
                    pass
                choices = [choice_body(choice, request) for choice in answer.choices]
                self._send(200, answer.wrap(choices, self.server.model_name, usage=True))
        finally:
            answer.abandon()

    def _tokens(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        worker = self.server.worker
        if isinstance(prompt, str):
            if worker.tokenizer is None:
                raise BadRequestError("prompt is text and this model has no tokenizer; give token ids", "prompt")
            prompt = tuple(worker.tokenizer.encode(prompt))
        try:
            check_tokens(prompt, worker.model.vocab_size, "prompt")
        except UserError as error:
            raise BadRequestError(str(error), "prompt") from error
        return prompt

    def _score(self, request: CompletionRequest, prompts: list[tuple[int, ...]]) -> None:
        worker = self.server.worker
        scores = worker.call(lambda: worker.score(prompts))
        choices = [
            Choice(i, prompt, logprobs=[None, *score], finish_reason="length")
            for i, (prompt, score) in enumerate(zip(prompts, scores))
        ]
        bodies = [choice_body(choice, request) for choice in choices]
        number = sum(map(len, prompts))
        usage = {"prompt_tokens": number, "completion_tokens": 0, "total_tokens": number}
        self._send(200, completion_body(new_identity(), self.server.model_name, bodies, worker.version, usage))

    def _stream(self, answer: Answer) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")  # the end of the stream is the end of the connection
        self.end_headers()
        self.close_connection = True
        try:
            for choice, since, text in answer.events():
                chunk = choice_body(choice, answer.job.request, since, text)
                self._event(json.dumps(answer.wrap([chunk], self.server.model_name)))
        except (BrokenPipeError, ConnectionError, TimeoutError):
            raise
        except Exception as error:
            self._event(json.dumps({"error": {"message": str(error), "type": "server_error", "code": 500}}))
        self._event("[DONE]")

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()
