"""Which quant sections are refused, in which words, and what a policy says of itself."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from k3kernels import mx

from k3train.config import implementation
from k3train.config.load import load_recipe
from k3train.config.quant import QuantConfig, policy_in_force, said_change
from k3train.config.rules_quant import check_quant, resolve_quant_backend
from k3train.config.validate import validate, validate_machine
from k3train.errors import UserError
from k3train.hf.quant_policy import KEY, policy_of, with_policy
from k3train.quant.fake import FakeQuant

ON = ["quant.enabled=true", "quant.skip_stages=[]"]
WRONG = [
    (["quant.weights=fp4"], "quant.weights=fp4 does not exist; allowed: mxfp4, mxfp8, none", "quant.weights=mxfp4"),
    (["quant.inputs=fp8"], "quant.inputs=fp8 does not exist", "quant.inputs=mxfp8"),
    (["quant.weight_scale=ceil"], "allowed: round_up, floor, nearest", "quant.weight_scale=round_up"),
    (["quant.input_scale=OCP"], "quant.input_scale=OCP does not exist", "quant.input_scale=round_up"),
    (["quant.backend=cuda"], "allowed: auto, torch, triton, te", "quant.backend=auto"),
    (["quant.modules=[experts.w1]"], "names experts.w1, which does not", "'quant.modules=[experts.w13,experts.w2]'"),
    (["quant.modules=[experts.w2,experts.w2]"], "names something twice", "'quant.modules=[experts.w2]'"),
    (["quant.skip_stages=[sftt]"], "quant.skip_stages", "quant.skip_stages=["),
    ([*ON, "quant.modules=[]"], "nothing to quantize", "'quant.modules=[experts.w13,experts.w2]'"),
    ([*ON, "quant.weights=none", "quant.inputs=none"], "nothing to quantize", "quant.inputs=mxfp8"),
    ([*ON, "quant.backend=te", "quant.input_scale=floor"], "quant.input_scale=floor is not", "input_scale=round_up"),
    ([*ON, "quant.backend=te", "quant.inputs=none"], "quant.inputs=none is not", "quant.inputs=mxfp8"),
    ([*ON, "model.moe.latent_size=48"], "latent_size=48 does not divide into blocks of 32", "latent_size=64"),
    ([*ON, "model.moe.expert_hidden_size=80"], "expert_hidden_size=80 does not", "model.moe.expert_hidden_size=64"),
    (
        [*ON, "parallel.tensor=2", "parallel.expert_tensor=2", "parallel.expert=1"],
        "parallel.expert_tensor=2 cuts the blocks of 32 along model.moe.expert_hidden_size=96",
        "parallel.expert_tensor=1",
    ),
]


@pytest.mark.parametrize(("overrides", "words", "cure"), WRONG)
def test_a_wrong_section_is_refused_in_one_sentence(overrides: list[str], words: str, cure: str) -> None:
    config = load_recipe(["recipe=pretrain/k3-tiny", *overrides])
    with pytest.raises(UserError) as error:
        check_quant(config, ("pretrain", "sft"))
    assert words in str(error.value)
    assert cure in str(error.value)
    assert "\n" not in str(error.value)


def test_k3s_policy_fits_the_shipped_models_and_layouts() -> None:
    for recipe in ("k3-tiny", "k3-mini", "k3-48b", "k3"):
        validate(load_recipe([f"recipe=pretrain/{recipe}", *ON]))
    wide = ["model.moe.expert_hidden_size=128", "parallel.tensor=2", "parallel.expert_tensor=2", "parallel.expert=1"]
    check_quant(load_recipe(["recipe=pretrain/k3-tiny", *ON, *wide]), ("pretrain",))


def test_off_by_default_and_skipped_in_pretraining() -> None:
    assert load_recipe(["recipe=pretrain/k3-tiny"]).quant == QuantConfig()
    assert policy_in_force(QuantConfig(), "sft") is None
    assert policy_in_force(QuantConfig(enabled=True), "pretrain") is None
    assert policy_in_force(QuantConfig(enabled=True), "sft") is not None
    quant = QuantConfig(enabled=True)
    assert (quant.weights, quant.inputs, quant.weight_scale) == ("mxfp4", "mxfp8", "round_up")
    assert quant.describe() == "mxfp4 weights (round_up) and mxfp8 inputs (round_up)"


def test_k3_is_fine_tuned_in_the_format_that_it_ships_in() -> None:
    config = load_recipe(["recipe=sft/k3"])
    quant = policy_in_force(config.quant, config.stage.name)
    assert quant is not None
    assert quant.is_published_format
    assert quant.policy() == QuantConfig().policy()


def test_a_change_of_policy_is_said_and_a_change_of_backend_is_not() -> None:
    on = QuantConfig(enabled=True)
    assert said_change(None, None, "a", "b") is None
    assert said_change(on, QuantConfig(enabled=True, backend="torch", skip_stages=[]), "a", "b") is None
    text = said_change(on, None, "ckpt", "this run trains it")
    assert text == (
        "ckpt was trained with mxfp4 weights (round_up) and mxfp8 inputs (round_up), and this run trains it without"
        " quantization: the same weights give other numbers"
    )
    assert "without quantization, and it runs with mxfp4" in said_change(None, on, "ckpt", "it runs")
    assert "(floor)" in said_change(on, QuantConfig(enabled=True, weight_scale="floor"), "a", "b")


class TestBackends:
    def test_what_is_not_there_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(UserError, match=r"quant.backend=te needs a CUDA device .* this run is on the CPU"):
            resolve_quant_backend("te", "cpu")
        with pytest.raises(UserError, match=r"quant.backend=triton needs a CUDA device .* this run is on the CPU"):
            resolve_quant_backend("triton", "cpu")
        monkeypatch.setattr(implementation.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UserError, match="transformer-engine is not installed"):
            resolve_quant_backend("te", "cuda")
        with pytest.raises(UserError, match="triton is not installed"):
            resolve_quant_backend("triton", "cuda")
        assert resolve_quant_backend("auto", "cuda") == "torch"
        monkeypatch.setattr(implementation.importlib.util, "find_spec", lambda name: object())
        assert resolve_quant_backend("auto", "cuda") == "triton"
        assert resolve_quant_backend("auto", "cpu") == "torch"
        assert resolve_quant_backend("te", "cuda") == "te"

    def test_transformer_engine_on_a_gpu_without_mxfp8(self, monkeypatch: pytest.MonkeyPatch) -> None:
        quant, capability = QuantConfig(enabled=True, backend="te"), (9, 0)
        monkeypatch.setattr(implementation.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        with pytest.raises(UserError, match=r"needs a GPU of compute capability 10\.0 .* has 9\.0; .*backend=auto"):
            FakeQuant(quant, "cuda")
        capability = (10, 0)
        assert FakeQuant(quant, "cuda").backend == "te"

    def test_before_any_rank_starts(self) -> None:
        recipe = ["recipe=pretrain/k3-tiny", "quant.enabled=true", "quant.backend=te"]
        validate_machine(load_recipe(recipe), gpus=0)  # not in force in pretraining
        with pytest.raises(UserError, match=r"quant\.backend=te needs a CUDA device"):
            validate_machine(load_recipe([*recipe, "quant.skip_stages=[]"]), gpus=0)

    def test_transformer_engine_gets_whole_multiples_of_32_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Over a stand-in for its kernel, which refuses what the real one refuses and rounds scales up as it does."""
        from k3train.quant.te_mxfp8 import te_round

        seen = []

        class Quantizer:
            def __init__(self, fp8_dtype: str, *, rowwise: bool, columnwise: bool) -> None:
                assert (fp8_dtype, rowwise, columnwise) == ("E4M3", True, False)

            def __call__(self, tensor: torch.Tensor) -> types.SimpleNamespace:
                assert tensor.shape[0] % 32 == 0
                assert tensor.shape[1] % 32 == 0
                seen.append(tensor.shape[0])
                rounded = mx.quantize_dequantize(tensor.float(), "e4m3")
                return types.SimpleNamespace(dequantize=lambda dtype: rounded.to(dtype))

        package = types.ModuleType("transformer_engine")
        pytorch, native = types.ModuleType("transformer_engine.pytorch"), types.ModuleType("transformer_engine_torch")
        pytorch.MXFP8Quantizer, package.pytorch = Quantizer, pytorch
        native.DType = types.SimpleNamespace(kFloat8E4M3="E4M3")
        for module in (package, pytorch, native):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        for rows in (0, 1, 32, 70):
            values = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).bfloat16()
            assert torch.equal(te_round(values), mx.quantize_dequantize(values, "e4m3"))
        assert seen == [32, 32, 96]


class TestConfigJson:
    def test_a_policy_comes_back(self) -> None:
        quant = QuantConfig(enabled=True, weight_scale="nearest", modules=["experts.w2"], backend="torch")
        content = json.loads(json.dumps(with_policy({"a": 1}, quant)))
        found = policy_of(content, Path("config.json"))
        assert found.policy() == quant.policy()
        assert policy_in_force(found, "pretrain") == found
        assert with_policy(content, None) == {"a": 1}
        assert policy_of({"a": 1}, Path("config.json")) == QuantConfig()

    @pytest.mark.parametrize(
        "found",
        [
            3,
            "mxfp4",
            {},
            {"weights": "mxfp4"},
            {**QuantConfig().policy(), "more": 1},
            {**QuantConfig().policy(), "weights": "int4"},
            {**QuantConfig().policy(), "inputs": ["mxfp8"]},
            {**QuantConfig().policy(), "modules": []},
            {**QuantConfig().policy(), "modules": [["experts.w2"]]},
            {**QuantConfig().policy(), "modules": "experts.w2"},
        ],
    )
    def test_another_thing_is_refused(self, found: object) -> None:
        with pytest.raises(UserError, match=rf"config.json: {KEY}"):
            policy_of({KEY: found}, Path("config.json"))
