"""The Python tool: what it returns, and every limit, by code that tries to break it."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from k3train.rl import sandbox, unit_tests
from k3train.rl.sandbox import Limits, Ran, run_python

PATIENT = Limits(seconds=60)  # a busy machine


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
        "import os, sys; os.open('k3', os.O_WRONLY, dir_fd=os.open(sys.base_prefix, 0))",
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
@pytest.mark.parametrize("walls", [True, False])
def test_what_is_refused(tmp_path: Path, code: str, walls: bool) -> None:
    (tmp_path / "secret").write_text("treasure")
    ran = run_python(code.format(target=tmp_path / "secret", folder=tmp_path), PATIENT, walls=walls)
    assert ran.status == "error"
    refused = ("is not allowed here", "lies outside the working folder", "No module named")
    assert any(words in ran.output for words in refused), ran.output
    assert "treasure" not in ran.output
    assert (tmp_path / "secret").read_text() == "treasure"


@pytest.mark.parametrize("walls", [True, False])
def test_an_interpreter_that_does_not_start_is_no_time_out(walls: bool) -> None:
    """A program that never began did nothing wrong: the environment failed, which counts as such."""
    with pytest.raises(RuntimeError, match=r"did not start .*memory_mib"):
        run_python("print(1)", Limits(memory_mib=4), walls=walls)
    with pytest.raises(RuntimeError, match="did not start"):
        unit_tests.passes("x = 1", "assert x == 1", Limits(memory_mib=4), walls=walls)


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


def test_descriptors_of_any_number() -> None:
    """As of a rank with many connections: the report's has a number beyond 1023."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 1200:
        pytest.skip("this system gives no more than 1,024 descriptors")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 1200), before[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1050)]
    try:
        assert run_python("print(1)", PATIENT).output == "1\n"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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


@pytest.fixture
def without_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sandboxes whose interpreter refuses nothing, as if a program had got the better of it."""
    script = sandbox._script()
    bare = script.replace("    refuse_programs()\n", "").replace("    sys.addaudithook(hook)\n", "")
    assert len(bare) < len(script) - 40
    monkeypatch.setattr(sandbox, "_script", lambda: bare)


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


CONNECT = """
import socket
try:
    socket.create_connection(('127.0.0.1', {port}), timeout=20)
    print('connected')
except OSError as error:
    print(type(error).__name__, error.errno)
"""


def test_the_network_is_out_of_reach_below_the_hook(without_hook: None, listening: int) -> None:
    """A server of this machine: without namespaces the bare program reaches it, so that the test can fail; with them
    the kernel has no way there."""
    assert run_python(CONNECT.format(port=listening), PATIENT, walls=False).output == "connected\n"
    ran = run_python(CONNECT.format(port=listening), PATIENT)
    if ran.network != "namespace":
        pytest.skip("this system gives users no network namespaces")
    assert ran.output == f"OSError {errno.ENETUNREACH}\n"


def test_files_and_programs_are_out_of_reach_below_the_hook(without_hook: None, tmp_path: Path) -> None:
    """Not there, not writable, not to be started; processes outside cannot be seen; no capability is left."""
    (tmp_path / "secret").write_text("treasure")
    code = f"""
import os, subprocess, sys
def tried(action):
    try: return action()
    except Exception as error: return type(error).__name__
