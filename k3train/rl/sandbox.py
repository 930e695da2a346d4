"""A Python tool: code of a model in a process of its own, with limits on time, memory, files and network.

Where the system lets users make namespaces, the kernel keeps it in: it has no network, sees the interpreter, the
system's libraries and a folder of its own, of a bounded size, and nothing else, and all that it starts dies with it.
CPU time, address space, file size and open files are bounded by setrlimit everywhere. Beneath all this an audit hook
in the interpreter refuses sockets, other programs, and files outside. Where there are no namespaces, the hook is all
that keeps files and network away: that stops accidents and tricks, not an attacker who knows Python's insides, such as
one who makes a code object of his own. `Ran` says what held. The kernel itself is no perfect wall either: run untrusted
code at scale in virtual machines.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

MOST_OUTPUT = 1 << 20  # bytes of each stream that are read at all
START_SECONDS = 60.0  # for an interpreter to start
LOOK_SECONDS = 0.1  # between two looks at a folder whose size no kernel bounds
FOLDER_FILES = 1024  # files and folders in it
LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/nix/store", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(frozen=True)
class Limits:
    """What a run may use; `folder_mib` is all of its files together. Output beyond `output_chars` is cut in the middle.
    """

    seconds: float = 5.0
    memory_mib: int = 512
    file_mib: int = 8
    folder_mib: int = 32
    open_files: int = 32
    output_chars: int = 2000


@dataclass(frozen=True)
class Ran:
    """What came of a run. `status`: ok, error (an exception, or another exit code), timeout, or killed (by a limit).

    `network` and `files`, what keeps them away: namespace (for the process there are none) | hook (of the interpreter).
    """

    status: str
    output: str
    network: str = "namespace"
    files: str = "namespace"


def run_python(code: str, limits: Limits | None = None, walls: bool = True) -> Ran:
    """Run a program in an empty folder that is gone afterwards; returns what it printed, both streams as one text.

    Never raises for what the code does, but RuntimeError where no interpreter starts. The process and all it started
    are dead when this returns (without namespaces, all but what broke out of its hook to leave its session). `walls`:
    whether namespaces are used where there are any.
    """
    with Sandbox(code, limits, walls=walls) as box:
        return box.wait()


class Sandbox:
    """A program that runs in an empty folder; `with` ends it, and all that it started.

    Args:
        code: the program.
        limits: what it may use.
        keep: open file descriptors that it is given.
        names: plain data that it finds among its globals.
        walls: whether namespaces are used where there are any.
    """

    def __init__(
        self,
        code: str,
        limits: Limits | None = None,
        keep: Sequence[int] = (),
        names: Mapping[str, Any] | None = None,
        walls: bool = True,
    ) -> None:
        self.limits = limits or Limits()
        self._exit = contextlib.ExitStack()
        self._given = {
            **vars(self.limits),
            "code": code,
            "keep": list(keep),
            "names": dict(names or {}),
            "walls": walls,
            "folder_files": FOLDER_FILES,
            "script": _script(),
            "python": os.path.realpath(sys.executable),
            "allowed": [sys.base_prefix, sys.base_exec_prefix, *DEVICES],
            "shown": _shown(),
        }
        self._held: dict[str, Any] = {"network": "hook", "files": "hook", "pid": 0}
        self._said, self._told, self._over = b"", False, False
        self._inner: int | None = None  # the first process in the namespace, as a descriptor

    def __enter__(self) -> Sandbox:
        with self._exit as stack:
            folder = tempfile.TemporaryDirectory(prefix="k3train-tool-", ignore_cleanup_errors=True)
            self._home = os.path.realpath(stack.enter_context(folder))
            self._out = stack.enter_context(tempfile.TemporaryFile())
            self._report, writer = os.pipe()
            stack.callback(os.close, self._report)
            try:
                self._child = self._spawn(writer)
            finally:
                os.close(writer)
            stack.callback(self._end)
            given = {**self._given, "home": self._home, "report": writer}
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.write(json.dumps(given).encode(errors="surrogatepass"))
                self._child.stdin.close()
            self._exit = stack.pop_all()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._exit.close()

    def wait(self) -> Ran:
        """What came of it, once it has ended or its time is up, which counts from when the program began.

        Raises:
            RuntimeError: its interpreter does not start.
        """
        self.begin()
        status = self._status()
        self._end()
        return Ran(status, _cut(self._output(), self.limits.output_chars), self._held["network"], self._held["files"])

    def begin(self) -> None:
        """Wait until the program begins.

        Raises:
            RuntimeError: its interpreter does not start, which says nothing of the program.
        """
        if self._await_start(START_SECONDS):
            return
        self._end()
        why = self._output().strip().rpartition("\n")[2] or f"nothing within {START_SECONDS:g} s"
        raise RuntimeError(
            f"the sandbox's Python did not start ({why:.300}); allow it more memory_mib, or correct the installation"
        )

    def _output(self) -> str:
        self._out.seek(0)
        return self._out.read(MOST_OUTPUT).decode(errors="replace").replace(self._home, ".")

    def _spawn(self, report: int) -> subprocess.Popen:
        return subprocess.Popen(
            [self._given["python"], "-I", "-S", "-B", "-u", "-c", self._given["script"]],
            cwd=self._home,
            env={"PATH": os.defpath, "HOME": self._home, "LANG": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            pass_fds=(report, *self._given["keep"]),
            start_new_session=True,
        )

    def _await_start(self, seconds: float) -> bool:
        """Read what holds, then that the program begins: a busy machine takes its time to start an interpreter."""
        until, poll = time.monotonic() + seconds, select.poll()  # not select: it takes no numbers beyond 1023
        poll.register(self._report, select.POLLIN)
        while self._said.count(b"\n") < 2:
            ready = poll.poll(max(0.0, 1000 * (until - time.monotonic())))
            more = os.read(self._report, 4096) if ready else b""
            self._said += more
            if self._said.count(b"\n") and not self._told:
                self._told = True
                self._held = json.loads(self._said.partition(b"\n")[0])
                if self._held["pid"]:
                    with contextlib.suppress(ProcessLookupError):
                        self._inner = os.pidfd_open(self._held["pid"])
            if not more:
                return False
        return True

    def _status(self) -> str:
        until = time.monotonic() + self.limits.seconds
        while True:
            left = until - time.monotonic()
            try:
                code = self._child.wait(timeout=max(0.0, left if self._bounded else min(left, LOOK_SECONDS)))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= until:
                    return "timeout"
                if not self._bounded and _too_much(self._home, self.limits.folder_mib):
                    return "killed"
                continue
            if not self._bounded and _too_much(self._home, self.limits.folder_mib):
                return "killed"
            return "ok" if code == 0 else "killed" if code < 0 else "error"

    @property
    def _bounded(self) -> bool:
        """Whether the kernel bounds the folder; else somebody has to look."""
        return self._held["files"] == "namespace"

    def _end(self) -> None:
        """Kill all of it: with the first process of a namespace, all others; the session of the child besides."""
        if self._over:
            return  # a number of a process that has ended may be another's by now
        self._over = True
        self._await_start(0.0)  # its first process may have begun in the meantime
        if self._inner is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._inner, signal.SIGKILL)
            os.close(self._inner)
            self._inner = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(timeout=START_SECONDS)  # it waits for the whole namespace
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


@functools.cache
def _script() -> str:
    return Path(__file__).with_name("sandbox_child.py").read_text(encoding="utf-8")


@functools.cache
def _shown() -> list[str]:
    """What a namespace shows of the system: no folder twice, none as a link."""
    wanted = [sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.path.realpath(sys.executable)), *LIBRARIES]
    real = sorted({os.path.realpath(path) for path in wanted if os.path.exists(path)})
    folders = [path for path in real if not any(path.startswith(f"{other}/") for other in real)]
    return [*folders, *(device for device in DEVICES if os.path.exists(device))]


def _too_much(folder: str, mib: int) -> bool:
    """Whether a folder holds more than it may; what was deleted and is still open is not seen."""
    used = count = 0
    for base, folders, files in os.walk(folder):
        count += len(folders) + len(files)
        if count > FOLDER_FILES:
            return True
        for name in files:
            with contextlib.suppress(OSError):
                used += os.lstat(os.path.join(base, name)).st_blocks * 512
    return used > mib << 20


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
