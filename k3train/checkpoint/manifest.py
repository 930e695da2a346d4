"""The list of a checkpoint's files with their sizes and SHA-256 hashes, written when it is committed.

Sizes are compared whenever a checkpoint is chosen to continue from, which costs one `stat` a file; hashes where asked
(`checkpoint.verify`, `k3train inspect --verify`, `tools/checkpoint.py copy`). The hash of the list itself stands in the
marker.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
Entry = dict[str, Any]  # bytes: size of the file; sha256: hexadecimal


def describe(file: Path) -> Entry:
    """Size and hash of a file, which is read once."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"bytes": os.fstat(stream.fileno()).st_size, "sha256": digest}


def describe_all(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """`describe` of several files below `folder`, several at a time (hashing frees the interpreter's lock)."""
    names = list(names)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        return dict(zip(names, threads.map(lambda name: describe(folder / name), names), strict=True))


def files_of(folder: Path) -> list[str]:
    """Every file below `folder`, relative to it."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def write(folder: Path, known: dict[str, Entry] | None = None) -> str:
    """Write the manifest of a folder; `known` spares the files in it another reading. Returns the manifest's hash."""
    known = known or {}
    rest = describe_all(folder, [name for name in files_of(folder) if name not in known and name != MANIFEST])
    text = json.dumps({"files": dict(sorted({**known, **rest}.items()))}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()


def read(folder: Path, expected: str) -> dict[str, Entry]:
    """The files of a checkpoint whose marker gives `expected` as the manifest's hash.

    Raises:
        ValueError: it is missing, or not the one that was written.
    """
    file = folder / MANIFEST
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror})") from error
    if hashlib.sha256(content).hexdigest() != expected:
        raise ValueError(f"{file} is not the one that was committed")
    return json.loads(content)["files"]


def compare(folder: Path, files: dict[str, Entry], verify: bool) -> list[str]:
    """What is missing, of another size or, with `verify`, of other content; a sentence each."""
    found = []
    whole = []
    for name, entry in files.items():
        file = folder / name
        try:
            size = file.stat().st_size
        except OSError as error:
            found.append(f"{file} is missing" if isinstance(error, FileNotFoundError) else f"{file}: {error.strerror}")
            continue
        if size != entry["bytes"]:
            found.append(f"{file} has {size} bytes, needs {entry['bytes']}")
        else:
            whole.append(name)
    if verify:
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
            found += [s for s in threads.map(lambda name: _content(folder / name, files[name]), whole) if s]
    return found


def _content(file: Path, entry: Entry) -> str | None:
    try:
        same = describe(file)["sha256"] == entry["sha256"]
    except OSError as error:
        return f"{file} cannot be read ({error.strerror})"
    return None if same else f"{file} is not what was written: its SHA-256 differs"
