"""Make the W&B workspace of k3train's runs: `python tools/wandb_dashboard.py --entity ME --project k3train`.

It needs the package wandb-workspaces and a W&B key. `--list` needs neither, and prints what the panels show.
"""

import argparse
import sys

from k3train.errors import UserError
from k3train.telemetry.dashboard import SECTIONS, build_workspace


def main() -> int:
    """Run the program; returns its exit code."""
    parser = argparse.ArgumentParser(description="Make the W&B workspace of k3train's runs.")
    parser.add_argument("--entity", help="user or team; needed unless --list")
    parser.add_argument("--project", default="k3train")
    parser.add_argument("--name", default="k3train")
    parser.add_argument("--list", action="store_true", help="print the panels and end")
    options = parser.parse_args()
    if options.list:
        for section in SECTIONS:
            print(section.name)
            for panel in section.panels:
                print(f"  {panel.title}: {panel.pattern or ', '.join(panel.metrics)}")
        return 0
    try:
        if not options.entity:
            raise UserError("--entity is missing; give the W&B user or team that the project belongs to")
        print(build_workspace(options.entity, options.project, options.name).save().url)
    except UserError as error:
        print(f"wandb_dashboard: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
