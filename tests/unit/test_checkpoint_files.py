"""Checkpoints as files: what counts as one, what stays, what is damaged, copying and pruning by hand."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from k3train.checkpoint import directory, health, manifest
from k3train.checkpoint.copying import copy
from k3train.checkpoint.retention import Retention, prune
from k3train.checkpoint.state import TrainState
from k3train.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def make(root: Path, step: int, attempt: str = "a1") -> Path:
    """A committed checkpoint of two files."""
    partial = directory.partial_of(root, step, attempt)
    (partial / "tokenizer").mkdir(parents=True)
    (partial / "__0_0.distcp").write_bytes(bytes(range(256)) * step)
    (partial / "tokenizer" / "tokenizer.json").write_text("{}", encoding="utf-8")
    marker = {"state": TrainState(step=step).to_dict(), "config": {}, "versions": {}}
    return directory.commit(root, step, marker, attempt)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def steps(root: Path) -> list[int]:
    return [step for step, _ in directory.committed(root)]


@pytest.mark.parametrize(
    ("retention", "left"),
    [
        (Retention(last=2), [50, 60]),
        (Retention(last=1, every=20), [20, 40, 60]),
        (Retention(last=1, every=25, milestones=[10]), [10, 50, 60]),
        (Retention(last=0), [10, 20, 30, 40, 50, 60]),
        (Retention(last=9), [10, 20, 30, 40, 50, 60]),
    ],
)
def test_what_stays(retention: Retention, left: list[int], tmp_path: Path) -> None:
    for step in range(10, 61, 10):
        make(tmp_path, step)
    assert prune(tmp_path, retention) == []
    assert steps(tmp_path) == left
    assert names(tmp_path) == [f"step_{step:08d}" for step in left]


def test_unfinished_ones_go_and_the_one_being_written_stays(tmp_path: Path) -> None:
    make(tmp_path, 1)
    for name in ("step_00000002.aa.partial", "step_00000003.bb.partial", "step_00000001.removed"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000004.damaged").mkdir()
    (tmp_path / "step_00000004.newer").mkdir()
    assert prune(tmp_path, Retention(last=1), writing=tmp_path / "step_00000003.bb.partial") == []
    aside = ["step_00000004.damaged", "step_00000004.newer"]
    assert names(tmp_path) == ["step_00000001", "step_00000003.bb.partial", *aside]


def test_a_commit_that_died_between_its_renames_is_undone(tmp_path: Path) -> None:
    """The old checkpoint of the same step has lost its name, and the new one not yet got it."""
    final = make(tmp_path, 1)
    final.rename(tmp_path / "step_00000001.replaced")
    (tmp_path / "step_00000001.bb.partial").mkdir()
    assert steps(tmp_path) == []
    assert directory.sweep(tmp_path) == []
    assert names(tmp_path) == ["step_00000001"]
    assert health.problems(final, verify=True) == []


def test_a_removal_that_died_halfway_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, 1)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        directory.remove(path)
    monkeypatch.undo()
    assert steps(tmp_path) == []
    directory.sweep(tmp_path)
    assert names(tmp_path) == []


def test_writing_again_replaces(tmp_path: Path) -> None:
    make(tmp_path, 1)
    path = make(tmp_path, 1, "b2")
    assert names(tmp_path) == [path.name]
    assert health.problems(path, verify=True) == []


def test_the_marker_is_written_when_all_else_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file and directory is synced before the marker exists; then the marker, its directory, and the rename."""
    synced: list[tuple[str, bool]] = []
    sync = directory.sync

    def recorded(path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        synced.append((path.name, (folder / directory.MARKER).exists()))
        sync(path)

    monkeypatch.setattr(directory, "sync", recorded)
    make(tmp_path, 1)
    before = [name for name, marked in synced if not marked]
    after = [name for name, marked in synced if marked]
    partial = "step_00000001.a1.partial"
    assert sorted(before[:-1]) == sorted(["__0_0.distcp", "manifest.json", partial, "tokenizer", "tokenizer.json"]), (
        synced
    )
    assert after == ["checkpoint.json", partial]
    assert before[-1] == tmp_path.name


def test_a_rank_of_the_other_engine_syncs_what_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 syncs everything before the marker, but on its own node."""
    import torch
    import torch.distributed as dist

    from k3train.checkpoint.whole import FOLDER
    from k3train.engine.saver import WholeWriting

    synced: list[str] = []
    monkeypatch.setattr(directory, "sync", lambda path: synced.append(path.name))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    writing = WholeWriting({"weight/a": torch.ones(2)}, {}, tmp_path)
    writing.start(in_thread=False)
    assert writing.failure is None
    assert {f"{FOLDER}/{name}" for name in synced[:2]} == writing.hashes.keys()
    assert len(writing.hashes) == 2
    assert synced[2:] == [FOLDER]


def damage(path: Path, how: str) -> Path:
    shard = path / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    if how == "truncated":
        shard.write_bytes(content[:-1])
    elif how == "missing":
        shard.unlink()
    elif how == "flipped":
        content[100] ^= 1
        shard.write_bytes(content)
    elif how == "manifest":
        file = path / manifest.MANIFEST
        file.write_text(file.read_text(encoding="utf-8").replace("256", "257"), encoding="utf-8")
        return file
    elif how == "no manifest":
        (path / manifest.MANIFEST).unlink()
        return path / manifest.MANIFEST
    elif how == "marker":
        (path / directory.MARKER).write_text("{", encoding="utf-8")
        return path / directory.MARKER
    elif how == "state":
        file = path / directory.MARKER
        file.write_text(file.read_text(encoding="utf-8").replace('"step": 1', '"step": "1"'), encoding="utf-8")
        return file
    return shard


@pytest.mark.parametrize("how", ["truncated", "missing", "flipped", "manifest", "no manifest", "marker", "state"])
def test_damage_is_found_and_named(how: str, tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    assert health.problems(path) == health.problems(path, verify=True) == []
    file = damage(path, how)
    assert bool(health.problems(path)) == (how != "flipped")  # only reading finds a bit
    (told,) = health.problems(path, verify=True)
    assert file.name in told


def test_a_newer_format_is_no_damage(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    marker = json.loads((path / directory.MARKER).read_text(encoding="utf-8"))
    (path / directory.MARKER).write_text(json.dumps({**marker, "format_version": 99}), encoding="utf-8")
    with pytest.raises(directory.NewerFormatError, match=r"format 99, this k3train reads up to 1; update it"):
        health.problems(path)


def test_a_copy_is_whole_and_verified(tmp_path: Path) -> None:
    path = make(tmp_path / "run", 3)
    (tmp_path / "archive").mkdir()
    made = copy(path, tmp_path / "archive")
    assert made == tmp_path / "archive" / "step_00000003"
    assert health.problems(made, verify=True) == []
    assert manifest.files_of(made) == manifest.files_of(path)
    assert all((made / name).read_bytes() == (path / name).read_bytes() for name in manifest.files_of(path))
    assert copy(path, tmp_path / "other" / "name").name == "name"
    with pytest.raises(UserError, match=r"step_00000003 is there already"):
        copy(path, tmp_path / "archive")


@pytest.mark.parametrize("how", ["truncated", "missing", "flipped", "manifest", "marker"])
def test_a_damaged_checkpoint_is_not_copied(how: str, tmp_path: Path) -> None:
    path = make(tmp_path / "run", 1)
    damage(path, how)
    with pytest.raises(UserError, match=r"step_00000001.* (is damaged|cannot be read)"):
        copy(path, tmp_path / "copy")
    assert names(tmp_path) == ["run"]


@pytest.mark.parametrize("name", ["step_00000001.a1.partial", "step_00000001.damaged"])
def test_a_half_written_checkpoint_is_not_copied(name: str, tmp_path: Path) -> None:
    """Not even one that has its marker, and lacks only its name."""
    make(tmp_path, 1).rename(tmp_path / name)
    with pytest.raises(UserError, match=r"is not a finished checkpoint .* such as .*step_00000001$"):
        copy(tmp_path / name, tmp_path / "copy")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"is half-written or no checkpoint \(no checkpoint\.json\)"):
        copy(tmp_path / "empty", tmp_path / "copy")


def test_a_copy_onto_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written"):
        copy(path, tmp_path / "file" / "copy")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checkpoint_tool", ROOT / "tools" / "checkpoint.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tool_prunes(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "checkpoints"
    for step in (1, 2, 3, 4, 5):
        make(root, step)
    damage(root / "step_00000005", "truncated")
    (root / "step_00000006.x.partial").mkdir()
    arguments = ["prune", str(tmp_path), "--keep-last", "1", "--milestone", "2"]
    assert tool.main([*arguments, "--dry-run"]) == 0
    assert steps(root) == [1, 2, 3, 4, 5]
    assert tool.main(arguments) == 0
    # The damaged one is the newest, but not the one that is kept for being it.
    assert names(root) == ["step_00000002", "step_00000004", "step_00000005"]
    told = capsys.readouterr().out
    assert "step_00000005: " in told
    assert "left alone" in told


def test_the_tool_refuses(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make(tmp_path / "checkpoints", 1)
    partial = path.with_name("step_00000002.x.partial")
    partial.mkdir()
    cases = [
        (["prune", str(partial), "--keep-last", "1"], "is a single checkpoint, whole or half-written"),
        (["prune", str(path), "--keep-last", "1"], "is a single checkpoint"),
        (["prune", str(tmp_path), "--keep-last", "0"], "--keep-last=0 is out of range; allowed: at least 1"),
        (["prune", str(tmp_path / "no"), "--keep-last", "1"], "holds no committed checkpoint"),
        (["copy", str(partial), str(tmp_path / "c")], "is not a finished checkpoint"),
    ]
    for arguments, words in cases:
        assert tool.main(arguments) == 2
        assert words in capsys.readouterr().err
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert tool.main(["prune", str(tmp_path), "--keep-last", "1"]) == 2
        assert "is in use by a run" in capsys.readouterr().err
    assert tool.main(["prune", str(tmp_path), "--keep-last", "1"]) == 0
