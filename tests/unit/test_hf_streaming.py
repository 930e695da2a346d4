"""Memory that does not grow with the checkpoint, and what a killed import leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import hf_folder
import pytest
from hf_folder import digests, k3_config, k3_tensors, write_folder

from k3train import cli

HIDDEN, WIDTH, EXPERTS, VOCAB = 512, 512, 64, 100_000
MEBIBYTE = 2**20

# Imports and exports a small folder and then a large one, and says how much more memory the large one took at its peak.
MEASURE = """
import json, sys
from k3train import cli

def peak():
    # Not getrusage: a child's value begins with the peak of the process that started it.
    status = open("/proc/self/status").read()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024

small, large, out = sys.argv[1:]
grown = {}
for name, hf in (("small", small), ("large", large)):
    for verb, arguments in (
        ("import", ["--hf", hf, "--out", f"{out}/{name}"]),
        ("export", ["--checkpoint", f"{out}/{name}", "--hf", f"{out}/{name}-back"]),
    ):
        before = peak()
        assert cli.main([verb, *arguments]) == 0
        grown[f"{verb} {name}"] = peak() - before
grown["whole process"] = peak()
print("GROWN " + json.dumps(grown))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 236 MB in a single file: 200 MB of embedding and head, and packed experts that decode to 100 MB."""
    config = k3_config()
    text = config["text_config"]
    text |= {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_experts": EXPERTS}
    text |= {"moe_intermediate_size": WIDTH, "routed_expert_hidden_size": HIDDEN, "num_experts_per_token": 8}
    text["linear_attn_config"] |= {"full_attn_layers": [2], "kda_layers": [1]}
    sizes = {"HIDDEN": HIDDEN, "LATENT": HIDDEN, "WIDTH": WIDTH, "EXPERTS": EXPERTS, "VOCAB": VOCAB}
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (sizes | {"LAYERS": 2, "FULL": (2,)}).items():
            patch.setattr(hf_folder, name, size)
        tensors = k3_tensors(tame=True)
    return write_folder(tmp_path_factory.mktemp("large") / "hf", tensors, config, shards=1)


def test_peak_memory_stays_far_below_the_checkpoint(large: Path, tmp_path: Path) -> None:
    small = write_folder(tmp_path / "hf", k3_tensors())
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE, str(small), str(large), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    grown = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("GROWN")).removeprefix("GROWN")
    )
    print(grown)
    size = (large / "model.safetensors").stat().st_size
    assert size > 220 * MEBIBYTE
    # The peak moves by some ten MiB with what the allocator kept from before.
    assert grown["import large"] < 0.8 * size
    assert grown["export large"] < 0.8 * size
    assert grown["whole process"] < 2048 * MEBIBYTE
    assert digests(tmp_path / "large-back") == digests(large)


@pytest.mark.usefixtures("_cpu_rank")
def test_a_killed_import_leaves_no_checkpoint_and_the_next_one_succeeds(
    large: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, partial = tmp_path / "ckpt", tmp_path / "ckpt.partial"
    command = [sys.executable, "-W", "ignore", "-m", "k3train", "import", "--hf", str(large), "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while process.poll() is None and not _written(partial) > 20 * MEBIBYTE:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    assert not (partial / "checkpoint.json").exists()
    assert cli.main(["inspect", str(partial)]) == 2
    assert cli.main(command[-5:]) == 0
    assert not partial.exists()
    capsys.readouterr()
    assert cli.main(["inspect", str(out)]) == 0
    assert "health      whole" in capsys.readouterr().out


def _written(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.distcp")) if folder.is_dir() else 0


# Reads all headers, places every tensor, plans the import for 16 ranks, and reads the largest piece.
PLAN = """
import sys
from pathlib import Path

from k3train import platform

platform.start("cpu", 1)

from k3train.hf.config import read_config
from k3train.hf.importer import make_plan, read_piece
from k3train.hf.inventory import take_inventory
from k3train.hf.mapping import published_parts, weights_of
from k3train.hf.safetensors_files import Reader
from k3train.hf.together import share_of

hf = Path(sys.argv[1])
source = read_config(hf / "config.json")
weights, _ = weights_of(source.model)
parts = published_parts(weights, source.prefix)
plan = make_plan(weights, parts, take_inventory(hf, source, parts))
mine = share_of(plan.pieces, [piece.nbytes for piece in plan.pieces], 0, 16)
read_piece(max(plan.pieces, key=lambda piece: piece.nbytes), plan, Reader())
peak = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) * 1024
print("PLANNED", sum(p.nbytes for p in plan.pieces), sum(p.nbytes for p in mine), peak)
"""


def test_tables_of_the_released_checkpoint_fit(single_rank: None, tmp_path: Path) -> None:
    """Names, dtypes and shapes of the released text model in 96 files without content: 1.4 TB that take no space."""
    import math
    import struct

    from k3train.config.load import load_recipe
    from k3train.hf.files_plan import entries_of, nbytes
    from k3train.hf.mapping import published_parts, weights_of
    from k3train.hf.safetensors_files import header_bytes
    from k3train.hf.write_config import new_config

    model = load_recipe(["recipe=pretrain/k3"]).model
    tensors = entries_of(published_parts(weights_of(model)[0], "language_model."), None, {}, packed=True)
    assert len(tensors) == 497_220 - 168  # without the vision tower and the projector
    weight_map, each = {}, math.ceil(len(tensors) / 96)
    for number in range(96):
        mine, name = tensors[number * each : (number + 1) * each], f"model-{number + 1:05d}-of-00096.safetensors"
        header = header_bytes(mine)
        with (tmp_path / name).open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + sum(map(nbytes, mine)))
        weight_map.update({tensor[0]: name for tensor in mine})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(new_config(model, True, "bfloat16")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAN, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    total, share, peak = map(int, done.stdout.split("PLANNED")[1].split())
    assert total > 5.5e12
    assert abs(16 * share / total - 1) < 0.01
    assert peak < 2048 * MEBIBYTE, peak
