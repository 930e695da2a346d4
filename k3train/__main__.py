"""`python -m k3train`: the same as the `k3train` command, also under torchrun and srun."""

from __future__ import annotations

import sys

from k3train.cli import main

if __name__ == "__main__":
    sys.exit(main())
