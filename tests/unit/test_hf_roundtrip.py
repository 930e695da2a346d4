"""A published folder in, and the same bytes out; what training changes, and what an export of one's own model has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from hf_folder import (
    EXPERTS,
    FULL,
    HEADS,
    LAYERS,
    PADDED_HEADS,
    add_tokenizer,
    all_tensors,
    digests,
    k3_config,
    k3_tensors,
    same_bytes,
    write_folder,
)
from safetensors.torch import load_file
from small_run import make_corpus, small_recipe, train

from k3train import cli
from k3train.checkpoint import directory
from k3train.config.load import recipe_from_dict
from k3train.hf.torch_dist import TensorReader
from k3train.train.quantization import tell_quantization

GOLDEN = Path(__file__).parents[1] / "goldens" / "k3-tiny"

pytestmark = pytest.mark.usefixtures("_cpu_rank")


def import_(hf: Path, out: Path, *extra: str) -> Path:
    assert cli.main(["import", "--hf", str(hf), "--out", str(out), *extra]) == 0
    return out


def export(checkpoint: Path, hf: Path, *extra: str) -> Path:
    assert cli.main(["export", "--checkpoint", str(checkpoint), "--hf", str(hf), *extra]) == 0
    return hf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random experts with every kind of block, in three files."""
    hf = write_folder(tmp_path_factory.mktemp("published") / "hf", k3_tensors())
    add_tokenizer(hf)
    return hf


@pytest.fixture(scope="module")
def checkpoint(_cpu_rank: None, folder: Path) -> Path:
    return import_(folder, folder.parent / "ckpt")


