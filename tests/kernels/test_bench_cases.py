"""The benchmark on a GPU, without one: every operation has a case, the cases are right, and its arithmetic is."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from k3kernels.registry import OPERATIONS

BENCH = Path(__file__).resolve().parents[2] / "kernels" / "bench"
sys.path.insert(0, str(BENCH))

import bench_kernels as bench  # noqa: E402
import on_gpu  # noqa: E402
import rivals  # noqa: E402
from kernel_cases import TINY, Case, Sizes, cases  # noqa: E402
from rivals import Rival  # noqa: E402

CPU = torch.device("cpu")
CASES = cases(CPU, TINY)
# fla's and nemo-automodel's kernels are tuned on a GPU; in the interpreter their first configuration is taken. It lacks
# CUDA's library, whose tanh is replaced, and bf16 constants, so that one loss is compared in fp32.
INTERPRETED = """
import dataclasses
import importlib.util
import json
import sys
import types

import torch
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner

sys.path.insert(0, sys.argv[1])
Autotuner.run = lambda self, *given, **named: self.fn.run(*given, **{**named, **self.configs[0].all_kwargs()})
import bench_kernels as bench
from kernel_cases import TINY, cases


@triton.jit
def tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


def interpretable(case):
    if case.operation == "situ_glu":
        from nemo_automodel.components.models.kimi_k3 import situ_triton

        situ_triton._libdevice = types.SimpleNamespace(tanh=tanh)
    if case.operation != "cross_entropy":
        return case
    return dataclasses.replace(case, inputs=[x.detach().float().requires_grad_() for x in case.inputs])


for number, case in enumerate(cases(torch.device("cpu"), TINY)):
    if "triton" in case.forms:
        print(json.dumps([number, "triton", bench.difference(case, lambda *x: case.call("triton", *x))]))
    for rival in case.rivals:
        # fla's own check asks for CUDA tensors before its mix.
        if rival.module == "fla" and case.operation != "mix":
            print(json.dumps([number, rival.name, bench.difference(case, rival.call)]))
        # A forward in CUDA, and one in assembly, are for a GPU.
        if rival.module == "nemo_automodel" and importlib.util.find_spec(rival.module):
            if case.operation != "kda" and "approximate" not in rival.name:
                print(json.dumps([number, rival.name, bench.difference(interpretable(case), rival.call)]))
