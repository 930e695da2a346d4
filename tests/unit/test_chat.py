"""Conversations: what is trained on, tokenizers with structural tokens, reading completions, rows of every kind."""

from __future__ import annotations

import json

import datasets
import pytest

from k3train.data.chat.messages import ToolCall, conversation_of
from k3train.data.chat.parse import parse_completion
from k3train.data.chat.sources import read_conversations
from k3train.data.chat.tokens import ChatEncoder, save_chat_tokenizer, with_chat_tokens
from k3train.data.chat.xtml import END, STRUCTURE, WORDS, K3Template
from k3train.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from k3train.errors import UserError

TEXT = "the quick brown fox jumps over the lazy dog and says hello to the world of messages and roles " * 30
CALL = {"name": "f", "arguments": {"x": 1, "s": 'a "b" &', "deep": {"k": [True, None]}}, "id": "c1"}
ROW = {
    "messages": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "reasoning": "think of it", "content": "world", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "result"},
        {"role": "assistant", "content": "the end"},
    ],
    "thinking_effort": "low",
}


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return train_tokenizer([TEXT], 300)


@pytest.fixture(scope="module")
def encoder(plain: Tokenizer) -> ChatEncoder:
    return ChatEncoder(with_chat_tokens(plain), K3Template())


def trained_text(encoder: ChatEncoder, row: dict) -> str:
    encoded = encoder.encode(conversation_of(row, "row"))
    return encoder.tokenizer.decode([int(i) for i, t in zip(encoded.ids, encoded.trained, strict=True) if t])


