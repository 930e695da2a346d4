"""Byte-level BPE tokenizers: train, save, load, encode, decode, decode as a stream.

Only byte-level tokenizers are accepted: they lose no byte of the text, so a document can be restored from its
tokens and a loss can be given in bits per byte.
"""

import codecs
import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from k3train.errors import UserError

BOS_TOKEN = "<|bos|>"
EOS_TOKEN = "<|eos|>"
PAD_TOKEN = "<|pad|>"
SPECIAL_TOKENS = (BOS_TOKEN, EOS_TOKEN, PAD_TOKEN)
MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

_ROLES = ("bos_token", "eos_token", "pad_token")


class Tokenizer:
    """A byte-level BPE with named beginning-of-text, end-of-document and padding tokens.

    It answers to what `megatron.core.datasets.GPTDatasetConfig` asks of a tokenizer (`vocab_size`, `eod`,
    `eos`, `pad`, `unique_identifiers`). Text that spells a special token is encoded as plain text: special
    tokens come from their ids only, so no document can forge a boundary.

    Args:
        spec: the parsed content of a `tokenizer.json`.
        special_tokens: the token strings of `bos_token`, `eos_token` and `pad_token`; only `eos_token` must
            be there.
        source: what to call this tokenizer in error messages.

    Raises:
        UserError: the content is not a byte-level BPE, or names no end-of-document token.
    """

    def __init__(self, spec: dict, special_tokens: dict[str, str], source: str = "the tokenizer") -> None:
        self._spec = _as_written(spec, special_tokens)
        self._special_tokens = {role: special_tokens[role] for role in _ROLES if special_tokens.get(role)}
        try:
            self._fast = FastTokenizer.from_str(json.dumps(self._spec))
        except Exception as error:  # the library raises bare Exception for every kind of bad content
            raise UserError(f"{source} cannot be read as a tokenizer.json: {error}.") from error
        self._fast.no_truncation()
        self._fast.no_padding()
        self._fast.encode_special_tokens = True
        if "ByteLevel" not in json.dumps(spec.get("decoder")):
            raise UserError(
                f"{source} is not a byte-level tokenizer (its decoder is {spec.get('decoder')}); "
                "use one whose tokenizer.json has a ByteLevel decoder, or train one with "
                "k3train.data.tokenizer."
            )
        if "eos_token" not in self._special_tokens:
            raise UserError(
                f"{source} names no end-of-document token; add `eos_token` to its tokenizer_config.json "
                f"or a special token {EOS_TOKEN!r} to its tokenizer.json."
            )
        for role, token in self._special_tokens.items():
            if self._fast.token_to_id(token) is None:
                raise UserError(
                    f"{source} names {token!r} as its {role}, which its vocabulary does not have; "
                    "correct tokenizer_config.json."
                )

    @property
    def vocab_size(self) -> int:
        """Number of embedding rows that the token ids need (the highest id plus one)."""
        return len(self._token_bytes)

    @property
    def eod(self) -> int:
        """Id of the token that ends every document."""
        return self._id_of("eos_token")

    @property
    def eos(self) -> int:
        """The same token as `eod`, under the name that Megatron-Core compares with `pad`."""
        return self.eod

    @property
    def bos(self) -> int | None:
        """Id of the beginning-of-text token, or None where the tokenizer has none."""
        return self._id_of("bos_token") if "bos_token" in self._special_tokens else None

    @property
    def pad(self) -> int:
        """Id of the padding token; `eod` where the tokenizer has none (padding is masked out of the loss)."""
        return self._id_of("pad_token") if "pad_token" in self._special_tokens else self.eod

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens, which no text encodes to."""
        added = self._fast.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def special_id(self, name: str) -> int | None:
        """Id of the special token called `name`; None where the tokenizer has no such special token."""
        return self._special_names.get(name)

    def content(self) -> tuple[dict, dict[str, str]]:
        """What it is made of: the content of `tokenizer.json`, and the named special tokens."""
        return self._spec, self._special_tokens

    @cached_property
    def _special_names(self) -> dict[str, int]:
        added = self._fast.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items() if token.special}

    @cached_property
    def sha256(self) -> str:
        """Hash of the vocabulary, the rules and the special tokens; independent of where the file lies."""
        content = json.dumps([self._spec, self._special_tokens], sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What Megatron-Core writes into the name of a cached sample index."""
        return OrderedDict(tokenizer_sha256=self.sha256)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without any special token."""
        return self._fast.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens show by name and broken UTF-8 as U+FFFD.

        Raises:
            UserError: an id lies outside the vocabulary.
        """
        return b"".join(self.token_bytes(index) for index in ids).decode("utf-8", errors="replace")

    def token_bytes(self, index: int) -> bytes:
        """The bytes that token `index` stands for (for a special token, those of its name).

        Raises:
            UserError: `index` lies outside the vocabulary.
        """
        if not 0 <= index < self.vocab_size:
            raise UserError(
                f"Token id {index} is outside the vocabulary of this tokenizer, which has ids "
                f"0 to {self.vocab_size - 1}; check that model and tokenizer belong together."
            )
        return self._token_bytes[index]

    def byte_lengths(self) -> np.ndarray:
        """Bytes of text per token id, int64 [vocab_size]; zero for special tokens, which are no text.

        `loss_sum / ln(2) / byte_lengths()[labels].sum()` is the exact bits per byte of the evaluated labels.
        """
        lengths = np.array([len(token) for token in self._token_bytes], dtype=np.int64)
        lengths[list(self.special_ids)] = 0
        return lengths

    def save(self, directory: str | Path) -> Path:
        """Write `tokenizer.json` and `tokenizer_config.json` into `directory`; returns the former's path."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "tokenizer.json"
        path.write_text(json.dumps(self._spec, ensure_ascii=False, indent=1), encoding="utf-8")
        config = json.dumps(self._special_tokens, ensure_ascii=False, indent=1)
        (directory / "tokenizer_config.json").write_text(config, encoding="utf-8")
        return path

    def __reduce__(self) -> tuple:
        return Tokenizer, (self._spec, self._special_tokens)

    def _id_of(self, role: str) -> int:
        return self._fast.token_to_id(self._special_tokens[role])

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        char_to_byte = byte_of_character()
        added = {index: token.content for index, token in self._fast.get_added_tokens_decoder().items()}
        vocab = {index: token for token, index in self._fast.get_vocab(with_added_tokens=True).items()}
        table = [b""] * (max(vocab) + 1)  # an id that no token uses stands for no bytes
        for index, token in vocab.items():
            if index in added:
                table[index] = token.encode()
            else:
                table[index] = bytes(char_to_byte[character] for character in token)
        return table


class StreamDecoder:
    """Decodes tokens one by one and holds back bytes until they make whole characters.

    Used while generating: `push(id)` gives the text that became final, `finish()` what is left, with broken
    UTF-8 as U+FFFD. All parts joined equal `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, index: int) -> str:
        """The text that token `index` completes; empty while a character is still partial."""
        return self._decoder.decode(self._tokenizer.token_bytes(index))

    def finish(self) -> str:
        """The rest; the decoder can then be used for another stream."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on `texts`.

    Args:
        texts: the training documents.
        vocab_size: size of the vocabulary, the three special tokens and the 256 bytes included.

    Raises:
        UserError: `vocab_size` is too small, or the texts are too few to fill it.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"vocab_size={vocab_size} is too small for a byte-level tokenizer; "
            f"it needs at least {MIN_VOCAB_SIZE} (256 bytes and {len(SPECIAL_TOKENS)} special tokens)."
        )
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(texts, trainer)
    if fast.get_vocab_size() < vocab_size:
        raise UserError(
            f"The texts give only {fast.get_vocab_size()} of the vocab_size={vocab_size} tokens asked for; "
            "give more text or a smaller vocab_size."
        )
    roles = dict(zip(_ROLES, SPECIAL_TOKENS, strict=True))
    return Tokenizer(json.loads(fast.to_str()), roles, "the trained tokenizer")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a `tokenizer.json`, or the directory of a Hugging Face fast tokenizer.

    The special tokens are those of the `tokenizer_config.json` beside it, else the ones this package trains
    with.

    Raises:
        UserError: no such file, unreadable content, no end-of-document token, or not byte-level.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"No tokenizer at {path}; give a tokenizer.json or a directory that holds one "
            "(tools/prepare_corpus.py --train-tokenizer and tools/prepare_demo.py write it into the corpus)."
        )
    spec = _read_json(file)
    config_file = file.parent / "tokenizer_config.json"
    config = _read_json(config_file) if config_file.is_file() else {}
    # A Hugging Face config gives a special token as its text or as {"content": text, ...}.
    roles = {
        role: value.get("content") if isinstance(value, dict) else value
        for role in _ROLES
        if (value := config.get(role))
    }
    odd = next((role for role, token in roles.items() if not isinstance(token, str)), None)
    if odd is not None:
        raise UserError(f"{config_file}: {odd} is {config[odd]!r}; expected the text of a token, or an object with it")
    added = spec.get("added_tokens", [])
    if not (isinstance(added, list) and all(isinstance(token, dict) for token in added)):
        raise UserError(f"{file}: added_tokens is no list of objects; restore it from its source.")
    if not roles:
        known = {token.get("content") for token in added}
        roles = {role: token for role, token in zip(_ROLES, SPECIAL_TOKENS, strict=True) if token in known}
    return Tokenizer(spec, roles, str(file))


def _as_written(spec: dict, special_tokens: dict[str, str]) -> dict:
    """A copy of `spec` whose named special tokens carry the flag that keeps text from spelling them."""
    named = set(special_tokens.values())
    added = [
        {**token, "special": bool(token.get("special")) or token.get("content") in named}
        for token in spec.get("added_tokens", [])
    ]
    return {**spec, "added_tokens": added}


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise UserError(f"{file} is not readable JSON ({error}); restore it from its source.") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a JSON {type(content).__name__}, not an object; restore it from its source.")
    return content


def byte_of_character() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte, inverted.

    Printable Latin-1 bytes stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + offset): byte for offset, byte in enumerate(others)})
    return table