"""


def named(name: str) -> Case:
    return next(case for case in CASES if name in case.name)


def test_every_operation_has_a_case() -> None:
    assert {case.operation for case in CASES} == {operation.name for operation in OPERATIONS}
    for operation in OPERATIONS:
        timed = {form for case in CASES if case.operation == operation.name for form in case.forms}
        # A token loop takes minutes at K3's sizes; a reference is what "compiled" compiles.
        assert set(operation.backends) - {"naive"} <= timed, operation.name


def test_the_sizes_are_the_published_models() -> None:
    from k3train.config.load import load_recipe

    model, sizes = load_recipe(["recipe=pretrain/k3"]).model, Sizes(8192)
    of_model = model.hidden_size, model.moe.expert_hidden_size, model.kda.num_heads, model.kda.head_dim
    assert (sizes.hidden, sizes.expert, sizes.heads, sizes.head) == of_model
    assert (sizes.latent, sizes.experts, sizes.top_k) == (model.moe.latent_size, model.moe.num_experts, model.moe.top_k)
    assert sizes.vocab * 8 == model.vocab_size
    assert sizes.sublayers == 2 * model.attention_residual.block_size


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
def test_what_runs_here_computes_what_the_reference_does(number: int) -> None:
    case, done = CASES[number], 0
    for form in case.forms:
        if form not in ("triton", "fla", "compiled"):
            assert bench.checked(case, lambda *x, form=form: case.call(form, *x)) is None, form
            done += 1
    for rival in case.rivals:
        if rival.why_not(CPU) is None:
            assert bench.checked(case, rival.call) is None, rival.name
            done += 1
    assert done


def test_the_interpreted_kernels_and_rivals_compute_what_the_reference_does(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton has no build for this machine")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    program = tmp_path / "interpreted.py"  # triton.jit reads its function's source from a file
    program.write_text(INTERPRETED)
    command = [sys.executable, str(program), str(BENCH)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for number, name, apart in lines:
        assert apart <= CASES[number].tolerance, (CASES[number].name, name, apart)
    assert {number for number, name, _ in lines if name == "triton"} == {
        number for number, case in enumerate(CASES) if "triton" in case.forms
    }
    assert sum(name.startswith("fla ") for _, name, _ in lines) == 5
    others = 3 if importlib.util.find_spec("nemo_automodel") else 0  # SiTU, the mix and the loss
    assert sum(name.startswith("nemo-automodel ") for _, name, _ in lines) == others


def test_what_is_absent_wrong_or_breaks_is_said_and_not_timed() -> None:
    case = named("RMSNorm")

    def wrong(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return case.call("torch", x, weight) * 1.1

    def wrong_gradient(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return case.call("torch", x, weight.detach()) + 0 * weight

    def broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel\nand a trace")

    strangers = (
        Rival("absent", "no-such-package", "no_such_package", wrong),
        Rival("on a GPU", "torch", "torch", wrong),
        Rival("wrong", "torch", "torch", wrong, cuda=False),
        Rival("wrong gradient", "torch", "torch", wrong_gradient, cuda=False),
        Rival("broken", "torch", "torch", broken, cuda=False),
    )
    case = dataclasses.replace(case, forms=("triton", "torch"), rivals=strangers)
    found = bench.measure(case, bench.candidates(case, case, CPU), CPU, rounds=1)
    version = torch.__version__.split("+")[0]
    labels = ["triton", "torch", "absent"] + [f"{rival.name} {version}" for rival in strangers[1:]]
    assert list(found) == labels
    said = [found[label] for label in labels if label != "torch"]
    assert said[:3] == ["needs CUDA", "not installed", "needs CUDA"]
    assert said[3].startswith("differs from the reference by 0.1")
    assert said[4].startswith("differs from the reference by 1")
    assert said[5] == "fails: RuntimeError: no such kernel"
    assert found["torch"][0] > 0
    assert bench.row(case, "absent", found["absent"], bench.Roof(1, {"fp32": 1}))[2:4] == ["not installed", ""]


def test_every_operation_of_the_model_has_the_rivals_that_there_are() -> None:
    """By package: nemo-automodel's kernels for K3, Megatron-Core's and Transformer Engine's where a run takes them."""
    found: dict[str, set[str]] = {}
    for case in CASES:
        found.setdefault(case.operation, set()).update(rival.package for rival in case.rivals)
    for operation in ("situ_glu", "mix", "kda", "cross_entropy"):
        assert "nemo-automodel" in found[operation], operation
    assert "flash-kda" in found["kda"]
    assert {"megatron-core", "transformer-engine"} <= found["cross_entropy"]
    assert "transformer-engine" in found["rms_norm"]
    on_hopper = [rival for rival in named("MX round trip").rivals if rival.capability <= (9, 0)]
    assert [rival.package for rival in on_hopper] == ["torchao"]
    nobodys = {name for name, packages in found.items() if not packages}
    assert nobodys == {"scale_rows", "two_phase_mix", "quantile_balancing"}
    assert {"compiled", "naive"} <= set(named("Kimi Delta").forms)


def test_a_rival_without_a_backward_is_compared_and_timed_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashKDA's call as fla-core makes it, over a stand-in."""
    case, seen = named("Kimi Delta"), {}

    def forward(q, k, v, f, b, scale, out, **named) -> None:
        seen.update(named, scale=scale)
        out.copy_(case.call("chunk", q, k, v, f, b, named["A_log"], named["dt_bias"]))

    monkeypatch.setitem(sys.modules, "flash_kda", types.SimpleNamespace(fwd=forward, __spec__=object()))
    [flash] = [rival for rival in case.rivals if rival.package == "flash-kda"]
    flash = dataclasses.replace(flash, cuda=False)
    case = dataclasses.replace(case, rivals=(flash,), forms=())
    found = bench.measure(case, bench.candidates(case, case, CPU), CPU, rounds=1)[flash.label]
    assert found[0] == found[1] > 0
    outs = [torch.empty_like(case.inputs[2])]
    assert found[2] == dataclasses.replace(case, backward=False).bytes_moved(outs) < case.bytes_moved(outs)
    assert set(seen) == {"scale", "A_log", "dt_bias", "lower_bound", "initial_state", "final_state", "cu_seqlens"}
    assert (seen["lower_bound"], seen["scale"], seen["dt_bias"].shape) == (-5.0, 128**-0.5, (2, 128))
    table = bench.Table()
    table.add(case, flash.label, found, bench.Roof(1.0, {"bf16": 1.0}))
    assert table.rows[0][3] == "-"
    assert table.rows[0][6] == f"{case.flops[0] / found[1] / 1e12:.3g}"


def test_transformer_engines_norm_is_called_with_the_weight_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parents[1] / "tests" / "unit"))
    import te_stand_in

    package = types.ModuleType("transformer_engine")
    package.pytorch = types.SimpleNamespace(RMSNorm=te_stand_in.RMSNorm)
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package.pytorch)
    assert bench.checked(named("RMSNorm"), rivals.te_norm) is None


