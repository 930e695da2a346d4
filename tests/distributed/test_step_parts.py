"""`tools/bench_step.py` on ranks: what they send is a part; batches are the recipe's where the corpus is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import VOCAB, make_corpus

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=48", "model.full_attention_layers=[2]"),
    *("model.moe.latent_size=16", "model.moe.expert_hidden_size=24", "model.attention_residual.block_size=1"),
    *(f"model.vocab_size={VOCAB}", "train.seq_length=32", "train.micro_batch_size=1", "train.global_batch_size=4"),
]


def run(folder: Path, *arguments: str) -> tuple[str, dict]:
    """What the program prints and writes."""
    target = folder / "step.json"
    command = [sys.executable, str(ROOT / "tools" / "bench_step.py"), "--steps", "1", "--json", str(target)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run(
        [*command, *arguments, *SMALL], env=environment, cwd=folder, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(target.read_text())


def test_two_ranks_on_the_recipes_corpus(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    data = [f"data.tokenizer={corpus / 'tokenizer.json'}", f"data.train=[{{path: {corpus / 'train'}, weight: 1.0}}]"]
    printed, found = run(tmp_path, "--ranks", "2", "parallel.expert=2", *data)
    shares = found["shares"]
    assert sum(shares.values()) == pytest.approx(1.0)
    wanted = {"KDA", "MLA", "attention residuals", "experts", "head and loss", "data", "communication"}
    assert wanted | {"optimizer and router bias", "embedding"} <= set(shares)
    assert all(shares[name] > 0 for name in wanted)
    assert (found["ranks"], found["random_tokens"], found["tokens"]) == (2, None, 4 * 32)
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["seconds"])
    assert "ranks: 2, parallel.expert=2; batches of its corpus" in printed
    assert f"| head and loss | {shares['head and loss']:.1%} |" in printed
    assert not (tmp_path / "runs").exists()  # the index of the corpus is kept elsewhere


def test_where_the_corpus_is_missing_tokens_are_random_and_it_is_said(tmp_path: Path) -> None:
    printed, found = run(tmp_path)
    assert found["random_tokens"] == "data/demo/tokenizer.json is not there"
    assert "ranks: 1; random tokens: data/demo/tokenizer.json is not there" in printed
    assert found["shares"]["head and loss"] > 0
