"""What cannot be imported or exported is named: file, tensor, what was expected, what was found; nothing is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hf_folder import all_tensors, k3_config, k3_tensors, write_folder

from k3train import cli

A_LOG = "language_model.model.layers.1.self_attn.A_log"
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.1.w2."
HEAD = "language_model.lm_head.weight"
LAST = "model-00003-of-00003.safetensors"

pytestmark = pytest.mark.usefixtures("_cpu_rank")


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return k3_tensors()


def refused(capsys: pytest.CaptureFixture[str], hf: Path, out: Path, *extra: str) -> str:
    """The one sentence with which an import ends."""
    assert cli.main(["import", "--hf", str(hf), "--out", str(out), *extra]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1, told
    assert not out.exists()
    assert not list(out.parent.glob(f"{out.name}*"))
    return told[0]


def changed(config: dict, **values: object) -> dict:
    config["text_config"] |= values
    return config


CONFIGS: dict[str, tuple[dict, tuple[str, ...]]] = {
    "Kimi K2": ({"model_type": "kimi_k2"}, ("kimi_k2", "Kimi K2", "kimi_k3", "kimi_linear")),
    "its sibling": ({"model_type": "deepseek_v3"}, ("deepseek_v3", "Kimi K2")),
    "another model": ({"model_type": "llama"}, ("'llama'", "does not know")),
    "no text part": ({"model_type": "kimi_k3"}, ("text_config", "NoneType")),
    "grouped routing": (changed(k3_config(), num_expert_group=8, topk_group=4), ("topk_group is 4", "8")),
    "rotary": (changed(k3_config(), mla_use_nope=False), ("mla_use_nope is False",)),
    "tied": (changed(k3_config(), tie_word_embeddings=True), ("tie_word_embeddings is True",)),
    "prediction layers": (changed(k3_config(), num_nextn_predict_layers=1), ("num_nextn_predict_layers is 1",)),
    "activation": (changed(k3_config(), hidden_act="gelu"), ("hidden_act is 'gelu'", "situ")),
    "grouped heads": (changed(k3_config(), num_key_value_heads=1), ("num_key_value_heads is 1",)),
    "layers that no list names": (changed(k3_config(), num_hidden_layers=6), ("full_attn_layers", "6 layers")),
    "dense layers in between": (
        changed(k3_config(), mlp_layer_types=["dense", "sparse", "dense", "sparse"]),
        ("mlp_layer_types",),
    ),
    "another quantization": (
        changed(k3_config(), quantization_config={"format": "nvfp4-pack-quantized"}),
        ("quantization_config.format is 'nvfp4-pack-quantized'",),
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configurations(tensors: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    config, words = CONFIGS[case]
    told = refused(capsys, write_folder(tmp_path / "hf", tensors, config), tmp_path / "ckpt")
    assert "config.json" in told
    for word in words:
        assert word in told


def test_a_folder_without_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hf").mkdir()
    assert "config.json cannot be read" in refused(capsys, tmp_path / "hf", tmp_path / "ckpt")
    (tmp_path / "hf" / "config.json").write_text("{")
    assert "config.json is not JSON" in refused(capsys, tmp_path / "hf", tmp_path / "ckpt")


def without(name: str) -> Callable[[dict], None]:
    return lambda tensors: tensors.pop(name)


def with_(name: str, tensor: torch.Tensor) -> Callable[[dict], None]:
    return lambda tensors: tensors.__setitem__(name, tensor)


def nonzero_padding(tensors: dict) -> None:
    tensors[A_LOG] = tensors[A_LOG].clone()
    tensors[A_LOG][5] = 0.25


def nan_scale(tensors: dict) -> None:
    tensors[EXPERT + "weight_scale"] = tensors[EXPERT + "weight_scale"].clone()
    tensors[EXPERT + "weight_scale"][7, 2] = 255


def beside_plain(tensors: dict) -> None:
    tensors[EXPERT + "weight"] = torch.zeros(64, 96).bfloat16()


def kimi_linear_names(tensors: dict) -> None:
    for name in [n for n in tensors if n.startswith("language_model.")]:
        tensors[name.removeprefix("language_model.")] = tensors.pop(name)


TENSORS: dict[str, tuple[Callable[[dict], object], tuple[str, ...]]] = {
    "missing": (without(HEAD), ("model.safetensors.index.json", HEAD, "is missing", "[304, 64]")),
    "another shape": (
        with_(HEAD, torch.zeros(300, 64).bfloat16()),
        (".safetensors", HEAD, "shape [300, 64]", "[304, 64]"),
    ),
    "another dtype": (with_(HEAD, torch.zeros(304, 64).int()), (HEAD, "I32", "float32 or bfloat16")),
    "unexpected": (
        with_("language_model.model.layers.1.self_attn.g_b_proj.bias", torch.zeros(32)),
        ("g_b_proj.bias", "F32 [32]", "is unexpected", "KimiK3ForConditionalGeneration"),
    ),
    "of no part": (with_("audio_tower.weight", torch.zeros(2)), ("audio_tower.weight", "is unexpected")),
    "codes without scales": (
        without(EXPERT + "weight_scale"),
        (f"found {EXPERT}weight_packed", "expected", EXPERT + "weight_scale"),
    ),
    "codes beside the weight": (beside_plain, (f"{EXPERT}weight_packed and {EXPERT}weight",)),
    "scales of another block size": (
        with_(EXPERT + "weight_scale", torch.zeros(64, 6, dtype=torch.uint8)),
        (EXPERT + "weight_scale", "[64, 6]", "[64, 3]"),
    ),
    "padding that is not zero": (nonzero_padding, (A_LOG, "8 entries for 2 heads", "found 0.25 at 5")),
    "fewer A_log than heads": (with_(A_LOG, torch.zeros(1)), (A_LOG, "shape [1]", "[2]")),
    "a NaN scale": (nan_scale, (EXPERT + "weight_scale", "255 (NaN) at (7, 2)")),
    "Kimi Linear's names": (kimi_linear_names, ("names of Kimi Linear", "config.json says KimiK3")),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(tensors: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    change, words = TENSORS[case]
    mine = dict(tensors)
    change(mine)
    told = refused(capsys, write_folder(tmp_path / "hf", mine), tmp_path / "ckpt")
    for word in words:
        assert word in told


def missing_shard(hf: Path) -> None:
    (hf / LAST).unlink()


def truncated(hf: Path) -> None:
    (hf / LAST).write_bytes((hf / LAST).read_bytes()[:-1000])


def no_header(hf: Path) -> None:
    (hf / LAST).write_bytes((hf / LAST).read_bytes()[:50])


def html(hf: Path) -> None:
    (hf / LAST).write_text("<html>a proxy's error page</html>")


def index_of_another_download(hf: Path) -> None:
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    index["weight_map"][HEAD] = LAST
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))


def broken_index(hf: Path) -> None:
    (hf / "model.safetensors.index.json").write_text("{")


def same_tensor_twice(hf: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({**load_file(hf / LAST), HEAD: all_tensors(hf)[HEAD]}, hf / LAST)


FILES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "missing shard": (missing_shard, (LAST, "is missing", "tensors in it")),
    "truncated": (truncated, (LAST, "ends at byte", "cut short")),
    "cut in the header": (no_header, (LAST, "50 bytes", "cut short")),
    "no safetensors": (html, (LAST, "no safetensors file")),
    "index of another download": (index_of_another_download, (LAST, HEAD, "it is in model-00001")),
    "broken index": (broken_index, ("model.safetensors.index.json cannot be read",)),
    "stored twice": (same_tensor_twice, (LAST, HEAD, "also in model-00001")),
}


@pytest.mark.parametrize("case", FILES)
def test_files(tensors: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    damage, words = FILES[case]
    hf = write_folder(tmp_path / "hf", tensors)
    damage(hf)
    told = refused(capsys, hf, tmp_path / "ckpt")
    for word in words:
        assert word in told


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["parallel.tensor=3"], ("parallel.tensor=3",)),
        (["parallel.expert=3"], ("parallel.expert=3",)),
        (["train.steps=3"], ("train.steps=3", "parallel.KEY")),
        (["parallel.tenser=2"], ("tenser",)),
        (["parallel.world_size=100"], ("parallel.world_size=100", "64")),
    ],
)
def test_layouts(
    tensors: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], words: tuple[str, ...]
) -> None:
    told = refused(capsys, write_folder(tmp_path / "hf", tensors), tmp_path / "ckpt", *extra)
    for word in words:
        assert word in told


def test_nothing_is_overwritten(tensors: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, out = write_folder(tmp_path / "hf", tensors), tmp_path / "ckpt"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    assert cli.main(["import", "--hf", str(hf), "--out", str(out)]) == 2
    assert "never overwrites" in capsys.readouterr().err
    (out / "thesis.txt").unlink()  # an empty folder will do
    assert cli.main(["import", "--hf", str(hf), "--out", str(out)]) == 0
    assert cli.main(["export", "--checkpoint", str(out), "--hf", str(hf)]) == 2
    assert "never overwrites" in capsys.readouterr().err
    assert cli.main(["export", "--checkpoint", str(out), "--hf", str(tmp_path / "no" / "where")]) == 2
    assert f"{tmp_path / 'no'} does not exist" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(_cpu_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from scratch whose experts are 24 wide."""
    from small_run import make_corpus, small_recipe, train

    root = tmp_path_factory.mktemp("scratch")
    code, _ = train(0, 1, small_recipe(make_corpus(root), root / "run", train__steps=1, train__eval_samples=0))
    assert code == 0
    return root / "run"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--experts", "mxfp4"], ("--experts mxfp4", "rows of 16", "--experts bf16")),
        (["--like", "{run}"], ("--like", "is not an imported checkpoint")),
        (["--like", "nowhere"], ("nowhere does not exist",)),
        (["--max-shard-gb", "0"], ("--max-shard-gb 0",)),
        (["--max-shard-gb", "nan"], ("--max-shard-gb nan",)),
        (["--experts", "int4"], ("int4", "mxfp4")),
    ],
)
def test_exports(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], words: tuple[str, ...]
) -> None:
    filled = [word.format(run=trained) for word in extra]
    assert cli.main(["export", "--checkpoint", str(trained), "--hf", str(tmp_path / "out"), *filled]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    for word in words:
        assert word in told
    assert not list(tmp_path.glob("out*"))


def test_a_damaged_checkpoint_and_a_lost_origin(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    from k3train.checkpoint import directory

    copy = tmp_path / "copy"
    shutil.copytree(directory.resolve(trained), copy)
    marker = json.loads((copy / "checkpoint.json").read_text())
    marker["config"]["checkpoint"]["load"] = str(tmp_path / "gone")
    (copy / "checkpoint.json").write_text(json.dumps(marker))
    arguments = ["export", "--checkpoint", str(copy), "--hf", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    told = capsys.readouterr().err
    assert f"trained from {tmp_path / 'gone'}, which is gone" in told
    assert "--like none" in told
    shard = next(copy.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 8])
    assert cli.main([*arguments, "--like", "none"]) == 2
    assert shard.name in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_another_model_than_the_imported_one(
    tensors: dict, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = write_folder(tmp_path / "hf", tensors)
    assert cli.main(["import", "--hf", str(hf), "--out", str(tmp_path / "ckpt")]) == 0
    arguments = [
        "export",
        "--checkpoint",
        str(trained),
        "--hf",
        str(tmp_path / "out"),
        "--like",
        str(tmp_path / "ckpt"),
    ]
    assert cli.main(arguments) == 2
    told = capsys.readouterr().err
    assert "was trained with hidden_size=32" in told
    assert "has 64" in told


@pytest.mark.parametrize("extra", [[], ["--like", "none"]])
def test_an_epsilon_that_no_config_json_can_say(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    import shutil

    from k3train.checkpoint import directory

    copy = tmp_path / "copy"
    shutil.copytree(directory.resolve(trained), copy)
    marker = json.loads((copy / "checkpoint.json").read_text())
    marker["config"]["model"]["mla"]["latent_norm_eps"] = 1e-5
    (copy / "checkpoint.json").write_text(json.dumps(marker))
    assert cli.main(["export", "--checkpoint", str(copy), "--hf", str(tmp_path / "out"), *extra]) == 2
    told = capsys.readouterr().err
    assert "model.mla.latent_norm_eps=1e-05" in told
    assert "published code has 1e-06" in told
    assert not list(tmp_path.glob("out*"))
