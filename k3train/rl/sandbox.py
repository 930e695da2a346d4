"""A Python tool: code of a model in a process of its own, with limits on time, memory, files and network.

Limits are the kernel's where it gives them: CPU time, address space, file size and open files by setrlimit, no network
by a network namespace of its own where the system lets users make one. Beneath them an audit hook in the process
refuses sockets, other programs, and files outside its folder. That stops accidents and simple tricks; it is no wall
against an attacker who knows Python's insides. Run untrusted code at scale in virtual machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

MOST_OUTPUT = 1 << 20  # bytes of each stream that are read at all
START_SECONDS = 60.0  # for an interpreter to start


@dataclass(frozen=True)
class Limits:
    """What a run may use. Output beyond `output_chars` is cut in the middle."""

    seconds: float = 5.0
    memory_mib: int = 512
    file_mib: int = 8
    open_files: int = 32
    output_chars: int = 2000


@dataclass(frozen=True)
class Ran:
    """What came of a run. `status`: ok, error (an exception, or another exit code), timeout, or killed (by a limit)."""

    status: str
    output: str
    network: str = "namespace"  # namespace: the kernel has none for it | hook: only the audit hook refuses it


# Runs in the child. `allowed` folders may be read (the interpreter's own), `home` written as well.
_RUNNER = r"""
import json, linecache, os, resource, sys, traceback
given = json.loads(sys.stdin.read())
cpu = max(1, int(given["seconds"] + 1))
network = "hook"
try:
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
    network = "namespace"
except (OSError, AttributeError):
    pass
os.write(given["report"], network.encode())
os.close(given["report"])
for kind, value in (
    (resource.RLIMIT_CPU, cpu),
    (resource.RLIMIT_AS, given["memory_mib"] << 20),
    (resource.RLIMIT_FSIZE, given["file_mib"] << 20),
    (resource.RLIMIT_NOFILE, given["open_files"]),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (value, value))
home, allowed = os.path.realpath("."), tuple(os.path.realpath(p) for p in given["allowed"])
refused = ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "ctypes.", "pty.",
           "os.kill", "signal.pthread_kill", "resource.setrlimit", "resource.prlimit", "shutil.chown")
writers = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
           "os.chown", "os.utime", "os.setxattr", "os.removexattr", "shutil.rmtree", "os.mkfifo", "os.mknod")
readers = ("open", "os.listdir", "os.scandir", "os.chdir", "os.walk", "glob.glob")


def inside(path, folders):
    if isinstance(path, int) or path is None:
        return True
    real = os.path.realpath(os.fsdecode(path))
    return any(real == f or real.startswith(f + os.sep) for f in folders)


def watch(event, args, realpath=os.path.realpath, error=PermissionError):
    if event.startswith(refused):
        raise error(f"{event} is not allowed here")
    if event in writers:
        for path in args[:2]:
            if isinstance(path, (str, bytes)) and not inside(path, (home,)):
                raise error(f"{os.fsdecode(path)} lies outside the working folder")
    elif event in readers and args:
        path, mode = args[0], args[1] if event == "open" and len(args) > 1 else "r"
        flags = args[2] if event == "open" and len(args) > 2 and isinstance(args[2], int) else 0
        writes = (isinstance(mode, str) and any(c in mode for c in "wax+")) or flags & (
            os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if not isinstance(path, int) and not inside(path, (home,) if writes else (home, *allowed)):
            raise error(f"{path} lies outside the working folder")


code = given["code"]
for name in list(os.environ):
    del os.environ[name]
sys.stdin = open(os.devnull)
sys.addaudithook(watch)
space = {"__name__": "__main__"}
try:
    exec(compile(code, "<tool>", "exec"), space)
except Exception as problem:
    trace = problem.__traceback__
    sys.stdout.flush()
    traceback.print_exception(type(problem), problem, trace.tb_next if trace else None, chain=False)
    sys.exit(1)
"""


def run_python(code: str, limits: Limits | None = None) -> Ran:
    """Run a program in an empty folder that is gone afterwards; returns what it printed, both streams as one text.

    Never raises for what the code does. The process and all it started are dead when this returns.
    """
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="k3train-tool-", ignore_cleanup_errors=True) as home:
        reader, writer = os.pipe()
        given = {
            "code": code,
            "seconds": limits.seconds,
            "memory_mib": limits.memory_mib,
            "file_mib": limits.file_mib,
            "open_files": limits.open_files,
            "allowed": [sys.base_prefix, sys.base_exec_prefix, "/dev/null", "/dev/urandom"],
            "report": writer,
        }
        with tempfile.TemporaryFile() as out:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", "-u", "-c", _RUNNER],
                cwd=home,
                env={"PATH": os.defpath, "HOME": home, "LANG": "C.UTF-8"},
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                start_new_session=True,
            )
            os.close(writer)
            try:
                network = _start(child, json.dumps(given).encode(errors="surrogatepass"), reader)
                status = _wait(child, limits.seconds) if network else "timeout"
            finally:
                os.close(reader)
                _end(child)
            out.seek(0)
            text = out.read(MOST_OUTPUT).decode(errors="replace")
    return Ran(status, _cut(text.replace(home, "."), limits.output_chars), network)


def _start(child: subprocess.Popen, given: bytes, report: int) -> str:
    """Hand over the program; returns what keeps the network away once the child is about to run it, "" for never.

    The time limit counts from then on: a busy machine takes its time to start an interpreter.
    """
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(given)
        child.stdin.close()
    ready, _, _ = select.select([report], [], [], START_SECONDS)
    return os.read(report, 16).decode() if ready else ""


def _wait(child: subprocess.Popen, seconds: float) -> str:
    try:
        code = child.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return "timeout"
    return "ok" if code == 0 else "killed" if code < 0 else "error"


def _end(child: subprocess.Popen) -> None:
    """Kill the session of the child: it, and whatever it managed to start."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
