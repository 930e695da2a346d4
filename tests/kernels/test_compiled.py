"""The Triton kernels compiled for Hopper and Blackwell, in every form that the shipped models launch: no spills."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no build for this machine")

import triton
from k3kernels.attention_residual import merge_kernel, phase_one_kernel
from k3kernels.attention_residual import triton_kernel as mix_kernel
from k3kernels.compiled import (
    CAPABILITIES,
    MODULES,
    Form,
    Report,
    compile_form,
    launched,
    meta,
    noted,
)
from k3kernels.rms_norm import triton_kernel as norm_kernel
from k3kernels.rows import MOST_COLUMNS
from k3kernels.sizes import MODELS, Sizes

from k3train.config.load import load_recipe

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
sys.path.insert(0, str(KERNELS / "bench"))

import compile_table  # noqa: E402

FLAGS = {
    "glu_forward_kernel": {"SITU", "WEIGHTED"},
    "glu_backward_kernel": {"SITU", "WEIGHTED"},
    "norm_forward_kernel": {"GATED"},
    "norm_backward_kernel": {"GATED"},
    "conv_forward_kernel": {"SILU", "PACKED", "STATE"},
    "conv_backward_kernel": {"SILU", "PACKED", "STATE"},
    "quantize_dequantize_kernel": {"STOCHASTIC"},
    "quantize_kernel": {"STOCHASTIC"},
    "select_and_count_kernel": {"COUNT", "LOG", "PADDED"},
}


@functools.cache
def forms(module: str) -> list[Form]:
    return importlib.import_module(module).forms()


@functools.cache
def reports(module: str) -> dict[str, list[Report]]:
    return dict(compile_table.compiled(forms(module)))


@pytest.mark.parametrize("module", MODULES)
def test_kernels_compile_without_spilling(module: str) -> None:
    wrong = []
    for form in forms(module):
        for capability, report in zip(CAPABILITIES, reports(module)[form.name]):
            over = report.registers > form.most_registers or report.shared > form.most_shared
            if report.spilled or over:
                wrong.append(f"{form.name} on sm_{capability}: {report}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", MODULES)
def test_the_table_is_what_the_compiler_says(module: str) -> None:
    """kernels/compiled.md, line by line; where Triton is another than the one that wrote it, nothing is compared."""
    written = compile_table.read_table(triton.__version__)
    if written is None:
        pytest.skip(f"kernels/compiled.md is of another Triton than {triton.__version__}")
    for form in forms(module):
        assert written.get(form.name) == compile_table.row(form, reports(module)[form.name]), "write the table anew"


def test_the_tables_list_every_form_and_nothing_else() -> None:
    lines = compile_table.COMPILED.read_text().splitlines()
    version = next(line for line in lines if line.startswith("Triton "))[len("Triton ") : -1]
    written = compile_table.read_table(version)
    assert list(written) == [form.name for module in MODULES for form in forms(module)]
    assert not any(spilled for line in written.values() for spilled in line[3::3])
    readme = (KERNELS / "README.md").read_text()
    assert compile_table.summary(list(written.values()), version) in readme


def test_a_spilling_kernel_is_seen() -> None:
    """A row of 7168 on a quarter of its threads: the report is not always zero."""
    form = next(f for f in forms("k3kernels.rms_norm.triton_kernel") if f.name.startswith("norm_backward, plain"))
    crowded = dataclasses.replace(form, num_warps=form.num_warps // 4)
    assert compile_form(crowded, 90).spilled > 0


def test_every_kernel_has_its_forms_with_both_values_of_its_flags() -> None:
    from triton.runtime.jit import JITFunction

    flags: dict[str, dict[str, set[bool]]] = defaultdict(lambda: defaultdict(set))
    for module in MODULES:
        for form in forms(module):
            for name, value in form.constants.items():
                if isinstance(value, bool):
                    flags[form.kernel.fn.__name__][name].add(value)
        kernels = {name for name, found in vars(importlib.import_module(module)).items() if type(found) is JITFunction}
        missing = {name for name in kernels if name.endswith("_kernel")} - {f.kernel.fn.__name__ for f in forms(module)}
        assert not missing, f"{module} names no form of {missing}"
    assert {kernel: set(found) for kernel, found in flags.items()} == FLAGS
    assert all(values == {True, False} for found in flags.values() for values in found.values()), flags
    files = {f"k3kernels.{path.parent.name}.{path.stem}" for path in (KERNELS / "k3kernels").glob("*/*_kernel.py")}
    assert files == set(MODULES)


@pytest.mark.parametrize("sizes", MODELS, ids=lambda sizes: sizes.name)
def test_the_sizes_are_those_of_the_recipes(sizes: Sizes) -> None:
    model = load_recipe([f"recipe=pretrain/{sizes.name}"]).model
    ranks = tuple(rank for rank in (model.mla.q_lora_rank, model.mla.kv_lora_rank) if rank is not None)
    moe, kda = model.moe, model.kda
    found = Sizes(
        name=model.name,
        hidden=model.hidden_size,
        dense=model.ffn_hidden_size,
        heads=kda.num_heads,
        head=kda.head_dim,
        ranks=ranks,
        latent=moe.latent_size or model.hidden_size,
        expert=moe.expert_hidden_size,
        shared=moe.num_shared_experts,
        experts=moe.num_experts,
        top_k=moe.top_k,
        vocab=model.vocab_size,
        layers=model.num_layers,
        block=model.attention_residual.block_size,
        bins=moe.quantile_bins,
        taps=kda.conv_size,
    )
    assert found == sizes


def test_every_pretraining_recipe_has_its_sizes() -> None:
    recipes = {path.stem for path in (KERNELS.parent / "recipes" / "recipe" / "pretrain").glob("*.yaml")}
    assert recipes == {sizes.name for sizes in MODELS}


def test_integers_are_specialized_as_the_launcher_does() -> None:
    """K3's 896 experts are a multiple of 16 and its 1000 bins are not; a weighted row has one program, a constant."""
    name = "select_and_count, 16 of 896 experts, log bins, padding"
    form = next(f for f in forms("k3kernels.quantile_balancing.triton_kernel") if f.name == name)
    assert (form.types["num_experts"], form.types["num_bins"], form.types["k"]) == ("i32:16", "i32", "i32:16")
    assert form.types["padding"] == "*u8:16"
    glu = {f.name: f for f in forms("k3kernels.situ.triton_kernel")}
    assert glu["glu_forward, 3072 wide and weighted, SiTU, bf16"].constants["splits"] == 1
    assert glu["glu_forward, 3072 wide, SiTU, bf16"].types["splits"] == "i32"
    mix = {f.name: f for f in forms("k3kernels.attention_residual.triton_kernel")}
    form = mix["mix_backward, 3 sources of 7168, bf16"]
    assert form.types["sources"] == ("*bf16:16",) * 3
    assert (form.types["count"], form.constants["COUNT"], form.constants["SLOTS"]) == ("i32", 3, 4)


