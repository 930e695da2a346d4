from pathlib import Path

import pytest

from k3train.data.corpus import check_corpus
from k3train.data.demo import prepare_demo, stdlib_files
from k3train.data.shards import split_of
from k3train.data.tokenizer import load_tokenizer, train_tokenizer
from k3train.errors import UserError


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    chosen = [file for file in stdlib_files() if 0 < file.stat().st_size < 20_000][:40]
    for index, file in enumerate(chosen):
        (tmp_path / f"{index:02d}.py").write_bytes(file.read_bytes())
    return sorted(tmp_path.glob("*.py"))


def test_standard_library_without_its_tests() -> None:
    files = stdlib_files()
    names = {file.name for file in files}
    assert {"argparse.py", "ast.py", "typing.py"} <= names
    assert not any({"test", "tests", "site-packages"} & set(file.parts[-3:-1]) for file in files)
    assert 5e6 < sum(file.stat().st_size for file in files) < 20e6


def test_demo_corpus_is_made_once(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "demo"
    manifest, written = prepare_demo(out, 400, 0.2, files=files)
    assert written
    held_out = sum(split_of(file.read_bytes(), 0.2) == "valid" for file in files)
    assert manifest["splits"]["valid"]["documents"] == held_out > 0
    assert manifest["splits"]["train"]["documents"] == len(files) - held_out
    tokenizer = load_tokenizer(out)
    training = [file.read_text() for file in files if split_of(file.read_bytes(), 0.2) == "train"]
    assert tokenizer.sha256 == train_tokenizer(training, 400).sha256  # held-out text was not looked at
    for split in ("train", "valid"):
        check_corpus(out / split, tokenizer.vocab_size, tokenizer.sha256)
    dates = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prepare_demo(out, 400, 0.2, files=files) == (manifest, False)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == dates


def test_other_demo_corpus_is_not_taken_for_this_one(files: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "demo"
    prepare_demo(out, 400, 0.2, files=files)
    with pytest.raises(UserError, match=r"other files or settings .* --overwrite"):
        prepare_demo(out, 500, 0.2, files=files)
    with pytest.raises(UserError, match="other files or settings"):
        prepare_demo(out, 400, 0.2, files=files[:-1])
    _, written = prepare_demo(out, 500, 0.2, files=files, overwrite=True)
    assert written
    assert load_tokenizer(out).vocab_size == 500
    (out / "train.bin").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"train\.bin is missing or differs"):
        prepare_demo(out, 500, 0.2, files=files)
