"""Wrong recipes of fine-tuning stop in one sentence that offers the cure; the cure is accepted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from k3train.config.load import load_recipe
from k3train.config.validate import validate
from k3train.data.chat.tokens import save_chat_tokenizer, with_chat_tokens
from k3train.data.tokenizer import train_tokenizer
from k3train.errors import UserError
from k3train.stages.inputs import check_inputs

TINY = "recipe=sft/k3-tiny"
WRONG = [
    (["sft.train=[]"], "sft.train=[] names no conversations", "sft.train=[data/tasks/train.jsonl]"),
    (["sft.valid=[]"], "train.eval_samples=8 asks for held-out ones", "train.eval_samples=0"),
    (["sft.train=['']"], "sft.train has an empty name", "sft.train=[data/tasks/train.jsonl]"),
    (["sft.batching=pack"], "sft.batching=pack does not exist", "sft.batching=packed"),
    (["sft.too_long=cut"], "sft.too_long=cut does not exist", "sft.too_long=drop"),
    (["sft.effort=medium"], "sft.effort=medium does not exist; allowed: low, high, max", "sft.effort=low"),
    (["sft.epochs=0"], "sft.epochs=0.0 is out of range; allowed: more than 0", "sft.epochs=1"),
    (["sft.template=chatml"], "sft.template=chatml is no file", "sft.template=k3"),
    (["model.moe.balancing=megatron"], "counts the filler", "model.moe.balancing=quantile"),
    (["sft.trian=[a]"], "sft.trian=[a]: there is no such key", None),
]


@pytest.mark.parametrize(("overrides", "wrong", "cure"), WRONG, ids=[w[0][0] for w in WRONG])
def test_a_wrong_recipe_is_told_with_its_cure(overrides: list[str], wrong: str, cure: str | None) -> None:
    with pytest.raises(UserError) as error:
        validate(load_recipe([TINY, *overrides]))
    assert wrong in str(error.value)
    if cure is not None:
        assert cure in str(error.value)
        validate(load_recipe([TINY, *overrides, cure]))


def test_missing_and_unfit_files_are_told_before_any_rank_starts(tmp_path: Path) -> None:
    plain = train_tokenizer(["some words " * 40], 266)
    plain.save(tmp_path / "plain")
    save_chat_tokenizer(with_chat_tokens(plain), tmp_path / "chat")
    data = tmp_path / "a.jsonl"
    data.write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    good = {
        "data.tokenizer": tmp_path / "chat",
        "sft.train": f"[{data}]",
        "sft.valid": f"[{data}]",
        "checkpoint.load": "null",
    }

    def check(**changes: str) -> None:
        values = good | {key.replace("__", "."): value for key, value in changes.items()}
        check_inputs(load_recipe([TINY, *(f"{key}={value}" for key, value in values.items())]))

    check()
    for changes, told in (
        ({"data__tokenizer": str(tmp_path / "plain")}, "has no special token <|open|>"),
        ({"sft__train": f"[{tmp_path}/none.jsonl]"}, "none.jsonl is no file, directory or pattern"),
        ({"sft__template": "tokenizer"}, "has no chat_template"),
        ({"checkpoint__load": str(tmp_path / "none")}, "none does not exist"),
    ):
        with pytest.raises(UserError) as error:
            check(**changes)
        assert told in str(error.value)
