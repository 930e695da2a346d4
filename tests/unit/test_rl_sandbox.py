"""The Python tool: what it returns, and every limit, by code that tries to break it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from k3train.rl.sandbox import Limits, Ran, run_python


def test_output_and_errors() -> None:
    assert run_python("import math\nprint(math.comb(5, 2), 6 * 7)").output == "10 42\n"
    failed = run_python("print('before')\n1 / 0")
    assert failed.status == "error"
    assert failed.output.startswith("before\n")
    assert failed.output.endswith("ZeroDivisionError: division by zero\n")
    assert run_python("while x").status == "error"
    assert run_python("import sys; sys.exit(3)").status == "error"
    assert run_python("").status == "ok"


def test_a_folder_of_its_own(tmp_path: Path) -> None:
    """Files can be written and read there, and nothing is left of them for the next run."""
    assert run_python("open('a.txt', 'w').write('hi')\nprint(open('a.txt').read())").output == "hi\n"
    assert run_python("import os; print(os.listdir('.'))").output == "[]\n"
    assert run_python("import os; print(dict(os.environ))").output == "{}\n"


@pytest.mark.parametrize(
    "code",
    [
        "open('{target}').read()",
        "open('{target}', 'w')",
        "import os; os.open('{target}', os.O_WRONLY)",
        "import os; os.remove('{target}')",
        "import os; os.rename('{target}', 'x')",
        "import os; os.symlink('{target}', 'x'); print(open('x').read())",
        "import pathlib; pathlib.Path('{target}').read_text()",
        "import os; os.listdir('{folder}')",
        "import shutil; shutil.rmtree('{folder}')",
        "open('/etc/passwd').read()",
        "import subprocess; subprocess.run(['ls', '/'])",
        "import os; os.system('ls /')",
        "import os; os.fork()",
        "import os, sys; os.execv(sys.executable, ['x'])",
        "import os; os.kill(os.getppid(), 9)",
        "import ctypes; ctypes.CDLL(None)",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9/')",
    ],
)
def test_what_is_refused(tmp_path: Path, code: str) -> None:
    (tmp_path / "secret").write_text("treasure")
    ran = run_python(code.format(target=tmp_path / "secret", folder=tmp_path), Limits(seconds=60))
    assert ran.status == "error"
    refused = ("is not allowed here", "lies outside the working folder", "No module named")
    assert any(words in ran.output for words in refused), ran.output
    assert "treasure" not in ran.output
    assert (tmp_path / "secret").read_text() == "treasure"


def test_time() -> None:
    """A loop and a sleep end at the limit; nothing is left of them, nor of a process that ignores signals."""
    for code in ("while True: pass", "import time; time.sleep(60)"):
        started = time.monotonic()
        assert run_python(f"print('on', flush=True)\n{code}", Limits(seconds=2)) == _like("timeout", "on\n")
        assert time.monotonic() - started < 40  # a busy machine, but no minute


def _like(status: str, output: str) -> object:
    class Like:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Ran) and (other.status, other.output) == (status, output)

        def __hash__(self) -> int:
            return 0

    return Like()


def test_memory_files_and_output() -> None:
    ran = run_python("x = bytearray(2 << 30)", Limits(memory_mib=256))
    assert ran.status == "error"
    assert "MemoryError" in ran.output
    ran = run_python("open('big', 'wb').write(bytes(3 << 20))", Limits(file_mib=1))
    assert ran.status in ("error", "killed")
    ran = run_python("print('x' * 100000)", Limits(output_chars=100))
    assert len(ran.output) < 200
    assert "99901 characters left out" in ran.output
    ran = run_python("files = [open('f', 'w') for _ in range(100)]", Limits(open_files=20))
    assert "Too many open files" in ran.output


def test_a_flood_of_output_is_bounded() -> None:
    ran = run_python("while True: print('x' * 10000)", Limits(seconds=5, file_mib=2))
    assert ran.status in ("error", "killed", "timeout")
    assert len(ran.output) <= 2100


def test_the_network_is_out_of_reach_below_python_too() -> None:
    """Where users may make network namespaces, the kernel has none for the process."""
    ran = run_python("print(1)")
    assert ran.network in ("namespace", "hook")
    assert os.path.exists("/proc/self/ns/net")
