"""Losses of distillation against plain formulas, and the stored logits they read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from k3train.config.distill import DistillConfig
from k3train.config.load import recipe_from_dict
from k3train.config.rules_distill import check_distill
from k3train.data.chat.encoded import EncodedSet
from k3train.distill.loss import cross_entropy, full_kl, top_k_kl
from k3train.distill.rows import DistillRows
from k3train.distill.store import _missing, _write, key_of, logit_store, plan, trained_labels
from k3train.distill.teacher import top_k
from k3train.errors import UserError

pytestmark = pytest.mark.usefixtures("single_rank")
TOKENS, VOCAB, K = 7, 23, 5


def group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


def logits(seed: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)


def both(ours: Any, plain: Any, student: torch.Tensor) -> None:
    """Values and gradients are equal."""
    a, b = student.clone().requires_grad_(), student.clone().requires_grad_()
    left, right = ours(a), plain(b)
    torch.testing.assert_close(left, right)
    weights = torch.arange(1.0, TOKENS + 1, dtype=torch.float64)
    (left * weights).sum().backward()
    (right * weights).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("temperature", [1.0, 0.25, 4.0])
def test_whole_distributions(temperature: float) -> None:
    teacher = torch.log_softmax(logits(1), -1)

    def plain(student: torch.Tensor) -> torch.Tensor:
        log_q = torch.log_softmax(student / temperature, -1)
        return F.kl_div(log_q, torch.log_softmax(teacher / temperature, -1), log_target=True, reduction="none").sum(-1)

    both(lambda s: full_kl(s, teacher, temperature, group()), plain, logits(2))


def test_tokens_that_do_not_exist_count_nothing() -> None:
    """Rows added to the vocabulary: minus infinity at the teacher, the least number at the student."""
    teacher, student = torch.log_softmax(logits(1), -1), logits(2)
    wide_teacher, wide_student = F.pad(teacher, (0, 2), value=-torch.inf), F.pad(student, (0, 2))
    wide_student[:, -2:] = torch.finfo(torch.float32).min
    wide_student.requires_grad_()
    for temperature in (1.0, 0.25):
        found = full_kl(wide_student, wide_teacher, temperature, group())
        torch.testing.assert_close(found, full_kl(student, teacher, temperature, group()))
        found.sum().backward()
        assert torch.isfinite(wide_student.grad).all()
        assert not wide_student.grad[:, -2:].any()


@pytest.mark.parametrize("rest", ["bucket", "drop"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_top_k(rest: str, temperature: float) -> None:
    """The outcomes written out: k tokens, and with `bucket` all others as one."""
    ids, said = top_k(logits(1) / temperature, K, group())
    p = torch.softmax(logits(1) / temperature, -1)
    torch.testing.assert_close(said[:, :K].exp(), p.sort(descending=True).values[:, :K])
    torch.testing.assert_close(said.exp().sum(-1), torch.ones(TOKENS, dtype=torch.float64))

    def plain(student: torch.Tensor) -> torch.Tensor:
        q, own = torch.softmax(student / temperature, -1).gather(-1, ids), p.gather(-1, ids)
        if rest == "drop":
            own = own / own.sum(-1, keepdim=True)
        else:
            q = torch.cat([q, 1 - q.sum(-1, keepdim=True)], -1)
            own = torch.cat([own, 1 - own.sum(-1, keepdim=True)], -1)
        return (own * (own.log() - q.log())).sum(-1)

    both(lambda s: top_k_kl(s, ids, said, temperature, rest, group()), plain, logits(2))


def test_all_but_one_token_are_the_whole_distribution_and_fewer_never_more() -> None:
    teacher, student = torch.log_softmax(logits(1), -1), logits(2)
    whole = full_kl(student, teacher, 1.0, group())
    found = [top_k_kl(student, *top_k(logits(1), k, group()), 1.0, "bucket", group()) for k in (1, 4, VOCAB - 1)]
    torch.testing.assert_close(found[-1], whole)
    assert (found[0] <= found[1] + 1e-12).all()
    assert (found[1] <= whole + 1e-12).all()


def test_a_sure_student_is_not_lost_in_rounding() -> None:
    """In fp32, with all but 1e-12 on two tokens, where the teacher has half: 1 minus their sum would have no log."""
    student = torch.zeros(1, VOCAB, dtype=torch.float64)
    student[:, :2] = 30.0
    ids, said = torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.25, 0.5]], dtype=torch.float64).log()
    exact = top_k_kl(student, ids, said, 1.0, "bucket", group())
    assert float(exact) > 10
    found = top_k_kl(student.float(), ids, said.float(), 1.0, "bucket", group())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


def test_cross_entropy() -> None:
    labels = torch.arange(TOKENS)
    both(lambda s: cross_entropy(s, labels, group()), lambda s: F.cross_entropy(s, labels, reduction="none"), logits(3))


def encoded() -> EncodedSet:
    """Three conversations of 4, 3 and 5 tokens, of which 2, 1 and 3 are trained on."""
    trained = np.array([0, 0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1], dtype=bool)
    return EncodedSet(np.arange(12, dtype=np.int32), trained, np.array([0, 4, 7, 12]), {}, "set")


def test_the_hash_follows_everything_that_is_stored() -> None:
    """And nothing else: whole distributions serve every temperature, and weights are the loss's."""
    base = DistillConfig(teacher="t")
    keys = {key_of(encoded(), "teacher", base), key_of(encoded(), "other", base)}
    keys.add(key_of(replace(encoded(), fingerprint="others"), "teacher", base))
    for change in ({"top_k": 9}, {"temperature": 2.0}, {"store": "fp32"}, {"logits": "full"}):
        keys.add(key_of(encoded(), "teacher", replace(base, **change)))
    assert len(keys) == 7
    assert key_of(encoded(), "teacher", replace(base, weight=0.5, rest="drop")) in keys
    assert key_of(encoded(), "teacher", replace(base, logits="full", temperature=2.0, top_k=3)) in keys


