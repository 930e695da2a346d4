import json
import pickle

import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from k3train.data.tokenizer import (
    MIN_VOCAB_SIZE,
    SPECIAL_TOKENS,
    StreamDecoder,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from k3train.errors import UserError

TEXTS = [f"def f{i}(x):\n    return 'é {i} 漢字 {SPECIAL_TOKENS[1]}' * x  # 🙂\n" for i in range(50)]
VOCAB_SIZE = 320


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, VOCAB_SIZE)


@pytest.mark.parametrize("text", [*TEXTS[:2], "", " \t\r\n\x00", "".join(map(chr, range(1, 600))), "🙂é" * 9])
def test_decode_restores_the_text_that_was_encoded(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_size_and_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB_SIZE
    assert tokenizer.special_ids == {tokenizer.bos, tokenizer.eod, tokenizer.pad}
    assert len(tokenizer.special_ids) == 3
    assert tokenizer.eos == tokenizer.eod
    assert tokenizer.decode([tokenizer.eod]) == "<|eos|>"


@pytest.mark.parametrize("special", SPECIAL_TOKENS)
@pytest.mark.parametrize("frame", ["{}", "a{}b", " {} ", "{}{}", "<|{}|>"])
def test_text_cannot_forge_a_special_token(tokenizer: Tokenizer, special: str, frame: str) -> None:
    text = frame.replace("{}", special)
    ids = tokenizer.encode(text)
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.decode(ids) == text


def test_training_is_deterministic(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(iter(TEXTS), VOCAB_SIZE).sha256 == tokenizer.sha256
    assert train_tokenizer(TEXTS, VOCAB_SIZE - 1).sha256 != tokenizer.sha256


def test_save_load_and_pickle_keep_the_tokenizer(tokenizer: Tokenizer, tmp_path) -> None:
    file = tokenizer.save(tmp_path / "tokenizer")
    for other in (load_tokenizer(file), load_tokenizer(file.parent), pickle.loads(pickle.dumps(tokenizer))):
        assert other.sha256 == tokenizer.sha256
        assert (other.eod, other.bos, other.pad) == (tokenizer.eod, tokenizer.bos, tokenizer.pad)
        assert other.encode(TEXTS[7]) == tokenizer.encode(TEXTS[7])


def test_tokenizer_json_alone_is_enough_for_ours(tokenizer: Tokenizer, tmp_path) -> None:
    file = tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert load_tokenizer(file).eod == tokenizer.eod


def _hugging_face_directory(directory, decoder=None, config=None) -> None:
    """A fast tokenizer as others write it: the special token is not flagged, and it pads."""
    fast = FastTokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoder or decoders.ByteLevel()
    fast.add_tokens(["[END]"])
    fast.enable_padding(length=64)
    fast.enable_truncation(3)
    fast.save(str(directory / "tokenizer.json"))
    config = {"eos_token": {"content": "[END]", "special": True}} if config is None else config
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def test_directory_of_a_hugging_face_tokenizer(tmp_path) -> None:
    _hugging_face_directory(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.bos, tokenizer.pad) == (257, 256, None, 256)
    ids = tokenizer.encode("long enough [END]")
    assert tokenizer.eod not in ids
    assert tokenizer.decode(ids) == "long enough [END]"


def test_stream_decoder_gives_whole_characters_only(tokenizer: Tokenizer) -> None:
    text = "naïve 漢字 🙂 zażółć"
    ids = [index for byte in text.encode() for index in _ids_of_byte(tokenizer, byte)]
    assert len(ids) == len(text.encode())
    stream = StreamDecoder(tokenizer)
    parts = [stream.push(index) for index in ids]
    assert "".join(parts) == text
    assert all(len(part) <= 1 and part != "\ufffd" for part in parts)
    assert stream.finish() == ""


def test_stream_decoder_equals_decode_on_broken_text(tokenizer: Tokenizer) -> None:
    generator = np.random.default_rng(0)
    stream = StreamDecoder(tokenizer)
    for _ in range(20):
        ids = generator.integers(0, tokenizer.vocab_size, 200).tolist()
        assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


def _ids_of_byte(tokenizer: Tokenizer, byte: int) -> list[int]:
    return [index for index in range(tokenizer.vocab_size) if tokenizer.token_bytes(index) == bytes([byte])]


def test_byte_lengths_count_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.bos, *tokenizer.encode(TEXTS[3]), tokenizer.eod]
    assert tokenizer.byte_lengths()[ids].sum() == len(TEXTS[3].encode())


def test_bad_tokenizers_are_refused_in_words(tokenizer: Tokenizer, tmp_path) -> None:
    with pytest.raises(UserError, match=r"No tokenizer at .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match=f"vocab_size=20 is too small.*at least {MIN_VOCAB_SIZE}"):
        train_tokenizer(TEXTS, 20)
    with pytest.raises(UserError, match=r"give only .* of the vocab_size=5000"):
        train_tokenizer(TEXTS, 5000)
    with pytest.raises(UserError, match=r"Token id 320 is outside .* 0 to 319"):
        tokenizer.decode([320])
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(UserError, match="not readable JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UserError, match=r"cannot be read as a tokenizer\.json"):
        load_tokenizer(tmp_path)
    _hugging_face_directory(tmp_path, decoder=decoders.Metaspace())
    with pytest.raises(UserError, match="not a byte-level tokenizer"):
        load_tokenizer(tmp_path)
    _hugging_face_directory(tmp_path, config={})
    with pytest.raises(UserError, match="no end-of-document token"):
        load_tokenizer(tmp_path)
    _hugging_face_directory(tmp_path, config={"eos_token": "[STOP]"})
    with pytest.raises(UserError, match=r"names '\[STOP\]' as its eos_token"):
        load_tokenizer(tmp_path)
