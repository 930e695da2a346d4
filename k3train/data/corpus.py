"""A corpus on disk: Megatron indexed datasets with a manifest, and the checks before anything reads them.

A corpus directory holds `train.bin/.idx`, `valid.bin/.idx` (where there is a validation split),
`tokenizer.json`, `report.json` and the manifest `corpus.json`. A *prefix* is the path of one split without
its suffix, such as `corpus/train`. Indexed datasets written by other tools work too; they only lack the
manifest.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from k3train.errors import UserError

MANIFEST_NAME = "corpus.json"
MANIFEST_FORMAT = "k3train-corpus"
MANIFEST_VERSION = 1

_IDX_MAGIC = b"MMIDIDX\x00\x00"
_IDX_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, document boundaries
_DTYPES: dict[int, type[np.generic]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
_SCAN_TOKENS = 1 << 24


@dataclass(frozen=True)
class CorpusInfo:
    """What is known of one split without reading its tokens.

    Attributes:
        prefix: path without suffix.
        documents: number of documents.
        sequences: number of sequences; above `documents` where long documents were split.
        tokens: number of tokens, end-of-document tokens included.
        text_bytes: UTF-8 bytes of the text, or None without a manifest.
        dtype: NumPy name of the stored token type.
        tokenizer_sha256: hash of the tokenizer it was written with, or None without a manifest.
        fingerprint: short hash that changes when the corpus is written anew with other content.
    """

    prefix: str
    documents: int
    sequences: int
    tokens: int
    text_bytes: int | None
    dtype: str
    tokenizer_sha256: str | None
    fingerprint: str


def check_corpus(
    prefix: str | Path, vocab_size: int, tokenizer_hash: str | None = None, seq_length: int | None = None
) -> CorpusInfo:
    """Check one split before any long work: files, header, sizes, tokenizer, token ids, length.

    Reads the index and the manifest. The tokens themselves are read only where no manifest gives the highest
    id, and then at most 16M of them, evenly over the file.

    Args:
        prefix: path of the split without `.bin` or `.idx`.
        vocab_size: the tokens must lie below it.
        tokenizer_hash: `Tokenizer.sha256` of the tokenizer that is going to be used; None skips the
            comparison.
        seq_length: training sequence length; the corpus must give at least one sample. None skips this.

    Raises:
        UserError: any of these fails; one sentence names the file, what was found and the cure.
    """
    prefix = str(prefix)
    manifest = _split_manifest(prefix)
    for suffix in (".idx", ".bin"):
        _require_file(prefix, suffix, manifest)
    info, dtype = _read_index(prefix, manifest)
    if tokenizer_hash and info.tokenizer_sha256 and tokenizer_hash != info.tokenizer_sha256:
        raise UserError(
            f"Corpus {prefix} was written with another tokenizer (hash {info.tokenizer_sha256[:12]}) than "
            "the one "
            f"given (hash {tokenizer_hash[:12]}); use the tokenizer.json in the corpus directory or prepare "
            "it anew."
        )
    if seq_length is not None and info.tokens < seq_length + 1:
        raise UserError(
            f"Corpus {prefix} has {info.tokens} tokens, too few for one sample of seq_length={seq_length} "
            f"(it takes {seq_length + 1}); give a smaller seq_length or a larger corpus."
        )
    highest = manifest["max_token_id"] if manifest else _highest_token(prefix, dtype, info.tokens)
    if highest >= vocab_size:
        raise UserError(
            f"Corpus {prefix} has token id {highest}, outside vocab_size={vocab_size}; "
            "use the tokenizer it was written with or a model whose vocab_size is larger."
        )
    return info


def read_manifest(directory: str | Path) -> dict | None:
    """The manifest of a corpus directory, or None where it has none.

    Raises:
        UserError: there is one, but it is not a manifest of this format and version.
    """
    path = Path(directory) / MANIFEST_NAME
    if not path.is_file():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON ({error}); prepare the corpus anew.") from error
    found = (manifest.get("format"), manifest.get("version")) if isinstance(manifest, dict) else None
    if found != (MANIFEST_FORMAT, MANIFEST_VERSION):
        raise UserError(
            f"{path} is not a corpus manifest this version reads (format and version are {found}, "
            f"allowed is {(MANIFEST_FORMAT, MANIFEST_VERSION)}); prepare the corpus anew."
        )
    return manifest


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_corpus(directory: str | Path) -> dict:
    """Read every file of a corpus and compare it with the manifest; returns the manifest.

    Raises:
        UserError: no manifest, or a file is missing or differs.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise UserError(f"{directory} has no {MANIFEST_NAME}, so it is not a finished corpus; prepare it first.")
    for split, entry in manifest["splits"].items():
        for suffix in ("bin", "idx"):
            path = Path(directory) / f"{split}.{suffix}"
            if not path.is_file() or file_sha256(path) != entry[f"{suffix}_sha256"]:
                raise UserError(f"{path} is missing or differs from {MANIFEST_NAME}; prepare the corpus anew.")
    return manifest


