"""Other weights for `k3train serve`, from disk and in place: whole, of the right version and policy, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_rl_serve
import torch
from saved_weights import recipe, save_weights
from test_rl_local_engine import finish, works
from test_rl_serve import ask, build, engine, local, same

from k3train.errors import UserError

folder, tokenizer = test_rl_serve.folder, test_rl_serve.tokenizer
server, original = test_rl_serve.server, test_rl_serve.original


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