def test_unchanged_weights_give_every_file_back_byte_for_byte(
    checkpoint: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packed experts, their scales, padding, vision tensors, headers, index, config, tokenizer and code."""
    wanted = digests(folder)
    assert {"config.json", "model-00003-of-00003.safetensors", "figures/one.txt", "tokenizer.json"} <= wanted.keys()
    assert digests(export(checkpoint, tmp_path / "back")) == wanted
    assert digests(export(checkpoint, tmp_path / "asked", "--experts", "mxfp4")) == wanted
    assert "warning" not in capsys.readouterr().out


def test_a_run_says_what_it_does_with_quantized_experts(checkpoint: Path) -> None:
    """The import names no policy, and yet a run without one would not train what it ships."""
    told: list[tuple[str, str]] = []
    telemetry = SimpleNamespace(event=lambda text, level="info": told.append((level, text)))
    config = recipe_from_dict(directory.read_marker(checkpoint)["config"])
    for quant, lora in ((True, False), (False, False), (False, True)):
        config.quant.enabled, config.lora.enabled, config.stage.name = quant, lora, "sft"
        tell_quantization(telemetry, config, checkpoint)
    start = f"{checkpoint} was imported with experts in MXFP4"
    assert told[0] == (
        "info",
        f"{start}; this run trains it with mxfp4 weights (round_up) and mxfp8 inputs (round_up)",
    )
    assert told[1][0] == "warning"
    assert told[1][1].startswith(f"{start}, and this run trains it without quantization: exported in MXFP4")
    assert len(told) == 2, "adapters leave experts as they are"


def test_requantizing_alone_would_not(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    """Without the imported scales the same values come out under other bytes: what they are kept for."""
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    forget_scales(copy)
    theirs, ours = all_tensors(folder), all_tensors(export(copy, tmp_path / "back"))
    scales = [name for name in theirs if name.endswith("weight_scale")]
    same = torch.cat([(theirs[name] == ours[name]).flatten() for name in scales])
    assert 0.2 < same.float().mean() < 0.8
    assert all(same_bytes(theirs[n], ours[n]) for n in theirs if not n.endswith(("weight_scale", "weight_packed")))


def forget_scales(checkpoint: Path) -> None:
    """Take the imported scales out of a checkpoint's table."""
    import pickle

    file = checkpoint / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for key in [key for key in metadata.state_dict_metadata if key.startswith("hf.mx_scale.")]:
        del metadata.state_dict_metadata[key]
    file.write_bytes(pickle.dumps(metadata))


def test_the_checkpoint_holds_what_the_files_stand_for(checkpoint: Path, folder: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="the library that defines the packing")
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    from k3train.hf.write_config import quantization_config

    scheme = QuantizationScheme(**quantization_config()["config_groups"]["group_0"])
    tensors, reader = all_tensors(folder), TensorReader(checkpoint)
    base = "language_model.model.layers.2."
    for expert in range(EXPERTS):
        for part, box in (("w1", (0, 1)), ("w3", (1, 2)), ("w2", None)):
            name = f"{base}block_sparse_moe.experts.{expert}.{part}."
            scales = tensors[name + "weight_scale"]
            state = {"weight_packed": tensors[name + "weight_packed"], "weight_scale": scales}
            theirs = MXFP4PackedCompressor.decompress(state, scheme)["weight"].detach()
            key = "decoder.layers.2.moe.experts." + ("w2" if box is None else "w13")
            ours = reader.read(key, (expert, expert + 1), *([box] if box else [])).view(theirs.shape)
            plain = ((scales > 10) & (scales < 240)).repeat_interleave(32, dim=1)  # the ends are beyond that library
            assert same_bytes(ours[plain], theirs[plain])
    a_log = tensors["language_model.model.layers.0.self_attn.A_log"]
    assert a_log.shape == (PADDED_HEADS,)
    assert same_bytes(reader.read("decoder.layers.0.mixer.A_log"), a_log[:HEADS])
    conv = tensors["language_model.model.layers.1.self_attn.k_conv1d.weight"]
    assert same_bytes(reader.read("decoder.layers.1.mixer.k_conv"), conv[:, 0])
    assert reader.dtype("decoder.layers.1.mixer.q_proj.weight") == torch.bfloat16


def test_experts_in_bf16_are_exact_and_config_json_says_so(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    theirs = all_tensors(folder)
    hf = export(checkpoint, tmp_path / "bf16", "--experts", "bf16", "--max-shard-gb", "0.0003")
    ours, config = all_tensors(hf), json.loads((hf / "config.json").read_text())
    assert "quantization_config" not in config["text_config"]
    assert not any(name.endswith(("_packed", "_scale")) for name in ours)
    for name, tensor in theirs.items():
        if not name.endswith(("_packed", "_scale")):
            assert same_bytes(ours[name], tensor), name
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == ours.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in ours.values())
    sizes = [file.stat().st_size for file in hf.glob("*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) < 0.0003e9 + 20_000  # the header comes on top
    # And from there back to MXFP4: the values are those of the first folder.
    again = import_(hf, tmp_path / "again")
    packed = export(again, tmp_path / "packed", "--experts", "mxfp4")
    assert json.loads((packed / "config.json").read_text())["text_config"]["quantization_config"]
    assert same_bytes(
        TensorReader(import_(packed, tmp_path / "last")).read("decoder.layers.1.moe.experts.w13"),
        TensorReader(checkpoint).read("decoder.layers.1.moe.experts.w13"),
    )


def test_mixed_experts_are_read_by_the_tensors_present(folder: Path, tmp_path: Path) -> None:
    """One expert matrix in bf16 among packed ones, named by no ignore list; and a list that names packed ones."""
    tensors = k3_tensors()
    name = "language_model.model.layers.2.block_sparse_moe.experts.1.w3.weight"
    del tensors[name + "_scale"]
    tensors[name] = torch.randn(tensors.pop(name + "_packed").shape[0], 64).bfloat16()
    config = k3_config()
    config["text_config"]["quantization_config"]["ignore"] = ["re:.*experts.*"]
    hf = write_folder(tmp_path / "hf", tensors, config)
    out = import_(hf, tmp_path / "ckpt")
    read = TensorReader(out).read("decoder.layers.2.moe.experts.w13", (1, 2), (1, 2))
    assert same_bytes(read[0, 0], tensors[name])
    assert digests(export(out, tmp_path / "back")) == digests(hf)


def test_golden_checkpoint_scores_its_own_loss_and_comes_back(tmp_path: Path) -> None:
    """The published layout without padding or quantization, in fp32."""
    hf = tmp_path / "hf"
    hf.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDEN / name, hf / name)
    out = import_(hf, tmp_path / "ckpt")
    golden = load_file(GOLDEN / "golden.safetensors")
    np.save(tmp_path / "tokens.npy", golden["input_ids"].numpy())
    arguments = ["score", "--checkpoint", str(out), "--tokens", str(tmp_path / "tokens.npy")]
    assert cli.main([*arguments, "--out", str(tmp_path / "out.npz"), "--logits"]) == 0
    scored = np.load(tmp_path / "out.npz")
    assert scored["loss"] == pytest.approx(golden["loss"].item(), abs=5e-6)
    assert np.abs(scored["logits"] - golden["logits"].numpy()).max() < 1e-3  # see tests/parity/test_golden.py
    assert digests(export(out, tmp_path / "back")) == digests(hf)


@pytest.fixture(scope="module")
def trained(_cpu_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on imported weights whose outputs are of ordinary size."""
    root = tmp_path_factory.mktemp("trained")
    hf = write_folder(root / "hf", k3_tensors(tame=True))
    add_tokenizer(hf)
    out = import_(hf, root / "ckpt")
    recipe = small_recipe(make_corpus(root), root / "run", checkpoint__load=str(out), train__steps=2)
    recipe["model"] = directory.read_marker(out)["config"]["model"]
    code, _ = train(0, 1, recipe)
    assert code == 0
    return root


def test_a_trained_model_takes_the_imported_files_along(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = all_tensors(trained / "hf")
    hf = export(trained / "run", tmp_path / "out")
    # It trained on unrounded experts, and ships with rounded ones.
    assert "warning: experts' weights are rounded to MXFP4 for the first time here" in capsys.readouterr().out
    after = all_tensors(hf)
    assert after.keys() == before.keys()
    assert all(after[n].dtype == before[n].dtype and after[n].shape == before[n].shape for n in before)
    moved = {n for n in before if not same_bytes(after[n], before[n])}
    assert {n for n in before if n.startswith(("vision_tower", "mm_projector"))}.isdisjoint(moved)
    assert "language_model.lm_head.weight" in moved
    a_log = after["language_model.model.layers.0.self_attn.A_log"]
    assert (a_log[HEADS:] == 0).all()
    for name in ("config.json", "chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert (hf / name).read_bytes() == (trained / "hf" / name).read_bytes()
    # Generation reads there which tokens end a text.
    given = (trained / "ckpt" / "tokenizer" / "generation_config.json").read_bytes()
    assert given == (trained / "hf" / "generation_config.json").read_bytes()
    checkpoint = TensorReader(directory.resolve(trained / "run"))
    head = checkpoint.read("output_layer.weight")
    assert head.dtype == torch.float32
    assert same_bytes(after["language_model.lm_head.weight"], head.bfloat16())
    # Trained experts are rounded to MXFP4: within half a step, which is a sixth of the block's largest value at most.
    back = TensorReader(import_(hf, tmp_path / "again")).read("decoder.layers.1.moe.experts.w2").float()
    exact = checkpoint.read("decoder.layers.1.moe.experts.w2")
    amax = exact.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, -1, 32).flatten(-2)
    assert ((back - exact).abs() <= amax / 3).all()
    assert (back - exact).norm() < 0.2 * exact.norm()


def test_blocks_that_training_left_alone_keep_their_bytes(trained: Path, tmp_path: Path) -> None:
    """A run whose learning rate is so small that no fp32 weight moves (zeros would, so experts have none): packed
    experts come back as they were, though the run's own checkpoint has no scales."""
    recipe = yaml.safe_load((trained / "run" / "config.yaml").read_text())
    recipe["run"]["dir"] = str(tmp_path / "run")
    recipe["optim"] |= {"lr": 1e-30, "min_lr": 1e-30, "weight_decay": 0.0}
    code, _ = train(0, 1, recipe)
    assert code == 0
    assert not any(key.startswith("hf.") for key in TensorReader(directory.resolve(tmp_path / "run")))
    before, after = all_tensors(trained / "hf"), all_tensors(export(tmp_path / "run", tmp_path / "out"))
    changed = {n for n in before if not same_bytes(after[n], before[n])}
    # Quantile Balancing sets its bias from the routing, whatever the learning rate.
    assert changed == {n for n in before if n.endswith("e_score_correction_bias")}


def test_a_model_of_ones_own_gets_the_released_layout(trained: Path, tmp_path: Path) -> None:
    hf = export(trained / "run", tmp_path / "own", "--like", "none", "--experts", "mxfp4")
    ours, published = all_tensors(hf), all_tensors(trained / "hf")
    expected = {n: t for n, t in published.items() if n.startswith("language_model.")}
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].shape == (tensor[:HEADS].shape if name.endswith("A_log") else tensor.shape), name
    config = json.loads((hf / "config.json").read_text())
    assert config["architectures"] == ["KimiK3ForConditionalGeneration"]
    text, given = config["text_config"], k3_config()["text_config"]
    given.pop("quantization_config")
    assert {key: text.get(key) for key in given} == given
    assert text["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert text["linear_attn_config"]["kda_layers"] == [n for n in range(1, LAYERS + 1) if n not in FULL]
    assert (hf / "tokenizer.json").is_file()
    # It is a folder that import takes, and that gives the same bytes again.
    assert digests(export(import_(hf, tmp_path / "ckpt"), tmp_path / "twice")) == digests(hf)


def test_96_heads_are_padded_to_128_as_released() -> None:
    from k3train.hf.files_plan import released_shape
    from k3train.hf.mapping import Part, Weight

    def shape(heads: int, name: str) -> tuple[int, ...]:
        weight = Weight("decoder.layers.0.mixer.A_log", (heads,), torch.float32)
        return released_shape(name, Part(weight, (), (heads,)))

    assert shape(96, "language_model.model.layers.0.self_attn.A_log") == (128,)
    assert shape(32, "language_model.model.layers.0.self_attn.A_log") == (32,)
    assert shape(32, "model.layers.0.self_attn.A_log") == (1, 1, 32, 1)


def test_the_released_dimensions_map_onto_the_released_index(single_rank: None) -> None:
    """497,220 tensors of the released names, shapes and dtypes."""
    from k3train.config.load import load_recipe
    from k3train.hf.mapping import packed_names, packed_shapes, published_parts, weights_of

    weights, _ = weights_of(load_recipe(["recipe=pretrain/k3"]).model)
    parts = published_parts(weights, "language_model.")
    packed = [name for name, part in parts.items() if part.weight.is_expert]
    assert len(packed) == 92 * 896 * 3
    layer = "language_model.model.layers.92.block_sparse_moe.experts.895."
    assert packed_shapes(parts[layer + "w1.weight"]) == ((3072, 1792), (3072, 112))
    assert packed_shapes(parts[layer + "w2.weight"]) == ((3584, 1536), (3584, 96))
    assert packed_names(layer + "w3.weight") == (layer + "w3.weight_packed", layer + "w3.weight_scale")
    others = {name: part for name, part in parts.items() if not part.weight.is_expert}
    fp32 = ("conv1d.weight", ".A_log", ".dt_bias", ".o_norm.weight", ".e_score_correction_bias")
    for name, part in others.items():
        assert (part.weight.dtype == torch.float32) == name.endswith(fp32), name
    assert others["language_model.model.layers.5.self_attn.q_conv1d.weight"].shape == (12288, 1, 4)
    assert others["language_model.model.layers.3.self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 7168)
    assert others["language_model.model.output_attn_res_proj.weight"].shape == (1, 7168)
    # 5 at the top; each layer 4 norms, 2 queries, g_proj and o_proj; 12 more of KDA and 6 of MLA; FFNs.
    assert len(others) == 5 + 93 * 8 + 69 * 12 + 24 * 6 + 3 + 92 * 8
    assert len(others) + 2 * len(packed) + (27 * 6 + 3) + 3 == 497_220  # with the vision tower and the projector