print(tried(lambda: open({str(tmp_path / "secret")!r}).read()))
print(tried(lambda: os.listdir('/etc')))
print(tried(lambda: subprocess.run(['/bin/sh', '-c', 'echo started'], capture_output=True).stdout))
print(tried(lambda: open(os.__file__, 'a')))
print(tried(lambda: open('/new', 'w')))
print(tried(lambda: os.kill({os.getpid()}, 0)))
print(tried(lambda: os.unshare(os.CLONE_NEWNS)), tried(lambda: os.chroot('.')))
print(sorted(os.listdir('/')), os.getpid())
"""
    ran = run_python(code, PATIENT)
    if ran.files != "namespace":
        pytest.skip("this system gives users no mount namespaces")
    secret, etc, shell, library, root, kill, more, shown = ran.output.splitlines()
    assert (secret, root, kill) == ("FileNotFoundError", "OSError", "ProcessLookupError")
    assert etc in ("FileNotFoundError", "['ld.so.cache']")
    assert shell == "FileNotFoundError"
    assert library in ("OSError", "PermissionError")
    assert more == "PermissionError PermissionError"
    assert "work" in shown
    assert "tmp" not in shown
    assert shown.endswith(" 1")


def test_what_a_program_starts_dies_with_it(without_hook: None) -> None:
    """A process that left its session, below the hook; it holds an end of a pipe for as long as it lives."""
    reader, writer = os.pipe()
    code = "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(600)\nprint('over')"
    with sandbox.Sandbox(code, PATIENT, keep=(writer,)) as box:
        os.close(writer)
        ran = box.wait()
    assert (ran.status, ran.output) == ("ok", "over\n")
    if ran.files != "namespace":
        pytest.skip("this system gives users no process namespaces")
    ready, _, _ = select.select([reader], [], [], 60)
    assert ready
    assert os.read(reader, 1) == b""
    os.close(reader)


@pytest.mark.parametrize("step", ["maps = {", "fill_root(given, mount)"])
def test_where_namespaces_are_given_by_half_the_hook_holds(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """As where a system lets users make namespaces and no mounts in them: the program runs all the same, with threads,
    in an empty folder, and says what held."""
    script = sandbox._script()
    assert script.count(f"        {step}") == 1
    halved = script.replace(f"        {step}", f"        os.open('/nowhere', 0)\n        {step}")
    monkeypatch.setattr(sandbox, "_script", lambda: halved)
    code = "import os, threading as t\nt.Thread(target=print, args=(os.listdir(),)).start()\nopen('/etc/passwd')"
    ran = run_python(code, PATIENT)
    assert (ran.status, ran.files) == ("error", "hook")
    assert "[]\n" in ran.output
    assert "lies outside the working folder" in ran.output
    assert ran.network == ("namespace" if run_python("").network == "namespace" else "hook")


@pytest.mark.parametrize("walls", [True, False])
def test_a_folder_has_a_bounded_size(walls: bool) -> None:
    """40 files, each small enough; and without namespaces somebody looks, so the program has to live a while."""
    code = "import time\nfor i in range(40): open(str(i), 'wb').write(bytes(1 << 20))\ntime.sleep(30)\nprint('whole')"
    ran = run_python(code, Limits(seconds=60, file_mib=2, folder_mib=8), walls=walls)
    assert "whole" not in ran.output
    kernel = ran.files == "namespace"
    assert (ran.status, "No space left" in ran.output) == ("error" if kernel else "killed", kernel)
    fine = run_python("for i in range(6): open(str(i), 'wb').write(bytes(1 << 20))", Limits(60, 512, 2, 8), walls=walls)
    assert fine.status == "ok"


TRICKS = [
    "import __main__; __main__.refused = (); __main__.inside = lambda *a: True; __main__.watch = print",
    "import builtins, os, posixpath; builtins.any = builtins.isinstance = builtins.len = lambda *a: False\n"
    "builtins.type = lambda *a: int; os.path.realpath = posixpath.realpath = lambda *a: os.getcwd()\n"
    "os.readlink = os.getcwd = lambda *a: ''",
    "import sys\ntry: open('/etc/passwd')\nexcept PermissionError as e: frame = e.__traceback__.tb_next.tb_frame\n"
    "print(frame.f_code.co_name)\nfor space in (frame.f_locals, frame.f_globals, frame.f_builtins):\n"
    "    for name in list(space):\n        if name not in ('__import__', '__builtins__', 'open', 'print', 'list'):\n"
    "            try: space[name] = '/'\n            except Exception: pass",
    "import gc\nfor found in gc.get_objects():\n    if getattr(found, '__name__', '') == 'watch': del found",
    "class S(str):\n    def startswith(self, *a): return True\n    def split(self, *a): return []\nTARGET = S(TARGET)",
    "class P:\n    said, target = ['x'], TARGET\n"
    "    def __fspath__(self): return self.said.pop() if self.said else self.target\nTARGET = P(); open(TARGET)",
    "import os\nos.makedirs('a/b/c/d/e/f/g/h')\nfd = os.open('.', 0)\nos.chdir('a/b/c/d/e/f/g/h')\n"
    "TARGET = '../' * 8 + TARGET[1:]\nopen_ = open\n"
    "def open(path): return os.fdopen(os.open(path, 0, dir_fd=fd))",
]


@pytest.mark.parametrize("walls", [True, False])
@pytest.mark.parametrize("trick", TRICKS)
def test_the_hook_cannot_be_switched_off(tmp_path: Path, trick: str, walls: bool) -> None:
    """Also where it is all there is."""
    (tmp_path / "secret").write_text("treasure")
    code = f"TARGET = {str(tmp_path / 'secret')!r}\ntry:\n" + "".join(f"    {line}\n" for line in trick.splitlines())
    ran = run_python(f"{code}except Exception as e: print(e)\nprint(open(TARGET).read())", PATIENT, walls=walls)
    assert ran.status == "error"
    assert "treasure" not in ran.output
    assert any(words in ran.output for words in ("lies outside", "not allowed here")), ran.output


@pytest.mark.parametrize(
    "code",
    [
        "import _posixsubprocess as p; p.fork_exec()",
        "import sys; del sys.modules['_posixsubprocess']; import _posixsubprocess",
        "import _xxsubinterpreters as x; x.create()",
        "class S(str): __hash__, __eq__ = str.__hash__, lambda *a: False\n__import__(S('_xxsubinterpreters'))",
        "import gc; gc.get_referrers(int)",
        "import sys; sys._current_frames()",
        "try: open('/etc/passwd')\nexcept PermissionError as e:\n    frame = e.__traceback__.tb_next.tb_frame\n"
        "resolve = frame.f_locals['resolve']\nresolve.__code__ = (lambda path: '/work/').__code__",
        "try: open('/etc/passwd')\nexcept PermissionError as e:\n    frame = e.__traceback__.tb_next.tb_frame\n"
        "resolve = frame.f_locals['resolve']\nresolve.__defaults__ = ()",
        "try: open('/etc/passwd')\nexcept PermissionError as e:\n    frame = e.__traceback__.tb_next.tb_frame\n"
        "resolve = frame.f_locals['resolve']\ndel resolve.__defaults__",
    ],
)
def test_ways_around_the_hook_are_refused(code: str) -> None:
    ran = run_python(code, PATIENT, walls=False)
    assert ran.status == "error"
    assert "not allowed here" in ran.output, ran.output


def test_what_the_hook_holds_is_immutable() -> None:
    """All that the frame in a traceback gives away of it: builtins, constants, and one function, without globals."""
    code = """
