"""Make a tokenizer.json of a tiktoken vocabulary: `python tools/tiktoken_to_json.py --hf FOLDER --out FOLDER`."""

import argparse
import json
import sys
from pathlib import Path

from k3train.checkpoint.directory import copy_tokenizer
from k3train.data.tiktoken import VOCABULARY, tokenizer_json
from k3train.data.tokenizer import load_tokenizer
from k3train.errors import UserError


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hf", required=True, type=Path, help=f"published folder with {VOCABULARY}")
    parser.add_argument("--out", required=True, type=Path, help="where to write tokenizer.json; may be the same folder")
    args = parser.parse_args()
    target = args.out / "tokenizer.json"
    try:
        if target.exists():
            raise UserError(f"{target} is there already; give another --out, it is never overwritten")
        content = tokenizer_json(args.hf)
        if args.out.resolve() != args.hf.resolve():
            copy_tokenizer(args.hf, args.out)
        target.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        made = load_tokenizer(args.out)
    except (UserError, OSError) as error:
        print(f"tiktoken_to_json: {error}", file=sys.stderr)
        return 2
    print(f"{target}: {made.vocab_size} tokens, {len(made.special_ids)} of them special")
    return 0


if __name__ == "__main__":
    sys.exit(main())
