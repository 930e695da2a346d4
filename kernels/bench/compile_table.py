"""Registers, spills and shared memory of every form of every Triton kernel, for Hopper and Blackwell; needs no GPU.

    python kernels/bench/compile_table.py            # print the table
    python kernels/bench/compile_table.py --write    # put all of it into kernels/compiled.md, the worst into README.md

Exits with 1 where a kernel spills. `tests/kernels/test_compiled.py` compares both files with what is compiled.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import triton
from k3kernels.compiled import CAPABILITIES, Form, Report, all_forms, compile_form
from readme import markdown, replace_block

COMPILED = Path(__file__).resolve().parents[1] / "compiled.md"
NUMBERS = ("registers", "spilled", "shared")
HEAD = [f"sm_{capability} {number}" for capability in CAPABILITIES for number in NUMBERS]
ABOUT = (
    "# What the compiler says\n\nEvery form of every Triton kernel that the package launches at the sizes of the "
    "shipped models: registers a thread, spilled bytes a thread, shared bytes a program. Written by "
    "`python kernels/bench/compile_table.py --write`."
)


def row(form: Form, reports: Sequence[Report]) -> list[object]:
    """A line of the table of all forms: `reports` for `CAPABILITIES`."""
    numbers = [getattr(report, number) for report in reports for number in NUMBERS]
    return [form.name, form.num_warps, *numbers]


def worst(rows: Sequence[Sequence[object]]) -> list[list[object]]:
    """A line a kernel: its number of forms, and the most of every column over them."""
    kernels: dict[str, list[Sequence[object]]] = {}
    for line in rows:
        kernels.setdefault(str(line[0]).split(",")[0], []).append(line)
    return [[name, len(lines), *map(max, zip(*(line[2:] for line in lines)))] for name, lines in kernels.items()]


def read_table(version: str) -> dict[str, list[object]] | None:
    """The lines of compiled.md by their forms' names, or None where another Triton than `version` wrote them."""
    lines = COMPILED.read_text().splitlines()
    if f"Triton {version}." not in lines:
        return None
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {name: [name, *map(int, numbers)] for name, *numbers in cells[2:]}


def write(rows: Sequence[Sequence[object]], version: str) -> None:
    """Both tables, in the files where they are read."""
    COMPILED.write_text(f"{ABOUT}\n\nTriton {version}.\n\n{markdown(['form', 'warps', *HEAD], rows)}\n")
    replace_block("compiled", summary(rows, version))


def summary(rows: Sequence[Sequence[object]], version: str) -> str:
    """What kernels/README.md says of the table."""
    return f"Triton {version}.\n\n{markdown(['kernel', 'forms', *HEAD], worst(rows))}"


def compiled(forms: Sequence[Form]) -> Mapping[str, list[Report]]:
    """Reports by the forms' names, for `CAPABILITIES`."""
    return {form.name: [compile_form(form, capability) for capability in CAPABILITIES] for form in forms}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into kernels/compiled.md and kernels/README.md")
    args = parser.parse_args()
    forms = all_forms()
    reports = compiled(forms)
    rows = [row(form, reports[form.name]) for form in forms]
    print(markdown(["form", "warps", *HEAD], rows))
    if args.write:
        write(rows, triton.__version__)
    spills = [name for name, found in reports.items() if any(report.spilled for report in found)]
    if spills:
        print(f"spills: {'; '.join(spills)}", file=sys.stderr)
    return 1 if spills else 0


if __name__ == "__main__":
    sys.exit(main())
