"""Input that nobody means: values of other types, damaged tables, odd output folders, two imports at once."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folder import digests, k3_config, k3_tensors, write_folder

from k3train import cli
from k3train.errors import UserError
from k3train.hf.config import parse_config
from k3train.hf.config_types import _LINEAR, _TEXT
from k3train.hf.safetensors_files import read_header, read_index
from k3train.hf.target import check_target, claimed

LAST = "model-00003-of-00003.safetensors"
WRONG = ["1", [1], {"a": 1}, -1, 0.5, True, 10**30, float("nan"), None]
RIGHT = {  # by key: which of WRONG are fine there
    "num_key_value_heads": [None],
    "q_lora_rank": [None],
    "rms_norm_eps": [0.5],
    "gate_lower_bound": [-1, 0.5, None],
    "full_attn_layers": [[1]],
    "kda_layers": [[1], None],
    "linear_attn_config": [{"a": 1}],
    "quantization_config": [{"a": 1}, None],
    "mlp_layer_types": [None],
    **{f"activation_situ_{name}": [0.5, None] for name in ("beta", "linear_beta")},
    "routed_scaling_factor": [0.5, None],
    "initializer_range": [0.5, None],
    **{key: [True, None] for key in ("mla_use_output_gate", "latent_moe_use_norm", "moe_renormalize")},
    "use_full_rank_gate": [True, None],
    **{key: [None] for key in ("num_shared_experts", "routed_expert_hidden_size", "first_k_dense_replace")},
    **{key: [None] for key in ("num_expert_group", "topk_group", "attn_res_block_size")},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hostile") / "hf", k3_tensors(tame=True))


@pytest.mark.parametrize("key", [*_TEXT, *_LINEAR])
def test_every_key_of_config_json_has_its_type(key: str) -> None:
    file = Path("config.json")
    for value in WRONG:
        if any(type(fine) is type(value) and fine == value for fine in RIGHT.get(key, [])):
            continue
        content = k3_config()
        section = content["text_config"]["linear_attn_config"] if key in _LINEAR else content["text_config"]
        section[key] = value
        with pytest.raises(UserError, match=rf"config\.json: (linear_attn_config\.)?{key} is .*; allowed: "):
            parse_config(content, file)


@pytest.mark.parametrize("kind", [[], {}, 3, None])
def test_a_model_type_of_another_type(kind: Any) -> None:
    with pytest.raises(UserError, match="model_type is"):
        parse_config({"model_type": kind}, Path("config.json"))


def test_mlp_layer_types_of_another_length() -> None:
    content = k3_config()
    content["text_config"]["mlp_layer_types"] = ["dense"]
    with pytest.raises(UserError, match="names 1 layers; num_hidden_layers is 4"):
        parse_config(content, Path("config.json"))


HEADERS: dict[str, Callable[[dict], Any]] = {
    "shape of a text": lambda t: t.update(shape="ab"),
    "negative shape": lambda t: t.update(shape=[-1]),
    "shape in fractions": lambda t: t.update(shape=[1.5]),
    "no shape": lambda t: t.pop("shape"),
    "dtype in a list": lambda t: t.update(dtype=["F32"]),
    "three offsets": lambda t: t.update(data_offsets=[0, 1, 2]),
    "offsets in fractions": lambda t: t.update(data_offsets=[0.5, 1.5]),
    "offset of truth": lambda t: t.update(data_offsets=[False, 4]),
}


def safetensors_file(path: Path, header: bytes, data: bytes = b"\0" * 4) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_are_none(tmp_path: Path, case: str) -> None:
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    assert len(read_header(safetensors_file(tmp_path / "a.safetensors", json.dumps({"x": tensor}).encode()))[1]) == 1
    HEADERS[case](tensor)
    with pytest.raises(UserError, match=r"a\.safetensors has .* no whole safetensors header"):
        read_header(safetensors_file(tmp_path / "a.safetensors", json.dumps({"x": tensor}).encode()))


def test_headers_deep_doubled_and_followed_by_bytes(tmp_path: Path) -> None:
    entry = '"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    file = tmp_path / "a.safetensors"
    with pytest.raises(UserError, match="no whole safetensors header"):
        read_header(safetensors_file(file, b"[" * 100_000))
    with pytest.raises(UserError, match="given twice"):
        read_header(safetensors_file(file, f"{{{entry},{entry}}}".encode()))
    with pytest.raises(UserError, match="2 bytes behind its last tensor"):  # they would not come back
        read_header(safetensors_file(file, f"{{{entry}}}".encode(), b"\0" * 6))


@pytest.mark.parametrize("name", [None, 3, "", "..", "config.json", "a\0b.safetensors", "x/a.safetensors", "\ud800"])
def test_an_index_that_names_no_file_of_the_folder(tmp_path: Path, name: Any) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(UserError, match=r"weight_map has .* where a name like"):
        read_index(index)


def test_a_pipe_in_place_of_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="cannot be read"):
        read_header(tmp_path / "a.safetensors")


def test_where_a_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    for inside in (source / "out", source / ".hidden" / ".." / "out"):
        with pytest.raises(UserError, match=r"lies inside .*hf"):
            check_target("--out", inside, source)
    with pytest.raises(UserError, match="File name too long"):
        check_target("--out", tmp_path / ("x" * 300))
    with pytest.raises(UserError, match="File name too long"):  # NAME.partial is
        check_target("--out", tmp_path / ("x" * 250))
    monkeypatch.chdir(source)
    with pytest.raises(UserError, match="working folder"):
        check_target("--out", "")
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    assert check_target("--out", tmp_path / "link") == tmp_path / "scratch"


def test_one_works_in_a_folder_at_a_time(tmp_path: Path) -> None:
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    partial.mkdir()
    (partial / "left by a killed one").write_text("x")
    with claimed(out, "--out"):
        assert not list(partial.iterdir())
        (partial / "mine").write_text("x")
        with pytest.raises(UserError, match="is being made by another"), claimed(out, "--hf"):
            pass
        assert (partial / "mine").exists()
        partial.rename(out)
    with claimed(tmp_path / "out2", "--out"):
        pass


@pytest.mark.usefixtures("_cpu_rank")
def test_two_imports_into_one_name(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["import", "--hf", str(folder), "--out", str(tmp_path / "ckpt")]
    with claimed(tmp_path / "ckpt", "--out") as partial:
        (partial / "shard").write_text("of the other import")
        assert cli.main(arguments) == 2
        assert "being made by another" in capsys.readouterr().err
        assert (partial / "shard").read_text() == "of the other import"
    assert cli.main(arguments) == 0
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.usefixtures("_cpu_rank")
def test_links_odd_names_and_the_way_back(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder as the hub caches it, of links, into a linked scratch folder with spaces and signs."""
    hf = tmp_path / "snap shot"
    hf.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (hf / path.name).symlink_to(path)
    scratch = tmp_path / "scrätch 🎉"
    scratch.mkdir()
    (tmp_path / "link").symlink_to(scratch)
    assert cli.main(["import", "--hf", str(hf), "--out", str(tmp_path / "link")]) == 0
    assert (scratch / "checkpoint.json").is_file()
    assert (tmp_path / "link").is_symlink()
    assert cli.main(["export", "--checkpoint", str(tmp_path / "link"), "--hf", str(tmp_path / "back")]) == 0
    assert digests(tmp_path / "back") == digests(hf)
    assert cli.main(["export", "--checkpoint", str(scratch), "--hf", str(scratch / "hf" / "files" / "x")]) == 2
    assert "lies inside" in capsys.readouterr().err
    for size in ("nan", "inf"):
        assert (
            cli.main(["export", "--checkpoint", str(scratch), "--hf", str(tmp_path / "b"), "--max-shard-gb", size]) == 2
        )
        assert f"--max-shard-gb {size}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def checkpoint(_cpu_rank: None, folder: Path) -> Path:
    assert cli.main(["import", "--hf", str(folder), "--out", str(folder.parent / "ckpt")]) == 0
    return folder.parent / "ckpt"


