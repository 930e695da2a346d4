"""`python -m k3train`: the same as the `k3train` command, also under torchrun and srun."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """`k3train.cli.main`; Ctrl-C while its modules are still being read ends this in silence as well."""
    # Threads that wait for each other sleep. By default OpenMP's spin, and where other programs have the cores they
    # burn the time of the ones they wait for: an evaluation on two busy cores took 14 times the processor time. It has
    # to be said before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        from k3train import cli
    except KeyboardInterrupt:
        return 130
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
