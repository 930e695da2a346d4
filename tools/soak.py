"""Break a run again and again and see that nothing of it shows: `python tools/soak.py --out DIR`.

A model (a small one of k3-tiny's kind, or k3-tiny itself with `--model k3-tiny`) is trained twice, once undisturbed
and once with a kill, a hang or a signal every few dozen steps, started anew after each. In the end the numbers of
every step and all tensors of the last checkpoint have to be the same bits, and the memory of the undisturbed run must
not have grown. Exit code 0 where that holds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from k3train.data.prepare import PrepareOptions, prepare_corpus

VOCAB = 304
CLOCKS = (
    "time",
    "tokens_per_second",
    "step_time",
    "tflops_per_second",
    "memory_bytes",
    "timings",
    "eval_time",
    "ranks",
)
KINDS = ("kill", "hang", "sigterm")
MODEL = [
    "model.num_layers=4",
    "model.hidden_size=32",
    f"model.vocab_size={VOCAB}",
    "model.ffn_hidden_size=48",
    "model.full_attention_layers=[3,4]",
    "model.kda.num_heads=2",
    "model.kda.head_dim=16",
    "model.mla.num_heads=2",
    "model.mla.q_lora_rank=24",
    "model.mla.kv_lora_rank=16",
    "model.mla.qk_nope_head_dim=16",
    "model.mla.qk_rope_head_dim=8",
    "model.mla.v_head_dim=16",
    "model.attention_residual.block_size=2",
    "model.moe.num_experts=8",
    "model.moe.top_k=2",
    "model.moe.latent_size=16",
    "model.moe.expert_hidden_size=24",
]


def make_corpus(folder: Path) -> Path:
    """A corpus of made-up words; returns its directory."""
    chance = random.Random(5)
    words = [f"{a}{b}" for a in ("ka", "mo", "ti", "ru", "se") for b in ("n", "l", "x", "ta")]
    lines = [" ".join(chance.choices(words, k=chance.randint(5, 60))) for _ in range(400)]
    source = folder / "text.jsonl"
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    prepare_corpus([str(source)], folder / "corpus", VOCAB, PrepareOptions(valid_fraction=0.2))
    return folder / "corpus"


def command(options: argparse.Namespace, corpus: Path, run_dir: Path, faults: list[dict[str, Any]]) -> list[str]:
    """One start of a run."""
    listed = ",".join("{" + ",".join(f"{k}: {v}" for k, v in fault.items()) + "}" for fault in faults)
    return [
        *shlex.split(options.wrap),
        *(sys.executable, "-m", "k3train", "recipe=pretrain/k3-tiny", "parallel=single"),
        *(MODEL if options.model == "small" else ()),
        f"parallel.expert={options.ranks}",
        f"parallel.world_size={options.ranks}",
        *(f"run.name={run_dir.name}", f"run.dir={run_dir}", "run.threads_per_rank=1", "telemetry=quiet"),
        f"train.steps={options.steps}",
        *("train.seq_length=32", "train.micro_batch_size=1", "train.global_batch_size=4"),
        *("train.eval_interval=100", "train.eval_samples=4"),
        *(f"data.tokenizer={corpus / 'tokenizer.json'}", f"data.train=[{{path: {corpus / 'train'}}}]"),
        f"data.valid=[{{path: {corpus / 'valid'}}}]",
        f"checkpoint.interval={options.interval}",
        f"guards.hang_minutes={options.hang_seconds / 60}",
        f"faults=[{listed}]",
        *options.overrides,
    ]


def choose_faults(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A fault every few dozen steps, on a rank drawn by lot; the kinds take turns in an order drawn by lot."""
    chance, faults, step = random.Random(options.seed), [], 0
    kinds: list[str] = []
    while True:
        step += chance.randint(*options.every)
        if step >= options.steps:
            return faults
        kinds = kinds or chance.sample(KINDS, len(KINDS))
        faults.append({"kind": kinds.pop(), "step": step, "rank": chance.randrange(options.ranks)})


def watch_memory(process: subprocess.Popen, samples: list[int], seconds: float = 1.0) -> None:
    """Resident bytes of all ranks together, as long as the launcher runs."""
    page = os.sysconf("SC_PAGE_SIZE")
    while process.poll() is None:
        total = 0
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if _descends(entry, process.pid):
                    total += int((entry / "statm").read_text().split()[1]) * page
            except (OSError, ValueError, IndexError):
                continue
        samples.append(total)
        time.sleep(seconds)


def _descends(entry: Path, ancestor: int) -> bool:
    pid = int(entry.name)
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def run_to_the_end(
    options: argparse.Namespace, corpus: Path, run_dir: Path, faults: list[dict[str, Any]]
) -> tuple[list[int], list[list[int]]]:
    """Start until it ends with 0; returns the exit codes, and the memory of each start."""
    codes: list[int] = []
    memory: list[list[int]] = []
    while len(codes) <= 2 * len(faults) + 1:  # a loaded machine may be slow enough to be taken for a hang
        with (run_dir.parent / f"{run_dir.name}.log").open("ab") as log:
            process = subprocess.Popen(command(options, corpus, run_dir, faults), stdout=log, stderr=log)
            samples: list[int] = []
            watch = threading.Thread(target=watch_memory, args=(process, samples))
            watch.start()
            codes.append(process.wait(options.timeout))
            watch.join()
        memory.append(samples)
        print(f"{run_dir.name}: start {len(codes)} ended with exit code {codes[-1]}", flush=True)
        if codes[-1] in (0, 2):
            break
    return codes, memory


