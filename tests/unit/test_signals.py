"""Stop requests: the first counts, and a repeat kills nobody."""

from __future__ import annotations

import os
import signal

from k3train.train.signals import StopFlag, exit_code


def test_a_request_that_is_repeated_to_the_end_changes_nothing() -> None:
    """slurm/environment.sh tells USR1 until the rank has ended: also after it has given its handlers back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        flag = StopFlag()
        flag.install()
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert flag.signal == signal.SIGUSR1
        assert exit_code(flag.signal) == 138
        flag.restore()
        assert signal.getsignal(signal.SIGTERM) is before[signal.SIGTERM]
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGUSR1)  # would end this process
        quiet = StopFlag()
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        quiet.install()
        quiet.restore()
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
