"""Registers, spills and shared memory of every Triton kernel, for Hopper and Blackwell; needs no GPU.

    python kernels/bench/compile_table.py            # print the table
    python kernels/bench/compile_table.py --write    # put it into kernels/README.md

Exits with 1 where a kernel spills.
"""

import argparse
import sys

import triton
from k3kernels.compiled import CAPABILITIES, all_forms, compile_form
from readme import markdown, replace_block


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into kernels/README.md")
    args = parser.parse_args()
    rows, spills = [], []
    for form in all_forms():
        reports = [compile_form(form, capability) for capability in CAPABILITIES]
        rows.append([form.name, form.num_warps])
        for capability, report in zip(CAPABILITIES, reports):
            rows[-1] += [report.registers, report.spilled, report.shared]
            if report.spilled:
                spills.append(f"{form.name} on sm_{capability}")
    head = ["kernel", "warps"]
    for capability in CAPABILITIES:
        head += [f"sm_{capability} registers", "spilled", "shared"]
    table = f"Triton {triton.__version__}; registers a thread, spilled bytes a thread, shared bytes a program.\n\n"
    table += markdown(head, rows)
    print(table)
    if args.write:
        replace_block("compiled", table)
    if spills:
        print(f"spills: {', '.join(spills)}", file=sys.stderr)
    return 1 if spills else 0


if __name__ == "__main__":
    sys.exit(main())
