"""Rollouts in K3's chat format: what is sampled over turns is token for token what the template writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from k3train.data.chat.messages import conversation_of
from k3train.data.chat.tokens import ChatEncoder, with_chat_tokens
from k3train.data.chat.xtml import K3Template
from k3train.rl.chat import ChatFormat
from k3train.rl.environments import PythonEnvironment
from k3train.rl.rewards import REWARDS
from k3train.rl.trajectory import Trajectory
from k3train.rollout.tasks import Task

CALL = {"name": "python", "arguments": {"code": "print(6 * 7)"}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from k3train.data.tokenizer import train_tokenizer

    return with_chat_tokens(train_tokenizer(["message role assistant think response print code"] * 5, 270), grow=True)


def conversation(messages: list[dict], **settings: Any) -> Any:
    return conversation_of({"messages": messages, **settings}, "the test")


def test_the_teacher_reads_no_effort(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer)
    asked = conversation([{"role": "user", "content": "how many"}], thinking_effort="low")
    student, teacher = chat.prompt(asked), chat.prompt(asked, show_effort=False)
    assert "thinking_effort=low" in tokenizer.decode(student)
    assert "effort" not in tokenizer.decode(teacher)
    assert student[-len(teacher) :] == teacher
    assert chat.end in chat.stop
    assert tokenizer.eod in chat.stop


def test_a_tool_session_is_what_the_template_writes(tokenizer: Any) -> None:
    """Prompt, call, result, answer: the rollout's tokens are the encoded conversation, and only the model's count."""
    chat, tools = ChatFormat(tokenizer), PythonEnvironment(REWARDS["answer"], seconds=60)
    user = {"role": "user", "content": "six times seven"}
    task = Task("t", "f", conversation([user]), "42", "digits")
    shown = tools.conversation(task)
    first = {"role": "assistant", "content": "", "reasoning": "compute", "tool_calls": [CALL]}
    last = {"role": "assistant", "content": "42", "reasoning": "it says so"}
    encoder = ChatEncoder(tokenizer, K3Template())
    declared = {"tools": shown.tools}
    one = encoder.encode(conversation([user, first], **declared)).ids.tolist()
    prompt = list(chat.prompt(shown))
    assert one[: len(prompt)] == prompt
    sample = Trajectory()
    for token in one[len(prompt) :]:
        sample.push(token, -1.0, 0)
    sample.end_turn()
    turns = [chat.answer(sample.tokens[start:stop], True) for start, stop in sample.turns]
    step = tools.step(task, turns, 0)
    assert step.messages[0]["content"] == "42\n"
    sample.reply(chat.reply(step.messages, True))
    result = {"role": "tool", "tool": "python", "content": "42\n"}
    whole = encoder.encode(conversation([user, first, result, last], **declared))
    begun = prompt + sample.tokens
    assert whole.ids.tolist()[: len(begun)] == begun
    for token in whole.ids.tolist()[len(begun) :]:
        sample.push(token, -1.0, 0)
    sample.end_turn()
    assert prompt + sample.tokens == whole.ids.tolist()
    # What is trained on is exactly what supervised fine-tuning would count of the same conversation.
    assert [version >= 0 for version in sample.versions] == whole.trained.tolist()[len(prompt) :]
    turns = [chat.answer(sample.tokens[start:stop], True) for start, stop in sample.turns]
    assert tools.step(task, turns, 0).reward == 1.0
    assert turns[1].thinking_tokens == len(tokenizer.encode("it says so"))


def test_a_plain_tokenizer_is_refused(tmp_path: Path) -> None:
    from k3train.data.tokenizer import train_tokenizer
    from k3train.errors import UserError

    with pytest.raises(UserError, match="add_chat_tokens"):
        ChatFormat(train_tokenizer(["a b c"], 260), "data.tokenizer=x")
