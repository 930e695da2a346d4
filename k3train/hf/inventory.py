"""The tensors of a Hugging Face folder against those of the model: everything wrong is said before long work."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from k3train.errors import UserError
from k3train.hf.config import K3_ARCHITECTURE, HFConfig
from k3train.hf.mapping import Part, packed_names, packed_shapes
from k3train.hf.names import K3_PREFIX, other_spelling
from k3train.hf.safetensors_files import DTYPES, INDEX, Entry, Reader, files_of, read_header, read_index
from k3train.hf.source import CARRIED_PREFIXES

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Inventory:
    """Where every published tensor lies."""

    headers: dict[str, bytes] = field(default_factory=dict)  # raw, by file name
    plain: dict[str, Entry] = field(default_factory=dict)  # by the published name of the weight
    packed: dict[str, tuple[Entry, Entry]] = field(default_factory=dict)  # codes and scales, by that name
    carried: list[Entry] = field(default_factory=list)

    def dtype(self, names: list[str]) -> torch.dtype:
        """The dtype that holds all of these weights exactly; quantized ones are exact in bf16."""
        dtypes = [torch.bfloat16 if n in self.packed else DTYPES[self.plain[n].dtype] for n in names]
        found = dtypes[0]
        for dtype in dtypes[1:]:
            found = torch.promote_types(found, dtype)
        return found


def take_inventory(folder: Path, config: HFConfig, parts: dict[str, Part]) -> Inventory:
    """Read all headers and place every tensor.

    Raises:
        UserError: a file is missing, cut short or damaged; a tensor is missing, unexpected, stored twice, of another
            shape or dtype; experts are quantized in another format; A_log's padding is not zero.
    """
    found: dict[str, Entry] = {}
    inventory = Inventory()
    for file in files_of(folder):
        inventory.headers[file.name], entries = read_header(file)
        for name, entry in entries.items():
            if name in found:
                raise UserError(f"{file}: tensor {name} is also in {found[name].file.name}; expected once")
            found[name] = entry
    _check_index(folder, found)
    left = dict(found)
    for name, part in parts.items():
        _place(name, part, left, inventory, folder, config)
    _place_rest(left, inventory, config, folder)
    if inventory.packed:
        _check_quantization(folder, config)
    _check_padding(inventory, parts)
    return inventory


def _check_index(folder: Path, found: dict[str, Entry]) -> None:
    if not (folder / INDEX).is_file():
        return
    for name, file in read_index(folder / INDEX).items():
        if name not in found or found[name].file.name != file:
            where = f"it is in {found[name].file.name}" if name in found else "it is in none"
            raise UserError(
                f"{folder / file}: {INDEX} expects tensor {name} in this file; {where}: download both again"
            )


def _place(name: str, part: Part, left: dict[str, Entry], inventory: Inventory, folder: Path, config: HFConfig) -> None:
    """Move the tensor that is called `name` from `left` to the inventory."""
    codes_name, scales_name = packed_names(name)
    codes, scales = left.pop(codes_name, None), left.pop(scales_name, None)
    entry = left.pop(name, None) or left.pop(other_spelling(name), None)
    one = codes or scales
    if part.weight.is_expert and one:
        if entry or not (codes and scales):
            beside = f" and {entry.name}" if entry else ""
            raise UserError(
                f"{one.file}: found {one.name}{beside}; expected {codes_name} and {scales_name}, or {name} alone"
            )
        for stored, shape in zip((codes, scales), packed_shapes(part)):
            _check(stored, stored.shape == shape, shape, (torch.uint8,))
        inventory.packed[name] = codes, scales
        return
    if entry is None:
        raise _missing(name, part, left, folder, config)
    _check(entry, part.accepts(entry.shape), part.shape, _FLOATS)
    inventory.plain[name] = entry


def _check(entry: Entry, fits: bool, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if not fits:
        raise UserError(
            f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}; config.json makes it {list(shape)}"
        )
    if DTYPES.get(entry.dtype) not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise UserError(f"{entry.file}: tensor {entry.name} is stored as {entry.dtype}; expected {names}")


def _missing(name: str, part: Part, left: dict[str, Entry], folder: Path, config: HFConfig) -> UserError:
    index = folder / INDEX
    where = index if index.is_file() else folder / "model.safetensors"
    is_k3 = config.architecture == K3_ARCHITECTURE
    other = name.removeprefix(K3_PREFIX) if is_k3 else K3_PREFIX + name
    hint = ""
    if other in left:
        kind = "Kimi Linear" if is_k3 else "Kimi K3"
        hint = f"; found {other}: these are the names of {kind}, and config.json says {config.architecture}"
    elif name.endswith("_proj.weight") and any(n.endswith("kv_a_proj_with_mqa.weight") for n in left):
        hint = "; the layer has full attention in the file and linear attention in config.json, or the reverse"
    return UserError(f"{where}: tensor {name} is missing; expected {list(part.shape)} for {config.architecture}{hint}")


def _place_rest(left: dict[str, Entry], inventory: Inventory, config: HFConfig, folder: Path) -> None:
    for name, entry in left.items():
        if not (config.architecture == K3_ARCHITECTURE and name.startswith(CARRIED_PREFIXES)):
            raise UserError(
                f"{entry.file}: tensor {name} {entry.dtype} {list(entry.shape)} is unexpected: {config.architecture}"
                f" as {folder / 'config.json'} describes it has none of that name"
            )
        if entry.dtype not in DTYPES:
            raise UserError(f"{entry.file}: tensor {name} is stored as {entry.dtype}; expected {', '.join(DTYPES)}")
    inventory.carried = list(left.values())


def _check_quantization(folder: Path, config: HFConfig) -> None:
    """The tensors decide what is quantized; the config may only not contradict how."""
    quantization = config.quantization or {}
    kind = quantization.get("format", "mxfp4-pack-quantized")
    if kind != "mxfp4-pack-quantized":
        raise UserError(
            f"{folder / 'config.json'}: quantization_config.format is {kind!r}; k3train reads mxfp4-pack-quantized"
        )


def _check_padding(inventory: Inventory, parts: dict[str, Part]) -> None:
    """A_log is stored with zeros behind the heads; anything else there means that the heads are counted wrongly."""
    reader = Reader()
    for name, entry in inventory.plain.items():
        if not parts[name].weight.key.endswith(".A_log") or len(entry.shape) != 1:
            continue
        heads, stored = parts[name].shape[0], entry.shape[0]
        padding = reader.elements(entry, heads, stored)
        if padding.numel() and padding.count_nonzero():
            first = int(padding.nonzero()[0])
            raise UserError(
                f"{entry.file}: tensor {entry.name} has {stored} entries for {heads} heads; expected zeros behind them,"
                f" found {float(padding[first])} at {heads + first}"
            )
    reader.close()
