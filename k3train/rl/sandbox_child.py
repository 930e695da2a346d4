"""The inside of the sandbox: a script that `sandbox.py` hands to an interpreter of its own. Never imported.

It runs twice. First it builds the walls that the kernel gives: namespaces for users, mounts, processes, network and
IPC, in which only the interpreter and an empty folder exist. Then, in a fresh interpreter inside them and without any
capability, it sets limits and the audit hook, and runs the program. Where the system gives no namespaces the second
part follows in the first's process. What holds is reported before the program begins.
"""

from __future__ import annotations

import json
import linecache  # noqa: F401 (so that a traceback can be written without opening the library)
import os
import resource
import signal
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

PLAIN_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 2, 4, 8, 32, 4096, 16384, 1 << 18  # MS_* of mount(2)
RDONLY, DETACH = 1, 2  # MS_RDONLY; MNT_DETACH of umount2(2)
# statvfs flags of a mount that a remount must not drop, as MS_*.
KEPT = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
INSIDE = 1000  # user and group inside: not 0, so that the exec drops every capability


def build_walls(given: dict[str, Any]) -> dict[str, Any]:
    """Enter the namespaces that the system gives; says which of network and files they keep away.

    `enter`: whether the program has to be a new process, because only that is in the new namespace of processes.
    """
    held = {"network": "hook", "files": "hook", "pid": 0, "enter": False}
    if not given["walls"] or not hasattr(os, "unshare"):
        return held
    user, group = os.geteuid(), os.getegid()
    more = os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWIPC | os.CLONE_NEWUTS
    try:
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET | more)
    except OSError:
        try:
            os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET)
            held["network"] = "namespace"
        except OSError:
            pass
        return held
    held["network"], held["enter"] = "namespace", True
    try:
        maps = {"setgroups": "deny", "uid_map": f"{INSIDE} {user} 1", "gid_map": f"{INSIDE} {group} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        build_root(given)
        held["files"] = "namespace"
    except (OSError, AttributeError, ImportError):
        os.chdir(given["home"])
    return held


def build_root(given: dict[str, Any]) -> None:
    """Make a root that holds the interpreter, read-only, three devices, and the folder /work, of a bounded size."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: Callable[..., int], *arguments: Any) -> None:
        if function(*(a.encode() if isinstance(a, str) else a for a in arguments)) != 0:
            raise OSError(ctypes.get_errno(), function.__name__)

    def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
        call(libc.mount, source, target, kind, ctypes.c_ulong(flags), data)

    root = given["home"]
    mount(None, "/", None, REC | PRIVATE)
    mount("k3train", root, "tmpfs", NOSUID | NODEV, "size=1m,nr_inodes=1024,mode=755")
    try:
        fill_root(given, mount)
    except OSError:
        libc.umount2(root.encode(), DETACH)
        raise
    os.chdir(root)
    call(libc.pivot_root, ".", ".")
    call(libc.umount2, ".", DETACH)
    mount(None, "/", None, BIND | REMOUNT | RDONLY | NOSUID | NODEV)
    os.chdir("/work")
    call(libc.prctl, 38, *(ctypes.c_ulong(n) for n in (1, 0, 0, 0)))  # PR_SET_NO_NEW_PRIVS


def fill_root(given: dict[str, Any], mount: Callable[..., None]) -> None:
    """Make what the new root, at the folder `home`, shows."""
    root = given["home"]

    def shown(path: str) -> None:
        target = root + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            open(target, "w").close()
        mount(path, target, None, BIND | REC)
        if path not in PLAIN_DEVICES:
            kept = sum(flag for held, flag in KEPT.items() if os.statvfs(target).f_flag & held)
            mount(None, target, None, BIND | REMOUNT | RDONLY | kept)

    for name in os.listdir("/"):
        if os.path.islink(f"/{name}"):  # such as /lib, which the interpreter's loader goes through
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
    for path in given["shown"]:
        shown(path)
    work = f"{root}/work"
    os.mkdir(work)
    bytes_and_files = f"size={given['folder_mib']}m,nr_inodes={given['folder_files']},mode=755"
    mount("k3train", work, "tmpfs", NOSUID | NODEV | NOEXEC, bytes_and_files)


def enter(given: dict[str, Any], held: dict[str, Any]) -> None:
    """Go on in a fresh interpreter, the first process of the new namespace; this one waits and ends as that one does.

    It stays a zombie for as long as this process lives, so that its number belongs to nobody else.
    """
    file = os.memfd_create("given")
    os.write(file, json.dumps({**given, "walls": None}).encode(errors="surrogatepass"))
    os.lseek(file, 0, os.SEEK_SET)
    go, tell = os.pipe()
    child = os.fork()
    if not child:
        os.close(tell)
        os.read(go, 1)  # until its number is known
        os.dup2(file, 0)
        command = [given["python"], "-I", "-S", "-B", "-u", "-c", given["script"]]
        os.execve(command[0], command, {"LANG": "C.UTF-8"})
    os.write(given["report"], json.dumps({**held, "pid": child}).encode() + b"\n")
    for descriptor in (go, tell, given["report"], *given["keep"]):
        os.close(descriptor)
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    if ended.si_code == os.CLD_EXITED:
        os._exit(ended.si_status)
    if ended.si_status != signal.SIGKILL:
        signal.signal(ended.si_status, signal.SIG_DFL)
    os.kill(os.getpid(), ended.si_status)
    os._exit(1)


def limit(given: dict[str, Any]) -> None:
    """The kernel's limits on one process."""
    for kind, value in (
        (resource.RLIMIT_CPU, max(1, int(given["seconds"] + 1))),
        (resource.RLIMIT_AS, given["memory_mib"] << 20),
        (resource.RLIMIT_FSIZE, given["file_mib"] << 20),
        (resource.RLIMIT_NOFILE, given["open_files"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def add_hook(home: str, allowed: tuple[str, ...]) -> None:
    """Refuse, in the interpreter, sockets, programs, and files outside `home` (to write) and `allowed` (to read).

    What runs are copies of `watch` and `resolved` that nobody else has: they use constants and the defaults of their
    arguments alone, all immutable, and no builtins, so that no name which a program can reach decides anything. What
    would find the copies (gc, frames of other threads) and change them (their code, from the frame in a traceback) is
    refused.
    """
    empty: dict[str, Any] = {"__builtins__": {}}
    tools = (type, str, len, PermissionError)
    resolve = types.FunctionType(resolved.__code__, empty, "resolved", (*tools, bytes, os.readlink, os.getcwd, OSError))
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
    roots = tuple(f"{path.rstrip('/')}/" for path in (home, *allowed))
    system = (roots, resolve, writing, os.stat, OSError)
    hook = types.FunctionType(watch.__code__, empty, "watch", (*tools, int, *system))
    sys.addaudithook(hook)


def watch(
    event: str,
    args: tuple,
    kind: type,
    text: type,
    length: Callable,
    error: type,
    whole: type,
    roots: tuple[str, ...],
    resolve: Callable,
    writing: int,
    stat: Callable,
    missing: type,
) -> None:
    """The audit hook. `roots` end with a slash; the first may be written to."""
    if event.startswith(
        ("socket.", "subprocess.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "ctypes.", "pty.",
         "os.kill", "signal.pthread_kill", "resource.setrlimit", "resource.prlimit", "shutil.chown", "gc.",
         "sys._current_frames", "sys._current_exceptions", "cpython.PyInterpreterState_New")
    ):  # fmt: skip
        raise error(f"{event} is not allowed here")
    if event in ("object.__setattr__", "object.__delattr__") and args[0] is resolve:
        raise error("changing this function is not allowed here")
    # What starts programs, and interpreters that have no hook. A name of another kind may equal what it likes.
    if event == "import" and (
        kind(args[0]) is not text or args[0] in ("_posixsubprocess", "_xxsubinterpreters", "_interpreters")
    ):
        raise error("this import is not allowed here")
    writes = event in (
        "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod",
        "os.chown", "os.utime", "os.setxattr", "os.removexattr", "shutil.rmtree", "os.mkfifo", "os.mknod",
    )  # fmt: skip
    if not writes and event not in ("open", "os.listdir", "os.scandir", "os.chdir"):
        return
    paths = args[:2] if writes else args[:1]
    if event == "open" and length(args) == 3:
        mode, flags = args[1], args[2]
        if kind(flags) is whole and flags & writing:
            writes = True
        elif kind(mode) is text:
            for letter in mode:
                if letter in "wax+":
                    writes = True
    for path in paths:
        if path is not None and kind(path) is not whole:
            real = resolve(path)
            if not real.startswith(roots[:1] if writes else roots):
                raise error(f"{path} lies outside the working folder")
            if event == "open" and not real.startswith(roots[:1]):
                try:
                    stat(real)  # with its slash: of a folder alone
                except missing:
                    continue
                # As `dir_fd` it would be where a path starts which here seems to start in the working folder.
                raise error(f"{path}: opening a folder there is not allowed here")


def resolved(
    path: Any,
    kind: type,
    text: type,
    length: Callable,
    error: type,
    raw: type,
    readlink: Callable,
    getcwd: Callable,
    missing: type,
) -> str:
    """A path without links, with a slash at its end. One that is relative may not climb above where it begins: the
    event does not say from which folder the kernel starts."""
    if kind(path) is raw:
        path = path.decode("utf-8", "surrogateescape")
    if kind(path) is not text:
        raise error("a path of another kind is not allowed here")
    rest = path.split("/")[::-1]
    done = [] if path.startswith("/") else getcwd().split("/")[1:]
    least, links = length(done), 0
    while rest:
        part = rest.pop()
        if part == "..":
            if length(done) <= least and least:
                raise error(f"{path} lies outside the working folder")
            done = done[:-1]
        elif part and part != ".":
            done = [*done, part]
            try:
                link = readlink("/" + "/".join(done))
            except missing:
                continue
            links += 1
            if links > 40:
                raise error(f"{path} has too many links")
            rest += link.split("/")[::-1]
            done, least = ([] if link.startswith("/") else done[:-1]), 0
    return "/" + "/".join(done) + "/"


def refuse_programs() -> None:
    """The one way to start a program that raises no event."""
    import _posixsubprocess

    def fork_exec(*_: Any) -> None:
        raise PermissionError("starting programs is not allowed here")

    _posixsubprocess.fork_exec = fork_exec


def main() -> None:
    given = json.loads(sys.stdin.read())
    if given["walls"] is not None:
        held = build_walls(given)
        if held["enter"]:
            enter(given, held)
        os.write(given["report"], json.dumps(held).encode() + b"\n")
    home, code = os.path.realpath("."), given["code"]
    limit(given)
    refuse_programs()
    for name in list(os.environ):
        del os.environ[name]
    sys.stdin = open(os.devnull)  # noqa: SIM115 (for as long as the program runs)
    os.write(given["report"], b"\n")
    os.close(given["report"])
    add_hook(home, tuple(os.path.realpath(path) for path in given["allowed"]))
    run(code, {"__name__": "__main__", **given["names"]})


def run(code: str, space: dict[str, Any]) -> None:
    """The program, in a space that holds nothing of this script; but frames lead here, so nothing here is secret."""
    try:
        exec(compile(code, "<tool>", "exec"), space)
    except Exception as problem:
        trace = problem.__traceback__
        sys.stdout.flush()
        traceback.print_exception(type(problem), problem, trace.tb_next if trace else None, chain=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
