"""Turn local files into a tokenized corpus for pretraining: `python tools/prepare_corpus.py --help`.

Interrupted, it goes on where it was when the same command is given again. Bad rows are counted and named in
`report.json`. See docs/data.md.
"""

import argparse
import os
import sys
import time

from k3train.data.corpus import verify_corpus
from k3train.data.prepare import Progress, prepare_corpus
from k3train.data.shards import PrepareOptions
from k3train.data.sources import FORMATS, TEXT_UNITS
from k3train.data.tokenizer import load_tokenizer
from k3train.errors import UserError

_LOG_SECONDS = 10.0


class ProgressLine:
    """One self-updating line on a terminal, a line now and then in a log."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown = float("-inf")
        self._first_bytes: int | None = None

    def __call__(self, progress: Progress) -> None:
        """Show `progress`."""
        now = time.monotonic()
        if self._first_bytes is None:  # shards of an earlier run do not count for the speed
            self._first_bytes = progress.bytes_done
        last = progress.shards_done == progress.shards
        if not sys.stderr.isatty() and now - self._shown < _LOG_SECONDS and not last:
            return
        self._shown = now
        rate = (progress.bytes_done - self._first_bytes) / max(now - self._started, 1e-9)
        eta = f"{(progress.bytes - progress.bytes_done) / rate:.0f} s left" if rate else "starting"
        line = (
            f"shard {progress.shards_done}/{progress.shards}, {progress.bytes_done / 1e6:.1f} of "
            f"{progress.bytes / 1e6:.1f} MB, {progress.tokens / 1e6:.2f}M tokens, {rate / 1e6:.1f} MB/s, "
            f"{eta}"
        )
        if sys.stderr.isatty():
            print(f"\r{line}\033[K", end="\n" if last else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def build_parser() -> argparse.ArgumentParser:
    """The options of the program."""
    defaults = PrepareOptions()
    parser = argparse.ArgumentParser(description="Turn local files into a tokenized corpus for pretraining.")
    parser.add_argument(
        "inputs", nargs="*", help="files, directories, glob patterns, or directories of datasets.save_to_disk"
    )
    parser.add_argument("--out", help="directory of the corpus to make")
    parser.add_argument("--tokenizer", help="tokenizer.json, or a directory that holds one")
    parser.add_argument("--train-tokenizer", type=int, metavar="VOCAB", help="train one of this size instead")
    parser.add_argument("--text-field", default=defaults.text_field, help="column of the text (%(default)s)")
    parser.add_argument("--text-unit", choices=TEXT_UNITS, default=defaults.text_unit, help="document of a text file")
    parser.add_argument("--format", choices=FORMATS, help="of all files; without it, by their suffixes")
    parser.add_argument("--dataset-split", help="split of a saved DatasetDict")
    parser.add_argument(
        "--valid-fraction", type=float, default=defaults.valid_fraction, help="share held out (%(default)s)"
    )
    parser.add_argument("--max-document-tokens", type=int, help="longest document (no limit)")
    parser.add_argument("--oversized", choices=("split", "drop"), default=defaults.oversized)
    parser.add_argument("--invalid-utf8", choices=("drop", "replace"), default=defaults.invalid_utf8)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace a finished corpus")
    parser.add_argument("--verify", metavar="DIR", help="only compare a corpus with its manifest")
    return parser


def run(args: argparse.Namespace) -> None:
    """Do what the options say.

    Raises:
        UserError: bad options or input.
    """
    if args.verify:
        verify_corpus(args.verify)
        print(f"{args.verify}: every file agrees with the manifest.")
        return
    if not args.inputs or not args.out:
        raise UserError("Inputs and --out are needed; see --help.")
    if (args.tokenizer is None) == (args.train_tokenizer is None):
        raise UserError("Give one of --tokenizer PATH and --train-tokenizer VOCAB.")
    options = PrepareOptions(
        text_field=args.text_field,
        text_unit=args.text_unit,
        file_format=args.format,
        dataset_split=args.dataset_split,
        valid_fraction=args.valid_fraction,
        max_document_tokens=args.max_document_tokens,
        oversized=args.oversized,
        invalid_utf8=args.invalid_utf8,
    )
    tokenizer = args.train_tokenizer if args.tokenizer is None else load_tokenizer(args.tokenizer)
    manifest, report = prepare_corpus(
        args.inputs, args.out, tokenizer, options, args.workers, args.overwrite, ProgressLine()
    )
    print("\n".join(report.lines()))
    for split, entry in manifest["splits"].items():
        print(
            f"{args.out}/{split}: {entry['documents']} documents, {entry['tokens']} tokens, "
            f"{entry['text_bytes'] / entry['tokens']:.2f} bytes per token"
        )
    if args.valid_fraction and "valid" not in manifest["splits"]:
        print("No document fell into the validation split; give a larger --valid-fraction to have one.")


def main() -> int:
    """Run the program; returns its exit code."""
    args = build_parser().parse_args()
    try:
        run(args)
    except UserError as error:
        print(f"prepare_corpus: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nprepare_corpus: stopped; the same command goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