def records(run_dir: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says of each step and evaluation, without what a clock says."""
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in e.items() if k not in CLOCKS} for e in entries if e["kind"] in ("train", "eval")]


def differing_tensors(one: Path, other: Path) -> tuple[int, list[str]]:
    """How many tensors two checkpoints hold, and the names of those that are not bit for bit the same."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    loaded: list[dict[str, Any]] = [{}, {}]
    for state, path in zip(loaded, (one, other)):
        _load_state_dict(state, FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    flat = [dict(_flatten(state)) for state in loaded]
    names = flat[0].keys() | flat[1].keys()
    missing = torch.empty(0)
    tensors = {n for n in names if isinstance(flat[0].get(n, flat[1].get(n)), torch.Tensor)}
    bits = [{n: f.get(n, missing).contiguous().view(-1).view(torch.uint8) for n in tensors} for f in flat]
    return len(tensors), sorted(n for n in tensors if not torch.equal(bits[0][n], bits[1][n]))


def _flatten(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if isinstance(tree, dict):
        return [item for key, value in tree.items() for item in _flatten(value, f"{prefix}{key}.")]
    return [(prefix, tree)]


def growth(samples: list[int]) -> float:
    """Memory of the last fifth of a run over that of the second fifth (medians), minus one."""
    fifth = max(1, len(samples) // 5)
    return settled(samples) / max(1, statistics.median(samples[fifth : 2 * fifth] or samples)) - 1


def settled(samples: list[int]) -> float:
    """Memory of a start's last fifth (median)."""
    return statistics.median(samples[-max(1, len(samples) // 5) :])


def compare_memory(clean: list[int], broken: list[list[int]], most: float, result: dict[str, Any]) -> list[str]:
    """What grew, of the undisturbed run in itself, and of the broken run's starts over it; adds numbers to `result`.

    A start that goes on from a checkpoint has loaded it, and may hold no more than the run that never did.
    """
    result["growth"] = growth(clean)
    result["megabytes"] = [round(s / 1e6) for s in clean[:: max(1, len(clean) // 10)]]
    result["broken_megabytes"] = [round(settled(samples) / 1e6) for samples in broken]
    result["broken_over_clean"] = max(map(settled, broken)) / settled(clean) - 1
    told = {"growth": "memory grew by", "broken_over_clean": "a start of the broken run holds more memory by"}
    return [f"{what} {result[key]:.1%}" for key, what in told.items() if result[key] > most]


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description="Break a run again and again and see that nothing of it shows.")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--model", choices=("small", "k3-tiny"), default="small", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, nargs=2, default=(20, 60), metavar=("LEAST", "MOST"), help="steps")
    parser.add_argument("--interval", type=int, default=10, help="steps between checkpoints (%(default)s)")
    parser.add_argument("--hang-seconds", type=float, default=30, help="after which a rank gives up (%(default)s)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds of one start (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-growth", type=float, default=0.05, help="of memory (%(default)s)")
    parser.add_argument("--wrap", default="", help="command that starts each run, such as `nice`")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="more keys of the recipe")
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    corpus, faults = make_corpus(options.out), choose_faults(options)
    print(f"{len(faults)} faults: " + ", ".join(f"{f['kind']} at {f['step']}" for f in faults), flush=True)
    clean_codes, clean_memory = run_to_the_end(options, corpus, options.out / "clean", [])
    codes, broken_memory = run_to_the_end(options, corpus, options.out / "broken", faults)
    result: dict[str, Any] = {"faults": faults, "codes": codes, "clean_codes": clean_codes}
    problems = []
    if codes[-1] or clean_codes != [0]:
        problems.append(f"a run did not reach its end: exit codes {clean_codes} and {codes}")
    elif len(codes) <= len(faults):
        problems.append(f"{len(faults)} faults, and only {len(codes)} starts")
    if not problems:
        ours, clean = records(options.out / "broken"), records(options.out / "clean")
        result["records"] = len(clean)
        if ours != clean:
            first = next((i for i, (a, b) in enumerate(zip(ours, clean)) if a != b), min(len(ours), len(clean)))
            problems.append(f"record {first} of metrics.jsonl differs")
        last = f"checkpoints/step_{options.steps:08d}"
        count, differ = differing_tensors(options.out / "broken" / last, options.out / "clean" / last)
        result["tensors"] = count
        if differ:
            problems.append(f"{len(differ)} of {count} tensors differ, such as {differ[0]}")
        problems += compare_memory(clean_memory[-1], broken_memory, options.most_growth, result)
    result["problems"] = problems
    (options.out / "soak.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(
        "\n".join(problems)
        or f"the same bits: {result['records']} records, {result['tensors']} tensors; memory {result['growth']:+.1%}, "
        f"of the broken run's starts at most {result['broken_over_clean']:+.1%} beside it"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
