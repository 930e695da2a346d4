"""Writes tables into kernels/README.md, between the comments that mark their places."""

from collections.abc import Sequence
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def replace_block(name: str, text: str) -> None:
    """Put ``text`` between ``<!-- name -->`` and ``<!-- end of name -->``.

    Raises:
        ValueError: the README has no such place.
    """
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, found, rest = README.read_text().partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"{README} lacks {begin} ... {end}.")
    README.write_text(f"{before}{begin}\n{text}\n{end}{after}")