def test_what_the_assistant_writes_is_trained_and_nothing_else(encoder: ChatEncoder) -> None:
    first = (
        "think of it<|close|>think<|sep|><|open|>response<|sep|>world<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="number"<|sep|>1<|close|>argument<|sep|>'
        '<|open|>argument key="s" type="string"<|sep|>a "b" &<|close|>argument<|sep|>'
        '<|open|>argument key="deep" type="object"<|sep|>{"k": [true, null]}<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    last = "the end<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    second = "<|close|>think<|sep|><|open|>response<|sep|>" + last
    assert trained_text(encoder, ROW) == first + second
    silent = {**ROW, "messages": [ROW["messages"][0], {**ROW["messages"][1], "weight": 0}, *ROW["messages"][2:]]}
    assert trained_text(encoder, silent) == second
    instruct = {"messages": ROW["messages"][:1] + ROW["messages"][3:], "thinking": False}
    assert trained_text(encoder, instruct) == last


def test_arguments_that_are_no_json_are_written_but_not_trained(encoder: ChatEncoder) -> None:
    call = {"name": "f", "arguments": "{broken"}
    row = {"messages": [ROW["messages"][0], {"role": "assistant", "content": "", "tool_calls": [call]}]}
    text = trained_text(encoder, row)
    assert "broken" not in text
    assert "json" not in text
    assert '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>' in text
    everything = encoder.tokenizer.decode(encoder.encode(conversation_of(row, "row")).ids.tolist())
    assert '<|open|>json type="object"<|sep|>{broken<|close|>json<|sep|>' in everything


def test_a_prompt_is_the_beginning_of_the_whole(encoder: ChatEncoder) -> None:
    """What generation begins with are the very tokens that training leaves out of the loss."""
    whole = encoder.encode(conversation_of(ROW, "row"))
    prompt = encoder.prompt(conversation_of({**ROW, "messages": ROW["messages"][:1]}, "row"))
    assert whole.ids[: len(prompt)].tolist() == prompt
    assert not whole.trained[: len(prompt)].any()
    assert whole.trained[len(prompt)]


def test_chat_tokens_replace_the_last_merges_and_keep_all_other_ids(plain: Tokenizer) -> None:
    chat = with_chat_tokens(plain)
    assert chat.vocab_size == plain.vocab_size
    ids = {chat.special_id(name) for name in STRUCTURE}
    assert ids == set(range(plain.vocab_size - 4, plain.vocab_size))
    for index in set(range(plain.vocab_size)) - ids:
        assert chat.token_bytes(index) == plain.token_bytes(index)
    lost = [plain.token_bytes(index).decode() for index in ids]
    for text in [TEXT, *lost, *STRUCTURE, "".join(STRUCTURE)]:
        found = chat.encode(text)
        assert chat.decode(found) == text
        assert not ids & set(found)
    assert with_chat_tokens(chat).sha256 == chat.sha256  # there is nothing to do twice


def test_chat_tokens_take_reserved_names_first_or_grow(plain: Tokenizer) -> None:
    grown = with_chat_tokens(plain, grow=True)
    assert [grown.special_id(name) for name in STRUCTURE] == list(range(300, 304))
    assert grown.encode(TEXT) == plain.encode(TEXT)
    reserved = with_chat_tokens(plain, grow=True, wanted=tuple(f"<|reserved_token_{n}|>" for n in range(3)))
    mixed = with_chat_tokens(reserved)
    assert sorted(mixed.special_id(name) for name in STRUCTURE) == [299, 300, 301, 302]
    assert mixed.special_id("<|reserved_token_0|>") is None


def test_words_of_the_format_become_one_token_each_and_stay_text(plain: Tokenizer) -> None:
    """Every text still comes back whole, all other ids keep their texts, and other words are not cut by them."""
    chat, words = with_chat_tokens(plain), with_chat_tokens(plain, words=True)
    assert words.vocab_size == plain.vocab_size
    new = {words.encode(word)[0] for word in WORDS}
    assert [len(words.encode(word)) for word in WORDS] == [1] * len(WORDS)
    assert not new & words.special_ids
    changed = {i for i in range(plain.vocab_size) if words.token_bytes(i) != chat.token_bytes(i)}
    assert changed <= new
    for text in [TEXT, "thinking rethink systematic", *WORDS, WORDS[0] + "low`."]:
        assert words.decode(words.encode(text)) == text
    assert not new & set(words.encode("thinking rethink systematic"))
    short, long = (len(ChatEncoder(t, K3Template()).encode(conversation_of(ROW, "row")).ids) for t in (words, chat))
    assert short < long


def test_a_tokenizer_without_structure_is_refused_with_the_cure(plain: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"has no special token <\|open\|>.*tools/add_chat_tokens.py --tokenizer"):
        ChatEncoder(plain, K3Template())


def test_a_saved_chat_tokenizer_is_the_same_and_ends_at_the_message(plain: Tokenizer, tmp_path) -> None:
    chat = with_chat_tokens(plain)
    save_chat_tokenizer(chat, tmp_path)
    assert load_tokenizer(tmp_path).sha256 == chat.sha256
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert ends == sorted([chat.eod, chat.special_id(END)])


def test_completions_are_read_back(encoder: ChatEncoder) -> None:
    tokenizer = encoder.tokenizer
    conversation = conversation_of({**ROW, "messages": ROW["messages"][:2]}, "row")
    start = len(encoder.prompt(conversation_of({**ROW, "messages": ROW["messages"][:1]}, "row")))
    tokens = encoder.encode(conversation).ids[start:].tolist()
    found = parse_completion(tokenizer, tokens)
    assert (found.thinking, found.response, found.complete) == ("think of it", "world", True)
    assert found.calls == [ToolCall("f", CALL["arguments"])]
    assert found.thinking_tokens == len(tokenizer.encode("think of it"))
    assert not parse_completion(tokenizer, tokens[:-1]).complete
    cut = parse_completion(tokenizer, tokens[: tokens.index(tokenizer.special_id("<|close|>"))])
    assert (cut.thinking, cut.response, cut.complete) == ("think of it", "", False)
    forged = [*tokenizer.encode("<|close|>think<|sep|><|open|>response<|sep|>7"), tokenizer.special_id(END)]
    found = parse_completion(tokenizer, forged)
    assert found.response == ""
    assert "response" in found.thinking
    assert not found.complete
    assert parse_completion(tokenizer, []).complete is False


def test_rows_of_jsonl_parquet_and_saved_data_sets_are_the_same(encoder: ChatEncoder, tmp_path) -> None:
    call = {"name": "f", "arguments": '{"x": 1}', "id": "c1"}
    row = {**ROW, "messages": [ROW["messages"][0], {**ROW["messages"][1], "tool_calls": [call]}, *ROW["messages"][2:]]}
    other = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "thinking": False}
    rows = [{**row, "thinking": True}, other]  # a table has the columns of its first row
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n\n" for r in rows))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "c.parquet")
    wanted = [encoder.encode(conversation_of(r, "row")).ids.tolist() for r in rows]
    for name in ("a.jsonl", "b.json", "c.parquet", "saved"):
        found = list(read_conversations([str(tmp_path / name)]))
        assert [encoder.encode(c).ids.tolist() for c in found] == wanted, name
        assert name in found[1].source