def test_transformer_engines_quantizer_gets_the_rows_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its own `is_quantizable` asks; the tiny case that is checked first has 38 rows."""
    from k3kernels import mx

    class Quantizer:
        def __init__(self, *_: object, **__: bool) -> None:
            pass

        def __call__(self, values: torch.Tensor) -> types.SimpleNamespace:
            assert not any(size % 32 for size in values.shape)
            return types.SimpleNamespace(dequantize=lambda dtype: mx.quantize_dequantize(values, "e4m3").to(dtype))

    package = types.ModuleType("transformer_engine")
    package.pytorch = types.SimpleNamespace(MXFP8Quantizer=Quantizer)
    extension = types.SimpleNamespace(DType=types.SimpleNamespace(kFloat8E4M3="e4m3"))
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package.pytorch)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", extension)
    case = named("MX round trip")
    assert len(case.inputs[0]) % 32
    assert bench.checked(case, rivals.te_round_trip) is None


def test_a_form_that_takes_too_long_is_compared_and_not_timed() -> None:
    case = named("Kimi Delta")
    said = bench.candidates(dataclasses.replace(case, forms=("naive",), rivals=()), case, CPU)
    assert said == {"naive": "compared only: a loop over the tokens"}


def test_a_compiled_form_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tiny case, with what torch.compile makes of it; one that is wrong is not timed, and is not our failure."""
    case = dataclasses.replace(named("RMSNorm"), forms=("compiled",), rivals=())
    makes = {"right": lambda f: f, "wrong": lambda f: lambda *x: f(*x) * 1.1, "broken": lambda f: lambda *x: 1 / 0}
    said = {}
    for what, make in makes.items():
        monkeypatch.setattr(torch, "compile", make)
        said[what] = bench.candidates(case, case, CPU)["compiled"]
    assert callable(said["right"])
    assert said["wrong"].startswith("differs from the reference by 0.1")
    assert said["broken"] == "fails: ZeroDivisionError: division by zero"
    table = bench.Table()
    table.add(case, "compiled", said["wrong"], bench.Roof(1, {"fp32": 1}))
    assert (table.rows[0][2], table.timed, table.wrong) == (said["wrong"], {}, [])


def test_the_roofline_is_the_longer_of_memory_and_products() -> None:
    case = named("RMSNorm")
    x, weight = (value.nbytes for value in case.inputs)
    # Forward reads x and the weight and writes x; backward reads those and writes both gradients.
    moved = (2 * x + weight) + (2 * x + weight) + (x + weight)
    assert case.bytes_moved([case.inputs[0]]) == moved
    work = 13 * case.inputs[0].numel()
    taken = (1e-3, 4e-3, moved)
    line = bench.row(case, "torch", taken, bench.Roof(moved / 1e-3, {"fp32": work / 2e-3, "bf16": 1.0}))
    assert line[2:4] == ["1.000", "4.000"]
    assert (line[5], line[7], line[8]) == ("25%", "50%", "50%")
    line = bench.row(case, "torch", taken, bench.Roof(moved / 3e-3, {"fp32": work / 2e-3, "bf16": 1.0}))
    assert (line[5], line[7], line[8]) == ("75%", "50%", "75%")
    forward_only = named("MX round trip")
    assert forward_only.bytes_moved(forward_only.inputs) == 2 * forward_only.inputs[0].nbytes
    assert bench.row(forward_only, "torch", (1e-3, 1e-3, 1), bench.Roof(1, {"fp32": 1}))[3] == "-"


def test_the_program_prints_a_line_for_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    """The measured roofline and table, of one operation."""
    sys_argv, sys.argv = sys.argv, ["bench", "--device=cpu", "--sizes=tiny", "--rounds=1", "--only=MX quantize, e4m3"]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "compile", lambda function: function)
            assert bench.main() == 0
    finally:
        sys.argv = sys_argv
    lines = capsys.readouterr().out.splitlines()
    assert "TFLOP/s" in lines[0]
    case = named("MX quantize, e4m3")
    assert len(lines) == 1 + len(case.forms) + len(case.rivals)


def test_a_whole_run_on_a_gpu_names_what_exists(capsys: pytest.CaptureFixture[str]) -> None:
    for part in on_gpu.parts(write=True):
        scripts = [Path(word) for word in part if word.endswith(".py")]
        assert scripts
        assert all(script.is_file() for script in scripts), part
    for name in on_gpu.ON_A_GPU:
        assert "def test_on_a_gpu" in (Path(__file__).parent / name).read_text()
