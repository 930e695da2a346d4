"""K3's chat template against the released encoder (llmcompressor's encoding_k3.py), on generated conversations."""

from __future__ import annotations

import copy
import importlib.machinery
import importlib.util
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from k3train.data.chat.messages import conversation_of
from k3train.data.chat.tokens import ChatEncoder, with_chat_tokens
from k3train.data.chat.xtml import STRUCTURE, K3Template
from k3train.data.tokenizer import train_tokenizer

CONVERSATIONS = 300
# Texts that spell structure, attributes that need escaping, other scripts, and nothing at all.
TEXTS = (
    "", " ", "hello there", "What is 3 + 4?\n", "<|open|>message role=\"system\"<|sep|>", "<|end_of_msg|><|close|>",
    "naïve café ☕", "日本語のテキスト", 'say "hi" & <b>go</b>', "```json\n{\"a\": 1}\n```",
    "<|kimi_image_placeholder|>", "\t x \n",
)  # fmt: skip
NAMES = ("search", "get weather", 'odd"name&', "f", "<|sep|>")


@pytest.fixture(scope="module")
def published() -> ModuleType:
    # Not importlib.util.find_spec: published_model.py may have put a package without a spec into sys.modules.
    spec = importlib.machinery.PathFinder.find_spec("llmcompressor")
    if spec is None:
        pytest.skip("the package llmcompressor is not installed; make setup installs it")
    path = Path(spec.submodule_search_locations[0]) / "modeling" / "kimi_k3" / "encoding_k3.py"
    spec = importlib.util.spec_from_file_location("published_encoding_k3", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 2 else 6)
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 7:
        return {rng.choice(NAMES): value(rng, depth + 1) for _ in range(rng.randrange(3))}
    return (rng.choice(TEXTS), rng.randint(-9, 9), rng.random(), True, False, None)[kind]


def arguments(rng: random.Random) -> Any:
    given = {rng.choice(NAMES): value(rng) for _ in range(rng.randrange(4))}
    return rng.choice([given, json.dumps(given), None, " ", "{not json", given])


def content(rng: random.Random) -> Any:
    parts = [{"type": "text", "text": rng.choice(TEXTS)} for _ in range(rng.randrange(3))]
    return rng.choice([rng.choice(TEXTS), rng.choice(TEXTS), parts, None])


def tool(rng: random.Random) -> dict:
    parameters = {"type": "object", "properties": {rng.choice(NAMES): {"type": "string", "enum": ["é", "b"]}}}
    return {"type": "function", "function": {"name": rng.choice(NAMES), "parameters": parameters}}


def assistant(rng: random.Random, ids: bool) -> dict:
    message: dict[str, Any] = {"role": "assistant", "content": content(rng)}
    if rng.random() < 0.6:
        message[rng.choice(["reasoning", "reasoning_content"])] = rng.choice(TEXTS)
    if rng.random() < 0.2:
        message["name"] = rng.choice(NAMES)
    if rng.random() < 0.5:
        calls = [{"name": rng.choice(NAMES), "arguments": arguments(rng)} for _ in range(rng.randint(1, 3))]
        message["tool_calls"] = [{"type": "function", "function": c} if rng.random() < 0.7 else c for c in calls]
        if ids:
            for number, call in enumerate(message["tool_calls"]):
                call["id"] = f"call:{number}"
    return message


def messages(rng: random.Random) -> list[dict]:
    out: list[dict] = []
    if rng.random() < 0.5:
        out.append({"role": "system", "content": content(rng)})
    for _ in range(rng.randint(1, 3)):
        named = {"name": rng.choice(NAMES)} if rng.random() < 0.2 else {}
        out.append({"role": "user", "content": content(rng)} | named)
        ids = rng.random() < 0.6
        answer = assistant(rng, ids)
        out.append(answer)
        results = [
            {"role": "tool", "content": content(rng)} | ({"tool_call_id": f"call:{n}"} if ids else {})
            for n in range(len(answer.get("tool_calls", [])))
        ]
        rng.shuffle(results)
        if results and rng.random() < 0.2:  # one that answers nothing, which leaves the order alone
            results[0] |= {"tool_call_id": "other", "tool": "f"}
        out += results
        if rng.random() < 0.15:
            out.append({"role": "system", "tools": [tool(rng)]})
    return out


def row(rng: random.Random) -> dict:
    thinking = rng.random() < 0.8
    out: dict[str, Any] = {"messages": messages(rng), "thinking": thinking}
    if thinking and rng.random() < 0.6:
        out["thinking_effort"] = rng.choice(["low", "high", "max"])
    if rng.random() < 0.4:
        out["tools"] = [tool(rng) for _ in range(rng.randint(1, 2))]
    out["tool_choice"] = rng.choice([None, "auto", "none", "required"])
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"b": 1, "a": {"d": "é", "c": 2}}}}
    out["response_format"] = rng.choice([None, "text", "json_object", {"type": "json_object"}, schema])
    return {key: given for key, given in out.items() if given is not None}


def test_segments_and_tokens_are_the_released_encoders(published: ModuleType) -> None:
    tokenizer = with_chat_tokens(train_tokenizer(["hello there message role user assistant think response " * 40], 290))
    encoder = ChatEncoder(tokenizer, K3Template())
    rng = random.Random(7)
    seen, blocks = set(), 0
    for number in range(CONVERSATIONS):
        given = row(rng)
        generation = number % 2 == 0
        options = {k: v for k, v in given.items() if k not in ("messages", "tools")}
        wanted = published.build_chat_segments(
            copy.deepcopy(given["messages"]), given.get("tools"), add_generation_prompt=generation, **options
        )
        conversation = conversation_of(given, f"conversation {number}")
        ours = K3Template().segments(conversation, generation=generation)
        assert [(s.text, s.special) for s in ours] == [(s.text, s.allow_special) for s in wanted], given
        ids = [
            index
            for s in wanted
            for index in ([tokenizer.special_id(s.text)] if s.allow_special else tokenizer.encode(s.text))
        ]
        found = encoder.prompt(conversation) if generation else encoder.encode(conversation).ids.tolist()
        assert found == ids
        # Structure appears exactly as often as the template put it there, whatever the texts spell.
        structure = {tokenizer.special_id(name) for name in STRUCTURE}
        assert sum(index in structure for index in ids) == sum(s.allow_special for s in wanted)
        seen.add("".join(s.text for s in ours))
        blocks += sum(s.text == "json" for s in ours)
    assert len(seen) > 200
    assert blocks > 10