try: open('/etc/passwd')
except PermissionError as e: frame = e.__traceback__.tb_next.tb_frame
print(sorted({type(value).__name__ for value in frame.f_locals.values()}), len(frame.f_globals), len(frame.f_builtins))
resolve = frame.f_locals['resolve']
frame.f_globals.update(str=None), frame.f_builtins.update(open=None)
print(resolve.__closure__, resolve.__kwdefaults__, {type(value).__name__ for value in resolve.__defaults__})
print(open('/etc/passwd'))
"""
    ran = run_python(code, PATIENT, walls=False)
    held, inside, *_ = ran.output.splitlines()
    assert held == "['bool', 'builtin_function_or_method', 'function', 'int', 'str', 'tuple', 'type'] 1 0"
    assert inside in (
        "None None {'type', 'builtin_function_or_method'}",
        "None None {'builtin_function_or_method', 'type'}",
    )
    assert "lies outside the working folder" in ran.output


def test_what_is_allowed_works() -> None:
    """Paths of all kinds within the folder, threads, and the library."""
    code = """
import asyncio, os, pathlib, shutil, sqlite3, tempfile, threading
os.mkdir('a'); pathlib.Path('a/x').write_text('1'); open(b'a/y', 'w').write('2'); os.symlink('x', 'a/z')
names = sorted(p.name for p in pathlib.Path('a').iterdir())
print(sorted(os.listdir('a')), open('a/z').read(), open('a/../a/y').read(), names)
os.rename('a/x', 'a/w'); shutil.rmtree('a'); print(os.path.exists('a'), os.listdir())
thread = threading.Thread(target=print, args=('thread',)); thread.start(); thread.join()
print(len(open(os.__file__).read()) > 100)
print(sqlite3.connect(':memory:').execute('select 1 + 1').fetchone()[0])
with tempfile.TemporaryDirectory(dir='.') as folder: open(folder + '/q', 'w').close()
"""
    for walls in (True, False):
        ran = run_python(code, PATIENT, walls=walls)
        assert ran.output == "['x', 'y', 'z'] 1 2 ['x', 'y', 'z']\nFalse []\nthread\nTrue\n2\n", ran.output