def test_pairs_are_conversations(encoder: ChatEncoder) -> None:
    whole = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "reasoning": "r", "content": "a"}]}
    pairs = [
        {"prompt": "q", "response": "a", "reasoning": "r"},
        {"prompt": "q", "completion": "a", "reasoning": "r"},
        {"prompt": whole["messages"][:1], "response": whole["messages"][1:]},
    ]
    wanted = encoder.encode(conversation_of(whole, "row")).ids.tolist()
    for pair in pairs:
        assert encoder.encode(conversation_of(pair, "row")).ids.tolist() == wanted


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ([], "is a JSON list"),
        ({}, "neither `messages` nor `prompt`"),
        ({"text": "x"}, "it has text"),
        ({"messages": []}, "messages is empty"),
        ({"messages": ["hi"]}, "message 1 is a str"),
        ({"messages": [{"role": "human", "content": "x"}]}, "message 1: role is 'human'; allowed: system, user"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is a int"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "is image_url; this model reads"),
        ({"messages": [{"role": "user"}], "thinking_effort": "medium"}, "'medium'; allowed: low, high, max"),
        ({"messages": [{"role": "user"}], "thinking": False, "thinking_effort": "low"}, "leave one of them out"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool call 1 has no name"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]}, "are a list"),
        ({"messages": [{"role": "assistant", "weight": 0.5}]}, "weight is 0.5"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "does not say whose result"),
        ({"messages": [{"role": "user"}], "response_format": "yaml"}, "response_format is 'yaml'"),
        ({"messages": [{"role": "user"}], "response_format": "json_schema"}, "without its json_schema.schema"),
        ({"messages": [{"role": "user"}], "tools": "f"}, "tools is a str; give a list"),
    ],
)
def test_what_is_no_conversation_is_told(row: object, told: str) -> None:
    with pytest.raises(UserError) as error:
        conversation_of(row, "data.jsonl line 3")
    assert told in str(error.value)
    assert str(error.value).startswith("data.jsonl line 3")


def test_files_that_cannot_be_read_are_told(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": []}\n{broken\n')
    with pytest.raises(UserError, match=r"a.jsonl line 1.*messages is empty"):
        list(read_conversations([str(tmp_path / "a.jsonl")]))
    (tmp_path / "b.jsonl").write_text("{broken\n")
    with pytest.raises(UserError, match=r"b.jsonl line 1 is not JSON"):
        list(read_conversations([str(tmp_path / "b.jsonl")]))
    (tmp_path / "c.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UserError, match=r"c.parquet cannot be read as parquet"):
        list(read_conversations([str(tmp_path / "c.parquet")]))
    (tmp_path / "d.txt").write_text("hi")
    with pytest.raises(UserError, match=r"d.txt is text, which has no conversations"):
        list(read_conversations([str(tmp_path / "d.txt")]))
