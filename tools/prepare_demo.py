"""Make the demo corpus: `python tools/prepare_demo.py --out DIR`. A second call finds it there."""

import argparse
import sys
import time

from k3train.data.demo import DEMO_VALID_FRACTION, DEMO_VOCAB_SIZE, prepare_demo
from k3train.errors import UserError


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(
        description="Turn the Python standard library's source files into a tokenized corpus for the demo."
    )
    parser.add_argument("--out", required=True, help="directory to make")
    parser.add_argument("--vocab-size", type=int, default=DEMO_VOCAB_SIZE, help="of the tokenizer (%(default)s)")
    parser.add_argument(
        "--valid-fraction",
        type=float,
        default=DEMO_VALID_FRACTION,
        help="share of held-out files (%(default)s)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that is there")
    args = parser.parse_args()
    started = time.monotonic()
    try:
        manifest, written = prepare_demo(args.out, args.vocab_size, args.valid_fraction, args.overwrite)
    except UserError as error:
        print(f"prepare_demo: {error}", file=sys.stderr)
        return 2
    if not written:
        print(f"The demo corpus is already in {args.out}; nothing to do.")
    for split, entry in manifest["splits"].items():
        print(
            f"{args.out}/{split}: {entry['documents']} files, {entry['tokens']} tokens, "
            f"{entry['text_bytes'] / entry['tokens']:.2f} bytes per token"
        )
    if written:
        print(f"Written in {time.monotonic() - started:.1f} s with a vocabulary of {args.vocab_size}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
