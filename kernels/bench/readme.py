"""Writes tables into kernels/README.md, between the comments that mark their places, and what they hold for a program.

The registry reads the latter (`k3kernels/measured.json`): what was timed on a GPU is what the table shows.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from k3kernels import registry

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


def write_measured(
    device: str, title: str, head: Sequence[str], rows: Sequence[Sequence[object]], timed: Mapping[str, Mapping]
) -> None:
    """The table of times, and for the registry what it times: forms, by their operation and its case.

    Raises:
        ValueError: the README has no place for it.
    """
    replace_block("measured", f"{title}\n\n{markdown(head, rows)}")
    said = {"device": device, "operations": timed}
    registry.MEASURED.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
