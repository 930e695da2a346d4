"""Prompts, token files and output files that nobody means, for `generate` and `score`."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from k3train import cli
from k3train.data.tokenizer import load_tokenizer, train_tokenizer
from k3train.errors import UserError
from k3train.rollout.generate_cli import read_prompts
from k3train.rollout.score_cli import _write, check_out, read_tokens


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def npz() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, a=np.arange(3))
    return stream.getvalue()


GOOD = npy(np.arange(10))
TOKENS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot be read as an .npy file"),
    "zip": (b"PK\x03\x04 and no more", "cannot be read as an .npy file"),
    "npz": (npz(), "cannot be read as an .npy file"),
    "cut npz": (npz()[:50], "cannot be read as an .npy file"),
    "header that is no Python": (GOOD[:10] + b"{'''" + GOOD[14:], "cannot be read as an .npy file"),
    "more than there is memory": (
        GOOD.replace(b"(10,), }           ", b"(9999999999999,), }"),
        "cannot be read as an .npy file",
    ),
    "durations": (npy(np.zeros(3, "m8[s]")), "integers of shape"),
    "no rows": (npy(np.zeros((0, 5), int)), "holds no rows"),
    "beyond int64": (npy(np.array([2**64 - 1, 3], np.uint64)), "token 18446744073709551615"),
}


@pytest.mark.parametrize("case", TOKENS)
def test_token_files(tmp_path: Path, case: str) -> None:
    content, words = TOKENS[case]
    (tmp_path / "t.npy").write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        read_tokens(tmp_path / "t.npy")
    assert "t.npy" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pipe_of_tokens_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.npy")
    with pytest.raises(UserError, match=r"t\.npy cannot be read"):
        read_tokens(tmp_path / "t.npy")


def test_where_scores_are_written(tmp_path: Path) -> None:
    """Found before the checkpoint is read; nothing is left, and what is no file stays what it is."""
    tokens = tmp_path / "t.npy"
    tokens.write_bytes(GOOD)
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UserError, match="is no file"):
            check_out(out, tokens)
    (tmp_path / "link").symlink_to(tokens)
    for out in (tokens, tmp_path / "link"):
        with pytest.raises(UserError, match="is the file of --tokens"):
            check_out(out, tokens)
    for out in (tmp_path / ("x" * 300), Path("/proc/s.npz")):
        with pytest.raises(UserError, match=r"--out .* cannot be written"):
            check_out(out, tokens)
    assert check_out(tmp_path / "s.npz", tokens) == tmp_path / "s.npz"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "t.npy"]


def test_scores_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "s.npz").write_bytes(b"earlier")
    with pytest.raises(ValueError, match="Cannot save"):
        _write(tmp_path / "s.npz", {"a": Unsavable()})
    assert [path.name for path in tmp_path.iterdir()] == ["s.npz"]
    assert (tmp_path / "s.npz").read_bytes() == b"earlier"
    _write(tmp_path / "s.npz", {"a": np.arange(3)})
    assert np.load(tmp_path / "s.npz")["a"].tolist() == [0, 1, 2]


class Unsavable:
    def __array__(self, *args: object, **kwargs: object) -> np.ndarray:
        raise ValueError("Cannot save")


PROMPTS: dict[str, tuple[bytes, str]] = {
    "half a pair": (b'{"prompt": "ok"}\n{"prompt": "\\ud800"}', "line 2 is not text in UTF-8: character 1"),
    "deep": (b"[" * 100_000, "line 1 is not JSON"),
    "empty": (b'\n{"prompt": ""}', "line 2 is empty"),
    "UTF-16": (b"\xff\xfea\0", "give a file of text in UTF-8"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_prompt_files(tmp_path: Path, case: str) -> None:
    content, words = PROMPTS[case]
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        read_prompts(None, str(tmp_path / "p.jsonl"))
    assert "p.jsonl" in str(caught.value)


def test_prompts_of_the_command_line_and_byte_order_marks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--prompt 2 is not text in UTF-8: character 3"):
        read_prompts(["a", "ab\udcff"], None)
    for name, content in (("p.jsonl", '{"prompt": "a"}'), ("p.txt", "a")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        assert read_prompts(None, str(tmp_path / name)) == ["a"]


def test_more_samples_than_fit(capsys: pytest.CaptureFixture[str]) -> None:
    for extra, words in ((["--n", str(10**30)], "allowed: up to"), (["--stop", "\udcff"], "--stop is not text")):
        assert cli.main(["generate", "--checkpoint", "nowhere", "--prompt", "a", *extra]) == 2
        assert words in capsys.readouterr().err


def test_names_that_no_file_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["generate", "--prompt", "a", "--checkpoint", "x" * 5000], ["inspect", "x" * 5000]):
        assert cli.main(arguments) == 2
        assert "File name too long" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token is 3"),
        ("tokenizer_config.json", '{"eos_token": {"id": 3}}', "eos_token is {'id': 3}"),
        ("tokenizer.json", '{"added_tokens": 3}', "added_tokens is no list"),
        ("tokenizer.json", "[" * 100_000, "not readable JSON"),
    ],
)
def test_tokenizers_of_other_types(tmp_path: Path, file: str, content: str, words: str) -> None:
    train_tokenizer(iter(["kan mol tix ruta sen"] * 20), 270).save(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        load_tokenizer(tmp_path)
    assert file in str(caught.value)


def run_verb(body: str, stdout: int) -> subprocess.CompletedProcess[str]:
    """A verb whose work is `body`, in a process of its own."""
    program = f"""
import sys, types
from k3train import cli
module = types.ModuleType("stand_in")
def run(arguments):
{body}
    return 0
module.run = run
sys.modules["stand_in"] = module
cli.VERBS["stand-in"] = ("", "stand_in", lambda parser: None)
sys.exit(cli.main(["stand-in"]))
"""
    return subprocess.run(
        [sys.executable, "-c", program],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        check=False,
    )


def test_output_that_nobody_reads_and_a_full_disk() -> None:
    """`k3train generate ... | head -1` ends as other programs do, and a full disk is said."""
    reader, writer = os.pipe()
    os.close(reader)
    done = run_verb("    print('x' * 100_000)", writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
    full = os.open("/dev/full", os.O_WRONLY)
    done = run_verb("    print('x')", full)
    os.close(full)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "k3train: the standard output cannot be read or written (No space left on device); see to its name, to rights"
        " and to space there"
    ]


def test_output_that_the_terminal_cannot_show() -> None:
    reader, writer = os.pipe()
    done = run_verb("    print('caf\\xe9 \\U0001f389 \\udcff')", writer)
    os.close(writer)
    with os.fdopen(reader) as shown:
        assert shown.read() == "caf\\xe9 \\U0001f389 \\udcff\n"
    assert (done.returncode, done.stderr) == (0, "")