def edited(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        content = json.loads((checkpoint / name).read_text())
        changed = change(content)
        (checkpoint / name).write_text(json.dumps(content if changed is None else changed))

    return edit


def written(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / name).write_bytes(data) and None


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "marker of another type": (edited("checkpoint.json", lambda m: [1]), "checkpoint.json"),
    "version in words": (edited("checkpoint.json", lambda m: m.update(format_version="one")), "format_version is str"),
    "no config": (edited("checkpoint.json", lambda m: m.pop("config") and None), "'config' is missing"),
    "config in a list": (edited("checkpoint.json", lambda m: m.update(config=[1])), "config is list"),
    "deep marker": (written("checkpoint.json", b"[" * 100_000), "checkpoint.json"),
    "table of nothing": (written(".metadata", b"\x80\x04N."), ".metadata cannot be read"),
    "table of an odd pickle": (written(".metadata", b"(lp0\n0"), ".metadata cannot be read"),
    "kept files of another type": (edited("hf/source.json", lambda s: s.update(files=[3])), "source.json"),
    "kept file gone": (lambda c: (c / "hf/files/chat_template.jinja").unlink(), "chat_template.jinja is missing"),
    "kept header gone": (lambda c: (c / "hf/headers" / f"{LAST}.json").unlink(), f"{LAST}.json"),
    "kept header damaged": (written(f"hf/headers/{LAST}.json", b'{"x":3}'), f"{LAST}.json"),
    "kept header of another model": (written(f"hf/headers/{LAST}.json", b"{}"), "disagree on tensor"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_checkpoints(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    damage, words = DAMAGE[case]
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    damage(copy)
    assert cli.main(["export", "--checkpoint", str(copy), "--hf", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert words in told[0]
    assert not list(tmp_path.glob("out*"))
    if not case.startswith("kept"):
        code = cli.main(["inspect", str(copy)])
        out, err = capsys.readouterr()
        assert (code == 2 and words in err) or (code == 1 and words in out)


def test_inspect_of_a_state_that_is_none(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(checkpoint, tmp_path / "copy")
    edited("checkpoint.json", lambda m: m["state"].update(step="x"))(tmp_path / "copy")
    assert cli.main(["inspect", str(tmp_path / "copy")]) == 2
    assert "expected whole numbers for step, consumed_samples, tokens" in capsys.readouterr().err


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """/dev/full refuses every byte, as a full disk does."""
    from k3train.hf.safetensors_files import Writer
    from k3train.hf.torch_dist import Piece, PieceWriter

    def write_header() -> None:
        Writer(Path("/dev/full"), b"{}").close()

    def write_piece() -> None:
        (tmp_path / "__0_0.distcp").symlink_to("/dev/full")
        writer = PieceWriter(tmp_path, 0)
        writer.tensor(Piece("x", (1 << 20,), torch.float32, 0, 1 << 20), torch.zeros(1 << 20))

    for write, name in ((write_header, "/dev/full"), (write_piece, str(tmp_path / "__0_0.distcp"))):
        with pytest.raises(OSError, match="No space") as caught:
            write()
        assert caught.value.filename == name
