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


def test_weights_from_disk(server: Any, tokenizer: Any, folder: Path, original: None) -> None:
    """A checkpoint, then an export of another: the server samples under those very weights."""
    from k3train import cli
    from k3train.rollout.refresh import named_weights

    jobs, outside = works(2, 8, samples=2), engine(server)
    other = build(seed=9)
    outside.refresh_from_disk(save_weights(folder / "other", recipe(), [other], folder / "tokenizer"), 1)
    outside.submit(jobs)
    said = finish(outside, {})
    assert {p.version for pieces in said.values() for p in pieces} == {1}
    same(said, local(other, tokenizer, jobs))
    third = build(seed=11)
    checkpoint = save_weights(folder / "third", recipe(), [third], folder / "tokenizer")
    arguments = ["export", "--checkpoint", str(checkpoint), "--hf", str(folder / "hf"), "--experts", "bf16"]
    assert cli.main(arguments) == 0
    outside.refresh_from_disk(folder / "hf", 2)
    own = named_weights(server.worker.model)
    for name, tensor in named_weights(third).items():
        assert torch.equal(own[name].bfloat16(), tensor.bfloat16()), name
        assert not torch.equal(tensor, named_weights(other)[name]) or tensor.unique().numel() == 1, name
    outside.submit(jobs)
    assert finish(outside, {})[2, 0][0].version == 2


def test_weights_in_place(server: Any, tokenizer: Any, original: None) -> None:
    """In buckets of at most 20 kB: the server then holds the very weights, and samples under the new version."""
    from k3train.rollout.refresh import buckets, named_weights

    other = build(seed=10)
    for bucket in buckets(other, 20_000):
        size = sum(t.numel() * t.element_size() for t in bucket.values())
        assert size <= 20_000
    outside = engine(server)
    sent = list(buckets(other, 20_000))
    for number, bucket in enumerate(sent, start=1):
        assert outside.send_bucket(bucket, number - 1, 4, is_last=number == len(sent))
        assert (server.worker.version is None) is (number < len(sent))
    assert len(sent) > 5
    for name, tensor in named_weights(server.worker.model).items():
        assert torch.equal(tensor, named_weights(other)[name]), name
    jobs = works(2, 8, samples=1)
    outside.submit(jobs)
    said = finish(outside, {})
    same(said, local(other, tokenizer, jobs))
    assert {p.version for p in said[2, 0]} == {4}


def restart(server: Any, weights: dict[str, torch.Tensor]) -> None:
    """As a server that is started anew: its first weights, under a name that nobody gave."""
    from k3train.rollout.refresh import apply_bucket

    worker = server.worker

    def start() -> None:
        apply_bucket(worker.model, weights)
        worker.version, worker._arriving = "start-again", None

    worker.call(start)


def test_a_refresh_that_is_interrupted_begins_again(server: Any, original: None) -> None:
    """The server is restarted between two buckets: it gets all of them again, and no mixture of weights."""
    from k3train.rl.shared_engine import SharedEngine
    from k3train.rollout.refresh import buckets, named_weights

    other = build(seed=10)
    [first] = [{k: v.clone() for k, v in b.items()} for b in buckets(server.worker.model, 1 << 40)]
    shared, made = SharedEngine(lambda: engine(server)), []

    def all_buckets() -> Iterator[dict[str, torch.Tensor]]:
        for number, bucket in enumerate(buckets(other, 20_000)):
            if number == 4 and not made.count(4):
                restart(server, first)
            made.append(number)
            yield bucket

    sent = shared.refresh_in_place(all_buckets, 5)
    assert sent > 5
    assert made == [*range(made[4:].index(0) + 4), *range(sent)]
    for name, tensor in named_weights(server.worker.model).items():
        assert torch.equal(tensor, named_weights(other)[name]), name
    assert server.worker.version.endswith(":5")
    assert shared.counters()["repeated_refreshes"] == 1


def test_tokens_of_other_weights_are_not_taken(server: Any, tokenizer: Any, original: None) -> None:
    """Restarted in the middle of texts, the server is given the weights again before they go on."""
    from k3train.rl.shared_engine import SharedEngine
    from k3train.rollout.refresh import buckets

    model, given = build(seed=10), []
    [first] = [{k: v.clone() for k, v in b.items()} for b in buckets(server.worker.model, 1 << 40)]

    def give() -> None:
        given.append(shared.refresh_in_place(lambda: buckets(model), 3))

    shared = SharedEngine(lambda: engine(server), give)
    give()
    jobs = works(1, 9, samples=3, tokens=40)
    shared.submit(jobs)
    said = finish(shared, {}, polls=4)
    restart(server, first)
    same(finish(shared, said), local(model, tokenizer, jobs))
    assert len(given) == 2
    assert {p.version for pieces in said.values() for p in pieces} == {3}
    alone = engine(server)
    alone.submit(works(2, 9, tokens=40))
    finish(alone, {}, polls=1)
    restart(server, first)
    with pytest.raises(UserError, match="has other weights than it was given"):
        finish(alone, {})
    alone.pause()


