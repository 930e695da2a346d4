"""`k3train serve` and the `openai` engine over loopback: the same tokens as in process, failures, other weights."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_weights import VOCAB, make_tokenizer, recipe, save_weights
from test_rl_local_engine import finish, resumed, works

from k3train.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from k3train.data.tokenizer import load_tokenizer

    return load_tokenizer(make_tokenizer(folder / "tokenizer"))


def build(seed: int = 1234) -> torch.nn.Module:
    from k3train.model.build import build_chunks

    config = recipe()
    config.train.seed = seed
    return build_chunks(config)[0][0].eval()


@pytest.fixture(scope="module")
def server(_cpu_rank: None, tokenizer: Any) -> Iterator[Any]:
    from k3train.config.schema import ParallelConfig
    from k3train.model.build import start_model_parallel
    from k3train.rollout.serve import CompletionServer
    from k3train.rollout.serve_model import ModelThread

    start_model_parallel(ParallelConfig())
    worker = ModelThread(build(), tokenizer, frozenset({tokenizer.eod}), 8, allow_updates=True)
    running = CompletionServer(("127.0.0.1", 0), worker, "tiny").start()
    yield running
    running.close()
    assert not worker.is_alive()


@pytest.fixture
def original(server: Any) -> Iterator[None]:
    """The first weights again after a test that changes them."""
    from k3train.rollout.refresh import apply_bucket, buckets

    [bucket] = [{k: v.clone() for k, v in b.items()} for b in buckets(server.worker.model, 1 << 40)]
    version = server.worker.version
    yield
    server.worker.call(lambda: apply_bucket(server.worker.model, bucket))
    server.worker.version = version


def ask(
    server: Any, body: Any, path: str = "/v1/completions", method: str = "POST", headers: dict[str, str] | None = None
) -> tuple[int, dict]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    content = content if method == "POST" else None
    request = urllib.request.Request(server.url + path, content, headers or {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def engine(server: Any, **settings: Any) -> Any:
    from k3train.rollout.client import CompletionClient
    from k3train.rollout.remote import OpenAIEngine

    return OpenAIEngine(CompletionClient(server.url, timeout=60), backoff=0.01, **settings)


def local(model: torch.nn.Module, tokenizer: Any, jobs: list) -> dict:
    from k3train.rollout.local import LocalEngine

    inside = LocalEngine(model, tokenizer.vocab_size)
    inside.submit(jobs)
    return finish(inside, {})


def same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for key, pieces in expected.items():
        assert [p.token for p in found[key]] == [p.token for p in pieces]
        assert [p.logprob for p in found[key]] == pytest.approx([p.logprob for p in pieces], abs=1e-4)
        assert [p.finish for p in found[key]] == [p.finish for p in pieces]


def test_a_completion_says_what_the_model_says(server: Any, tokenizer: Any) -> None:
    """Text in and out, token ids, log-probabilities of a whole forward, usage; a stream joins up to the same."""
    from k3train.rollout.scoring import token_logprobs

    body = {"prompt": "ka mo", "max_tokens": 9, "seed": 3, "logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    status, answer = ask(server, body)
    assert status == 200
    [choice] = answer["choices"]
    assert choice["text"] == tokenizer.decode(choice["token_ids"])
    assert choice["prompt_token_ids"] == tokenizer.encode("ka mo")
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"]) == 9
    row = choice["prompt_token_ids"] + choice["token_ids"]
    [expected] = token_logprobs(server.worker.model, [row])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected[-9:], abs=1e-4)
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps({**body, "stream": True}).encode())
    with urllib.request.urlopen(request, timeout=60) as stream:
        lines = [line[6:].strip() for line in stream if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert [t for chunk in chunks for t in chunk["token_ids"]] == choice["token_ids"]
    status, echoed = ask(server, {"prompt": row, "max_tokens": 0, "echo": True, "logprobs": 0})
    assert status == 200
    assert echoed["choices"][0]["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)


def test_stop_strings_and_several_choices(server: Any) -> None:
    base = {"prompt": ["ka mo", "ti"], "n": 2, "max_tokens": 8, "ignore_eos": True}
    free = ask(server, base)[1]["choices"]
    assert [choice["index"] for choice in free] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in free}) == 4
    word = free[1]["text"][3:5]
    ended = ask(server, {**base, "stop": [word]})[1]["choices"]
    assert ended[1]["text"] == free[1]["text"][: free[1]["text"].index(word)]
    assert ended[1]["finish_reason"] == "stop"


BAD = [
    (b"{", "not JSON", None),
    (b"[1]", "an object is needed", None),
    ({}, "prompt is missing", "prompt"),
    ({"prompt": ""}, "none empty", "prompt"),
    ({"prompt": []}, "missing or empty", "prompt"),
    ({"prompt": [[1], "a", 3]}, "none empty", "prompt"),
    ({"prompt": [100000]}, "outside the model's vocabulary", "prompt"),
    ({"prompt": "a", "max_tokens": "9"}, "whole number", "max_tokens"),
    ({"prompt": "a", "max_tokens": -1}, "whole number", "max_tokens"),
    ({"prompt": "a", "max_tokens": 0}, "echo", "max_tokens"),
    ({"prompt": "a", "temperature": -1}, "temperature", "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p", "top_p"),
    ({"prompt": "a", "temperature": True}, "a number", "temperature"),
    ({"prompt": "a", "n": 0}, "from 1 to", "n"),
    ({"prompt": "a", "stop": [""]}, "none empty", "stop"),
    ({"prompt": "a", "logprobs": 5}, "from 0 to 1", "logprobs"),
    ({"prompt": "a", "presence_penalty": 0.5}, "not supported", "presence_penalty"),
    ({"prompt": "a", "echo": True}, "max_tokens=0", "echo"),
    ({"prompt": "a", "sead": 1}, "sead is no field", "sead"),
]


@pytest.mark.parametrize(("body", "words", "param"), BAD)
def test_bad_requests_are_answered_in_words(server: Any, body: Any, words: str, param: str | None) -> None:
    status, answer = ask(server, body)
    assert status == 400
    assert words in answer["error"]["message"]
    assert answer["error"]["param"] == param
    assert "\n" not in answer["error"]["message"]


def test_other_paths_methods_and_models(server: Any) -> None:
    assert ask(server, {}, "/v1/chat")[0] == 404
    assert ask(server, {}, "/v1/completions", "GET")[0] == 405
    assert ask(server, {"prompt": "a", "model": "other"})[0] == 404
    assert ask(server, {}, "/v1/models", "GET")[1]["data"][0]["id"] == "tiny"
    assert ask(server, {}, "/health", "GET")[1]["status"] == "ok"
    with socket.create_connection(server.server_address) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 413 " in raw.recv(100)
    assert ask(server, {"prompt": "ka", "max_tokens": 1})[0] == 200  # and the server lives on


def test_the_remote_engine_equals_the_local_one(server: Any, tokenizer: Any) -> None:
    """Groups of samples, lengths and stop tokens over HTTP: token for token what the model gives in this process."""
    jobs = works(7, 20, samples=4) + works(8, 3, samples=2)
    expected = local(server.worker.model, tokenizer, jobs)
    token = expected[7, 0][4].token
    jobs += works(9, 20, samples=1, stop=frozenset({token}))
    expected = local(server.worker.model, tokenizer, jobs)
    outside = engine(server)
    outside.submit(jobs)
    same(finish(outside, {}), expected)
    counters = outside.counters()
    assert (counters["generated_tokens"], counters["prefilled_tokens"]) == (sum(map(len, expected.values())), 43)
    assert counters["failures"] == 0


def test_the_remote_engine_pauses_and_resumes(server: Any, tokenizer: Any) -> None:
    """Streams are left in the middle and their samples submitted again: nothing is lost, repeated or changed."""
    jobs = works(1, 9, samples=3, tokens=40)
    expected = local(server.worker.model, tokenizer, jobs)
    outside = engine(server)
    outside.submit(jobs)
    said = finish(outside, {}, polls=4)
    for piece in outside.pause():
        said.setdefault(piece.key, []).append(piece)
    assert outside.poll() == []
    left = [w for w in jobs if not (w.key in said and said[w.key][-1].finish)]
    assert left, "the pause came too late to test anything"
    outside.submit([resumed(w, said.get(w.key, [])) for w in left])
    same(finish(outside, said), expected)


class Unreliable(threading.Thread):
    """Passes connections on to a server, but cuts the first few after some bytes of the answer."""

    def __init__(self, target: tuple[str, int], cuts: list[int]) -> None:
        super().__init__(daemon=True)
        self.target, self.cuts = target, cuts
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()

    def run(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.carry, args=(client,), daemon=True).start()

    def carry(self, client: socket.socket) -> None:
        with client, socket.create_connection(self.target) as upstream:
            request = client.recv(1 << 16)
            head, _, body = request.partition(b"\r\n\r\n")
            length = next(
                (int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-len")), 0
            )
            while len(body) < length:
                body += client.recv(1 << 16)
            upstream.sendall(head + b"\r\n\r\n" + body)
            left = self.cuts.pop(0) if b"/v1/completions" in head and self.cuts else 1 << 30
            while left > 0 and (data := upstream.recv(min(left, 4096))):
                client.sendall(data)
                left -= len(data)


def test_broken_streams_are_continued_and_counted(server: Any, tokenizer: Any) -> None:
    """Cut before the answer, and twice in its middle: the texts are those of an undisturbed run."""
    jobs = works(5, 12, samples=2, tokens=20)
    expected = local(server.worker.model, tokenizer, jobs)
    between = Unreliable(server.server_address, [0, 2500, 3000])
    between.start()
    try:
        outside = engine(type("At", (), {"url": "http://{}:{}".format(*between.address)}))
        outside.submit(jobs)
        same(finish(outside, {}), expected)
        assert outside.counters()["failures"] == 3
        assert outside.counters()["given_up"] == 0
    finally:
        between.listener.close()


def test_a_sample_that_cannot_be_had_is_given_up(server: Any) -> None:
    """A server that always cuts, and one that refuses: each sample ends as failed, with a reason."""
    between = Unreliable(server.server_address, [0] * 50)
    between.start()
    try:
        outside = engine(type("At", (), {"url": "http://{}:{}".format(*between.address)}), retries=2)
        outside.submit(works(5, 12, samples=2))
        said = finish(outside, {})
    finally:
        between.listener.close()
    assert {key: [p.finish for p in pieces] for key, pieces in said.items()} == {(5, 0): ["failed"], (5, 1): ["failed"]}
    assert outside.counters()["given_up"] == 2
    refused = engine(server)
    refused.submit([replace(works(6, 2, samples=1)[0], context=(99999,))])
    [piece] = finish(refused, {})[6, 0]
    assert (piece.finish, piece.token) == ("failed", None)
    assert "vocabulary" in piece.error


def test_the_command(folder: Path, server: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """`k3train serve` from a checkpoint says where it listens, answers, and ends on SIGTERM with code 0."""
    import signal
    import subprocess
    import sys

    from k3train import cli

    checkpoint = save_weights(folder / "served", recipe(), [build()], folder / "tokenizer")
    command = [sys.executable, "-m", "k3train", "serve", "--checkpoint", str(checkpoint), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            said = child.stdout.readline()
            assert said.startswith(f"serving {checkpoint} as k3train at http://127.0.0.1:")
            at = type("At", (), {"url": said.split()[-1]})
            status, answer = ask(at, {"prompt": "ka mo", "max_tokens": 3, "ignore_eos": True})
            assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
            assert ask(at, b"{}", "/update_weights_from_disk")[0] == 403
            with socket.create_server(("127.0.0.1", 0)) as taken:
                port = str(taken.getsockname()[1])
                assert cli.main(["serve", "--checkpoint", str(checkpoint), "--port", port]) == 2
            assert "cannot be listened on" in capfd.readouterr().err
            child.send_signal(signal.SIGTERM)
            assert child.wait(timeout=60) == 0
        finally:
            child.kill()


def test_an_address_without_a_server(server: Any) -> None:
    from k3train.rollout.client import CompletionClient

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UserError, match="does not answer"):
        engine(type("At", (), {"url": f"http://127.0.0.1:{port}"}), retries=1)
    with pytest.raises(UserError, match="no address"):
        CompletionClient("ftp://x")
    assert VOCAB
