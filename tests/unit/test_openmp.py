"""How the threads of a command wait for each other: asleep, for those that spin burn what others need."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="asks GNU's OpenMP, with which torch comes on Linux")
@pytest.mark.parametrize(("given", "used"), [(None, "PASSIVE"), ("active", "ACTIVE")])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(given: str | None, used: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "true"} | ({} if given is None else {"OMP_WAIT_POLICY": given})
    command = [sys.executable, "-m", "k3train", "kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"OMP_WAIT_POLICY = '{used}'" in done.stderr
