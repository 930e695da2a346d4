"""What an imported checkpoint keeps of the Hugging Face folder it came from, under `hf/`.

config.json           as it was
headers/FILE.json     the header of every safetensors file: names, dtypes, shapes, order
carried.safetensors   tensors of the vision tower and projector, untouched
files/                everything else: tokenizer, chat template, generation config, code, index
source.json           the files in order, and whether experts were quantized
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from k3train.checkpoint import directory
from k3train.config.model import ModelConfig
from k3train.errors import UserError
from k3train.hf.config import HFConfig, read_config
from k3train.hf.safetensors_files import NO_HEADER, Entry, Reader, Writer, header_bytes, read_header, rows_of
from k3train.hf.write_config import text_config

FOLDER = "hf"
CARRIED_PREFIXES = ("vision_tower.", "mm_projector.")
_FORMAT_VERSION = 1
_FREE = ("initializer_range",)  # of the training alone
_NO_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")  # other copies of the weights


@dataclass(frozen=True)
class Source:
    """The kept folder of an imported checkpoint, and that checkpoint."""

    checkpoint: Path
    config: HFConfig
    files: tuple[str, ...]
    packed: bool
    others: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return self.checkpoint / FOLDER

    def header(self, file: str) -> bytes:
        """The raw header that a safetensors file had. UserError where it is damaged."""
        kept = self.folder / "headers" / f"{file}.json"
        try:
            raw = kept.read_bytes()
            tensors_of(raw)
        except (OSError, *NO_HEADER) as error:
            raise UserError(f"{kept} cannot be read ({error}); import the checkpoint again") from error
        return raw

    def carried(self) -> dict[str, Entry]:
        """The tensors that were carried through."""
        return read_header(self.folder / "carried.safetensors")[1]

    def other_files(self) -> list[Path]:
        """What was kept beside the tensors, relative to `files/`. UserError where one is gone."""
        lost = next((name for name in self.others if not (self.folder / "files" / name).is_file()), None)
        if lost is not None:
            raise UserError(f"{self.folder / 'files' / lost} is missing; restore it, or import the checkpoint again")
        return [Path(name) for name in self.others]

    def check_model(self, model: ModelConfig, checkpoint: Path) -> None:
        """Raise UserError where `model` computes something else than the kept config.json says."""
        kept, now = text_config(self.config.model), text_config(model)
        for key in (k for k in kept | now if k not in _FREE and kept.get(k) != now.get(k)):
            raise UserError(
                f"{checkpoint} was trained with {key}={now.get(key)}, and the imported"
                f" {self.folder / 'config.json'} has {kept.get(key)}; --like none writes a new config.json"
            )


def keep_source(hf: Path, checkpoint: Path, headers: dict[str, bytes], carried: list[Entry], packed: bool) -> None:
    """Write the folder into a checkpoint that is being made."""
    folder = checkpoint / FOLDER
    (folder / "headers").mkdir(parents=True)
    shutil.copyfile(hf / "config.json", folder / "config.json")
    for file, raw in headers.items():
        (folder / "headers" / f"{file}.json").write_bytes(raw)
    reader = Reader()
    with Writer(folder / "carried.safetensors", header_bytes((e.name, e.dtype, e.shape) for e in carried)) as writer:
        for entry in carried:
            for data in reader.chunks(entry):
                writer.write(data)
    reader.close()
    others = other_files(hf, headers)
    for path in others:
        target = folder / "files" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(hf / path, target)
    source = {"format_version": _FORMAT_VERSION, "files": list(headers), "packed": packed}
    source["others"] = [str(path) for path in others]
    (folder / "source.json").write_text(json.dumps(source, indent=1), encoding="utf-8")


def other_files(hf: Path, headers: dict[str, bytes]) -> list[Path]:
    """Files beside the weights, without hidden ones (a download's own notes) and other copies of the weights."""
    found = []
    for path in sorted(hf.rglob("*")):
        inside = path.relative_to(hf)
        hidden = any(part.startswith(".") for part in inside.parts)
        weights = path.suffix in _NO_FILES or inside.name in headers
        if path.is_file() and not hidden and not weights and str(inside) != "config.json":
            found.append(inside)
    return found


def read_source(checkpoint: Path) -> Source | None:
    """What a checkpoint kept, or None where it was not imported.

    Raises:
        UserError: it is damaged, or a newer version wrote it.
    """
    file = checkpoint / FOLDER / "source.json"
    if not file.is_file():
        return None
    try:
        source = json.loads(file.read_text(encoding="utf-8"))
        version, files, packed = source["format_version"], source["files"], source["packed"]
        others = source["others"] if "others" in source else _listed(checkpoint / FOLDER / "files")
        named = all(isinstance(names, list) and all(type(n) is str for n in names) for names in (files, others))
        if not (isinstance(version, int) and named and isinstance(packed, bool)):
            raise ValueError("format_version, files and packed are of other types")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file} cannot be read ({error}); import the checkpoint again") from error
    if version > _FORMAT_VERSION:
        raise UserError(f"{file} has version {version}, this k3train reads up to {_FORMAT_VERSION}; update it")
    return Source(checkpoint, read_config(checkpoint / FOLDER / "config.json"), tuple(files), packed, tuple(others))


def _listed(root: Path) -> list[str]:
    """The files below a folder: what imports before the list was written kept."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def find_source(checkpoint: Path, like: str | None) -> Source | None:
    """The import that a checkpoint descends from: its own, or that of the weights its run started with.

    `like` names another imported checkpoint, or is "none" for the published defaults.

    Raises:
        UserError: the weights that the run started with are gone, or `like` is no imported checkpoint.
    """
    if like == "none":
        return None
    if like is not None:
        source = read_source(directory.resolve(like))
        if source is None:
            raise UserError(f"--like {like} is not an imported checkpoint; give what `k3train import` made, or none")
        return source
    seen: set[Path] = set()
    here = checkpoint
    while here.resolve() not in seen:
        seen.add(here.resolve())
        if source := read_source(here):
            return source
        origin = directory.read_marker(here)["config"].get("checkpoint", {}).get("load")
        if origin is None:
            return None
        try:
            here = directory.resolve(origin)
        except UserError as error:
            raise UserError(
                f"{here} was trained from {origin}, which is gone, and with it the files and layout to export; give an"
                " imported checkpoint with --like DIR, or --like none for the text model in the published layout"
            ) from error
    return None


def tensors_of(header: bytes) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of a raw header in the order of the bytes."""
    rows = sorted(rows_of(header), key=lambda row: row[3])
    return [(name, dtype, shape) for name, dtype, shape, _ in rows]