def test_buckets_as_large_as_the_server_says(server: Any, original: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its limit is of the weights alone, and one that is too small is told when connecting."""
    from k3train.rollout import serve
    from k3train.rollout.client import CompletionClient
    from k3train.rollout.remote import OpenAIEngine
    from k3train.rollout.servers import ServerSettings

    monkeypatch.setattr(serve, "MOST_BUCKET_BYTES", 400)
    outside = engine(server, settings=ServerSettings(largest_bucket=400))
    bucket = {"embedding.weight@0": server.worker.model.state_dict()["embedding.weight"][:3].clone()}
    assert sum(rows.nbytes for rows in bucket.values()) == 384
    assert outside.send_bucket(bucket, 0, 1, is_last=True)
    with pytest.raises(UserError, match=r"sends up to 401 bytes.*takes 400; try a smaller rl.rollout.bucket_mib"):
        OpenAIEngine(CompletionClient(server.url), settings=ServerSettings(largest_bucket=401))


def test_a_policy_that_differs_is_refused(server: Any, folder: Path) -> None:
    """When connecting, and where weights come with another one; the server says which it has."""
    from safetensors.torch import save

    from k3train.config.quant import QuantConfig
    from k3train.rollout.servers import ServerSettings

    policy = QuantConfig(enabled=True).policy()
    assert ask(server, {}, "/v1/models", "GET")[1]["data"][0]["k3train"]["quant"] is None
    with pytest.raises(UserError, match=r"with mxfp4 weights .* without quantization, so they are not the same policy"):
        engine(server, settings=ServerSettings(quant=policy))
    before, version = server.worker.model.state_dict()["embedding.weight"].clone(), server.worker.version
    headers = {"K3train-Weight-Version": "v", "K3train-Bucket": "0", "K3train-Quant": json.dumps(policy)}
    content = save({"embedding.weight@0": torch.zeros(3, 32)})
    status, answer = ask(server, content, "/update_weights_from_bucket", headers=headers)
    assert (status, "trained with mxfp4 weights" in answer["error"]["message"]) == (400, True)
    config = recipe()
    config.model.moe.latent_size, config.model.moe.expert_hidden_size = 32, 64
    config.quant = QuantConfig(enabled=True, skip_stages=[])
    rounded = save_weights(folder / "rounded", config, [build()], folder / "tokenizer")
    for body in ({"model_path": str(rounded)}, {"model_path": str(folder), "k3train_quant": policy}):
        status, answer = ask(server, body, "/update_weights_from_disk")
        assert (status, "trained with mxfp4 weights" in answer["error"]["message"]) == (400, True), answer
    assert torch.equal(server.worker.model.state_dict()["embedding.weight"], before)
    assert server.worker.version == version


def test_adapters_are_in_the_weights_that_are_served(server: Any, folder: Path, original: None) -> None:
    """Of a checkpoint that has some: W + scale B A stands in the server's weights, and no adapter beside them."""
    from k3train.config.lora import LoRAConfig
    from k3train.model.build import build_chunks
    from k3train.model.lora import merge_adapters
    from k3train.rollout.refresh import named_weights
    from k3train.rollout.scoring import token_logprobs

    config = recipe()
    config.lora = LoRAConfig(enabled=True, rank=4, alpha=12.0)
    adapted = build_chunks(config)[0][0].eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if name.endswith("lora.b"):
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    weights = {name: tensor.clone() for name, tensor in named_weights(adapted).items()}
    [scores] = token_logprobs(adapted, [list(range(30))])
    path = save_weights(folder / "adapted", config, [adapted], folder / "tokenizer")
    assert engine(server).refresh_from_disk(path, 1)
    merge_adapters(adapted)
    changed = 0
    for model in (server.worker.model, adapted):
        for name, tensor in named_weights(model).items():
            expected, stem = weights[name], name.removesuffix("weight") + "lora."
            if stem + "a" in weights:
                expected = expected + 12.0 / 4 * (weights[stem + "b"] @ weights[stem + "a"])
                changed += 1
            assert torch.allclose(tensor, expected, atol=1e-5), name
        assert token_logprobs(model, [list(range(30))])[0] == pytest.approx(scores, abs=1e-4)
    assert changed > 20


def test_bad_updates_change_nothing(server: Any) -> None:
    from safetensors.torch import save

    before = {n: t.clone() for n, t in server.worker.model.state_dict().items() if isinstance(t, torch.Tensor)}
    wrong = save({"embedding.weight@300": torch.zeros(9, 32), "embedding.weight@0": torch.zeros(1, 32)})
    version, first = server.worker.version, {"K3train-Weight-Version": "new", "K3train-Bucket": "0"}
    for body, path, headers in (
        ({"model_path": "/nonexistent"}, "/update_weights_from_disk", {}),
        ({"model_path": "/", "weight_version": [1]}, "/update_weights_from_disk", {}),
        (b"rubbish", "/update_weights_from_bucket", first),
        (wrong, "/update_weights_from_bucket", first),
        (save({"nothing@0": torch.zeros(1)}), "/update_weights_from_bucket", first),
        (b"rubbish", "/update_weights_from_bucket", {}),
    ):
        status, answer = ask(server, body, path, headers=headers)
        assert status == 400, answer
    assert server.worker.version == version
    assert all(torch.equal(server.worker.model.state_dict()[n], t) for n, t in before.items())
    server.worker.allow_updates = False
    try:
        assert ask(server, wrong, "/update_weights_from_bucket")[0] == 403
    finally:
        server.worker.allow_updates = True


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
