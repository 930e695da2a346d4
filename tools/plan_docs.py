"""Rewrite the tables of docs/planner.md: published sizes and throughputs beside predictions, and the ladder's plans.

    python tools/plan_docs.py            # rewrites the parts between <!-- plan:NAME --> and <!-- end -->
    python tools/plan_docs.py --check    # says whether they are as the program would write them

Nothing in those parts is typed in. Takes about a minute.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from k3train.config.load import load_recipe
from k3train.config.parameters import parameter_count
from k3train.config.rules_cluster import load_cluster
from k3train.plan import anchors, own_runs, picture, text
from k3train.plan.inventory import take_inventory
from k3train.plan.memory import GIB
from k3train.plan.plan import Plan, make_plan
from k3train.plan.storage import VISION_PARAMETERS, export_bytes

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "planner.md"
PICTURE = ROOT / "docs" / "images" / "plan-k3.png"
Rung = tuple[str, str, tuple[str, ...]]  # recipe, cluster, overrides
LADDER: tuple[Rung, ...] = (
    ("pretrain/k3-tiny", "cpu", ()),
    ("pretrain/k3-mini", "h100-8x", ()),
    ("pretrain/k3-48b", "h100-8x", ("parallel.world_size=64",)),
    ("pretrain/k3-8layers", "h100-8x", ()),
    ("pretrain/k3", "gb200-nvl72", ()),
)


def sizes() -> str:
    """The released model: the report's figures and the planner's."""
    config = load_recipe(["recipe=pretrain/k3", "model.mtp.num_layers=0", "parallel.pipeline_layout=auto"])
    inventory, count = take_inventory(config), parameter_count(config.model)
    rows = [
        ("parameters of the text model", "2.78T (report)", f"{inventory.total / 1e12:.4f}T"),
        ("active, without the input embedding", "104.2B (report)", f"{count['active'] / 1e9:.2f}B"),
        (
            "published folder, vision included",
            "about 1,453.7 GiB (index of its 96 files)",
            f"{export_bytes(inventory, VISION_PARAMETERS) / GIB:,.1f} GiB",
        ),
    ]
    return markdown(("", "Published", "Planner"), rows)


def throughputs() -> str:
    """Every published row, its prediction and the error; mean and largest error of those that nothing was fitted to."""
    compared = list(anchors.compare())
    rows = [
        (
            c.name,
            c.devices,
            f"{c.published:,.4g} {c.unit}",
            f"{c.predicted:,.4g}",
            f"{c.error:+.0%}" + (" (fitted)" if c.fitted else ""),
            c.assumed or "-",
            c.source,
        )
        for c in compared
    ]
    unfitted = [c for c in compared if not c.fitted]
    runs = [abs(c.error) for c in unfitted if c.unit.startswith("tokens")]
    worst = max(unfitted, key=lambda c: abs(c.error))
    head = ("Run", "Devices", "Published", "Predicted", "Error", "Not in the source, assumed", "Source")
    told = f"Mean absolute error of the {len(runs)} training runs in tokens/s that nothing was fitted to: "
    told += f"{sum(runs) / len(runs):.0%}, largest {max(runs):.0%}.\n"
    told += f"Of all {len(unfitted)} rows that nothing was fitted to: "
    told += f"{sum(abs(c.error) for c in unfitted) / len(unfitted):.0%}, largest {worst.error:+.0%} ({worst.name})."
    return f"{markdown(head, rows)}\n\n{told}"


def measured() -> str:
    """Times of this program on a machine at hand, and what the planner says of them."""
    rows = [
        (
            m.run.of,
            f"{m.run.tokens:,}",
            m.run.quoted,
            f"{m.predicted:.3g} s",
            f"{m.error:+.0%}",
        )
        for m in own_runs.compare_own()
    ]
    return markdown(("k3-tiny on one CPU rank", "Tokens", "Measured", "Predicted", "Error"), rows)


def ladder() -> str:
    """One line a rung, then each plan as printed."""
    plans = [(rung, plan_of(rung)) for rung in LADDER]
    head = ("Recipe", "Parameters / active", "Devices", "Layout", "GiB", "Tokens/s a device", "MFU")
    parts = [markdown(head, [rung_cells(rung[0], plan) for rung, plan in plans])]
    return "\n\n".join([*parts, *(printed(rung, plan) for rung, plan in plans)])


def rung_cells(name: str, plan: Plan) -> tuple[str, ...]:
    """A recipe's line of the ladder."""
    count, step = parameter_count(plan.config.model), plan.step
    return (
        f"`{name}`",
        f"{count['total'] / 1e9:,.4g}B / {count['active'] / 1e9:,.4g}B",
        f"{plan.world_size:,} x {plan.cluster.device}",
        text.layout_name(plan.config, plan.world_size),
        f"{plan.fullest.total / GIB:,.3g} of {plan.room / GIB:,.3g}",
        f"{step.tokens_per_second / plan.world_size:,.0f}",
        f"{step.mfu:.0%}",
    )


def printed(rung: Rung, plan: Plan) -> str:
    """A recipe's plan under its heading, as the command prints it."""
    name, cluster, extra = rung
    command = " ".join(["k3train plan", f"recipe={name}", f"cluster={cluster}", *extra])
    return f"### {name}\n\n```\n$ {command}\n{text.summary(plan)}\n```"


def plan_of(rung: Rung) -> Plan:
    """The plan of a rung, which has to fit."""
    name, cluster, extra = rung
    plan = make_plan(load_recipe([f"recipe={name}", *extra]), load_cluster(cluster, {}))
    if not plan.fits:
        raise SystemExit(f"{name} does not fit on {cluster}: the ladder has to stand")
    return plan


def markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table."""
    return "\n".join([markdown_row(head), "|" + "---|" * len(head), *map(markdown_row, rows)])


def markdown_row(cells: tuple[str, ...]) -> str:
    """One line of a table."""
    return "| " + " | ".join(cells) + " |"


PARTS: dict[str, Callable[[], str]] = {
    "sizes": sizes,
    "throughputs": throughputs,
    "measured": measured,
    "ladder": ladder,
}


def rewritten(document: str) -> str:
    """The document with its generated parts made anew."""

    def make(match: re.Match[str]) -> str:
        return f"<!-- plan:{match[1]} -->\n{PARTS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- plan:(\w+) -->.*?<!-- end -->", make, document, flags=re.DOTALL)


def main() -> int:
    """Rewrite or check; 1 where the document is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    before = DOC.read_text(encoding="utf-8")
    after = rewritten(before)
    if arguments.check:
        print("docs/planner.md is up to date" if before == after else "docs/planner.md differs; run tools/plan_docs.py")
        return int(before != after)
    DOC.write_text(after, encoding="utf-8")
    picture.draw(plan_of(LADDER[-1]), PICTURE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