def test_rows_have_each_tokens_own_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations in any row and order, with parts of two tokens; what is interrupted goes on with what is there."""
    monkeypatch.setattr("k3train.distill.store.PART_BYTES", 2 * (3 * 2 + 2 * 4))
    settings, calls = DistillConfig(teacher="t", top_k=2), []

    def says(model: Any, texts: Any, trained: Any, _: Any) -> Any:
        calls.append(len(texts))
        for text, own in zip(texts, trained):
            labels = text[1:][own]
            yield np.stack([labels, labels + 1], 1).astype(np.int32), np.stack([labels] * 3, 1) / 8.0

    monkeypatch.setattr("k3train.distill.store.what_it_says", says)
    first, parts = plan(encoded(), 14)
    assert (first.tolist(), parts.tolist()) == ([0, 2, 3, 6], [0, 1, 2, 3])

    def make() -> Any:
        return logit_store(encoded(), tmp_path, "k" * 20, settings, VOCAB, lambda: None, lambda text: None)

    make()
    assert calls == [1, 1, 1]
    (tmp_path / ("k" * 16) / "ids-00001.npy").unlink()
    (tmp_path / ("k" * 16) / "logits.json").unlink()
    assert _missing(tmp_path / ("k" * 16), 3, True) == [1]
    store = make()
    assert calls == [1, 1, 1, 1]
    rows = DistillRows(encoded(), 10, 2, "packed", 3, 4, 0)
    rows.take(store, VOCAB, (0, VOCAB))
    seen = 0
    for index in range(rows.rows_per_epoch):
        row = rows[index]
        kept = row["loss_mask"] > 0
        assert torch.equal(row["teacher_ids"][kept], torch.stack([row["labels"], row["labels"] + 1], 1)[kept])
        assert torch.equal(row["teacher_logprobs"][kept][:, 0], row["labels"][kept] / 8.0)
        assert not row["teacher_logprobs"][~kept].any()
        seen += int(kept.sum())
    assert seen == 6


def test_a_rank_reads_its_own_columns(tmp_path: Path) -> None:
    """Of a vocabulary of 5 over two ranks of 3: the last column of the second is no token."""
    said = np.log(np.arange(1.0, 31.0).reshape(6, 5))
    counts = [int(trained_labels(encoded(), i).sum()) for i in range(3)]
    folder = tmp_path / ("k" * 16)
    folder.mkdir()
    _write(folder, 0, [(None, part) for part in np.split(said, np.cumsum(counts)[:-1])], np.float32)
    (folder / "logits.json").write_text("{}")
    settings = DistillConfig(teacher="t", logits="full", store="fp32")
    store = logit_store(encoded(), tmp_path, "k" * 20, settings, 5, lambda: None, lambda text: None)
    shards = []
    for start in (0, 3):
        rows = DistillRows(encoded(), 12, 1, "packed", 3, 1, 0)
        rows.take(store, 5, (start, start + 3))
        row = rows[0]
        shards.append(row["teacher_logprobs"][row["loss_mask"] > 0])
    whole = torch.cat(shards, -1)
    assert torch.equal(whole[:, 5], torch.full((6,), -torch.inf))
    order = [int(label) for label in row["labels"][row["loss_mask"] > 0]]
    place = {int(label): n for n, label in enumerate(encoded().tokens[encoded().trained])}
    assert torch.equal(whole[:, :5], torch.tensor(said, dtype=torch.float32)[[place[label] for label in order]])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distill": {"teacher": None}}, "distill.teacher=null names no teacher"),
        ({"distill": {"logits": "some"}}, "distill.logits=some does not exist"),
        ({"distill": {"top_k": 0}}, "distill.top_k=0"),
        ({"distill": {"top_k": 50_000_000}}, "distill.top_k=50000000"),
        ({"distill": {"temperature": 0.0}}, "distill.temperature=0"),
        ({"distill": {"weight": 1.5}}, "distill.weight=1.5"),
        ({"parallel": {"pipeline": 2}}, "parallel.pipeline=2 is no layout"),
        ({"parallel": {"context": 2}}, "parallel.context=2 is no layout"),
        ({"engine": "deepspeed"}, "engine=deepspeed has no distillation"),
    ],
)
def test_wrong_recipes_get_one_sentence(changes: dict[str, Any], words: str) -> None:
    recipe = {"data": {"tokenizer": "t"}, **changes}
    recipe["distill"] = {"teacher": "t", **changes.get("distill", {})}
    with pytest.raises(UserError) as caught:
        check_distill(recipe_from_dict(recipe))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
