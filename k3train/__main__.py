"""`python -m k3train`: the same as the `k3train` command, also under torchrun and srun."""

from __future__ import annotations

import sys


def main() -> int:
    """`k3train.cli.main`; Ctrl-C while its modules are still being read ends this in silence as well."""
    try:
        from k3train import cli
    except KeyboardInterrupt:
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
