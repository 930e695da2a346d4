"""A program of a model against the tests of a task: the program in one sandbox, each test in another."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

from k3train.rl.sandbox import Limits, Sandbox


def passes(program: str, test: str, limits: Limits | None = None, walls: bool = True) -> bool:
    """Whether a test, statements that fail by raising, holds for a program.

    Program and test run in processes of their own, which share nothing but two pipes for calls and plain values. The
    verdict comes over a descriptor that only the test's process has, once the test's end is reached; what the program
    prints, returns or ends with is none. Names of Python's builtins mean those in a test.

    Args:
        program: source that defines what the test calls.
        test: source.
        limits: of each of the two.
        walls: as `sandbox.run_python` has it.

    Raises:
        RuntimeError: an interpreter does not start, so that nothing was tested.
    """
    with contextlib.ExitStack() as stack:

        def pipe() -> tuple[int, int]:
            ends = os.pipe()
            for end in ends:
                stack.callback(_close, end, open_ends)
                open_ends.add(end)
            return ends

        open_ends: set[int] = set()
        asked, ask = pipe()
        answered, answer = pipe()
        verdict, say = pipe()
        given = {"source": program, "read": asked, "write": answer}
        answers = stack.enter_context(Sandbox(_script("run_program"), limits, (asked, answer), _names(given), walls))
        given = {"source": test, "read": answered, "write": ask, "verdict": say}
        tests = stack.enter_context(Sandbox(_script("run_test"), limits, (answered, ask, say), _names(given), walls))
        for end in (asked, ask, answered, answer, say):  # so that each side notices when the other has ended
            _close(end, open_ends)
        answers.begin()  # the time of a test is not spent on an interpreter that is still starting
        tests.wait()
        return os.read(verdict, 16) == b"passed"


def _close(end: int, open_ends: set[int]) -> None:
    if end in open_ends:
        open_ends.remove(end)
        os.close(end)


@functools.cache
def _sources() -> dict[str, str]:
    """The two modules that run inside, where nothing of this package can be imported."""
    names = ("unit_tests_wire", "unit_tests_child")
    return {name: Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8") for name in names}


def _names(given: dict[str, Any]) -> dict[str, Any]:
    return {"GIVEN": given, "SOURCES": _sources()}


def _script(entry: str) -> str:
    return f"""\
import sys, types
for name in ("k3train", "k3train.rl", *(f"k3train.rl.{{name}}" for name in SOURCES)):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    if source := SOURCES.get(name.rpartition(".")[2]):
        exec(compile(source, name, "exec"), module.__dict__)
module.{entry}(GIVEN)
"""