def test_two_forms_of_one_name_are_refused() -> None:
    calls = [("a row", partial(norm_kernel.norm_forward, meta(3, n), None, meta(n), 1e-5)) for n in (128, 4096)]
    limits = {norm_kernel.norm_forward_kernel: (255, 65536)}
    with pytest.raises(ValueError, match="Two forms are called 'norm_forward, a row'"):
        launched(calls, limits)


def test_longer_rows_are_refused_but_by_the_first_phase() -> None:
    """`triton_cases.limits` runs them; here nothing but the launches, as on a GPU."""

    def calls(n: int) -> dict[str, partial]:
        row, vector, number = meta(3, n), meta(n), meta(3)
        return {
            "rms_norm": partial(norm_kernel.norm_forward, row, None, vector, 1e-5),
            "mix": partial(mix_kernel.mix_forward, [row, row], vector, vector, 1e-5),
            "merge": partial(merge_kernel.merge_forward, row, number, number, row, vector, vector, 1e-5),
        }

    for name, call in calls(MOST_COLUMNS).items():
        with noted() as launches:
            call()
        assert len(launches) == 1, name
    for name, call in calls(MOST_COLUMNS + 1).items():
        with noted() as launches, pytest.raises(ValueError, match=f"{name} got rows of {MOST_COLUMNS + 1} values"):
            call()
        assert not launches
    with noted() as launches:
        phase_one_kernel.phase_one_forward([meta(3, 4 * MOST_COLUMNS)] * 2, meta(5, 4 * MOST_COLUMNS), 1e-5)
    assert len(launches) == 2
    blocks = [arguments["BLOCK"] for _, arguments, _ in launches if "BLOCK" in arguments]
    assert blocks == [2048]  # a piece of either source, and of two rows beside them
    widest = max(width for sizes in MODELS for width in (*sizes.normed, sizes.hidden))
    assert triton.next_power_of_2(widest) == MOST_COLUMNS  # the longest row that is compiled


def test_the_only_atomic_is_the_integer_one_of_the_counts() -> None:
    """What kernels add up in any order would differ from run to run, but for integers."""
    found = [
        (path.relative_to(KERNELS / "k3kernels").as_posix(), line.strip())
        for path in (KERNELS / "k3kernels").rglob("*.py")
        for line in path.read_text().splitlines()
        if "atomic_" in line
    ]
    assert [place for place, _ in found] == ["quantile_balancing/triton_kernel.py"]
    assert found[0][1].startswith("tl.atomic_add(counts + ")
    counts = {form.types.get("counts") for form in forms("k3kernels.quantile_balancing.triton_kernel")}
    assert counts <= {"*i32:16", "*i64:16"}
