"""A tokenizer.json made of a tiktoken vocabulary encodes as tiktoken's procedure does, written here as plain Python."""

from __future__ import annotations

import base64
import importlib.machinery
import importlib.util
import itertools
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from k3train.config.sft import SftConfig
from k3train.data.chat.encoder import make_encoder
from k3train.data.chat.messages import conversation_of
from k3train.data.chat.xtml import STRUCTURE
from k3train.data.tiktoken import tokenizer_json
from k3train.data.tokenizer import load_tokenizer, train_tokenizer
from k3train.errors import UserError

ROOT = Path(__file__).parents[2]
RESERVED = 256  # in the published code
PIECES = [
    "Hello", "HELLO", "hello", "don't", "I'LL", "x's", "漢字", "漢", "かな", " ", "  ", "\n", "\r\n", "\t", "1", "23",
    "45678", "é", "e\u0301", "🙂", "<|open|>", "[EOS]", "_", "...", "Ünï", "中a", "ПРИвет", "\u00a0", "{}", "word", "ǅ",
]  # fmt: skip


def random_texts(number: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices(PIECES, k=chance.randint(0, 30))) for _ in range(number)]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """256 bytes, and tokens each of which is made of two before it."""
    trained = train_tokenizer(random_texts(400, 0), 520)
    first = len(trained.special_ids)
    return {trained.token_bytes(index): index - first for index in range(first, trained.vocab_size)}


@pytest.fixture(scope="module")
def folder(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As K3 is published: the vocabulary, the names of special tokens, and the released code."""
    spec = importlib.machinery.PathFinder.find_spec("llmcompressor")
    if spec is None:
        pytest.skip("the package llmcompressor is not installed; make setup installs it")
    made = tmp_path_factory.mktemp("published")
    code = Path(spec.submodule_search_locations[0]) / "modeling" / "kimi_k3" / "tokenization_kimi.py"
    shutil.copyfile(code, made / code.name)
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (made / "tiktoken.model").write_bytes(b"".join(lines))
    names = {str(len(ranks) + 2 * i): {"content": name} for i, name in enumerate(("[BOS]", "[EOS]", *STRUCTURE))}
    config = {"bos_token": "[BOS]", "eos_token": "[EOS]", "added_tokens_decoder": names}
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    (made / "chat_template.jinja").write_text("{{ messages }}")
    return made


def convert(*words: str) -> int:
    """`python tools/tiktoken_to_json.py`."""
    spec = importlib.util.spec_from_file_location("tiktoken_to_json", ROOT / "tools" / "tiktoken_to_json.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tiktoken_to_json.py", *words])
        return tool.main()


def by_definition(text: str, ranks: dict[bytes, int], pattern: str) -> list[int]:
    """A piece that is a token stays whole; in others, the two neighbours of the lowest token are merged, and again."""
    import regex

    found = []
    for match in regex.finditer(pattern, text, flags=regex.V1):
        piece = match.group().encode()
        parts = [piece] if piece in ranks else [bytes([byte]) for byte in piece]
        while pairs := [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]:
            place = min(pairs)[1]
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        found += [ranks[part] for part in parts]
    return found


def published_pattern(folder: Path) -> str:
    """`pat_str`, by running the statement that sets it."""
    code = (folder / "tokenization_kimi.py").read_text()
    start = code.index("    pat_str = ")
    values: dict[str, str] = {}
    exec(code[start : code.index("    def __init__")].replace("    pat_str", "pat_str", 1), values)
    return values["pat_str"]


def test_texts_get_the_ids_that_tiktoken_gives(
    folder: Path, ranks: dict[bytes, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("regex", reason="what cuts texts by classes of Unicode in the oracle")
    assert convert("--hf", str(folder), "--out", str(tmp_path)) == 0, capsys.readouterr().err
    tokenizer, pattern = load_tokenizer(tmp_path), published_pattern(folder)
    assert tokenizer.vocab_size == len(ranks) + RESERVED
    assert len(tokenizer.special_ids) == RESERVED
    lengths = set()
    for text in random_texts(500, 1):
        ids = tokenizer.encode(text)
        assert ids == by_definition(text, ranks, pattern), repr(text)
        assert tokenizer.decode(ids) == text
        lengths.update(len(tokenizer.token_bytes(index)) for index in ids)
    assert len(lengths) > 4
    for place, name in enumerate(("[BOS]", "[EOS]", *STRUCTURE)):
        assert tokenizer.special_id(name) == len(ranks) + 2 * place
    assert tokenizer.special_id(f"<|reserved_token_{len(ranks) + 1}|>") == len(ranks) + 1
    assert (tokenizer.bos, tokenizer.eod) == (len(ranks), len(ranks) + 2)
    assert (tmp_path / "chat_template.jinja").is_file()
    encoder = make_encoder(SftConfig(), tokenizer, str(tmp_path))
    messages = [{"role": "user", "content": "漢 <|open|>"}, {"role": "assistant", "content": "Hello"}]
    encoded = encoder.encode(conversation_of({"messages": messages}, "row"))
    assert encoded.ids.tolist().count(tokenizer.special_id("<|end_of_msg|>")) >= 2
    assert convert("--hf", str(folder), "--out", str(tmp_path)) == 2
    assert "it is never overwritten" in capsys.readouterr().err


def change(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no vocabulary": (lambda folder: (folder / "tiktoken.model").unlink(), "tiktoken.model cannot be read"),
    "no base64": (change("tiktoken.model", "?? 0\n"), "tiktoken.model cannot be read"),
    "a byte is gone": (change("tiktoken.model", "YQ== 0\n"), "lacks a byte or a number"),
    "no names": (change("tokenizer_config.json", "[]"), "tokenizer_config.json cannot be read"),
    "a name beyond": (
        change("tokenizer_config.json", '{"added_tokens_decoder": {"7": {"content": "[BOS]"}}}'),
        "names token 7, and special tokens of tiktoken.model are 517 to 772",
    ),
    "no code": (lambda folder: (folder / "tokenization_kimi.py").unlink(), "gives no pat_str"),
    "a pattern that is computed": (change("tokenization_kimi.py", "pat_str = make()\n"), "tokenization_kimi.py cannot"),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_form_is_told(folder: Path, tmp_path: Path, name: str) -> None:
    breaking, told = WRONG[name]
    shutil.copytree(folder, tmp_path / "hf")
    breaking(tmp_path / "hf")
    with pytest.raises(UserError) as error:
        tokenizer_json(tmp_path / "hf")
    assert told in str(error.value)
