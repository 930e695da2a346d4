"""k3train eval on tensor- and expert-parallel ranks says what it says on one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from saved_weights import make_tokenizer
from test_rollout_layouts import command, save


def test_evaluation_is_the_same_in_every_layout(pool: Any, tmp_path: Path) -> None:
    from k3train.data.chat.tokens import save_chat_tokenizer, with_chat_tokens
    from k3train.data.tokenizer import load_tokenizer

    save_chat_tokenizer(with_chat_tokens(load_tokenizer(make_tokenizer(tmp_path / "plain"))), tmp_path / "chat")
    tokenizer = tmp_path / "chat" / "tokenizer.json"
    pool.run(save, 1, tmp_path / "weights", tokenizer, {})
    pool.run(save, 2, tmp_path / "weights_pp2", tokenizer, {"pipeline": 2})
    rows = [{"id": str(n), "prompt": "ka mo ti " * (n + 1), "response": "se", "answer": "se"} for n in range(3)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["eval", "--tasks", str(tmp_path / "tasks.jsonl")]
    words += ["--max-new-tokens", "6", "--perplexity", f"own={tmp_path / 'tasks.jsonl'}"]
    found = {}
    for name, weights, ranks, layout in (
        ("one", "weights", 1, []),
        ("tp2", "weights", 2, ["parallel.tensor=2"]),
        ("ep2", "weights", 2, ["parallel.expert=2"]),
        ("saved by a pipeline", "weights_pp2", 1, []),
    ):
        out = tmp_path / f"{name}.json"
        given = [*words, "--checkpoint", str(tmp_path / weights), *layout, "--out", str(out)]
        results = pool.run(command, ranks, given)
        assert [code for code, _, _ in results] == [0] * ranks, results[0][2]
        assert results[0][1]
        assert not any(said for _, said, _ in results[1:])
        found[name] = json.loads(out.read_text())
    for name in ("tp2", "ep2", "saved by a pipeline"):
        assert found[name]["answers"] == found["one"]["answers"]
        assert found[name]["all"] == found["one"]["all"]
        assert found[name]["reference"].keys() == found["one"]["reference"].keys()
        pairs = [(found[name][kind], found["one"][kind]) for kind in ("perplexity", "reference")]
        for ours, theirs in pairs:
            for part, values in theirs.items():
                assert ours[part]["loss"] == pytest.approx(values["loss"], rel=1e-5)
