"""`k3train kernels` says what the model does: asked of the same functions, held against the layers and the loss."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from k3kernels import registry
from k3kernels.quantile_balancing import resolve_backend as resolve_routing
from k3kernels.registry import OPERATIONS

from k3train.config.model import ModelConfig, MoEConfig
from k3train.model.operations import USED_BY, services
from k3train.model.router import QuantileBalancingRouter

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "kernels" / "bench"))

import bench_kernels as bench  # noqa: E402
import readme  # noqa: E402
from kernel_cases import TINY, cases  # noqa: E402

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WITH_TE = """
import json
import sys

sys.path.insert(0, sys.argv[1])
import te_stand_in

te_stand_in.install()
import torch

from k3train.model.operations import services
from k3train.model.spec import k3_submodules

found = {}
for impl, precision in (("auto", "bf16"), ("te", "bf16"), ("local", "bf16"), ("auto", "fp32")):
    [norm] = [s for s in services(torch.device("cuda"), "auto", impl, precision) if s.operation == "rms_norm"]
    found[f"{impl} {precision}"] = [norm.used, norm.why, norm.chosen_by, norm.run_on_a_gpu]
print(json.dumps([found, k3_submodules("te").norm.__name__]))
"""


def used(device: torch.device, kernels: str = "auto") -> dict[str, str]:
    return {service.operation: service.used for service in services(device, kernels)}


def test_every_operation_says_who_uses_it() -> None:
    assert set(USED_BY) == {operation.name for operation in OPERATIONS}
    found = {service.operation: service for service in services(CUDA)}
    assert [name for name, service in found.items() if service.used == "none"] == ["two_phase_mix"]
    assert found["two_phase_mix"].used_by == "no model path"
    assert found["kda"].used_by == "training, prefill (decoding in torch)"


def test_the_norm_is_the_one_of_the_layers() -> None:
    command = [sys.executable, "-c", WITH_TE, str(ROOT / "tests" / "unit")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found, name = json.loads(done.stdout.splitlines()[-1])
    assert found["auto bf16"] == ["te", f"{name}, parallel.transformer_impl=te", "parallel.transformer_impl", False]
    assert found["te bf16"] == found["auto bf16"]
    assert found["local bf16"][0] == found["auto fp32"][0] == "triton"


@pytest.mark.parametrize("kernels", ["auto", "torch", "reference"])
def test_the_loss_is_the_one_that_the_model_computes(
    single_rank: None, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    from k3train.config.schema import RecipeConfig
    from k3train.model.build import build_chunks
    from k3train.model.model import K3Model

    moe = MoEConfig(num_experts=4, top_k=2, latent_size=16, expert_hidden_size=24)
    model = ModelConfig(
        num_layers=1, hidden_size=32, vocab_size=50, full_attention_layers=[1], kernels=kernels, moe=moe
    )
    (built,), _ = build_chunks(RecipeConfig(model=model), "meta")
    monkeypatch.setattr(K3Model, "compute_language_model_loss", lambda *_: "megatron")
    monkeypatch.setattr("k3train.model.model.shard_losses", lambda *given: given[-1])
    for device in ("cpu", "meta"):
        assert built._loss(None, torch.zeros(2, 1, 50, device=device)) == used(CPU, kernels)["cross_entropy"]
    asked = []
    monkeypatch.setattr("k3train.parallel.vocab_loss.resolve_backend", lambda *given: asked.append(given) or "triton")
    assert built._loss(None, torch.zeros(2, 1, 50)) == "triton"
    assert asked == [("cross_entropy", kernels, CPU, torch.float32)]


def test_the_loss_on_cuda() -> None:
    assert [used(CUDA, kernels)["cross_entropy"] for kernels in ("auto", "triton", "torch", "reference")] == [
        "triton",
        "triton",
        "megatron",
        "megatron",
    ]


@pytest.mark.parametrize(("kernels", "cuda"), [("auto", "triton"), ("torch", "torch"), ("reference", "torch")])
def test_the_router_follows_the_kernels(single_rank: None, kernels: str, cuda: str) -> None:
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from k3train.config.schema import ParallelConfig
    from k3train.model.transformer_config import build_transformer_config

    config = build_transformer_config(ModelConfig(kernels=kernels), ParallelConfig())
    router = QuantileBalancingRouter(config, get_default_pg_collection())
    assert resolve_routing(router.backend, CUDA) == cuda
    assert used(CUDA, kernels)["quantile_balancing"] == cuda
    assert used(CPU, kernels)["quantile_balancing"] == "torch"


def test_what_follows_another_key_says_so() -> None:
    found = {service.operation: service for service in services(CUDA, "torch")}
    assert {name: s.chosen_by for name, s in found.items() if s.chosen_by != "model.kernels"} == {
        "kda": "model.kda.backend",
        "mx": "quant.backend",
        "newton_schulz": "the only form",
    }
    assert (found["mx"].used, found["kda"].used) == ("triton", "fla")  # whatever model.kernels says
    assert found["mx"].why.startswith("a CUDA device")


def test_what_ran_on_a_gpu_is_what_the_table_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written with the table, read by the registry."""
    page, data = tmp_path / "README.md", tmp_path / "measured.json"
    page.write_text("before\n<!-- measured -->\n<!-- end of measured -->\nafter\n")
    monkeypatch.setattr(readme, "README", page)
    monkeypatch.setattr(registry, "MEASURED", data)
    roof, table = bench.Roof(1e9, {"fp32": 1e12, "bf16": 1e12}), bench.Table()
    case = next(case for case in cases(CPU, TINY) if case.operation == "mix")
    for form, taken in (
        ("triton", (1e-3, 2e-3, 10)),
        ("torch", "fails: OSError: no"),
        ("a rival 1.0", (1e-3, 2e-3, 9)),
    ):
        table.add(case, form, taken, roof)
    readme.write_measured("a GPU", "A title", bench.HEAD, table.rows, table.timed)
    assert "A title" in page.read_text()
    assert shown(page) == stored(data) == {(case.name, "triton"), (case.name, "a rival 1.0")}
    ran = {service.operation for service in services(CUDA) if service.run_on_a_gpu}
    assert ran == {"mix"}
    assert not any(service.run_on_a_gpu for service in services(CUDA, "torch"))  # that form failed
    assert table.wrong == [f"{case.name}, torch: fails: OSError: no"]


def test_the_repositorys_table_and_its_data_agree() -> None:
    assert shown(ROOT / "kernels" / "README.md") == stored(registry.MEASURED)


def shown(page: Path) -> set[tuple[str, str]]:
    """Case and form of every line of the table that has a time."""
    block = page.read_text().partition("<!-- measured -->")[2].partition("<!-- end of measured -->")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line[:1] == "|"]
    return {(cells[0], cells[1]) for cells in lines[2:] if cells[-1]}


def stored(data: Path) -> set[tuple[str, str]]:
    found = json.loads(data.read_text())["operations"].values()
    return {(case, form) for named in found for case, forms in named.items() for form in forms}
