"""A vocabulary that is published for tiktoken, as Kimi's are, made into a `tokenizer.json`: same texts, same ids.

Tiktoken cuts a text by a pattern, takes a piece that is a token whole, and merges the bytes of any other, always the
neighbours whose token has the lowest number. The library behind `tokenizer.json` does the same, given the merges in
the order of the tokens that they make.
"""

from __future__ import annotations

import ast
import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from k3train.data.tokenizer import byte_of_character
from k3train.errors import UserError

VOCABULARY = "tiktoken.model"
_CODE = "tokenization_*.py"


def tokenizer_json(folder: Path) -> dict[str, Any]:
    """The content of the `tokenizer.json` of a published folder.

    It has the vocabulary (`tiktoken.model`), the code that says by which pattern texts are cut and how many special
    tokens there are (`tokenization_*.py`; it is read and not run), and the special tokens' names
    (`tokenizer_config.json`).

    Raises:
        UserError: one of them is missing, or is of another form.
    """
    ranks = _ranks(folder / VOCABULARY)
    pattern, reserved = _from_code(folder)
    names = _special_names(folder / "tokenizer_config.json")
    first, end = len(ranks), len(ranks) + reserved
    if beyond := sorted(index for index in names if not first <= index < end):
        raise UserError(
            f"{folder / 'tokenizer_config.json'} names token {beyond[0]}, and special tokens of {VOCABULARY} are"
            f" {first} to {end - 1}; restore the folder from its source"
        )
    letters = {byte: character for character, byte in byte_of_character().items()}
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    merges = [(spelled[left], spelled[right]) for left, right in _merges(ranks)]
    fast = FastTokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    letters_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([cut, letters_of])
    fast.decoder = decoders.ByteLevel()
    special = [names.get(index, f"<|reserved_token_{index}|>") for index in range(first, end)]
    fast.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in special])
    for index, name in enumerate(special, start=first):
        if fast.token_to_id(name) != index:
            raise UserError(f"{folder}: special token {name!r} comes twice, or is one of {VOCABULARY} too")
    return json.loads(fast.to_str())


def _ranks(file: Path) -> dict[bytes, int]:
    """Tokens by number; a line of the file is a token's bytes in base64, and its number."""
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); restore it from its source") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise UserError(f"{file} lacks a byte or a number; restore it from its source")
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every way to make a token of two others, in the order of the tokens made."""
    found = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:place], token[place:]) for place in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        found += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found


def _from_code(folder: Path) -> tuple[str, int]:
    """`pat_str` and `num_reserved_special_tokens` of the tokenizer's class."""
    values: dict[str, Any] = {}
    for file in sorted(folder.glob(_CODE)):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                name = getattr(node.targets[0], "id", None) if isinstance(node, ast.Assign) else None
                if name in ("pat_str", "num_reserved_special_tokens"):
                    values[name] = _literal(node.value)
        except (OSError, ValueError, SyntaxError, AttributeError, TypeError) as error:
            raise UserError(f"{file} cannot be read ({error}); restore it from its source") from error
    pattern, reserved = values.get("pat_str"), values.get("num_reserved_special_tokens")
    if not isinstance(pattern, str) or type(reserved) is not int:
        raise UserError(
            f"{folder / _CODE} gives no pat_str and num_reserved_special_tokens as plain values, which say how texts"
            " are cut; put the published code there"
        )
    return pattern, reserved


def _literal(node: ast.expr) -> Any:
    """A plain value, or plain texts joined by another."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
        return ast.literal_eval(node.func.value).join(ast.literal_eval(node.args[0]))
    return ast.literal_eval(node)


def _special_names(file: Path) -> dict[int, str]:
    try:
        listed = json.loads(file.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
        return {int(index): token["content"] for index, token in listed.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}); restore it from its source") from error
