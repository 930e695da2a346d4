"""The demo corpus: the source files of the Python standard library, which every machine here has."""

import hashlib
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

from k3train.data.corpus import read_manifest, verify_corpus
from k3train.data.prepare import Progress, prepare_corpus
from k3train.data.shards import PrepareOptions
from k3train.errors import UserError

DEMO_VOCAB_SIZE = 2048
DEMO_VALID_FRACTION = 0.05

# Tests repeat themselves, encodings are near copies of one table, and the rest is not the standard library.
_SKIPPED_DIRECTORIES = frozenset(
    {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__", "ensurepip"}
)


def stdlib_files(root: Path | None = None) -> list[Path]:
    """The source files of the running interpreter's standard library (or of `root`), tests left out, sorted.

    Raises:
        UserError: there are none, as in an interpreter whose library is a zip file.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(root.rglob("*.py")) if not _SKIPPED_DIRECTORIES & {*file.relative_to(root).parts}]
    if not files:
        raise UserError(
            f"No Python source files in {root}, the standard library of {sys.executable}; "
            "use an interpreter that has them."
        )
    return files


def prepare_demo(
    out: str | Path,
    vocab_size: int = DEMO_VOCAB_SIZE,
    valid_fraction: float = DEMO_VALID_FRACTION,
    overwrite: bool = False,
    files: list[Path] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[dict, bool]:
    """Write the demo corpus to `out`, with a tokenizer trained on its training files; or find it there.

    Each file is one document; a hash of its content puts it into training or validation.

    Args:
        out: directory to make.
        vocab_size: of the tokenizer.
        valid_fraction: share of the files that are held out.
        overwrite: write it anew even where it is there.
        files: the source files; None takes `stdlib_files()`.
        on_progress: called as the files are tokenized.

    Returns:
        The manifest, and whether anything was written.

    Raises:
        UserError: `out` holds another corpus or something else, or its files are damaged.
    """
    files = stdlib_files() if files is None else files
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    # Of the content and not the place: two interpreters with the same library share the corpus.
    demo = {
        "source_sha256": digest.hexdigest(),
        "vocab_size": vocab_size,
        "valid_fraction": valid_fraction,
    }
    manifest = read_manifest(out)
    if manifest is not None and not overwrite:
        if manifest.get("demo") != demo:
            raise UserError(
                f"{out} holds a corpus of other files or settings than this demo corpus; "
                "give another --out, or --overwrite to replace it."
            )
        return verify_corpus(out), False
    options = PrepareOptions(file_format="text", valid_fraction=valid_fraction)
    paths = [str(file) for file in files]
    manifest, _ = prepare_corpus(
        paths, out, vocab_size, options, overwrite=overwrite, on_progress=on_progress, extra={"demo": demo}
    )
    return manifest, True