def _split_manifest(prefix: str) -> dict | None:
    """The manifest's entry of the split at `prefix`, with the tokenizer's hash added."""
    path = Path(prefix)
    manifest = read_manifest(path.parent)
    if manifest is None or path.name not in manifest["splits"]:
        return None
    return {**manifest["splits"][path.name], "tokenizer_sha256": manifest["tokenizer"]["sha256"]}


def _require_file(prefix: str, suffix: str, manifest: dict | None) -> None:
    if Path(prefix + suffix).is_file():
        return
    other = ".bin" if suffix == ".idx" else ".idx"
    if manifest is not None or Path(prefix + other).is_file():
        raise UserError(f"Corpus {prefix} lacks its {suffix} file; copy {prefix}{suffix} again or prepare it anew.")
    known = (read_manifest(prefix) or read_manifest(Path(prefix).parent) or {}).get("splits", {})
    hint = f" (this corpus has the splits {', '.join(known)})" if known else ""
    raise UserError(
        f"No corpus at {prefix}: {prefix}.idx and {prefix}.bin do not exist{hint}; give the path of a split "
        "without "
        "suffix, such as corpus/train, or make one with tools/prepare_corpus.py or tools/prepare_demo.py."
    )


def _read_index(prefix: str, manifest: dict | None) -> tuple[CorpusInfo, np.dtype]:
    """Read header and lengths of the index and hold them against the sizes of both files."""
    path = Path(prefix + ".idx")
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(_IDX_HEADER.size)
    if len(header) < _IDX_HEADER.size or not header.startswith(_IDX_MAGIC):
        raise UserError(f"{path} is not a Megatron index (bad header); copy it again or prepare the corpus anew.")
    _, version, code, sequences, boundaries = _IDX_HEADER.unpack(header)
    if version != 1 or code not in _DTYPES:
        raise UserError(
            f"{path} has version {version} and token type {code}, allowed are version 1 and types "
            f"{sorted(_DTYPES)}; copy it again or prepare the corpus anew."
        )
    expected = _IDX_HEADER.size + sequences * (4 + 8) + boundaries * 8
    if size != expected:
        raise UserError(
            f"{path} has {size} bytes where its header promises {expected} (truncated or corrupt); "
            "copy it again or prepare the corpus anew."
        )
    dtype = np.dtype(_DTYPES[code])
    lengths = np.fromfile(path, dtype="<i4", count=sequences, offset=_IDX_HEADER.size)
    tokens = int(lengths.sum(dtype=np.int64))
    if tokens == 0 or lengths.min() < 0:
        raise UserError(f"Corpus {prefix} has no tokens; give it text and prepare it anew.")
    found = Path(prefix + ".bin").stat().st_size
    if found != tokens * dtype.itemsize:
        raise UserError(
            f"{prefix}.bin has {found} bytes where its index promises {tokens * dtype.itemsize} (truncated, "
            "or of "
            "another corpus); copy it again or prepare the corpus anew."
        )
    if manifest and manifest["tokens"] != tokens:
        raise UserError(
            f"{path} has {tokens} tokens where {MANIFEST_NAME} says {manifest['tokens']}; "
            "the files are of different corpora, prepare it anew."
        )
    # The manifest's hash names the content; without it, the lengths and the date of the data file have to do.
    stamp = manifest["bin_sha256"] if manifest else str(Path(prefix + ".bin").stat().st_mtime_ns)
    info = CorpusInfo(
        prefix=prefix,
        documents=boundaries - 1,
        sequences=sequences,
        tokens=tokens,
        text_bytes=manifest["text_bytes"] if manifest else None,
        dtype=dtype.name,
        tokenizer_sha256=manifest["tokenizer_sha256"] if manifest else None,
        fingerprint=hashlib.sha256(lengths.tobytes() + stamp.encode()).hexdigest()[:16],
    )
    return info, dtype


def _highest_token(prefix: str, dtype: np.dtype, tokens: int) -> int:
    data = np.memmap(prefix + ".bin", dtype=dtype, mode="r", shape=(tokens,))
    return int(data[:: max(1, tokens // _SCAN_TOKENS)].max())
