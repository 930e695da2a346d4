"""Give a tokenizer K3's structural chat tokens: `python tools/add_chat_tokens.py --tokenizer FILE --out DIR`."""

import argparse
import sys
from pathlib import Path

from k3train.data.chat.tokens import save_chat_tokenizer, with_chat_tokens
from k3train.data.chat.xtml import STRUCTURE, WORDS
from k3train.data.tokenizer import load_tokenizer
from k3train.errors import UserError


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json, or the folder that holds it")
    parser.add_argument("--out", required=True, help="folder to write the new one into")
    parser.add_argument("--grow", action="store_true", help="new ids instead of those of reserved or last tokens")
    parser.add_argument("--words", action="store_true", help="the format's words too, for small vocabularies")
    args = parser.parse_args()
    try:
        old = load_tokenizer(args.tokenizer)
        out = Path(args.out)
        new = with_chat_tokens(old, args.grow, words=args.words)
        if (out / "tokenizer.json").exists() and load_tokenizer(out).sha256 != new.sha256:
            raise UserError(f"{out} holds another tokenizer; give another --out, it is never overwritten")
        save_chat_tokenizer(new, out)
    except UserError as error:
        print(f"add_chat_tokens: {error}", file=sys.stderr)
        return 2
    for name in (*STRUCTURE, *(WORDS if args.words else ())):
        index = new.special_id(name) or new.encode(name)[0]
        was = old.decode([index]) if index < old.vocab_size else None
        print(f"{name[:24]:<24} id {index}" + ("" if was in (None, name) else f", which was {was!r}"))
    print(f"{out}: {new.vocab_size} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
